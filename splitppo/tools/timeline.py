"""Runs as they recorded themselves: the timeline of a step, curves, tables of several runs. Needs no torch."""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from splitppo.config import Config
from splitppo.config.toml import leaves
from splitppo.errors import UserError, one_line
from splitppo.run.files import parse_record, read_if_there, read_lines

Span = tuple[str, float, float]  # name, start and end in seconds
Lane = tuple[str, list[tuple[int, str, float, float]]]  # its name; step, name, start and end of spans
Rows = list[tuple[str, ...]]  # of a table; the first are the heads

SPAN_COLOURS = {
    "rollout": "#4878b8",
    "barrier_wait": "#a9c1dd",  # the rollout's, paler: other ranks of the group still generate
    "logprobs": "#3fa7a3",
    "update": "#e08a3c",
    "score": "#8a6bbf",
    "advantages": "#5aa454",
    "sync": "#d8b93a",
    "validate": "#cf6f9f",
    "checkpoint": "#97705a",
}
COLOURS = ("#2f6db3", "#d9722e", "#3c9a5f", "#b5486f", "#8a6bbf", "#97705a", "#2fa3b0", "#c2a11f", "#5c6773", "#e08fb0")
RASTER_STEPS = 6  # drawn, the last
OTHER_COLOUR = "#c94f4f"  # of a span that is not ours
WAIT = "wait_"  # begins the name of a wait for the other column
RESULTS = ("run", "steps", "held-out score: last", "best", "training score: last", "median step", "tokens/s", "total")


class Step(NamedTuple):
    """What one column recorded of one step."""

    metrics: dict[str, float]
    spans: list[Span]
    calibration: Sequence[dict[str, float]] = ()
    slots: Sequence[Sequence[Sequence[int]]] = ()  # (row, tokens) that each of the first slots decoded

    def ends(self) -> tuple[float, float]:
        """When the spans begin and end."""
        return min(start for _, start, _ in self.spans), max(end for _, _, end in self.spans)


Column = dict[int, Step]


class Timeline(NamedTuple):
    """One step and its neighbours as they are drawn, in seconds since the actor began the step."""

    step: int
    title: str
    length: float  # of the actor's step
    view: tuple[float, float]
    lanes: list[Lane]  # the spans in view
    shared: list[tuple[float, float]]  # work of both lanes at once within the step, whichever step the critic's is of


class Run(NamedTuple):
    """A run of a comparison: its curves by metric; its settings (`flat`), none without config.toml."""

    name: str
    colour: str
    series: dict[str, dict[int, float]]
    settings: dict[str, str]


def read_column(path: Path) -> Column:
    """The steps of a metrics file; {} without a file, since a colocated run may have the actor's alone. A resumed run
    does steps again: the last record of a step counts."""
    records = read_lines(path, parse_record) if path.is_file() else ()
    found = {}
    for r in records:
        numbers: dict[str, float] = {name: value for name, value in r.items() if isinstance(value, int | float)}
        found[r["step"]] = Step(numbers, r["spans"], r.get("critic/calibration", ()), r.get("slots", ()))
    return found


def read_columns(run: Path) -> tuple[Column, Column]:
    """The steps of the actor and of the critic."""
    return read_column(run / "metrics" / "actor.jsonl"), read_column(run / "metrics" / "critic.jsonl")


def shared_work(actor_spans: Iterable[Span], critic_spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The intervals in which both columns are at work. Spans of one column don't overlap, so neither do these."""
    actor, critic = ([s for s in spans if not s[0].startswith(WAIT)] for spans in (actor_spans, critic_spans))
    cuts = [(max(a[1], c[1]), min(a[2], c[2])) for a in actor for c in critic]
    return sorted((start, end) for start, end in cuts if start < end)


def timed_steps(actor: Column, critic: Column) -> list[int]:
    """The steps that have spans, in order: in both columns, or in the actor's if none has them in both."""
    timed = sorted(number for number, step in actor.items() if step.spans)
    return [number for number in timed if number in critic and critic[number].spans] or timed


def choose_step(actor: Column, critic: Column, wanted: int | None = None) -> int | None:
    """The step to draw: the wanted one, or one of median duration among the last half; None if none has spans. If the
    wanted step has none, it is a UserError."""
    steps = timed_steps(actor, critic)
    if wanted is None:  # the first ones warm up
        late = sorted(steps[len(steps) // 2 :], key=lambda number: actor[number].ends()[1] - actor[number].ends()[0])
        return late[(len(late) - 1) // 2] if late else None
    if wanted not in steps:
        known = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise UserError(f"--step {wanted} has no recorded spans; steps with spans: {known}: name one of them")
    return wanted


def build_timeline(actor: Column, critic: Column, step: int) -> Timeline:
    """Lays out a step. Columns with the same spans are one column that was written twice (colocated). The view has the
    step's spans beyond its end, up to as long again: the critic's update ends in the next step."""
    origin, end = actor[step].ends()
    length, columns = max(end - origin, 1e-6), {"actor": actor, "critic": critic}
    if step not in critic or critic[step].spans in ([], actor[step].spans):
        columns = {"all ranks": actor}
    lanes: list[Lane] = []
    for lane, column in columns.items():
        near = ((n, *span) for n in range(step - 1, step + 2) if n in column for span in column[n].spans)
        lanes.append((lane, [(n, name, round(a - origin, 6), round(b - origin, 6)) for n, name, a, b in near]))
    inside = [[(name, max(a, 0.0), min(b, length)) for _, name, a, b in spans] for _, spans in lanes]
    shared = shared_work(*inside) if len(lanes) > 1 else []
    title = f"{seconds(length)}, in which nothing overlaps"  # also of a colocated run that wrote both columns
    if shared:
        both = sum(b - a for a, b in shared)
        title = f"both columns worked at once for {seconds(both)} of {seconds(length)} ({both / length:.0%})"
    last = max(b for _, spans in lanes for n, _, _, b in spans if n == step)
    low, high = (-0.06 if len(lanes) > 1 else -0.01) * length, min(max(last + 0.05 * length, 1.02 * length), 2 * length)
    seen = [(lane, [bar for bar in spans if bar[2] < high and bar[3] > low]) for lane, spans in lanes]
    return Timeline(step, f"Step {step}: {title}", length, (low, high), seen, shared)


def raster(actor: Column) -> tuple[str, list[tuple[int, int]], list[list[tuple[str, int, int]]]]:
    """What the first slots decoded in the last steps, side by side: a title, (step, where it begins), and of each slot
    (colour, where it begins, tokens) for each row. A step is as wide as the most tokens that a slot decoded in it."""
    last = [number for number in sorted(actor) if actor[number].slots][-RASTER_STEPS:]
    begins, at = [], 0
    bars: list[list[tuple[str, int, int]]] = [[] for _ in range(max((len(actor[n].slots) for n in last), default=0))]
    order: list[dict[int, int]] = [{} for _ in bars]  # of each slot: row -> number
    for number in last:
        begins.append((number, at))
        for slot, rows in enumerate(actor[number].slots):
            ends = accumulate((tokens for _, tokens in rows), initial=at)
            for (row, tokens), start in zip(rows, ends, strict=False):
                colour = COLOURS[(3 * slot + order[slot].setdefault(row, len(order[slot]))) % len(COLOURS)]
                bars[slot].append((colour, start, tokens))
        at = max(start + tokens for rows in bars for _, start, tokens in rows[-1:])
    full = sum(tokens for rows in bars for *_, tokens in rows)
    return f"{len(bars)} slots, a colour a row: {full / max(1, at * len(bars)):.0%} busy", begins, bars


def seconds(value: float) -> str:
    """Seconds with as many digits as help."""
    return f"{value:.{1 if value >= 10 else 2 if value >= 0.1 else 3}f} s"


def curves(actor: Column, critic: Column) -> dict[str, dict[int, float]]:
    """The values of each metric by step. A critic's metric has `critic/` in front, also where its name lacks it."""
    found: dict[str, dict[int, float]] = {}
    for prefix, column in (("", actor), ("critic/", critic)):
        for number, step in sorted(column.items()):
            for name, value in step.metrics.items():
                found.setdefault(prefix + name.removeprefix(prefix), {})[number] = value
    return found


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
    del both["config"]
    return {n: "unset" if value is None else json.dumps(value, ensure_ascii=False) for n, value in both.items()}


def differences(columns: Sequence[Mapping[str, str]]) -> Rows:
    """(setting, its value in each column) of each setting that isn't the same in all columns that have any; - where a
    run of another version lacks it."""
    names = dict.fromkeys(name for column in (flat(asdict(Config())), *columns) for name in column)
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    return [row for row in rows if len({cell for cell, column in zip(row[1:], columns, strict=True) if column}) > 1]


def settings_table(runs: Sequence[Run]) -> Rows:
    """Heads, and the settings that differ, but for the runs' own names."""
    rows = [row for row in differences([run.settings for run in runs]) if row[0] not in ("run_dir", "log.name")]
    return [("setting", *(run.name for run in runs)), *rows]


def results_table(runs: Sequence[Run]) -> Rows:
    """Heads, and the results of each run; - is not recorded."""
    rows: Rows = [RESULTS]
    for run in runs:
        names = ("val/score/mean", "critic/score/mean", "timing_s/step", "perf/throughput")
        held_out, training, took, speed = ([*run.series.get(name, {}).values()] for name in names)
        total, steps = sum(took), [value for step, value in run.series.get("timing_s/step", {}).items() if step]
        row = [run.name, str(max(map(max, run.series.values())))]
        row += [f"{held_out[-1]:.4g}", f"{max(held_out):.4g}"] if held_out else ["-", "-"]
        row += [f"{training[-1]:.4g}" if training else "-", seconds(median(steps)) if steps else "-"]
        row += [f"{median(speed):,.0f}" if speed else "-"]
        rows.append((*row, "-" if not total else seconds(total) if total < 120 else f"{total / 60:,.1f} min"))
    return rows


def as_text(table: Rows, width: int = 120) -> list[str]:
    """A table as lines of at most `width` characters; cells of the widest columns lose their middle."""
    cells = [[one_line(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while sum(widths) + 2 * len(widths) - 2 > width:
        widths[max(range(len(widths)), key=lambda i: widths[i] if i else widths[i] / 3)] -= 1

    def fit(cell: str, size: int) -> str:
        return cell.ljust(size) if len(cell) <= size else f"{cell[: (size - 1) // 2]}…{cell[len(cell) - size // 2 :]}"

    return ["  ".join(map(fit, row, widths)).rstrip() for row in cells]
