"""Runs side by side: how they ended, and their settings that differ, as tables. Needs no torch."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from splitppo.config import Config
from splitppo.config.toml import leaves
from splitppo.errors import UserError, one_line
from splitppo.run.files import read_if_there
from splitppo.tools.timeline import COLOURS, curves, read_columns, seconds

RESULTS = ("run", "steps", "held-out score: last", "best", "training score: last", "median step", "tokens/s", "total")
Rows = list[tuple[str, ...]]


class Run(NamedTuple):
    """A run of a comparison: its curves by metric; its settings (`flat`), none without config.toml."""

    name: str
    colour: str
    series: dict[str, dict[int, float]]
    settings: dict[str, str]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Runs by their folders' names, or by their paths where two have one name. Raises UserError if a run has no step,
    or there are more runs than colours."""
    if len(folders) > len(COLOURS):
        raise UserError(f"{len(folders)} runs: at most {len(COLOURS)} have a colour of their own; name fewer")
    names = [folder.resolve().name for folder in folders]
    names = names if len({*names}) == len(names) else [str(folder) for folder in folders]
    series = [curves(*read_columns(folder)) for folder in folders]
    for folder in (folder for folder, found in zip(folders, series, strict=True) if not found):
        raise UserError(f"{folder} has no step in metrics/actor.jsonl: name runs that have begun")
    return [Run(*run) for run in zip(names, COLOURS, series, (read_settings(f) or {} for f in folders), strict=False)]


def read_settings(run: Path) -> dict[str, str] | None:
    """A run's settings (`flat`); None without config.toml."""
    return read_if_there(run / "config.toml", lambda text: flat(tomllib.loads(text)))


def flat(table: dict[str, Any]) -> dict[str, str]:
    """Settings by dotted name, each as JSON, with those that a preset leaves out since they are unset by default."""
    given, known = dict(leaves(table)), dict(leaves(asdict(Config())))
    both = {name: value for name, value in (known | given).items() if name in given or value is None}
    return {name: _json(value) for name, value in both.items() if name != "config"}


def differences(columns: Sequence[Mapping[str, str]], absent: Sequence[str]) -> Rows:
    """(setting, its value in each column) of each setting that isn't the same in all columns that have any. A run of
    another version may lack some of today's settings, and have others; `absent` is what a column shows for these."""
    names = dict.fromkeys(name for column in (flat(asdict(Config())), *columns) for name in column)
    rows = [(name, *(column.get(name, no) for column, no in zip(columns, absent, strict=True))) for name in names]
    return [row for row in rows if len({cell for cell, column in zip(row[1:], columns, strict=True) if column}) > 1]


def settings_table(runs: Sequence[Run]) -> Rows:
    """Heads, and the settings that differ, but for the runs' own names."""
    rows = differences([run.settings for run in runs], ["-"] * len(runs))
    return [("setting", *(run.name for run in runs)), *(row for row in rows if row[0] not in ("run_dir", "log.name"))]


def results_table(runs: Sequence[Run]) -> Rows:
    """Heads, and of each run its scores, seconds and tokens/s of the median step, and the time of all steps; - is not
    recorded."""
    return [RESULTS, *map(_results, runs)]


def _results(run: Run) -> tuple[str, ...]:
    held_out, training, took, speed = (
        dict(sorted(run.series.get(name, {}).items()))
        for name in ("val/score/mean", "critic/score/mean", "timing_s/step", "perf/throughput")
    )
    total = sum(took.values())
    took.pop(0, None)  # the validation before the first step
    return (
        run.name,
        str(max(map(max, run.series.values()))),
        *((f"{[*held_out.values()][-1]:.4g}", f"{max(held_out.values()):.4g}") if held_out else "--"),
        f"{[*training.values()][-1]:.4g}" if training else "-",
        seconds(median(took.values())) if took else "-",
        f"{median(speed.values()):,.0f}" if speed else "-",
        "-" if not total else seconds(total) if total < 120 else f"{total / 60:,.1f} min",
    )


def as_text(table: Rows, width: int = 120) -> list[str]:
    """A table as lines of at most `width` characters; cells of the widest columns lose their middle."""
    cells = [[one_line(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while sum(widths) + 2 * len(widths) - 2 > width:
        widths[max(range(len(widths)), key=lambda i: widths[i] if i else widths[i] / 3)] -= 1
    cut = [
        [c if len(c) <= w else f"{c[: (w - 1) // 2]}…{c[len(c) - w // 2 :]}" for c, w in zip(row, widths, strict=True)]
        for row in cells
    ]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cut]


def _json(value: Any) -> str:
    """A setting's value; tuples and lists are alike, and so are 1 and 1.0."""
    if value is None:
        return "unset"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, ensure_ascii=False)
