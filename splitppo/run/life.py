"""A run from its first step to its last, as one rank sees it: logs, checkpoints, trackers, the
end."""

import gc
import json
import logging
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from splitppo.config import Config
from splitppo.critic import Critic
from splitppo.data import PromptSet
from splitppo.errors import UserError, say
from splitppo.generator import Generator
from splitppo.generator.sampler import Sampler
from splitppo.job.launch import LAUNCHER
from splitppo.job.runtime import Runtime, format_map
from splitppo.models.tiny import build_tiny
from splitppo.placement import Role, StepPlan, data_parallel, make_step_plan
from splitppo.policy import Policy
from splitppo.run import checkpoint, checks, files, notices, screen, sources
from splitppo.run.build import Builder
from splitppo.run.folder import (
    PATIENCE,
    check_run_folder,
    check_same_run,
    new_folder,
    take,
    write_run_files,
)
from splitppo.run.metrics import ColumnLog, records_until
from splitppo.run.resolve import Resolved
from splitppo.run.saver import Saver, load
from splitppo.run.trackers import Trackers

GOAL = "log.stop_at"  # requests a stop when the score of held-out rows has come to it
# key of the job's store: the run has ended early, after a whole step
STOPPED = "splitppo/stopped"
BAD_STEPS = 3  # the run ends after this many steps in a row without a finite gradient


def _begin_folder(
    resolved: Resolved, runtime: Runtime, prompts: tuple[PromptSet, PromptSet]
) -> tuple[Path, TextIO | None, Path | None]:
    """Locks, checks and fills the run's folder; all ranks call it. Returns the folder, on rank 0
    its lock, and the checkpoint to resume."""
    config = resolved.config
    rank = runtime.launch.rank
    chosen = config.run_dir or ""
    held = None
    if rank == 0:
        chosen = chosen or str(new_folder())
        held = take(Path(chosen))
    folder = Path(runtime.broadcast("run_dir", lambda: chosen, patience=PATIENCE))
    inputs = resolved.inputs(*prompts) if rank == 0 else {}
    resumed = find_checkpoint(config, runtime, folder, inputs)
    checks.check_adapters(resolved, resumed)
    if rank == 0:
        for line in (*(f"warning: {text}" for text in checks.warnings(resolved)), *resolved.notes):
            say(line)
        write_run_files(config, folder, resumed, inputs, resolved.user_settings)
        sources.keep_copies(
            config, {name: model.path for name, model in resolved.models.items()}, folder
        )
        files.write_whole(folder / "resolved.json", resolved.to_json() + "\n")
        (folder / "placement.txt").write_text(
            format_map(runtime.placement, runtime.hosts, runtime.devices) + "\n"
        )
    if any(model.name == "tiny" for model in resolved.models.values()):
        runtime.broadcast("tiny", lambda: build_tiny(folder / "tiny", seed=config.seed) or "built")
    # for this rank's warnings, and its libraries' messages
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    if LAUNCHER in os.environ:
        Path(os.environ[LAUNCHER]).write_text(str(folder))
    logging.basicConfig(
        filename=folder / "logs" / f"rank_{rank:03d}.log",
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        level=logging.INFO,
        force=True,
    )
    logging.captureWarnings(True)
    return folder, held, resumed


def find_checkpoint(
    config: Config, runtime: Runtime, folder: Path, inputs: Mapping[str, str]
) -> Path | None:
    """Returns the checkpoint that the run resumes from, if any, and removes unfinished ones. All
    ranks call it, each checks some of the files; `inputs` (`inputs_of`) matters on rank 0."""
    launch = runtime.launch

    def candidates() -> str:
        # starts of this job (torchrun --max-restarts) that passed here
        restarts = runtime.job.add("splitppo/begun", 0)
        if restarts:
            check_same_run(config, folder, inputs)
        else:
            check_run_folder(config, inputs)
        # a restart resumes from the newest checkpoint, whatever the first start resumed from
        resume = "auto" if restarts and checkpoint.complete(folder) else config.resume
        paths = checkpoint.candidates(folder, resume)
        runtime.job.add("splitppo/begun", 1)
        return "\n".join(map(str, paths))

    def damage_of(folder: Path) -> str:
        damage = checkpoint.damage(folder, rank=launch.rank, ranks=launch.world)
        return max(runtime.all_gather(f"damage/{folder}", damage))

    listed = [*map(Path, runtime.broadcast("candidates", candidates).splitlines())]
    chosen = checkpoint.choose(listed, damage_of, report=launch.rank == 0)
    if launch.rank == 0:
        start = checkpoint.step_of(chosen)
        for path in folder.glob("metrics/*.jsonl") if start else ():
            records_until(path, start)  # refuses a broken one before anything is changed
        checkpoint.tidy(folder, start)
    return chosen


def plan_step(resolved: Resolved, runtime: Runtime, sampler: Sampler, step: int) -> StepPlan:
    """Who owns which slot in a step; every rank asks at the step's beginning. With windows it
    depends on the open rows, whose lengths all actor ranks know: rank 0 tells the others over the
    store."""
    config = resolved.config
    rollout = config.rollout
    sizes = data_parallel(config, resolved.placement)
    contexts: list[int] = []
    if rollout.window and sizes["actor"] > 1:
        contexts = sampler.contexts()
        is_actor = "actor" in runtime.groups
        if not resolved.placement.colocated and (runtime.launch.rank == 0 or not is_actor):
            sent = runtime.broadcast(f"contexts/{step}", lambda: json.dumps(sampler.contexts()))
            contexts = json.loads(sent)
            # all have read that one: to send its rows of a step, rank 0 needs the critic there
            runtime.store.delete_key(f"contexts/{step - 3}")
    return make_step_plan(
        sampler.streams,
        seed=config.seed,
        step=step,
        mini_batches=config.ppo.mini_batches,
        sizes=sizes,
        contexts=contexts,
    )


def check_open_rows(sampler: Sampler, resumed: Path | None) -> None:
    """Raises UserError if the checkpoint's partial rollouts can't continue in this run."""
    if resumed:
        files.read_file(
            resumed / "actor" / "state.json",
            lambda text: sampler.load_state(json.loads(text)["open"]),
            f"remove {resumed}",
        )


class Run:
    """A run as one rank sees it. All ranks make theirs together: they agree on its folder and first
    step."""

    def __init__(self, resolved: Resolved, prompts: tuple[PromptSet, PromptSet], runtime: Runtime):
        self.config = resolved.config
        self.runtime = runtime
        self.stopped: str | None = None  # who requested a stop before the last step
        self.savers: dict[Role, Saver] = {}
        # steps in a row without a finite gradient
        self.bad: Counter[Role] = Counter()
        self.logs: dict[Role, ColumnLog] = {}
        self.writer = ThreadPoolExecutor(1, "samples")
        self.written: Future[None] | None = None  # the step's samples
        # of the channel `logprobs`, without rows: the old ones, and the reference's if the actor
        # group holds it
        both = self.config.has_kl and resolved.role_of("reference") == "actor"
        self.logprob_columns = [torch.zeros(0)] * (1 + both)
        try:
            self.folder, self.lock, self.resumed = _begin_folder(resolved, runtime, prompts)
            # the step that it resumes after
            self.start = checkpoint.step_of(self.resumed)
            runtime.last_checkpoint = self.last_checkpoint
            self.build = Builder(resolved, runtime, self.folder, prompts)
            check_open_rows(self.build.sampler, self.resumed)
        except OSError as error:
            raise UserError(f"run_dir: {error}; fix that, or choose another --run-dir") from error
        # who owns which slot in a step: every rank asks once, when it begins the step
        self.plan = partial(plan_step, resolved, runtime, self.build.sampler)
        if runtime.launch.rank == 0:
            say(screen.opening(resolved, self.folder, self.start, *prompts))

    def begin(
        self, generator: Generator | None, policy: Policy | None, critic: Critic | None
    ) -> None:
        """Loads the checkpoint, if any, waits for the engine, begins the logs and trackers;
        validates before the first step."""
        self.links = self.build.links() if len(self.runtime.groups) == 1 else None
        settings = self.config.checkpoint
        prune = partial(checkpoint.prune, self.folder, settings.keep, settings.keep_every)
        parts: dict[Role, list[Any]] = {"actor": [policy, generator], "critic": [critic]}
        for role in self.runtime.groups:
            learners = parts[role][0].learners
            group = self.runtime.saving[role]
            writes = self.runtime.writes[role]
            self.savers[role] = Saver(
                learners, role, self.folder, group, committed=prune, writes=writes
            )
            if settings.every:
                self.savers[role].allocate()
            if self.resumed:
                states = [part.load_state for part in parts[role]]
                load(learners, self.resumed / role, states, group)
        if generator:
            self.build.connect_engine(generator)
        silent = notices.silent(self.build.resolved)
        for role, group in self.runtime.groups.items():
            self.logs[role] = ColumnLog(
                role,
                self.folder,
                first=group.is_first,
                phase=self.runtime.status.set_phase,
                start=self.start,
                steps=self.config.steps,
                notices=partial(next, notices.follow(self.folder, silent)),
            )
        self.trackers = Trackers(
            self.config, self.folder, self.start, active=self.runtime.launch.rank == 0
        )
        if generator and policy and not self.resumed:
            with self.logs["actor"].span("validate"):
                metrics = generator.validate(0, policy.weights())
            if metrics:
                self.logs["actor"].finish(0, metrics)
            for log in self.logs.values():
                log.began = log.now()

    def steps(self) -> Iterator[int]:
        """The steps to do, counted from 1."""
        gc.collect()
        # a full garbage collection over the models' objects takes up to 1 s, and all wait for the
        # slowest
        gc.freeze()
        for step in range(self.start + 1, self.config.steps + 1):
            yield step
            if stop := self.runtime.status.stopped_by(step):
                self.runtime.job.set(STOPPED, "1")
                self.stopped = stop if step < self.config.steps and stop != GOAL else None
                if stop == GOAL and self.runtime.launch.rank == 0:
                    goal = self.config.log.stop_at
                    say(f"[actor] step {step}: {GOAL}={goal} is reached; the run ends")
                return

    def answer_stop(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Actor ranks let all ranks know whether this step is the last: early in the step, or by
        the `metrics` at its end if a validation decides (`log.stop_at`)."""
        goal = self.config.log.stop_at if self.config.validates(step) else None
        if (goal is None) == (metrics is None):
            reached = goal is not None and metrics is not None and metrics["val/score/mean"] >= goal
            self.runtime.status.answer_stop(step, GOAL * reached)

    def save(self, role: Role, step: int, *parts: Generator | Policy | Critic) -> None:
        """Starts to write the role's part of a checkpoint, if the interval says so, or the run ends
        or stops here. `parts`: those that have a state beside the learners."""
        settings = self.config.checkpoint
        due = (
            (settings.every > 0 and step % settings.every == 0)
            or (settings.last and step == self.config.steps)
            or self.runtime.status.stopped_by(step)
        )
        if due:
            state = {name: value for part in parts for name, value in part.state().items()}
            self.savers[role].begin(step, state)

    def finish(self, role: Role, step: int, metrics: dict[str, Any]) -> None:
        """Ends a step: writes its metrics, then lets its checkpoint count, so that a resumed run
        has the metrics of all steps before. Raises FloatingPointError if no update of the last
        `BAD_STEPS` steps had a finite gradient."""
        log = self.logs[role]
        log.phase(f"{role} step {step} metrics and trackers")
        if role == "critic" and self.written:
            self.written.result()
        if log.screen:  # a failure's cause is to stay the last on it
            log.screen.silent = self.runtime.status.has_failure()
        log.finish(step, metrics)
        self.savers[role].commit(step)
        updates = len(metrics.get("optimizer_steps", ()))
        all_skipped = updates > 0 and metrics[f"{role}/skipped"] == updates
        self.bad[role] = (self.bad[role] + 1) * all_skipped
        if self.bad[role] >= BAD_STEPS:
            raise FloatingPointError(
                f"no gradient of the {role}'s last {BAD_STEPS} steps was finite; check its loss "
                "and the scores, and try a lower "
                f"--{'policy' if role == 'actor' else 'value'}.optim.lr"
            )
        if role == "actor":
            self.trackers.update()

    def write_samples(self, step: int, samples: Callable[[], Sequence[dict[str, Any]]]) -> None:
        """Starts a thread that writes a step's samples and gives them to the screen, on the critic
        group's first rank; `finish` waits for it."""

        def write(shown: screen.Screen) -> None:
            if rows := samples():
                files.write_rows(self.folder / "samples", step, rows)
                shown.samples = rows

        if shown := self.logs["critic"].screen:
            self.written = self.writer.submit(write, shown)

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint whose files have the right sizes, or None."""
        newest_first = reversed(checkpoint.complete(self.folder))
        whole = (path for path in newest_first if not checkpoint.damage(path, sizes_only=True))
        return next(whole, None)

    def end(self) -> None:
        """Waits for the checkpoints and the other group's last update, and prints the run's
        folder."""
        for saver in self.savers.values():
            saver.wait()
        # from here on ranks may end
        self.runtime.all_gather("end of the work", "")
        self.runtime.work_done.set()
        self.trackers.close()
        if self.runtime.launch.rank == 0:
            notice_lines = next(notices.follow(self.folder, notices.silent(self.build.resolved)))
            say(screen.summary(self.folder, self.config, self.last_checkpoint(), notice_lines))
            if self.stopped:
                say(
                    f"stopped by {self.stopped}: {checkpoint.complete(self.folder)[-1].name} is "
                    "saved; the same command with --run-dir "
                    f"{shlex.quote(str(self.folder))} resumes"
                )
        self.runtime.wait_for_all()
        if self.lock:
            self.lock.close()
