"""`splitppo report`: a run's curves and the timeline of a step, or several runs over each other.
Needs no torch."""

import fcntl
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from splitppo.errors import UserError
from splitppo.run.files import write_whole
from splitppo.tools.page import build_comparison, build_page
from splitppo.tools.runs import (
    COLOURS,
    Run,
    as_text,
    read_runs,
    results_table,
    seconds,
    settings_table,
)
from splitppo.tools.timeline import (
    OTHER_COLOUR,
    SPAN_COLOURS,
    WAIT,
    Timeline,
    build_timeline,
    choose_step,
    raster,
)

DARK = "#2b2f36"
GREY = "#80868f"
WAIT_LOOK: Any = {"facecolor": "#f0f1f3", "edgecolor": "#c3c7cd", "hatch": "////"}
LEGEND: Any = {
    "loc": "lower right",
    "bbox_to_anchor": (1, 1),
    "ncols": 5,
    "borderaxespad": 0.1,
    "frameon": False,
}
STYLE: Any = {
    "font.size": 11,
    "legend.fontsize": 10,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b4b9c0",
    "grid.color": "#e6e8ec",
    "text.color": DARK,
    "hatch.linewidth": 0.6,
}

# the right axis is for a second quantity with a scale of its own
LEFT = False
RIGHT = True
PANELS = {  # title: (label, metric, axis)
    "Score": [("train", "critic/score/mean", LEFT), ("held-out", "val/score/mean", LEFT)],
    "Policy": [
        ("policy loss", "actor/pg_loss", LEFT),
        ("KL to old", "actor/ppo_kl", RIGHT),
        ("KL to reference", "actor/ref_kl", RIGHT),
    ],
    "Value": [
        ("value loss", "critic/vf_loss", LEFT),
        ("explained variance", "critic/vf_explained_var", RIGHT),
    ],
    "Critic": [  # explained variance against rewards-to-go
        ("first token", "critic/explained/first", LEFT),
        ("tokens 8 to 15", "critic/explained/token_8", LEFT),
        ("64 to 127", "critic/explained/token_64", LEFT),
        ("512 to 1023", "critic/explained/token_512", LEFT),
        ("first value - score", "critic/first_value_error", RIGHT),
    ],
    "Response length": [
        ("tokens", "response_length/mean", LEFT),
        ("share cut", "response_length/clip_ratio", RIGHT),
    ],
    "Gradient norm": [("actor", "actor/grad_norm", LEFT), ("critic", "critic/grad_norm", RIGHT)],
    "Seconds a step": [("actor", "timing_s/step", LEFT), ("critic", "critic/timing_s/step", LEFT)],
}
PAUSE = 10  # seconds between two pages that follow a run, at least
SETTINGS = 30  # lines of the settings that differ, in a picture
Curve = tuple[str, str, bool, str, dict[int, float]]  # label, metric, axis, colour, points


def draw_panel(
    ax: Axes, title: str, curves: Sequence[Curve], missing: str = "not recorded"
) -> None:
    """One panel of curves, named by a coloured axis label, or by a legend where lines share an
    axis; or unnamed. `missing`: what it says without curves."""
    ax.set_title(title)
    ax.grid(True)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    sides = {right: ax.twinx() if right else ax for right in {right for _, _, right, *_ in curves}}
    for label, metric, right, colour, points in curves:
        steps, values = zip(*sorted(points.items()), strict=True)
        if "explained" in metric:
            # unbounded below where all returns are alike, which would flatten the rest of the curve
            values = [max(value, -1.0) for value in values]
        sides[right].plot(
            steps,
            values,
            color=colour,
            lw=1.8,
            ms=4,
            marker="o" if len(steps) <= 15 else None,
            label=label,
        )
        sides[right].set_ylabel(label, color=colour)
    if not curves:
        ax.text(0.5, 0.5, missing, transform=ax.transAxes, ha="center", color=GREY)
    if LEFT not in sides:
        ax.set_yticks([])
    for side in (ax, *sides.values()):
        side.tick_params(length=0)
        if len(side.get_legend_handles_labels()[1]) > 1:
            side.set_ylabel("")
            side.legend(labelcolor="linecolor", **LEGEND)


def draw_calibration(ax: Axes, bins: Sequence[Any], missing: str) -> None:
    """Mean score against mean value, a dot for each range of the values; its area goes with the
    tokens in it."""
    draw_panel(ax, "Calibration, last step", [], "" if bins else missing)
    if bins:
        values, scores, tokens = (
            [one[name] for one in bins] for name in ("value", "score", "tokens")
        )
        ax.axline((scores[0], scores[0]), slope=1, color=GREY, lw=1, ls=":")
        ax.scatter(values, scores, [20 + 200 * n / max(tokens) for n in tokens], color=COLOURS[0])
        ax.set(xlabel="value", ylabel="score")
        ax.yaxis.set_major_locator(MaxNLocator(5))


def draw_lane(
    ax: Axes, y: float, timeline: Timeline, spans: Sequence[tuple[int, str, float, float]]
) -> list[Patch]:
    """The bars of a lane, the neighbouring steps' faint. Returns legend entries of the bars too
    narrow for a label."""
    low, high = timeline.view
    legend = []
    for step, name, start, end in spans:
        left = max(start, low)
        width = min(end, high) - max(start, low)
        own = step == timeline.step
        wait = name.startswith(WAIT)
        colour = SPAN_COLOURS.get(name, OTHER_COLOUR)
        face: Any = WAIT_LOOK if wait else {"facecolor": colour, "edgecolor": "white"}
        ax.barh(y, width, 0.6, left, alpha=1 if own else 0.3, lw=0.8, **face)
        if width > 0.06 * (high - low):
            below = seconds(end - start) if own else f"of step {step}"
            ax.text(
                left + width / 2,
                y,
                name.replace("_", "\n", 1) + "\n" + below,
                ha="center",
                va="center",
                color=DARK if wait or not own else "white",
                fontsize=11.5,
            )
        elif own:
            legend.append(Patch(label=f"{name} {seconds(end - start)}", **face))
    return legend


def draw_timeline(ax: Axes, timeline: Timeline) -> None:
    """The lanes, and between them a strip where both are at work."""
    (above, actor), (below, critic) = timeline.lanes
    ax.set(xlim=timeline.view, ylim=(-0.5, 1.8), xlabel="seconds since the actor began the step")
    legend = draw_lane(ax, 1.0, timeline, actor) + draw_lane(ax, 0.0, timeline, critic)
    ax.broken_barh(
        [(start, end - start) for start, end in timeline.shared], (0.44, 0.12), color=DARK
    )
    ax.axvspan(0, timeline.length, color="#f6f7f9", zorder=0)
    for x, step in ((0.0, timeline.step), (timeline.length, timeline.step + 1)):
        ax.axvline(x, color=GREY, lw=1, ls=":")
        ax.text(x, 1.6, f" step {step}", color=GREY, va="center", fontsize=10, clip_on=True)
    ax.set_yticks([1.0, 0.5, 0.0], [above, "both", below])
    ax.grid(True, axis="x")
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)
    ax.set_title(timeline.title, fontsize=14, pad=10)
    ax.legend(handles=legend, **LEGEND)


def draw_raster(ax: Axes, run: Run) -> None:
    """The tokens that the first slots decoded in the last steps, a line for each slot."""
    title, begins, bars = raster(run.columns[0])
    for slot, rows in enumerate(bars):
        ax.broken_barh(
            [(start, tokens) for _, start, tokens in rows],
            (slot, 0.85),
            facecolors=[colour for colour, *_ in rows],
        )
    for step, at in begins:
        ax.axvline(at, color=DARK, lw=1)
        ax.text(at, -0.4, f" step {step}", color=GREY, fontsize=10)
    ax.set(xlabel="tokens decoded", yticks=[], ylim=(len(bars) or 1, -1.5), xmargin=0)
    ax.set_title(title, fontsize=14, pad=10)


def draw(run: Run, timeline: Timeline | None) -> Figure:
    """The whole figure, 2000 pixels wide."""
    actor, critic = run.columns
    baseline = run.settings.get("ppo.baseline", '"value"')
    missing = (
        "not recorded" if baseline == '"value"' else f"no value model: ppo.baseline = {baseline}"
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(20, 14.9), dpi=100)
        figure.text(0.055, 0.975, f"{run.name}: {max(actor)} steps", fontsize=17, weight="bold")
        grid = figure.add_gridspec(
            2, 4, left=0.045, right=0.955, top=0.938, bottom=0.579, wspace=0.45, hspace=0.36
        )
        for i, (panel, lines) in enumerate(PANELS.items()):
            found = [line for line in lines if line[1] in run.series]
            own = [
                (*line, colour, run.series[line[1]])
                for line, colour in zip(found, COLOURS, strict=False)
            ]
            draw_panel(figure.add_subplot(grid[i // 4, i % 4]), panel, own, missing)
        draw_calibration(
            figure.add_subplot(grid[1, 3]),
            critic[max(critic)].calibration if critic else (),
            missing,
        )
        if timeline:
            draw_timeline(figure.add_axes((0.055, 0.2745, 0.89, 0.235)), timeline)
        draw_raster(figure.add_axes((0.055, 0.046, 0.89, 0.148)), run)
    return figure


def draw_comparison(runs: Sequence[Run]) -> Figure:
    """Curves over each other; below them the table of results in the curves' colours, and the
    settings that differ."""
    panels = [
        (f"{title}: {label}", metric)
        for title, lines in PANELS.items()
        for label, metric, _ in lines
        if any(metric in run.series for run in runs)
    ][:12]
    lines = [*as_text(results_table(runs)), "", *as_text(settings_table(runs))[:SETTINGS]]

    # inches
    rows = max(-(-len(panels) // 4), 1)
    below = 0.25 * len(lines) + 0.8
    height = 0.4 + 2.8 * rows + below
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(16, height), dpi=100)
        grid = figure.add_gridspec(
            rows,
            4,
            left=0.04,
            right=0.985,
            top=1 - 0.4 / height,
            bottom=below / height,
            hspace=0.36,
        )
        for i, (title, metric) in enumerate(panels):
            draw_panel(
                figure.add_subplot(grid[i // 4, i % 4]),
                title,
                [
                    ("", metric, LEFT, run.colour, run.series[metric])
                    for run in runs
                    if metric in run.series
                ],
            )
        for i, line in enumerate(lines):
            figure.text(
                0.04,
                (below - 0.8 - 0.25 * i) / height,
                line,
                color=runs[i - 1].colour if 0 < i <= len(runs) else DARK,  # below the heads
                family="monospace",
                fontsize=12,
                weight="bold",
                parse_math=False,
            )
    return figure


def newest_run() -> Path:
    """The run under ./runs whose metrics were written last."""
    found = [*Path("runs").glob("**/metrics/actor.jsonl")]
    if not found:
        raise UserError(
            "./runs holds no run with metrics (RUN/metrics/actor.jsonl): name the run's folder"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent.parent


def goes_on(folder: Path) -> bool:
    """Whether a run holds its folder's lock (run/lock.py)."""
    with suppress(FileNotFoundError), (folder / "lock").open() as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (),
    step: int | None = None,
    out: Path | None = None,
    html: bool = False,
    follow: bool = False,
) -> None:
    """Draw a run's report: its curves, and the timeline of one step; or write it as a page. Of
    several runs: their curves over each other, tables of their results and of the settings that
    differ.

    Args:
        runs: The runs' folders. Unset: the newest one under ./runs.
        step: The step of the timeline. Unset: a typical one of the run's last half.
        out: Where the picture or page goes. Unset: RUN/report.png or report.html; of several runs
            report_RUN_RUN.png or .html in this folder.
        html: Write a page in place of the picture: curves, timelines, rows, in one file that
            needs no network.
        follow: With --html, write the page again while a run goes on; opened in a browser, it
            loads itself again. Ctrl-C ends that.
    """
    if step is not None and len(runs) > 1:
        raise UserError(f"--step {step} is for one run, and {len(runs)} are named: leave it out")
    if follow and not html:
        raise UserError("--follow is for the page: add --html")
    folders = runs or (newest_run(),)
    show = True
    with suppress(KeyboardInterrupt):
        while follow and any(map(goes_on, folders)):
            began = time.monotonic()
            write(folders, step, out, html=True, follow=PAUSE, show=show)
            show = False
            # a long run takes seconds to read, and it needs the processors, too
            time.sleep(max(PAUSE, 10 * (time.monotonic() - began)))
    write(folders, step, out, html=html, show=show)


def write(
    folders: Sequence[Path],
    step: int | None,
    out: Path | None,
    *,
    html: bool,
    follow: int | None = None,
    show: bool = True,
) -> None:
    """Writes the report of `report`'s arguments. `follow`: of `page.render`. `show`: whether to
    print what it says and where it is."""
    ending = "html" if html else "png"
    found = read_runs(folders)
    if len(found) > 1:
        names = [run.name.replace("/", "-") for run in found]
        path = Path("_".join(["report", *names])[:200] + f".{ending}")
        lines = [*as_text(results_table(found)), "", *as_text(settings_table(found)), ""]
        made = build_comparison(found, follow) if html else draw_comparison(found)
    else:
        folder = folders[0]
        run = found[0]
        path = folder / f"report.{ending}"
        chosen = choose_step(*run.columns, step)
        timeline = None if chosen is None else build_timeline(*run.columns, chosen)
        line = timeline.title if timeline else "no spans recorded: no timeline"
        lines = [f"run folder: {folder}"] if html else [line, f"run folder: {folder}"]
        made = build_page(folder, run, chosen, follow) if html else draw(run, timeline)
    path = out or path
    try:
        if not isinstance(made, str):
            made.savefig(path, format=path.suffix[1:] or "png")
        elif path.is_file():
            write_whole(path, made)  # a browser that loads it again never sees half of it
        else:
            path.write_text(made, encoding="utf-8")
    except ValueError as error:  # a suffix of no picture
        raise UserError(f"--out {path} can't be written: {error}") from error
    if show:
        print(*lines, f"{'page' if html else 'report'}: {path}", sep="\n")
