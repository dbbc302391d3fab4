"""Where the run's figures go beside RUN/metrics: Weights & Biases and TensorBoard.

One rank, the actor group's first, owns the trackers of both roles. It reads what RUN/metrics/actor.jsonl and
critic.jsonl have grown by, so a line of the critic may come a step later than the actor's. Each figure keeps its name,
but `timing_s/NAME` and `perf/NAME`, which both roles have, get the role in: `timing_s/actor/NAME`. RUN/trackers.json
notes what each tracker has got; a resumed run sends the rest, also to a tracker that is new.

Tables of samples: validation's each time, the step's own at about `SAMPLE_TABLES` steps of the run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from splitppo.config import Config
from splitppo.errors import UserError
from splitppo.placement import Role
from splitppo.run.files import read_file, write_whole

TABLE_ROWS = 64  # rows of a table at most
SAMPLE_TABLES = 100
_OF_BOTH = ("timing_s/", "perf/")
# role -> the folder of the tables that are there, complete, when its line is
_TABLES: dict[Role, Literal["samples", "validation"]] = {"critic": "samples", "actor": "validation"}

Rows = Sequence[Mapping[str, Any]]


def check_trackers(config: Config) -> None:
    """A UserError if a tracker's package is not installed."""
    for name in config.log.trackers:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # without an origin it is a mere folder of that name
            raise UserError(
                f"log.trackers={' '.join(config.log.trackers)}: {name} is not installed; "
                f"pip install -e '.[{name}]' or leave {name} out"
            )


class Tail:
    """The lines that a file has grown by, whole ones only: the last waits until its end is written."""

    def __init__(self, path: Path):
        self.path, self.offset = path, 0

    def read(self) -> list[dict[str, Any]]:
        """The new lines' JSON objects; none while there is no file."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            grown = file.read()
        whole = grown[: grown.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _up_to(start: int, sent: dict[str, dict[Role, int]]) -> dict[str, dict[Role, int]]:
    return {name: {role: min(start, step) for role, step in got.items()} for name, got in sent.items()}


def figures_of(role: Role, record: Mapping[str, Any]) -> dict[str, float]:
    """A record's figures under the trackers' names; the clock, the spans and all that is no number are left out."""
    return {
        _renamed(role, name): float(value)
        for name, value in record.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    }


def _renamed(role: Role, name: str) -> str:
    for prefix in _OF_BOTH:
        if name.startswith(prefix):
            return f"{prefix}{role}/{name.removeprefix(prefix)}"
    return name


class Tracker(Protocol):
    """A place that figures go to. `start` is the step that the run goes on from, 0 for a new one."""

    def __init__(self, config: Config, run_dir: Path, start: int): ...

    def write(self, step: int, time: float, figures: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        """Takes some of a step's figures and tables; `time` is when they were taken, in Unix seconds."""
        ...

    def close(self) -> None: ...


class Wandb:
    """One run in Weights & Biases, drawn over `step`; a resumed run goes on in it (RUN/wandb_id).

    wandb only ever adds to a run: steps that were done again after a crash are there twice. It writes every 15 seconds
    or so: a run that is killed may lack there what RUN/metrics has of its last ones.

    Raises:
        UserError: wandb cannot log in.
    """

    def __init__(self, config: Config, run_dir: Path, start: int):
        import wandb  # only installed if asked for
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

    def write(self, step: int, time: float, figures: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        listed = {name: table_of(rows) for name, rows in tables.items()}
        drawn = {name: self.table(columns=[*columns], data=cells) for name, (columns, cells) in listed.items()}
        self.run.log({"step": step, **figures, **drawn})

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files in RUN/tensorboard; a resumed run hides the steps that it does again."""

    def __init__(self, config: Config, run_dir: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter  # needs a package that is only installed if asked for

        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start + 1 if start else 0)

    def write(self, step: int, time: float, figures: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step, walltime=time)
        for name, rows in tables.items():
            self.writer.add_text(name, text_of(rows), step, walltime=time)
        self.writer.flush()  # a killed run's figures are on the disk

    def close(self) -> None:
        self.writer.close()


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "tensorboard": TensorBoard}


class Trackers:
    """The trackers of a run, which read its metrics from its folder.

    Args:
        start: the step that the run goes on from, 0 for a new one.
        active: whether this rank owns them; else nothing happens here.
    """

    def __init__(self, config: Config, run_dir: Path, start: int, *, active: bool = True):
        self.run_dir, self.steps = run_dir, config.steps
        self.noted = run_dir / "trackers.json"
        self.tails: dict[Role, Tail] = {role: Tail(run_dir / "metrics" / f"{role}.jsonl") for role in get_args(Role)}
        # tracker -> role -> the last step that it got; what a new run finds there is another's
        self.sent: dict[str, dict[Role, int]] = {}
        if active and start and self.noted.is_file():
            remedy = "delete it, and the trackers get all steps again"
            self.sent = read_file(self.noted, lambda text: _up_to(start, json.loads(text)), remedy)
        self.trackers: dict[str, Tracker] = {
            name: TRACKERS[name](config, run_dir, start) for name in (config.log.trackers if active else ())
        }

    def update(self) -> None:
        """Sends what the metrics' files have grown by. The first call comes after a step's end: then both roles have
        dropped from their files what an earlier run wrote of steps after `start`."""
        if not self.trackers:
            return
        for role, tail in self.tails.items():
            for record in tail.read():
                self._send(role, record)
        write_whole(self.noted, json.dumps(self.sent) + "\n")

    def close(self) -> None:
        """Sends the rest and ends the trackers; for when all ranks have done their last step."""
        self.update()
        for tracker in self.trackers.values():
            tracker.close()

    def _send(self, role: Role, record: Mapping[str, Any]) -> None:
        step = record["step"]
        due = [name for name in self.trackers if step > self.sent.get(name, {}).get(role, -1)]
        if due:
            figures, tables = figures_of(role, record), self._tables(role, step)
            for name in due:
                self.trackers[name].write(step, record["time"], figures, tables)
                self.sent.setdefault(name, {})[role] = step

    def _tables(self, role: Role, step: int) -> dict[str, Rows]:
        kind = _TABLES[role]
        path = self.run_dir / kind / f"step_{step:06d}.jsonl"
        skipped = kind == "samples" and step != self.steps and step % -(-self.steps // SAMPLE_TABLES)
        if skipped or not path.is_file():
            return {}
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in islice(file, TABLE_ROWS)]
        return {"samples" if kind == "samples" else "validation/samples": rows} if rows else {}


def table_of(rows: Rows) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells. A column holds numbers or texts, not both; a key that a row lacks is None there."""
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    cells = [values if _all_numbers(values) else [_text(value) for value in values] for values in columns.values()]
    return list(columns), [list(row) for row in zip(*cells, strict=True)]


def text_of(rows: Rows) -> str:
    """Rows as TensorBoard shows texts, in Markdown: a block each, as it stands, a line or more for each key."""
    return "\n\n---\n\n".join(
        "\n".join(f"    {line}" for name, value in row.items() for line in f"{name}: {_text(value)}".splitlines())
        for row in rows
    )


def _all_numbers(values: Sequence[Any]) -> bool:
    return all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
