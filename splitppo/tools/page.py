"""A run as one page, RUN/report.html: settings, curves, timelines of its steps, samples.

The page is the template report.html with the data as JSON. It loads nothing, so it opens offline. The constants below
bound its size.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from splitppo.config import Config
from splitppo.config.toml import leaves
from splitppo.run.files import read_if_there
from splitppo.run.records import read_lines
from splitppo.tools.timeline import OTHER_COLOUR, SPAN_COLOURS, Column, Timeline, build_timeline, curves, timed_steps

CURVE_POINTS = 2000
TIMELINES, LAST_TIMELINES = 200, 50  # all of the last steps, and some of the steps before them
SAMPLE_ROWS, SAMPLE_STEPS = 300, 75  # of the training and as many of the held-out samples
TEXT_CHARS = 2000
ABSENT = "not in config.toml"

SAMPLES = {"training": "samples", "held-out": "validation"}  # kind: the run's folder
NO_METRICS = {"step", "time", "critic/step", "critic/time"}
GROUPS = {  # title: pattern of a metric's name; the first that fits takes the metric
    "Score and validation": r"^val/|^(?!.*timing_s).*(score|reward)",
    "Losses, gradients, learning rate": r"(?<!kl)_loss$|grad_norm|skipped|/lr$",
    "KL": r"kl",
    "Clipping and ratio": r"clipfrac|ratio_mean|importance",
    "Entropy": r"entropy",
    "Value statistics": r"^critic/(values|returns|advantages|vf_|vpred)",
    "Lengths": r"length|^tokens$",
    "Mismatch of engine and trainer": r"mismatch",
    "Throughput, memory, idle share": r"perf/",
    "Seconds": r"timing_s/",
    "Further figures": r"",
}

T = TypeVar("T")


def build_page(run: Path, actor: Column, critic: Column, chosen: int | None) -> str:
    """The page of a run.

    Args:
        chosen: the step whose timeline it opens with; None: no timeline, since no step has spans.

    Raises:
        UserError: a file of the run can't be read.
    """
    series = {name: points for name, points in curves(actor, critic).items() if name not in NO_METRICS}
    timelines = [build_timeline(actor, critic, step) for step in pick_steps(timed_steps(actor, critic), chosen)]
    times = [step.metrics["time"] for column in (actor, critic) for step in column.values() if "time" in step.metrics]
    settings = read_if_there(run / "config.toml", tomllib.loads)
    names = {name for timeline in timelines for spans in timeline.lanes.values() for _, (name, _, _) in spans}
    data = {
        "name": run.resolve().name,
        "folder": str(run.resolve()),
        "steps": max(actor),
        "time": max(times, default=None),
        "config": None if settings is None else differences(settings, asdict(Config())),
        "versions": read_if_there(run / "versions.json", lambda text: dict(json.loads(text))),
        "placement": read_if_there(run / "placement.txt", str.splitlines) or ["no placement.txt in the run's folder"],
        "groups": [[title, [[name, *curve(series[name])] for name in found]] for title, found in grouped(series)],
        "timelines": [layout(timeline) for timeline in timelines],
        "chosen": chosen,
        "colours": dict.fromkeys(names, OTHER_COLOUR) | SPAN_COLOURS,
        "samples": {kind: read_samples(run / folder) for kind, folder in SAMPLES.items()},
        "limits": {"points": CURVE_POINTS, "timelines": TIMELINES, "rows": SAMPLE_ROWS, "chars": TEXT_CHARS},
    }
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", embed(data))


def embed(data: Any) -> str:
    """JSON that may stand within an HTML <script>: nothing in it ends the element or begins another. Numbers must be
    finite, since JSON has no others."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def thin(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items (2 at least), evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def thin_points(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most `most` points of a curve (5 at least): the first, the last, and of each stretch between them the lowest,
    the highest and one that isn't finite, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], (most - 2) // 3
    kept = {points[0], points[-1]}
    for i in range(stretches):
        part = inner[len(inner) * i // stretches : len(inner) * (i + 1) // stretches]
        finite = sorted((point for point in part if math.isfinite(point[1])), key=lambda point: point[1])
        kept |= {*finite[:1], *finite[-1:], *[point for point in part if not math.isfinite(point[1])][:1]}
    return sorted(kept, key=lambda point: point[0])


def curve(points: Mapping[int, float]) -> tuple[list[int], list[float | None]]:
    """Steps and values of a curve, thinned, with six digits; None is a value that isn't finite."""
    kept = thin_points(sorted(points.items()), CURVE_POINTS)
    return [step for step, _ in kept], [float(f"{value:.6g}") if math.isfinite(value) else None for _, value in kept]


def grouped(names: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The metrics by the groups of the page, without empty groups."""
    found: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in names:
        found[next(title for title, pattern in GROUPS.items() if re.search(pattern, name))].append(name)
    return [(title, members) for title, members in found.items() if members]


def pick_steps(steps: Sequence[int], chosen: int | None) -> list[int]:
    """The steps whose timelines the page holds, at most `TIMELINES`, `chosen` among them."""
    kept = {*thin(steps[:-LAST_TIMELINES], TIMELINES - LAST_TIMELINES - 1), *steps[-LAST_TIMELINES:]}
    return sorted(kept if chosen is None else kept | {chosen})


def layout(timeline: Timeline) -> dict[str, Any]:
    """A timeline as the page draws it: the spans in view, in seconds."""
    low, high = timeline.view()
    lanes = {
        lane: [
            [step, name, round(start, 6), round(end, 6)]
            for step, (name, start, end) in sorted(spans, key=lambda span: span[1][1])
            if start < high and end > low
        ]
        for lane, spans in timeline.lanes.items()
    }
    own = {"step": timeline.step, "title": timeline.title(), "length": timeline.length, "view": [low, high]}
    return own | {"lanes": list(lanes.items()), "shared": timeline.shared}


def differences(settings: Mapping[str, Any], defaults: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(setting, value, default) of each setting that isn't at its default, as JSON. A run of another version may lack
    some of today's settings, and have others."""
    here, known = ({name: _json(value) for name, value in leaves(dict(table))} for table in (settings, defaults))
    names = [name for name in [*known, *sorted(here.keys() - known.keys())] if name != "config"]
    rows = [(name, here.get(name, ABSENT), known.get(name, "not a setting of this version")) for name in names]
    return [row for row in rows if row[1] != row[2] and row[1:] != (ABSENT, "unset")]


def read_samples(folder: Path) -> dict[str, Any]:
    """The samples of step_*.jsonl: evenly chosen steps, the last among them, and of each its first rows.

    Returns:
        `steps`: how many there are; `rows`: flat objects whose values are numbers, true, false or cut texts.
    """
    files = sorted(folder.glob("step_*.jsonl"))
    kept = thin(files, SAMPLE_STEPS)
    rows = [row for path in kept for row in islice(read_lines(path), SAMPLE_ROWS // len(kept))]
    return {"steps": len(files), "rows": [{key: _cell(value) for key, value in row.items()} for row in rows]}


def _cell(value: Any) -> Any:
    """A sample's value as the page's table shows it."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= TEXT_CHARS else f"{text[:TEXT_CHARS]} … ({len(text) - TEXT_CHARS} more characters)"


def _json(value: Any) -> str:
    """A setting's value; tuples and lists are alike, and so are 1 and 1.0."""
    if value is None:
        return "unset"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, ensure_ascii=False)
