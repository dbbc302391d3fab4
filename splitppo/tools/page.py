"""A run as one page, RUN/report.html: settings, curves, timelines of its steps, samples.

The page is report.html with the data put into it as JSON; it loads nothing, so it opens offline and from a mail. It is
bounded: at most `CURVE_POINTS` points a curve, timelines of at most `TIMELINES` steps, and at most `SAMPLE_ROWS` rows
of the training and as many of the held-out samples, with texts cut at `TEXT_CHARS`.
"""

import json
import math
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from splitppo.config import Config
from splitppo.config.toml import leaves
from splitppo.errors import UserError
from splitppo.run.files import read_if_there
from splitppo.tools.timeline import Column, Timeline, build_timeline, curves, span_colours, timed_steps

CURVE_POINTS = 2000
TIMELINES, LAST_TIMELINES = 200, 50  # the last ones are kept as they are, the ones before thinned
SAMPLE_ROWS, SAMPLE_STEPS = 300, 75  # of each kind
TEXT_CHARS = 2000
THINNEST = 1 / 4000  # share of a timeline's width below which a span can't be seen

SAMPLES = {"training": "samples", "held-out": "validation"}  # kind: the run's folder
NO_METRICS = {"step", "time", "critic/step", "critic/time"}
GROUPS = {  # title: what a metric's name must have; the first that fits takes it
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
        "placement": placement(run, settings or {}),
        "groups": [[title, [[name, *curve(series[name])] for name in found]] for title, found in grouped(series)],
        "timelines": [layout(timeline) for timeline in timelines],
        "chosen": chosen,
        "colours": span_colours(names),
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
    """At most `most` of the items, evenly spaced; of two or more the first and the last stay."""
    if len(items) <= most:
        return list(items)
    if most < 2:
        return list(items[len(items) - most :])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def thin_points(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most `most` points of a curve (5 at least): the first, the last, and of each stretch between them the lowest,
    the highest and one that isn't finite, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], (most - 2) // 3
    kept = [points[0]]
    for i in range(stretches):
        part = inner[len(inner) * i // stretches : len(inner) * (i + 1) // stretches]
        finite = [point for point in part if math.isfinite(point[1])]
        extremes = [low_high(finite, key=lambda point: point[1]) for low_high in (min, max)] if finite else []
        kept += sorted({*extremes, *[point for point in part if not math.isfinite(point[1])][:1]}, key=lambda p: p[0])
    return [*kept, points[-1]]


def curve(points: Mapping[int, float]) -> tuple[list[int], list[float | None]]:
    """Steps and values of a curve, thinned, with six digits; None is a value that isn't finite."""
    kept = thin_points(sorted(points.items()), CURVE_POINTS)
    return [step for step, _ in kept], [float(f"{value:.6g}") if math.isfinite(value) else None for _, value in kept]


def grouped(names: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The metrics by the groups of the page, groups without any left out."""
    found: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in names:
        found[next(title for title, pattern in GROUPS.items() if re.search(pattern, name))].append(name)
    return [(title, members) for title, members in found.items() if members]


def pick_steps(steps: Sequence[int], chosen: int | None) -> list[int]:
    """The steps whose timelines the page holds, at most `TIMELINES`, `chosen` among them."""
    early, last = steps[:-LAST_TIMELINES], steps[-LAST_TIMELINES:]
    kept = {*thin(early, TIMELINES - LAST_TIMELINES - 1), *last}
    return sorted(kept if chosen is None else kept | {chosen})


def layout(timeline: Timeline) -> dict[str, Any]:
    """A timeline as the page draws it: what is in view and wide enough to be seen, in seconds to the microsecond."""
    low, high = timeline.view()
    least = (high - low) * THINNEST
    return {
        "step": timeline.step,
        "title": timeline.title(),
        "length": round(timeline.length, 6),
        "view": [round(low, 6), round(high, 6)],
        "lanes": [
            [
                lane,
                [
                    [step, name, round(start, 6), round(end, 6)]
                    for step, (name, start, end) in sorted(spans, key=lambda item: item[1][1])
                    if min(end, high) - max(start, low) > least
                ],
            ]
            for lane, spans in timeline.lanes.items()
        ],
        "shared": [[round(start, 6), round(end, 6)] for start, end in timeline.shared if end - start > least],
    }


def differences(settings: Mapping[str, Any], defaults: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(setting, value, default) of each setting that isn't at its default, as JSON. One that config.toml lacks is
    unset, or of a later version than the run's; one that this version doesn't know has no default."""
    here, known = dict(leaves(dict(settings))), dict(leaves(defaults))
    found: list[tuple[str, str, str]] = []
    for name in [*known, *sorted(here.keys() - known.keys())]:
        if name == "config" or _json(here.get(name)) == _json(known.get(name)):
            continue
        value = _json(here[name]) if name in here else "not in config.toml"
        found.append((name, value, _json(known[name]) if name in known else "not a setting of this version"))
    return found


def placement(run: Path, settings: Mapping[str, Any]) -> list[str]:
    """Lines on who played which role: RUN/placement.txt if there is one, else what was asked for and how many ranks
    wrote a log."""
    if table := read_if_there(run / "placement.txt", str.splitlines):
        return table
    asked = settings.get("placement", {})
    sizes = ", ".join(f"{role} ranks {asked.get(role, 'unset')}" for role in ("actor", "critic"))
    ranks = len(list((run / "logs").glob("rank_*.log")))
    return [f"placement.mode {asked.get('mode', 'unset')}, {sizes}", f"{ranks} ranks wrote a log"]


def read_samples(folder: Path) -> dict[str, Any]:
    """The samples of step_*.jsonl: evenly chosen steps, the last among them, and of each its first rows.

    Returns:
        `steps`: how many there are; `rows`: flat objects whose values are numbers, true, false or cut texts.
    """
    files = sorted(folder.glob("step_*.jsonl"))
    kept = thin(files, SAMPLE_STEPS)
    each = SAMPLE_ROWS // max(len(kept), 1)
    rows = [row for path in kept for row in read_rows(path, each)]
    return {"steps": len(files), "rows": [{key: _cell(value) for key, value in row.items()} for row in rows]}


def read_rows(path: Path, most: int) -> list[dict[str, Any]]:
    """The first rows of a JSONL file; the last line of a file may be torn, since the run may be writing it.

    Raises:
        UserError: another line is no JSON object.
    """
    # not splitlines(): a text may hold line separators of Unicode as they are
    *lines, torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate([*lines, *([torn] if torn else [])][:most], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number > len(lines):
                print(f"note: {path}:{number} is torn and was skipped", file=sys.stderr)
                break
            raise UserError(f"{path}:{number}: {line[:40]!r} is no JSON; mend or remove that line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: {line[:40]!r} is no JSON object, and a sample must be one; remove it")
        rows.append(row)
    return rows


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
