"""A run as one page, or several runs compared: the template web/report.html with its style, its
scripts and the data as JSON. It loads nothing, so it opens offline. The constants below bound its
size."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from splitppo.config import Config
from splitppo.run.files import read_if_there, read_lines, shown
from splitppo.tools.runs import (
    COLOURS,
    Run,
    differences,
    flat,
    results_table,
    seeds,
    settings_table,
)
from splitppo.tools.timeline import OTHER_COLOUR, SPAN_COLOURS, build_timeline, timed_steps

CURVE_POINTS = 2000  # of a curve
POINTS = 70_000  # of all curves
TIMELINES = 100  # of the last steps and the chosen one
# of the training and as many of the held-out samples
SAMPLE_ROWS = 200
SAMPLE_STEPS = 25
TEXT_CHARS = 1500
TURNS = 40
# steps with rows shown token by token; rows of a step, tokens of a row
TOKEN_STEPS = 8
TOKEN_ROWS = 4
TOKENS = 500

NO_METRICS = {"step", "time", "critic/step", "critic/time"}


def build_page(folder: Path, run: Run, chosen: int | None) -> str:
    """The page of a run. It opens with the timeline of the step `chosen`; None: no step has spans.
    Raises UserError if a file of the run can't be read."""
    actor, critic = run.columns
    timed = timed_steps(actor, critic)
    timelines = [
        build_timeline(actor, critic, step)
        for i, step in enumerate(timed)
        if step == chosen or i > len(timed) - TIMELINES
    ]
    metrics = [step.metrics for column in (actor, critic) for step in column.values()]
    changed = differences([run.settings, flat(asdict(Config()))], [run.user_settings])
    versions = read_if_there(folder / "versions.json", lambda text: dict(json.loads(text)))
    names = {name for timeline in timelines for _, spans in timeline.lanes for _, name, *_ in spans}
    return render(
        {
            "name": run.name,
            "about": f"{folder.resolve()}: {max(actor)} steps",
            "time": max((record["time"] for record in metrics if "time" in record), default=None),
            "tables": [
                [
                    "Settings that differ from the defaults",
                    ("setting", "here", "default"),
                    changed if run.settings else None,
                ],
                ["Versions", ("", ""), versions and list(versions.items())],
            ],
            "placement": read_if_there(folder / "placement.txt", str.splitlines)
            or ["no placement.txt in the run's folder"],
            "timelines": [timeline._asdict() for timeline in timelines],
            "chosen": chosen,
            "colours": {name: SPAN_COLOURS.get(name, OTHER_COLOUR) for name in names},
            "samples": {
                kind: read_samples(folder / name)
                | {"per_prompt": int(run.settings.get(setting, "1"))}
                for kind, name, setting in (
                    ("training", "samples", "rollout.samples"),
                    ("held-out", "validation", "log.validate_samples"),
                )
            },
        },
        [run],
    )


def build_comparison(runs: Sequence[Run]) -> str:
    """The page of several runs: tables of their results and of the settings that differ, curves
    over each other."""
    heads, *results = results_table(runs)
    names, *settings = settings_table(runs)
    data = {
        "name": ", ".join(run.name for run in runs),
        "about": f"{len(runs)} runs",
        "tables": [["Results", heads, results], ["Settings that differ", names, settings]],
    }
    return render(data, runs)


def render(data: dict[str, Any], runs: Sequence[Run]) -> str:
    """The template with its data and the runs' curves."""
    data |= {
        "runs": [
            {"name": run.name, "colour": run.colour, "clocks": clocks(run.series), "group": group}
            for run, group in zip(runs, seeds(runs), strict=True)
        ],
        "groups": groups([run.series for run in runs]),
        "palette": COLOURS,
        "limits": {
            "timelines": TIMELINES,
            "rows": SAMPLE_ROWS,
            "chars": TEXT_CHARS,
            "tokens": TOKENS,
        },
    }
    files = Path(__file__).with_name("web")

    def part(placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        return embed(data) if name == "data" else (files / name).read_text(encoding="utf-8")

    template = (files / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([\w.]+)\}\}", part, template)


def clocks(series: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """By the end of each step, the `tokens` of all steps so far and the `hours` that they took
    (`curve`); those that are recorded."""
    by_unit = {}
    for unit, metric, size in (("tokens", "tokens", 1), ("hours", "timing_s/step", 3600)):
        if points := series.get(metric):
            steps = sorted(points)
            sums = accumulate(points[step] / size for step in steps)
            by_unit[unit] = curve(dict(zip(steps, sums, strict=True)), CURVE_POINTS)
    return by_unit


def embed(data: Any) -> str:
    """JSON for an HTML <script>: nothing in it ends the element or begins another. Numbers must be
    finite."""
    return (
        json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        .encode(errors="backslashreplace")  # half a surrogate pair, as JSON writes it
        .decode()
        .replace("&", r"\u0026")
        .replace("<", r"\u003c")
        .replace(">", r"\u003e")
    )


def thin(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the items (2 at least), evenly spaced, with the first and the last."""
    count = min(most, len(items))
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]


def groups(runs: Sequence[Mapping[str, Mapping[int, float]]]) -> list[Any]:
    """[group, [[metric, [[number of the run, *`curve`], ...]], ...]] for each group: what stands
    before the last slash of a metric's name. Groups of scores come first."""
    by_group: dict[str, list[Any]] = {}
    most = min(CURVE_POINTS, max(POINTS // max(1, sum(map(len, runs))), 100))
    for name in sorted({name for run in runs for name in run} - NO_METRICS):
        lines = [[i, *curve(run[name], most)] for i, run in enumerate(runs) if name in run]
        by_group.setdefault(name.rpartition("/")[0] or "others", []).append([name, lines])
    return sorted(by_group.items(), key=lambda group: ("score" not in group[0], group[0]))


def curve(points: Mapping[int, float], most: int) -> tuple[list[int], list[float | None]]:
    """Steps and values of a curve, with six digits; None is a value that isn't finite.

    At most `most` points (5 at least): the first, the last, and of each stretch between them the
    lowest, the highest and one that isn't finite, so that no spike is lost.
    """
    steps = sorted(points)
    if len(steps) > most:
        inner = steps[1:-1]
        stretches = (most - 2) // (2 if all(map(math.isfinite, points.values())) else 3)
        chosen = {steps[0], steps[-1]}
        for i in range(stretches):
            part = inner[len(inner) * i // stretches : len(inner) * (i + 1) // stretches]
            finite = sorted(
                (step for step in part if math.isfinite(points[step])), key=points.__getitem__
            )
            chosen |= {*finite[:1], *finite[-1:], *sorted({*part} - {*finite})[:1]}
        steps = sorted(chosen)
    return steps, [
        float(f"{points[step]:.6g}") if math.isfinite(points[step]) else None for step in steps
    ]


def read_samples(folder: Path) -> dict[str, Any]:
    """The samples of step_*.jsonl: evenly chosen steps, the last among them, and of each its first
    rows.

    Returns `steps`, how many there are, and `rows`: objects whose values are numbers, true, false
    or cut texts, but for two. A dialogue has `turns` in place of its `response`: objects with role,
    content and, where the policy spoke, reward and value. The first rows of some steps have
    `tokens`, if they are recorded: lists of the first tokens' texts and figures. `first_value` is
    the value at a row's first token.
    """
    files = sorted(folder.glob("step_*.jsonl"))
    rows = []
    chosen = thin(files, SAMPLE_STEPS)
    for path in chosen:
        for i, row in enumerate(islice(read_lines(path), SAMPLE_ROWS // len(chosen))):
            rows.append({key: _cell(value) for key, value in shown(row).items()})
            if turns := row.get("turns"):
                del rows[-1]["response"]
                most = max(TEXT_CHARS // len(turns), 200)
                rows[-1]["turns"] = [
                    {key: _cell(value, most) for key, value in turn.items()}
                    for turn in turns[:TURNS]
                ]
            tokens = row.get("tokens", {})
            if values := tokens.get("value"):
                rows[-1]["first_value"] = _cell(values[0])
            if tokens and path in thin(chosen, TOKEN_STEPS) and i < TOKEN_ROWS:
                rows[-1]["tokens"] = {
                    name: list(map(_cell, xs[:TOKENS])) for name, xs in tokens.items()
                }
    return {"steps": len(files), "rows": rows}


def _cell(value: Any, most: int = TEXT_CHARS) -> Any:
    """A sample's value as the page shows it."""
    if isinstance(value, int | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"
