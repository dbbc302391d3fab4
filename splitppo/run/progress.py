"""How a run gets on: which step is its last, when its checkpoints are written, whether its numbers are still good."""

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from splitppo.config import Config
from splitppo.job.runtime import Runtime, format_map
from splitppo.learner import Learner
from splitppo.models.tiny import build_tiny
from splitppo.placement import Role
from splitppo.run import checkpoint
from splitppo.run.checks import check_run_folder, model_folders, warnings
from splitppo.run.folder import check_same_run, inputs_of, log_to_file, new_folder, write_run_files
from splitppo.run.lock import STALE, Lock
from splitppo.run.metrics import check_records
from splitppo.run.saver import Saver

BAD_STEPS = 3  # steps in a row without one good update, after which there is no hope


def begin_folder(config: Config, runtime: Runtime, lock: Lock) -> tuple[Path, Path | None]:
    """Takes the run's folder, checks and fills it; returns it, and the checkpoint that the run goes on from."""
    given = Path(config.run_dir) if config.run_dir else None
    folder = Path(runtime.share("run_dir", lambda: str(lock.take(given or new_folder())), patience=STALE))
    own = {name: path for name, path in model_folders(config).items() if path != "tiny"}
    inputs = inputs_of(config, own) if runtime.launch.rank == 0 else {}
    found = find_checkpoint(config, runtime, folder, inputs)
    if runtime.launch.rank == 0:
        print(placed := format_map(runtime.placement, runtime.hosts, runtime.devices), flush=True)
        for warning in warnings(config, runtime.device.type, runtime.placement):
            print(f"warning: {warning}", flush=True)
        write_run_files(config, folder, found, inputs)
        (folder / "placement.txt").write_text(placed + "\n")
    tiny = folder / "tiny"
    if "tiny" in model_folders(config).values():
        runtime.share("tiny", lambda: build_tiny(tiny, seed=config.seed) or "built")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    log_to_file(folder / "logs" / f"rank_{runtime.launch.rank:03d}.log")
    return folder, Path(found) if found else None


def find_checkpoint(config: Config, runtime: Runtime, folder: Path, inputs: Mapping[str, str]) -> str:
    """The checkpoint that the run goes on from, "" if there is none; all ranks call it, and read a share of its files.
    What earlier runs left of others is removed. Of `inputs` (`inputs_of`), rank 0's count."""
    launch = runtime.launch

    def candidates() -> str:
        begun = runtime.job.add("splitppo/begun", 0)  # attempts, which torchrun starts anew, that passed these checks
        if not begun:
            check_run_folder(config, config.resume, inputs)
        elif not config.force:
            check_same_run(config, folder, inputs)
        # a later attempt goes on from the newest, wherever the first one was told to begin
        resume = "auto" if begun and checkpoint.complete(folder) else config.resume
        found = checkpoint.candidates(folder, resume)
        runtime.job.add("splitppo/begun", 1)
        return "\n".join(map(str, found))

    listed = runtime.share("candidates", candidates)

    def damage_of(candidate: Path) -> str:
        own = checkpoint.damage(candidate, share=launch.rank, of=launch.world)
        return next((told for told in runtime.everyone(f"damage/{candidate}", own) if told), "")

    found = checkpoint.choose([Path(name) for name in listed.splitlines()], damage_of, tell=launch.rank == 0)

    def tidy() -> str:
        start = checkpoint.step_of(found) if found else 0
        if found and checkpoint.is_in(found, folder):
            check_records(folder / "metrics", start, force=config.force)
        return checkpoint.tidy(folder, start) or "tidy"

    runtime.share("tidy", tidy)
    return str(found or "")


class Holder(Protocol):
    """A role's part of the run that a checkpoint holds."""

    @property
    def learner(self) -> Learner: ...

    def state(self) -> dict[str, Any]: ...


class Progress:
    """One rank's view of it.

    Args:
        folder: the run's.
        start: the step after which the run goes on.
    """

    def __init__(self, config: Config, runtime: Runtime, folder: Path, start: int):
        self.config, self.runtime, self.folder, self.start = config, runtime, folder, start
        self.savers: dict[Role, Saver] = {}
        self.bad: dict[Role, int] = {}  # bad steps in a row
        self.stopped: str | None = None  # who asked for an end before the last step

    def steps(self) -> Iterator[int]:
        """The steps to do, counted from 1."""
        # models and compiled code stay: to look for garbage in them takes a rank up to a second, and all wait for it
        gc.collect()
        gc.freeze()
        for step in range(self.start + 1, self.config.steps + 1):
            yield step
            if (stop := self.runtime.stops_after()) and stop[0] <= step:
                self.stopped = stop[1] if step < self.config.steps else None
                return

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        every = self.config.checkpoint.every
        if every and (step % every == 0 or step == self.config.steps):
            return True
        stop = self.runtime.stops_after()
        return stop is not None and stop[0] <= step

    def save(self, role: Role, step: int, holder: Holder) -> None:
        """Starts to write the role's part of a checkpoint, if one is due."""
        if self.due(step):
            self._saver(role, holder.learner).begin(step, holder.state())

    def allocate(self, role: Role, learner: Learner) -> None:
        """Takes what writing checkpoints needs of the host's memory, if they are written."""
        if self.config.checkpoint.every:
            self._saver(role, learner).allocate()

    def _saver(self, role: Role, learner: Learner) -> Saver:
        if role not in self.savers:
            group = self.runtime.saving[role]
            self.savers[role] = Saver(learner, role, self.folder, group, committed=self._prune)
        return self.savers[role]

    def finish(self, role: Role, step: int, metrics: Mapping[str, Any]) -> None:
        """Ends a step whose line is written: its checkpoint counts once all of it is on the disk.

        Raises:
            FloatingPointError: no update of the last steps had a finite gradient.
        """
        if role in self.savers:
            self.savers[role].commit(step)
        taken = metrics.get("optimizer_steps", ())
        all_skipped = bool(taken) and metrics[f"{role}/skipped"] == len(taken)
        self.bad[role] = self.bad.get(role, 0) + 1 if all_skipped else 0
        if self.bad[role] >= BAD_STEPS:
            raise FloatingPointError(
                f"no gradient of the {role}'s last {BAD_STEPS} steps was finite; look at its loss and the scores, and "
                f"try a lower --{'policy' if role == 'actor' else 'value'}.optim.lr"
            )

    def last_good(self) -> Path | None:
        """The newest checkpoint that counts, and is whole by the sizes of its files."""
        found = reversed(checkpoint.complete(self.folder))
        return next((folder for folder in found if not checkpoint.damage(folder, sizes_only=True)), None)

    def settle(self) -> None:
        """After a failure: a checkpoint that is to count may still be put in its place, if all of it is written."""
        for saver in self.savers.values():
            saver.settle(2.0)

    def close(self) -> None:
        """Until everything is written."""
        for saver in self.savers.values():
            saver.wait()

    def _prune(self, _: int) -> None:
        checkpoint.prune(self.folder, self.config.checkpoint.keep, self.config.checkpoint.keep_every)
