"""Runs as they recorded themselves: steps, curves, settings, and tables of several runs. Needs no
torch."""

import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from splitppo.config import Config
from splitppo.config.toml import leaves
from splitppo.errors import UserError, one_line
from splitppo.run.files import parse_record, read_if_there, read_lines

Span = tuple[str, float, float]  # name, start and end in seconds
Rows = list[tuple[str, ...]]  # of a table; the first are the heads

COLOURS = (
    "#2f6db3",
    "#d9722e",
    "#3c9a5f",
    "#b5486f",
    "#8a6bbf",
    "#97705a",
    "#2fa3b0",
    "#c2a11f",
    "#5c6773",
    "#e08fb0",
)


NAMES = ("seed", "run_dir")  # settings in which the seeds of one configuration differ


class Step(NamedTuple):
    """What one column recorded of one step."""

    metrics: dict[str, float]
    spans: list[Span]

    def ends(self) -> tuple[float, float]:
        """When the spans begin and end."""
        return min(start for _, start, _ in self.spans), max(end for _, _, end in self.spans)


Column = dict[int, Step]


class Run(NamedTuple):
    """A run of a report."""

    name: str
    colour: str
    series: dict[str, dict[int, float]]  # its curves by metric
    settings: dict[str, str]  # as `flat` has them; none without config.toml
    columns: tuple[Column, Column] = ({}, {})  # the actor's and the critic's
    # the settings that the user set; None: not recorded
    user_settings: Collection[str] | None = None


def check_folder(run: Path, *, file: str = "") -> None:
    """Raises UserError if there is no such folder, or it lacks a `file` that a run writes."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder (from {Path.cwd()}); name the folder of a run")
    if file and not (run / file).is_file():
        raise UserError(
            f"{run} is not a run's folder: {file} is missing; name the folder of a run"
            + ", not a checkpoint of it" * (run / "actor").is_dir()
        )


def read_column(path: Path) -> Column:
    """The steps of a metrics file; {} without a file. A resumed run does steps again: a step's last
    record counts."""
    return {
        record["step"]: Step(
            {name: value for name, value in record.items() if isinstance(value, int | float)},
            record["spans"],
        )
        for record in (read_lines(path, parse_record) if path.is_file() else ())
    }


def read_columns(run: Path) -> tuple[Column, Column]:
    """The steps of the actor and of the critic."""
    return (
        read_column(run / "metrics" / "actor.jsonl"),
        read_column(run / "metrics" / "critic.jsonl"),
    )


def seconds(value: float) -> str:
    """Seconds with as many digits as help."""
    return f"{value:.{1 if value >= 10 else 2 if value >= 0.1 else 3}f} s"


# a column of the table of results -> how it shows a number
RESULTS: dict[str, Callable[[float], str]] = {
    "steps": "{:.10g}".format,
    "held-out score: last": "{:.4g}".format,
    "best": "{:.4g}".format,
    "training score: last": "{:.4g}".format,
    "median step": seconds,
    "tokens/s": "{:,.0f}".format,
    "total": lambda total: seconds(total) if total < 120 else f"{total / 60:,.1f} min",
}


def curves(actor: Column, critic: Column) -> dict[str, dict[int, float]]:
    """The values of each metric by step. A critic's metric has `critic/` in front, also where its
    name lacks it."""
    series: dict[str, dict[int, float]] = {}
    for prefix, column in (("", actor), ("critic/", critic)):
        for number, step in sorted(column.items()):
            for name, value in step.metrics.items():
                series.setdefault(prefix + name.removeprefix(prefix), {})[number] = value
    return series


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Runs by their folders' names, or by their paths where two have one name. Raises UserError if
    a run has no step, or there are more runs than colours."""
    if len(folders) > len(COLOURS):
        raise UserError(
            f"{len(folders)} runs: at most {len(COLOURS)} have a colour of their own; name fewer"
        )
    names = [folder.resolve().name for folder in folders]
    names = names if len({*names}) == len(names) else [str(folder) for folder in folders]
    runs = []
    for folder, name, colour in zip(folders, names, COLOURS, strict=False):
        check_folder(folder)
        columns = read_columns(folder)
        if not columns[0]:
            raise UserError(
                f"{folder} has no step in metrics/actor.jsonl: name runs that have begun"
            )
        runs.append(
            Run(
                name,
                colour,
                series=curves(*columns),
                settings=read_if_there(folder / "config.toml", lambda s: flat(tomllib.loads(s)))
                or {},
                columns=columns,
                user_settings=read_if_there(folder / "given.json", json.loads),
            )
        )
    return runs


def flat(table: dict[str, Any]) -> dict[str, str]:
    """Settings by dotted name, each as JSON, with those that a preset leaves out since they are
    unset by default."""
    settings = dict(leaves(table))
    return {
        name: "unset" if value is None else json.dumps(value, ensure_ascii=False)
        for name, value in (dict(leaves(asdict(Config()))) | settings).items()
        if name != "config" and (name in settings or value is None)
    }


def differences(
    columns: Sequence[Mapping[str, str]], user_set: Sequence[Collection[str] | None] = (None,)
) -> Rows:
    """(setting, its value in each column) of each setting that isn't the same in all columns that
    have any; - where a run of another version lacks it. `user_set`: the settings that the user of
    each run set. Those that no user set are left out, since only their defaults differ; unless a
    run of an earlier version (None) has no record of that."""
    names = dict.fromkeys(name for column in (flat(asdict(Config())), *columns) for name in column)
    rows = [
        (name, *(column.get(name, "-") for column in columns))
        for name in names
        if any(user is None or name in user for user in user_set)
    ]
    return [
        row
        for row in rows
        if len({cell for cell, column in zip(row[1:], columns, strict=True) if column}) > 1
    ]


def settings_table(runs: Sequence[Run]) -> Rows:
    """Heads, and the settings that differ, but for the runs' own names."""
    rows = differences([run.settings for run in runs], [run.user_settings for run in runs])
    return [("setting", *(run.name for run in runs)), *(row for row in rows if row[0] != "run_dir")]


def seeds(runs: Sequence[Run]) -> list[int]:
    """For each run the number of the first one whose settings differ in nothing but the seed and
    the names. A run without settings stands alone."""
    keys = [
        sorted(item for item in run.settings.items() if item[0] not in NAMES) or number
        for number, run in enumerate(runs)
    ]
    return [keys.index(key) for key in keys]


def results_table(runs: Sequence[Run]) -> Rows:
    """Heads, and the results of each run; then the mean of each group of `seeds`, of what all of
    them recorded. - is not recorded."""
    heads = ("run", *RESULTS)
    results = [_results(run) for run in runs]
    rows = [(run.name, *_shown(result)) for run, result in zip(runs, results, strict=True)]
    groups = seeds(runs)
    for first in dict.fromkeys(groups):
        members = [results[i] for i, group in enumerate(groups) if group == first]
        if len(members) > 1:
            columns = zip(*members, strict=True)
            means = [None if None in column else fmean(column) for column in columns]
            rows.append((f"{runs[first].name}: mean of {len(members)} seeds", *_shown(means)))
    return [heads, *rows]


def _results(run: Run) -> list[float | None]:
    """The numbers of RESULTS, in their order; None is not recorded."""
    held_out, training, took, speed = (
        [*run.series.get(name, {}).values()]
        for name in ("val/score/mean", "critic/score/mean", "timing_s/step", "perf/throughput")
    )
    steps = [value for step, value in run.series.get("timing_s/step", {}).items() if step]
    return [
        max(map(max, run.series.values())),
        held_out[-1] if held_out else None,
        max(held_out, default=None),
        training[-1] if training else None,
        median(steps) if steps else None,
        median(speed) if speed else None,
        sum(took) or None,
    ]


def _shown(numbers: Sequence[float | None]) -> list[str]:
    pairs = zip(RESULTS.values(), numbers, strict=True)
    return ["-" if number is None else show(number) for show, number in pairs]


def as_text(table: Rows, width: int = 120) -> list[str]:
    """A table as lines of at most `width` characters; cells of the widest columns lose their
    middle."""
    cells = [[one_line(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while sum(widths) + 2 * len(widths) - 2 > width:
        widths[max(range(len(widths)), key=lambda i: widths[i] if i else widths[i] / 3)] -= 1

    def fit(cell: str, size: int) -> str:
        return (
            cell.ljust(size)
            if len(cell) <= size
            else f"{cell[: (size - 1) // 2]}…{cell[len(cell) - size // 2 :]}"
        )

    return ["  ".join(map(fit, row, widths)).rstrip() for row in cells]
