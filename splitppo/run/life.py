"""A run from its first step to its last, as one rank sees it: logs, checkpoints, trackers, the end."""

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from splitppo.actor import Actor
from splitppo.channel import Links
from splitppo.critic import Critic
from splitppo.engine.vllm.process import Process
from splitppo.errors import UserError, say
from splitppo.job.nodes import Peer
from splitppo.job.runtime import Runtime
from splitppo.learner import Learner
from splitppo.placement import ROLES, Role
from splitppo.run import checkpoint
from splitppo.run.build import Builder
from splitppo.run.files import write_rows
from splitppo.run.lock import Lock
from splitppo.run.metrics import ColumnLog
from splitppo.run.resolve import Resolved
from splitppo.run.saver import Saver, load
from splitppo.run.screen import opening, summary
from splitppo.run.start import begin_folder
from splitppo.run.trackers import Trackers

BAD_STEPS = 3  # the run ends after this many steps in a row without a finite gradient


def open_run(resolved: Resolved, runtime: Runtime, engine: Process | None = None) -> "Run":
    """Agrees with the other ranks on the run's folder and first step, and reads the data; all ranks call it."""
    runtime.status.set_phase("reading the data")
    lock = Lock(Peer.of_this_process(runtime.device))
    try:
        run = Run(resolved, runtime, *begin_folder(resolved, runtime, lock), engine, lock)
        if runtime.launch.rank == 0:
            say(opening(resolved, run.folder, run.start, run.build.training, run.build.validation))
        return run
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError):
            wrong = f"run_dir={resolved.config.run_dir or 'runs'}: {error}; fix that, or choose another --run-dir"
            raise UserError(wrong) from error
        raise


class Run:
    """A run as one rank sees it.

    Attributes:
        folder: the run's folder.
        resumed: the checkpoint that it resumes from.
        start: the step after which that was written, or 0.
        stopped: who requested a stop before the last step.
        build: makes actor, critic and links.
    """

    def __init__(
        self, resolved: Resolved, runtime: Runtime, folder: Path, saved: Path | None, engine: Process | None, lock: Lock
    ):
        self.config, self.runtime, self.folder = resolved.config, runtime, folder
        self.resumed, self.lock = saved, lock
        self.start = checkpoint.step_of(saved) if saved else 0
        self.stopped: str | None = None
        self.savers: dict[Role, Saver] = {}
        self.bad: dict[Role, int] = {}  # steps in a row without a finite gradient
        runtime.last_checkpoint = self.last_checkpoint
        self.build = Builder(resolved, runtime, folder, engine, self.allocate)
        self.logs: dict[Role, ColumnLog] = {}
        self.links: Links | None = None
        # fields of the channel `logprobs`: the old ones, and the reference's if the actor group holds it
        self.logprob_fields = 1 + ("reference" in resolved.models and resolved.role_of("reference") == "actor")

    def log(self, role: Role) -> ColumnLog:
        """The role's log, made on first use."""
        if role not in self.logs:
            first, phase = self.runtime.groups[role].is_first, self.runtime.status.set_phase
            start, steps = self.start, self.config.steps
            self.logs[role] = ColumnLog(role, self.folder, first=first, phase=phase, start=start, steps=steps)
        return self.logs[role]

    def begin(self, *, actor: Actor | None = None, critic: Critic | None = None) -> None:
        """Loads the checkpoint, if any, and validates before the first step."""
        first = "actor" in self.runtime.groups and self.runtime.groups["actor"].is_first
        self.trackers = Trackers(self.config, self.folder, self.start, active=first)
        if self.resumed:
            for role, holder in zip(ROLES, (actor, critic), strict=True):
                if holder:
                    load(holder.learners, self.resumed / role, holder.load_state, self.runtime.saving[role])
                    for learner in holder.learners:
                        learner.updates = self.start
        elif actor:
            log = self.log("actor")
            with log.span("validate"):
                metrics = actor.validate(0)
            if metrics:
                log.finish(0, metrics)

    def steps(self) -> Iterator[int]:
        """The steps to do, counted from 1."""
        # Freeze the models' objects: a full garbage collection over them takes up to 1 s, and every rank waits for the
        # slowest.
        gc.collect()
        gc.freeze()
        for step in range(self.start + 1, self.config.steps + 1):
            yield step
            if (stop := self.runtime.status.last_step()) and stop[0] <= step:
                self.stopped = stop[1] if step < self.config.steps else None
                return

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step: the interval says so, or the run ends or stops here."""
        settings, stop = self.config.checkpoint, self.runtime.status.last_step()
        regular = settings.every > 0 and step % settings.every == 0
        last = settings.last and step == self.config.steps
        return regular or last or (stop is not None and stop[0] <= step)

    def allocate(self, role: Role, learners: Sequence[Learner]) -> None:
        """Prepares to write the learners' checkpoints: allocates host memory, if the run writes any at intervals."""
        group = self.runtime.saving[role]
        self.savers[role] = Saver(learners, role, self.folder, group, committed=self._prune)
        if self.config.checkpoint.every:
            self.savers[role].allocate()

    def save(self, role: Role, step: int, holder: Actor | Critic) -> None:
        """Starts to write the role's part of a checkpoint, if one is due after this step."""
        if self.due(step):
            self.savers[role].begin(step, holder.state())

    def may_stop(self, step: int) -> None:
        """Makes this step the last if a stop was requested. The actor group's first rank says so here, before any rank
        can finish the step: all need its rows' log-probs for that."""
        group = self.runtime.groups.get("actor")
        if group is not None and group.is_first:
            self.runtime.status.answer_stop(step)

    def finish(self, role: Role, step: int, metrics: dict[str, Any]) -> None:
        """Ends a step: writes its metrics, then lets its checkpoint count. So a resumed run has the metrics of every
        step up to its checkpoint. Raises FloatingPointError if no update of the last `BAD_STEPS` steps had a finite
        gradient."""
        log = self.log(role)
        if self.config.placement.barrier:
            with log.span("wait_barrier"):
                self.runtime.barrier(f"barrier of step {step}")
        log.finish(step, metrics | (self.links.wire.spent() if self.links else {}))
        self.savers[role].commit(step)
        updates = len(metrics.get("optimizer_steps", ()))
        all_skipped = updates > 0 and metrics[f"{role}/skipped"] == updates
        self.bad[role] = self.bad.get(role, 0) + 1 if all_skipped else 0
        if self.bad[role] >= BAD_STEPS:
            raise FloatingPointError(
                f"no gradient of the {role}'s last {BAD_STEPS} steps was finite; check its loss and the scores, and "
                f"try a lower --{'policy' if role == 'actor' else 'value'}.optim.lr"
            )
        if role == "actor":
            self.trackers.update()

    def write_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Writes a step's samples; the critic group's first rank does."""
        if self.runtime.groups["critic"].is_first and samples:
            write_rows(self.folder / "samples", step, samples)

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint whose files have the right sizes, or None."""
        found = reversed(checkpoint.complete(self.folder))
        return next((folder for folder in found if not checkpoint.damage(folder, sizes_only=True)), None)

    def commit_written(self) -> None:
        """After a failure, commits a checkpoint whose files are already all written."""
        for saver in self.savers.values():
            saver.commit_written(2.0)

    def end(self) -> None:
        """Waits for the checkpoints and the other group's last update, and prints the run's folder."""
        for saver in self.savers.values():
            saver.wait()
        self.runtime.end_work()
        self.trackers.close()
        if self.runtime.launch.rank == 0:
            say(summary(self.folder, self.config, self.last_checkpoint()))
            if why := self.stopped:
                where = checkpoint.complete(self.folder)[-1].name
                say(f"stopped by {why}: {where} is saved; the same command with --run-dir {self.folder} resumes")
        self.runtime.wait_for_all()
        self.lock.release()

    def _prune(self, _: int) -> None:
        checkpoint.prune(self.folder, self.config.checkpoint.keep, self.config.checkpoint.keep_every)
