"""The report of a run: its curves, and the timeline of one step that shows the two columns at work at once.

    python -m splitppo.report [RUN] [--step N] [--out PATH]

Reads nothing but `RUN/metrics/{actor,critic}.jsonl` and needs no torch, so it runs anywhere, also during the run.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from splitppo.errors import UserError

Span = tuple[str, float, float]  # name, start and end in seconds

CURVE_COLOURS = ("#2f6db3", "#d9722e", "#8a6bbf")
SPAN_COLOURS = {"rollout": "#4878b8", "logprobs": "#3fa7a3", "update": "#e08a3c", "score": "#8a6bbf"}
SPAN_COLOURS |= {"advantages": "#5aa454", "sync": "#d8b93a", "validate": "#cf6f9f", "checkpoint": "#97705a"}
OTHER_COLOURS = ("#c94f4f", "#6f8f2f", "#3d9bd1", "#b08ad0", "#a8763e", "#5f7f95")
DARK, GREY = "#2b2f36", "#80868f"
ABOVE: Any = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 6, "borderaxespad": 0.1, "frameon": False}
ABOVE |= {"columnspacing": 1.2, "handlelength": 1.7, "handletextpad": 0.5}
WAIT_LOOK: Any = {"facecolor": "#f0f1f3", "edgecolor": "#c3c7cd", "hatch": "////"}
STYLE: Any = {"font.size": 11, "legend.fontsize": 10, "axes.titlesize": 13, "axes.titleweight": "bold"}
STYLE |= {"axes.edgecolor": "#b4b9c0", "grid.color": "#e6e8ec", "text.color": DARK, "hatch.linewidth": 0.6}
STYLE |= {"axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}

LEFT, RIGHT = False, True  # the right axis is for a second quantity with a scale of its own
PANELS = {  # title: (label, metric, axis)
    "Score": [("train", "critic/score/mean", LEFT), ("held-out", "val/score/mean", LEFT)],
    "Policy": [
        ("policy loss", "actor/pg_loss", LEFT),
        ("KL to old", "actor/ppo_kl", RIGHT),
        ("KL to reference", "actor/ref_kl", RIGHT),
    ],
    "Value": [("value loss", "critic/vf_loss", LEFT), ("explained variance", "critic/vf_explained_var", RIGHT)],
    "Response length": [("tokens", "response_length/mean", LEFT), ("share cut", "response_length/clip_ratio", RIGHT)],
    "Gradient norm": [("actor", "actor/grad_norm", LEFT), ("critic", "critic/grad_norm", RIGHT)],
    "Seconds a step": [("actor", "timing_s/step", LEFT), ("critic", "critic/timing_s/step", LEFT)],
}


@dataclass(frozen=True)
class Step:
    """What one column recorded of one step."""

    metrics: dict[str, float]
    spans: list[Span]


Column = dict[int, Step]


def read_column(path: Path) -> Column:
    """The steps of a metrics file, none without a file: a colocated run may have the actor's alone. A step that a
    resumed run did again counts as it was done last."""
    column: Column = {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            spans = [(str(name), float(start), float(end)) for name, start, end in record.get("spans", [])]
            numbers = {k: float(v) for k, v in record.items() if isinstance(v, int | float)}  # some are lists
            column[int(record["step"])] = Step(numbers, spans)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, json.JSONDecodeError) and number == len(lines):  # killed as it wrote, or writing now
                print(f"note: {path}:{number} is torn and was skipped", file=sys.stderr)
                break
            rule = "a line must be a JSON object of `step`, numbers and `spans` (only the last may be torn)"
            raise UserError(f"{path}:{number}: {line[:40]!r} is no step; {rule}: mend or remove that line") from error
    return column


def shared_work(actor_spans: Iterable[Span], critic_spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The intervals in which both columns are at work. Spans of one column don't overlap, so neither do these."""
    actor, critic = ([s for s in spans if not s[0].startswith("wait_")] for spans in (actor_spans, critic_spans))
    cuts = [(max(a[1], c[1]), min(a[2], c[2])) for a in actor for c in critic]
    return sorted((start, end) for start, end in cuts if start < end)


def overlap(actor_spans: Iterable[Span], critic_spans: Iterable[Span]) -> float:
    """Seconds in which both columns are in a span that is no wait."""
    return sum(end - start for start, end in shared_work(actor_spans, critic_spans))


def duration(step: Step) -> float:
    """Seconds from the first span's start to the last one's end."""
    return max(end for _, _, end in step.spans) - min(start for _, start, _ in step.spans)


def choose_step(actor: Column, critic: Column, wanted: int | None = None) -> int | None:
    """The step to draw: the wanted one, or one of median duration among the last half; None if none has spans."""
    timed = sorted(number for number, step in actor.items() if step.spans)
    steps = [number for number in timed if number in critic and critic[number].spans] or timed
    if wanted is not None:
        if wanted not in steps:
            known = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise UserError(f"--step {wanted} has no recorded spans; steps with spans: {known}: name one of them")
        return wanted
    if not steps:
        return None
    late = sorted(steps[len(steps) // 2 :], key=lambda number: duration(actor[number]))  # the first ones warm up
    return late[(len(late) - 1) // 2]


@dataclass(frozen=True)
class Timeline:
    """One step and its two neighbours, in seconds since the actor began the step."""

    step: int
    length: float
    lanes: dict[str, list[tuple[int, Span]]]
    """By lane: the spans with the step that they belong to."""
    shared: list[tuple[float, float]]
    """Work of both lanes at once within the step, whichever step the critic's work belongs to: in a steady run the
    update of the step before is under this rollout, as this step's update is under the next one."""

    def title(self) -> str:
        """The step, its seconds, and the overlap."""
        if not self.shared:  # also a colocated run that wrote both columns: they take turns
            return f"Step {self.step}: {seconds(self.length)}, in which nothing overlaps"
        both = sum(end - start for start, end in self.shared)
        share = f"{seconds(both)} of {seconds(self.length)} ({both / self.length:.0%})"
        return f"Step {self.step}: both columns worked at once for {share}"


def build_timeline(actor: Column, critic: Column, step: int) -> Timeline:
    """Lay out a step. Columns with the same spans are one column that was written down twice (colocated)."""
    origin, length = min(start for _, start, _ in actor[step].spans), max(duration(actor[step]), 1e-6)
    near: list[list[tuple[int, Span]]] = [
        [(n, (name, a - origin, b - origin)) for n in range(step - 1, step + 2) if n in c for name, a, b in c[n].spans]
        for c in (actor, critic)
    ]
    if step not in critic or critic[step].spans in ([], actor[step].spans):
        return Timeline(step, length, {"all ranks": near[0]}, [])
    inside = ([(name, max(a, 0.0), min(b, length)) for _, (name, a, b) in spans] for spans in near)
    return Timeline(step, length, {"actor": near[0], "critic": near[1]}, shared_work(*inside))


def seconds(value: float) -> str:
    """Seconds with as many digits as help."""
    return f"{value:.{1 if value >= 10 else 2 if value >= 0.1 else 3}f} s"


def curves(actor: Column, critic: Column) -> dict[str, dict[int, float]]:
    """The values of each metric by step. A colocated run may write the critic's metrics into actor.jsonl: the column
    is in the name, and put there where both columns have a metric."""
    found: dict[str, dict[int, float]] = {}
    for prefix, column in (("", actor), ("critic/", critic)):
        for number, step in sorted(column.items()):
            for name, value in step.metrics.items():
                found.setdefault(prefix + name.removeprefix(prefix), {})[number] = value
    return found


def draw_panel(ax: Axes, title: str, series: dict[str, dict[int, float]]) -> None:
    """One panel of curves, named by a coloured axis label, or by a legend where lines share an axis."""
    ax.set_title(title)
    sides: dict[bool, Axes] = {}
    for colour, (label, metric, right) in zip(CURVE_COLOURS, PANELS[title], strict=False):
        if points := series.get(metric):
            if metric.endswith("explained_var"):
                # where all returns are alike it has no floor, and would flatten the rest of the curve
                points = {step: max(value, -1.0) for step, value in points.items()}
            side = sides[right] if right in sides else sides.setdefault(right, ax.twinx() if right else ax)
            look: Any = {"ls": "--" if side.lines else "-", "marker": "o" if len(points) <= 15 else None}
            side.plot(*zip(*sorted(points.items()), strict=True), color=colour, lw=1.8, ms=4, label=label, **look)
    if not sides:
        ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", color=GREY)
    ax.grid(True)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for side in (ax, *sides.values()):
        side.tick_params(length=0)
        side.yaxis.set_major_locator(MaxNLocator(5 if side.lines else 1))
        side.yaxis.set_major_formatter("{x:.3g}" if side.lines else "")
        if len(side.lines) > 1:
            side.legend(labelcolor="linecolor", **ABOVE)
        elif side.lines:
            side.set_ylabel(str(side.lines[0].get_label()), color=side.lines[0].get_color())


def draw_lane(ax: Axes, y: float, timeline: Timeline, lane: str, colours: dict[str, str]) -> set[str]:
    """The bars of a lane, the neighbouring steps' faint. A label too wide for its bar goes above or below the lane on
    a leader; the names that found no room there are returned, for the legend."""
    low, high = ax.get_xlim()
    pixel = (high - low) / ax.get_window_extent().width
    outward, free, unlabelled = 1 if y else -1, low, set()
    for step, (name, start, end) in sorted(timeline.lanes[lane], key=lambda item: item[1][1]):
        left, right, own, wait = max(start, low), min(end, high), step == timeline.step, name.startswith("wait_")
        if right - left < pixel:  # out of sight, or nothing to see: a checkpoint that wasn't due
            continue
        face: Any = WAIT_LOOK if wait else {"facecolor": colours[name], "edgecolor": "white"}
        ax.barh(y, right - left, 0.6, left, alpha=1 if own else 0.3, lw=0.8, **face)
        middle, ink = (left + right) / 2, DARK if wait or not own else "white"
        label = name.replace("_", "\n", 1) + "\n" + (seconds(end - start) if own else f"of step {step}")
        text = ax.text(middle, y, label, ha="center", va="center", color=ink, fontsize=11.5)
        if wait:  # or the hatching makes it hard to read
            text.set_bbox({"facecolor": WAIT_LOOK["facecolor"], "edgecolor": "none", "pad": 1.5, "alpha": 0.9})
        if text.get_window_extent().width * pixel < 0.94 * (right - left):
            continue
        text.set(text=label.replace("\n", " "), fontsize=10, color=DARK)
        half = text.get_window_extent().width * pixel / 2
        x = min(max(left, free) + half, high - half)
        if own and not wait and x >= free + half and x - middle < half + 40 * pixel:
            text.set_position((x, y + 0.52 * outward))
            ax.plot([middle, max(middle, x - half)], [y + 0.3 * outward, y + 0.43 * outward], color=GREY, lw=0.8)
            free = x + half + 10 * pixel
        else:
            text.remove()
            unlabelled |= {name} if own and not wait else set()
    return unlabelled


def draw_timeline(ax: Axes, timeline: Timeline) -> None:
    """The lanes, and between two of them a strip where both are at work."""
    length, lanes, split = timeline.length, list(timeline.lanes), len(timeline.lanes) > 1
    own = [span for spans in timeline.lanes.values() for step, span in spans if step == timeline.step]
    last = max(end for _, _, end in own)  # the critic's update ends in the next step: show it whole
    ax.set_xlim(-0.06 * length if split else -0.01 * length, min(max(last + 0.05 * length, 1.02 * length), 2 * length))
    ax.set_ylim((-0.68 if split else 0.0), 1.8)
    names = {name for spans in timeline.lanes.values() for _, (name, *_) in spans}
    colours = dict(zip(sorted(names - SPAN_COLOURS.keys()), cycle(OTHER_COLOURS), strict=False)) | SPAN_COLOURS
    unlabelled = set().union(*(draw_lane(ax, 1.0 - i, timeline, lane, colours) for i, lane in enumerate(lanes)))
    ax.broken_barh([(start, end - start) for start, end in timeline.shared], (0.44, 0.12), color=DARK)
    ax.axvspan(0, length, color="#f6f7f9", zorder=0)
    for x, step in ((0.0, timeline.step), (length, timeline.step + 1)):
        ax.axvline(x, color=GREY, lw=1, ls=":")
        ax.text(x, 1.72, f" step {step}", color=GREY, va="center", fontsize=10, clip_on=True)
    ax.set_yticks([1.0, 0.5, 0.0] if split else [1.0], [lanes[0], "both", lanes[1]] if split else lanes)
    ax.grid(True, axis="x")
    ax.tick_params(length=0, axis="both")
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("seconds since the actor began the step" if split else "seconds since the step began")
    ax.set_title(timeline.title(), fontsize=14, pad=10)
    patches = [Patch(color=colours[name], label=name) for name in sorted(unlabelled)]
    patches += [Patch(label="waiting", **WAIT_LOOK)] if any(name.startswith("wait_") for name, *_ in own) else []
    ax.legend(handles=patches, **ABOVE)


def draw(title: str, series: dict[str, dict[int, float]], timeline: Timeline | None) -> Figure:
    """The whole figure, 1600 pixels wide. The places are fixed, since labels are measured before the first drawing."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(16, 11.5), dpi=100)
        figure.text(0.055, 0.968, title, fontsize=17, weight="bold")
        grid = figure.add_gridspec(2, 3, left=0.055, right=0.945, top=0.92, bottom=0.455, wspace=0.38, hspace=0.36)
        for i, panel in enumerate(PANELS):
            draw_panel(figure.add_subplot(grid[i // 3, i % 3]), panel, series)
        if timeline:
            draw_timeline(figure.add_axes((0.055, 0.06, 0.89, 0.305)), timeline)
    return figure


def report(run: Annotated[Path | None, tyro.conf.Positional] = None, step: int | None = None, out: Path | None = None):
    """Draw a run's report: its curves, and the timeline of one step.

    Args:
        run: The run's folder. Unset: the newest one under ./runs.
        step: The step of the timeline. Unset: a typical one of the run's last half.
        out: Where the picture goes. Unset: RUN/report.png.
    """
    if run is None:
        found = sorted(Path("runs").glob("**/metrics/actor.jsonl"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise UserError("./runs holds no run with metrics (RUN/metrics/actor.jsonl): name the run's folder")
        run = found[-1].parent.parent
    actor, critic = (read_column(run / "metrics" / f"{name}.jsonl") for name in ("actor", "critic"))
    if not actor:
        raise UserError(f"{run} has no step in metrics/actor.jsonl, and a report needs one: name a run that has begun")
    chosen = choose_step(actor, critic, step)
    timeline = None if chosen is None else build_timeline(actor, critic, chosen)
    out = out or run / "report.png"
    figure = draw(f"{run.resolve().name}: {max(actor)} steps", curves(actor, critic), timeline)
    try:
        figure.savefig(out, format=out.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise UserError(f"--out {out} can't be written ({error}): name a picture in a folder that exists") from error
    print(timeline.title() if timeline else "no spans recorded: no timeline")
    print(f"run folder: {run}\nreport: {out}")


def main() -> None:
    """The command: a user's error is one line."""
    try:
        tyro.cli(report, prog="python -m splitppo.report")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
