"""A run as one page, or several runs compared: the template report.html with the data as JSON. It
loads nothing, so it opens offline. The constants below bound its size."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from splitppo.config import Config
from splitppo.run.files import read_if_there, read_lines, shown
from splitppo.tools.runs import (
    Column,
    Run,
    curves,
    differences,
    flat,
    read_settings,
    results_table,
    settings_table,
)
from splitppo.tools.timeline import OTHER_COLOUR, SPAN_COLOURS, build_timeline, raster, timed_steps

CURVE_POINTS = 2000
TIMELINES = 200  # of the last steps and the chosen one
# of the training and as many of the held-out samples
SAMPLE_ROWS = 300
SAMPLE_STEPS = 75
TEXT_CHARS = 2000
# steps with rows shown token by token; rows of a step, tokens of a row
TOKEN_STEPS = 12
TOKEN_ROWS = 4
TOKENS = 1000

NO_METRICS = {"step", "time", "critic/step", "critic/time"}


def build_page(run: Path, actor: Column, critic: Column, chosen: int | None) -> str:
    """The page of a run. It opens with the timeline of the step `chosen`; None: no step has spans.
    Raises UserError if a file of the run can't be read."""
    timed = timed_steps(actor, critic)
    timelines = [
        build_timeline(actor, critic, step)
        for i, step in enumerate(timed)
        if step == chosen or i > len(timed) - TIMELINES
    ]
    metrics = [step.metrics for column in (actor, critic) for step in column.values()]
    settings = read_settings(run)
    changed = settings and differences(
        [settings, flat(asdict(Config()))], [read_if_there(run / "given.json", json.loads)]
    )
    versions = read_if_there(run / "versions.json", lambda text: dict(json.loads(text)))
    names = {name for timeline in timelines for _, spans in timeline.lanes for _, name, *_ in spans}
    return render(
        {
            "name": run.resolve().name,
            "about": f"{run.resolve()}: {max(actor)} steps",
            "time": max((found["time"] for found in metrics if "time" in found), default=None),
            "runs": [],
            "tables": [
                ["Settings that differ from the defaults", ("setting", "here", "default"), changed],
                ["Versions", ("", ""), versions and list(versions.items())],
            ],
            "placement": read_if_there(run / "placement.txt", str.splitlines)
            or ["no placement.txt in the run's folder"],
            "groups": groups([curves(actor, critic)]),
            "timelines": [timeline._asdict() for timeline in timelines],
            "raster": raster(actor),
            "chosen": chosen,
            "colours": {name: SPAN_COLOURS.get(name, OTHER_COLOUR) for name in names},
            "samples": {
                "training": read_samples(run / "samples"),
                "held-out": read_samples(run / "validation"),
            },
        }
    )


def build_comparison(runs: Sequence[Run]) -> str:
    """The page of several runs: tables of their results and of the settings that differ, curves
    over each other."""
    heads, *results = results_table(runs)
    names, *settings = settings_table(runs)
    return render(
        {
            "name": ", ".join(run.name for run in runs),
            "about": f"{len(runs)} runs",
            "runs": [{"name": run.name, "colour": run.colour} for run in runs],
            "tables": [["Results", heads, results], ["Settings that differ", names, settings]],
            "groups": groups([run.series for run in runs]),
        }
    )


def render(data: dict[str, Any]) -> str:
    """The template with its data."""
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    data["limits"] = {
        "points": CURVE_POINTS,
        "timelines": TIMELINES,
        "rows": SAMPLE_ROWS,
        "chars": TEXT_CHARS,
        "tokens": TOKENS,
    }
    return template.replace("__DATA__", embed(data))


def embed(data: Any) -> str:
    """JSON for an HTML <script>: nothing in it ends the element or begins another. Numbers must be
    finite."""
    return (
        json.dumps(data, allow_nan=False, separators=(",", ":"))
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
    before the last slash of a metric's name. Groups of scores come first. A curve has at most
    `CURVE_POINTS` points, over all runs."""
    found: dict[str, list[Any]] = {}
    most = max(CURVE_POINTS // len(runs), 100)
    for name in sorted({name for run in runs for name in run} - NO_METRICS):
        lines = [[i, *curve(run[name], most)] for i, run in enumerate(runs) if name in run]
        found.setdefault(name.rpartition("/")[0] or "others", []).append([name, lines])
    return sorted(found.items(), key=lambda group: ("score" not in group[0], group[0]))


def curve(points: Mapping[int, float], most: int) -> tuple[list[int], list[float | None]]:
    """Steps and values of a curve, with six digits; None is a value that isn't finite.

    At most `most` points (5 at least): the first, the last, and of each stretch between them the
    lowest, the highest and one that isn't finite, so that no spike is lost.
    """
    steps = sorted(points)
    if len(steps) > most:
        inner = steps[1:-1]
        stretches = (most - 2) // 3
        kept = {steps[0], steps[-1]}
        for i in range(stretches):
            part = inner[len(inner) * i // stretches : len(inner) * (i + 1) // stretches]
            finite = sorted(
                (step for step in part if math.isfinite(points[step])), key=points.__getitem__
            )
            kept |= {*finite[:1], *finite[-1:], *sorted({*part} - {*finite})[:1]}
        steps = sorted(kept)
    return steps, [
        float(f"{points[step]:.6g}") if math.isfinite(points[step]) else None for step in steps
    ]


def read_samples(folder: Path) -> dict[str, Any]:
    """The samples of step_*.jsonl: evenly chosen steps, the last among them, and of each its first
    rows. Returns `steps`, how many there are, and `rows`: flat objects whose values are numbers,
    true, false or cut texts. The first rows of some steps have `tokens`, if they are recorded:
    lists of the first tokens' texts and figures."""
    files = sorted(folder.glob("step_*.jsonl"))
    rows = []
    kept = thin(files, SAMPLE_STEPS)
    for path in kept:
        for i, row in enumerate(islice(read_lines(path), SAMPLE_ROWS // len(kept))):
            rows.append({key: _cell(value) for key, value in shown(row).items()})
            if path in thin(kept, TOKEN_STEPS) and i < TOKEN_ROWS and "tokens" in row:
                rows[-1]["tokens"] = {
                    name: list(map(_cell, xs[:TOKENS])) for name, xs in row["tokens"].items()
                }
    return {"steps": len(files), "rows": rows}


def _cell(value: Any) -> Any:
    """A sample's value as the page's table shows it."""
    if isinstance(value, int | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return (
        text
        if len(text) <= TEXT_CHARS
        else f"{text[:TEXT_CHARS]} … ({len(text) - TEXT_CHARS} more characters)"
    )
