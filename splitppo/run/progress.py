"""The steps of a run: which step is the last, when checkpoints are written, whether gradients are still finite."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitppo.actor import Actor
from splitppo.config import Config
from splitppo.critic import Critic
from splitppo.job.runtime import Runtime
from splitppo.learner import Learner
from splitppo.placement import Role
from splitppo.run import checkpoint
from splitppo.run.saver import Saver

BAD_STEPS = 3  # the run ends after this many steps in a row without a finite gradient


class Progress:
    """The steps and checkpoints of a run on one rank. The run resumes after step `start`; 0 for a new run."""

    def __init__(self, config: Config, runtime: Runtime, folder: Path, start: int):
        self.config, self.runtime, self.folder, self.start = config, runtime, folder, start
        self.savers: dict[Role, Saver] = {}
        self.bad: dict[Role, int] = {}  # steps in a row without a finite gradient
        self.stopped: str | None = None  # who requested a stop before the last step

    def steps(self) -> Iterator[int]:
        """The steps to do, counted from 1."""
        # Freeze the models' objects: a full garbage collection over them takes up to 1 s, and every rank waits for the
        # slowest.
        gc.collect()
        gc.freeze()
        for step in range(self.start + 1, self.config.steps + 1):
            yield step
            if (stop := self.runtime.stop.last_step()) and stop[0] <= step:
                self.stopped = stop[1] if step < self.config.steps else None
                return

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after this step: the interval says so, or the run ends or stops here."""
        settings, stop = self.config.checkpoint, self.runtime.stop.last_step()
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

    def finish(self, role: Role, step: int, metrics: Mapping[str, Any]) -> None:
        """Ends a step whose metrics are on disk: its checkpoint may be committed. Raises FloatingPointError if no
        update of the last `BAD_STEPS` steps had a finite gradient."""
        self.savers[role].commit(step)
        updates = len(metrics.get("optimizer_steps", ()))
        all_skipped = updates > 0 and metrics[f"{role}/skipped"] == updates
        self.bad[role] = self.bad.get(role, 0) + 1 if all_skipped else 0
        if self.bad[role] >= BAD_STEPS:
            raise FloatingPointError(
                f"no gradient of the {role}'s last {BAD_STEPS} steps was finite; check its loss and the scores, and "
                f"try a lower --{'policy' if role == 'actor' else 'value'}.optim.lr"
            )

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint whose files have the right sizes, or None."""
        found = reversed(checkpoint.complete(self.folder))
        return next((folder for folder in found if not checkpoint.damage(folder, sizes_only=True)), None)

    def commit_written(self) -> None:
        """After a failure, commits a checkpoint whose files are already all written."""
        for saver in self.savers.values():
            saver.commit_written(2.0)

    def close(self) -> None:
        """Waits until all checkpoints are written."""
        for saver in self.savers.values():
            saver.wait()

    def _prune(self, _: int) -> None:
        checkpoint.prune(self.folder, self.config.checkpoint.keep, self.config.checkpoint.keep_every)
