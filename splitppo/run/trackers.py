"""Sends the run's metrics to Weights & Biases and TensorBoard.

The actor group's first rank sends both roles' records. After each step it reads the new lines of RUN/metrics/, so a
record of the critic may come one step later than the actor's. A resumed run sends the steps that it does.

Metrics that both roles have get the role into their name: `timing_s/actor/NAME`, `perf/critic/NAME`. Tables show the
samples of each validation, and those of about `SAMPLE_TABLES` training steps.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from splitppo.config import Config
from splitppo.errors import UserError
from splitppo.placement import Role
from splitppo.run.files import parse_record, read_file, read_lines, shown, table

TABLE_ROWS = 64  # rows of a table at most
SAMPLE_TABLES = 100

Rows = Sequence[Mapping[str, Any]]


def check_trackers(config: Config) -> None:
    """Raises UserError if a tracker's package is not installed."""
    for name in config.log.trackers:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name has no origin
            raise UserError(
                f"log.trackers={' '.join(config.log.trackers)}: {name} is not installed; "
                f"pip install 'splitppo[{name}]' or leave {name} out"
            )


class Wandb:
    """One run in Weights & Biases, plotted over `step`. A resumed run continues it (RUN/wandb_id).

    wandb only appends, so steps that a run repeats after a crash are there twice. It uploads every 15 seconds or so, so
    it may lack the last steps of a killed run. Raises UserError if wandb cannot log in.
    """

    def __init__(self, config: Config, run_dir: Path, start: int):
        import wandb  # an optional package
        from wandb.errors import AuthenticationError, UsageError

        path = run_dir / "wandb_id"
        try:
            self.run = wandb.init(
                project=config.log.project,
                name=config.log.name or run_dir.resolve().name,
                id=(read_file(path, str.strip, "delete it") or None) if start and path.is_file() else None,
                resume="allow",
                dir=run_dir,
                config=asdict(config),
                allow_val_change=True,  # a resumed run may have other settings
            )
        except (UsageError, AuthenticationError) as error:
            raise UserError(f"log.trackers=wandb: {error} Or set WANDB_MODE=offline in the environment") from error
        path.write_text(self.run.id)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.table = wandb.Table

    def write(self, step: int, time: float, metrics: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        """Takes one role's metrics and tables of a step, which ended at `time` (Unix seconds)."""
        shown = {
            name: self.table(list(rows[0]), [list(row.values()) for row in rows], allow_mixed_types=True)
            for name, rows in tables.items()
        }
        self.run.log({"step": step, **metrics, **shown})

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in RUN/tensorboard. Those of a resumed run hide the steps that it repeats."""

    def __init__(self, config: Config, run_dir: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter  # needs an optional package

        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start + 1 if start else 0)

    def write(self, step: int, time: float, metrics: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step, walltime=time)
        for name, rows in tables.items():
            self.writer.add_text(name, table(rows), step, walltime=time)
        self.writer.flush()  # so that the files of a killed run have them

    def close(self) -> None:
        self.writer.close()


TRACKERS = {"wandb": Wandb, "tensorboard": TensorBoard}


class Tail:
    """Reads the records that a file gains. A torn last line waits until all of it is written."""

    def __init__(self, path: Path):
        self.path, self.offset, self.lines = path, 0, 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The new records; none while there is no file."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if line.endswith(b"\n"):
                    self.offset, self.lines = self.offset + len(line), self.lines + 1
                    yield parse_record(line, f"{self.path}:{self.lines}")


class Trackers:
    """The trackers of a run that resumes after step `start`, or begins (0). They do nothing on a rank that is not
    `active`."""

    def __init__(self, config: Config, run_dir: Path, start: int, *, active: bool = True):
        names = config.log.trackers if active else ()
        self.run_dir, self.steps, self.start = run_dir, config.steps, start
        self.tails: dict[Role, Tail] = {role: Tail(run_dir / "metrics" / f"{role}.jsonl") for role in get_args(Role)}
        self.trackers = [TRACKERS[name](config, run_dir, start) for name in names]

    def update(self) -> None:
        """Sends the new records. Call it first after a step has ended: by then both roles have removed the records of
        an earlier run after `start` from their files."""
        for role, tail in self.tails.items() if self.trackers else ():
            for record in tail.read():
                if (step := record["step"]) > self.start or not self.start:
                    figures, tables = metrics_of(role, record), self._tables(role, step)
                    for tracker in self.trackers:
                        tracker.write(step, record["time"], figures, tables)

    def close(self) -> None:
        """Sends the last records and closes the trackers. Call it when all ranks have finished their last step."""
        self.update()
        for tracker in self.trackers:
            tracker.close()

    def _tables(self, role: Role, step: int) -> dict[str, Rows]:
        """The samples that were written before the role's record of the step."""
        name, folder = ("samples", "samples") if role == "critic" else ("validation/samples", "validation")
        path = self.run_dir / folder / f"step_{step:06d}.jsonl"
        skipped = role == "critic" and step != self.steps and step % -(-self.steps // SAMPLE_TABLES)
        rows = [] if skipped or not path.is_file() else list(map(shown, islice(read_lines(path), TABLE_ROWS)))
        return {name: rows} if rows else {}


def metrics_of(role: Role, record: Mapping[str, Any]) -> dict[str, float]:
    """A record's numbers under their names in the trackers."""
    return {
        re.sub("^(timing_s|perf)/", rf"\1/{role}/", name): float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }
