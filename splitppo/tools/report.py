"""The report of a run: its curves, and the timeline of one step that shows the two columns at work at once.

    splitppo report [RUN] [--step N] [--out PATH]    a picture, RUN/report.png
    splitppo report [RUN] --html                     a page that opens offline, RUN/report.html (page.py)
    splitppo report [RUN] --trace STEP               trace events for Perfetto (timeline.py)

Reads `RUN/metrics/{actor,critic}.jsonl`, for the page also the run's settings, versions and samples. Needs no torch, so
it runs anywhere, also during the run.
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
from splitppo.tools.page import build_page
from splitppo.tools.timeline import (
    OTHER_COLOUR,
    SPAN_COLOURS,
    Timeline,
    build_timeline,
    choose_step,
    curves,
    is_wait,
    read_columns,
    seconds,
    trace_events,
)

CURVE_COLOURS = ("#2f6db3", "#d9722e", "#8a6bbf")
DARK, GREY = "#2b2f36", "#80868f"
WAIT_LOOK: Any = {"facecolor": "#f0f1f3", "edgecolor": "#c3c7cd", "hatch": "////"}
LEGEND: Any = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 6, "borderaxespad": 0.1, "frameon": False}
STYLE: Any = {"font.size": 11, "legend.fontsize": 10, "axes.titlesize": 13, "axes.titleweight": "bold"}
STYLE |= {"axes.titlelocation": "left", "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.edgecolor": "#b4b9c0", "grid.color": "#e6e8ec", "text.color": DARK, "hatch.linewidth": 0.6}

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
    ax.grid(True)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    found = [curve for curve in PANELS[title] if curve[1] in series]
    sides = {right: ax.twinx() if right else ax for right in {right for *_, right in found}}
    for colour, (label, metric, right) in zip(CURVE_COLOURS, found, strict=False):
        steps, values = zip(*sorted(series[metric].items()), strict=True)
        if metric.endswith("explained_var"):
            # unbounded below where all returns are alike, which would flatten the rest of the curve
            values = [max(value, -1.0) for value in values]
        marker = "o" if len(steps) <= 15 else None
        sides[right].plot(steps, values, color=colour, lw=1.8, ms=4, marker=marker, label=label)
        sides[right].set_ylabel(label, color=colour)
    if not found:
        ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", color=GREY)
    if LEFT not in sides:
        ax.set_yticks([])
    for side in (ax, *sides.values()):
        side.tick_params(length=0)
        if len(side.lines) > 1:
            side.set_ylabel("")
            side.legend(labelcolor="linecolor", **LEGEND)


def draw_lane(ax: Axes, y: float, timeline: Timeline, lane: str) -> list[Patch]:
    """The bars of a lane, the neighbouring steps' faint. Returns legend entries of the bars too narrow for a label."""
    low, high = ax.get_xlim()
    pixel = (high - low) / ax.get_window_extent().width
    legend: list[Patch] = []
    for step, (name, start, end) in sorted(timeline.lanes[lane], key=lambda item: item[1][1]):
        left, width = max(start, low), min(end, high) - max(start, low)
        own, wait = step == timeline.step, is_wait(name)
        if width < pixel:  # out of view, or too short to be seen
            continue
        face: Any = WAIT_LOOK if wait else {"facecolor": SPAN_COLOURS.get(name, OTHER_COLOUR), "edgecolor": "white"}
        ax.barh(y, width, 0.6, left, alpha=1 if own else 0.3, lw=0.8, **face)
        label = name.replace("_", "\n", 1) + "\n" + (seconds(end - start) if own else f"of step {step}")
        ink = DARK if wait or not own else "white"
        text = ax.text(left + width / 2, y, label, ha="center", va="center", color=ink, fontsize=11.5)
        if wait:  # or the hatching makes it hard to read
            text.set_bbox({"facecolor": WAIT_LOOK["facecolor"], "edgecolor": "none", "pad": 1.5, "alpha": 0.9})
        if text.get_window_extent().width * pixel > 0.94 * width:
            text.remove()
            legend += [Patch(label=f"{name} {seconds(end - start)}", **face)] if own else []
    return legend


def draw_timeline(ax: Axes, timeline: Timeline) -> None:
    """The lanes, and between two of them a strip where both are at work."""
    length, lanes, split = timeline.length, list(timeline.lanes), len(timeline.lanes) > 1
    ax.set_xlim(*timeline.view())
    ax.set_ylim((-0.5 if split else 0.5), 1.8)
    legend = [patch for i, lane in enumerate(lanes) for patch in draw_lane(ax, 1.0 - i, timeline, lane)]
    ax.broken_barh([(start, end - start) for start, end in timeline.shared], (0.44, 0.12), color=DARK)
    ax.axvspan(0, length, color="#f6f7f9", zorder=0)
    for x, step in ((0.0, timeline.step), (length, timeline.step + 1)):
        ax.axvline(x, color=GREY, lw=1, ls=":")
        ax.text(x, 1.6, f" step {step}", color=GREY, va="center", fontsize=10, clip_on=True)
    ax.set_yticks([1.0, 0.5, 0.0] if split else [1.0], [lanes[0], "both", lanes[1]] if split else lanes)
    ax.grid(True, axis="x")
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("seconds since the actor began the step" if split else "seconds since the step began")
    ax.set_title(timeline.title(), fontsize=14, pad=10)
    ax.legend(handles=legend, **LEGEND)


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
    actor, critic = read_columns(run)
    if not actor:
        raise UserError(f"{run} has no step in metrics/actor.jsonl, and a report needs one: name a run that has begun")
    chosen, written = choose_step(actor, critic, step), []
    if trace is not None:
        choose_step(actor, critic, trace, flag="--trace")
        path = out or run / f"trace_step_{trace:06d}.json"
        path.write_text(json.dumps(trace_events(actor, critic, trace)) + "\n")
        written.append(f"trace: {path}")
    if html:
        path = out or run / "report.html"
        path.write_text(build_page(run, actor, critic, chosen), encoding="utf-8")
        written.append(f"page: {path}")
    if not written:
        path = out or run / "report.png"
        timeline = None if chosen is None else build_timeline(actor, critic, chosen)
        figure = draw(f"{run.resolve().name}: {max(actor)} steps", curves(actor, critic), timeline)
        try:
            figure.savefig(path, format=path.suffix[1:] or "png")
        except ValueError as error:  # a suffix of no picture
            raise UserError(f"--out {path} can't be written: {error}") from error
        print(timeline.title() if timeline else "no spans recorded: no timeline")
        written.append(f"report: {path}")
    print("\n".join([f"run folder: {run}", *written]))


@command
def main() -> None:
    tyro.cli(report, prog="splitppo report", args=words())
