"""The report of a run: its curves, and the timeline of one step that shows the two columns at work at once.

    splitppo report [RUN] [--step N] [--out PATH]    a picture, RUN/report.png
    splitppo report [RUN] --html                     a page that opens offline, RUN/report.html (html.py)
    splitppo report [RUN] --trace STEP               trace events for Perfetto (chrome.py)

Reads nothing but `RUN/metrics/{actor,critic}.jsonl`, for the page also the run's settings, versions and samples, and
needs no torch, so it runs anywhere, also during the run.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from splitppo.errors import UserError, command, words
from splitppo.tools.chrome import trace_events, trace_name
from splitppo.tools.page import build_page
from splitppo.tools.timeline import (
    Column,
    Timeline,
    build_timeline,
    choose_step,
    curves,
    read_column,
    seconds,
    span_colours,
)
from splitppo.tools.timeline import overlap as overlap

CURVE_COLOURS = ("#2f6db3", "#d9722e", "#8a6bbf")
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
    ax.set_xlim(*timeline.view())
    ax.set_ylim((-0.68 if split else 0.0), 1.8)
    colours = span_colours(name for spans in timeline.lanes.values() for _, (name, *_) in spans)
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


def newest_run() -> Path:
    """The run under ./runs whose metrics were written last."""
    found = sorted(Path("runs").glob("**/metrics/actor.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError("./runs holds no run with metrics (RUN/metrics/actor.jsonl): name the run's folder")
    return found[-1].parent.parent


def draw_picture(run: Path, actor: Column, critic: Column, step: int | None, out: Path) -> None:
    """Draws the picture and prints what its timeline shows."""
    chosen = choose_step(actor, critic, step)
    timeline = None if chosen is None else build_timeline(actor, critic, chosen)
    figure = draw(f"{run.resolve().name}: {max(actor)} steps", curves(actor, critic), timeline)
    try:
        figure.savefig(out, format=out.suffix[1:] or "png")
    except ValueError as error:  # a suffix of no picture
        raise UserError(f"--out {out} can't be written: {error}") from error
    print(timeline.title() if timeline else "no spans recorded: no timeline")


def report(
    run: Annotated[Path | None, tyro.conf.Positional] = None,
    step: int | None = None,
    out: Path | None = None,
    html: bool = False,
    trace: int | None = None,
):
    """Draw a run's report: its curves, and the timeline of one step; or write it as a page or as trace events.

    Args:
        run: The run's folder. Unset: the newest one under ./runs.
        step: The step of the timeline. Unset: a typical one of the run's last half.
        out: Where the picture, page or trace goes. Unset: RUN/report.png, report.html, trace_step_NNNNNN.json.
        html: Write a page in place of the picture: curves, timelines, samples, in one file that needs no network.
        trace: Write this step's spans, in place of the picture, as trace events for Perfetto or chrome://tracing.
    """
    if out and html and trace is not None:
        raise UserError(
            f"--out {out} names one file, and --html and --trace write one each: leave out one of the three"
        )
    run = newest_run() if run is None else run
    actor, critic = (read_column(run / "metrics" / f"{name}.jsonl") for name in ("actor", "critic"))
    if not actor:
        raise UserError(f"{run} has no step in metrics/actor.jsonl, and a report needs one: name a run that has begun")
    written: dict[str, Path] = {}
    if trace is not None:
        choose_step(actor, critic, trace, flag="--trace")
        written["trace"] = out or run / trace_name(trace)
        written["trace"].write_text(json.dumps(trace_events(actor, critic, trace)) + "\n")
    if html:
        written["page"] = out or run / "report.html"
        written["page"].write_text(build_page(run, actor, critic, choose_step(actor, critic, step)), encoding="utf-8")
    if not written:
        written["report"] = out or run / "report.png"
        draw_picture(run, actor, critic, step, written["report"])
    print(f"run folder: {run}")
    for name, path in written.items():
        print(f"{name}: {path}")


@command
def main() -> None:
    """The command."""
    tyro.cli(report, prog="splitppo report", args=words())
