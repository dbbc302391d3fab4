"""`splitppo report`: a run as a page, or several runs over each other. Needs no torch."""

from pathlib import Path
from typing import Annotated

import tyro

from splitppo.errors import UserError
from splitppo.run.files import write_whole
from splitppo.tools.page import build_comparison, build_page
from splitppo.tools.runs import as_text, read_runs, results_table, settings_table
from splitppo.tools.timeline import build_timeline, timed_steps


def newest_run() -> Path:
    """The run under ./runs whose metrics were written last."""
    metrics = [*Path("runs").glob("**/metrics/actor.jsonl")]
    if not metrics:
        raise UserError(
            "./runs holds no run with metrics (RUN/metrics/actor.jsonl): name the run's folder"
        )
    return max(metrics, key=lambda path: path.stat().st_mtime).parent.parent


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (), out: Path | None = None
) -> None:
    """Print a run's results and write a report page with curves, timelines and rows: one HTML file
    that needs no network. Several runs share one page, with their curves in one plot, their
    results, and the settings in which they differ.

    Args:
        runs: Folders of runs. Unset: the newest run under ./runs.
        out: File of the page. Unset: RUN/report.html, or for several runs report_RUN_RUN.html in
            the current folder.
    """
    folders = runs or (newest_run(),)
    read = read_runs(folders)
    lines = [*as_text(results_table(read)), ""]
    if len(read) > 1:
        names = [run.name.replace("/", "-") for run in read]
        path = Path("_".join(["report", *names])[:200] + ".html")
        lines += [*as_text(settings_table(read)), ""]
        page = build_comparison(read)
    else:
        path = folders[0] / "report.html"
        columns = read[0].columns
        timed = timed_steps(*columns)
        # the first steps warm up, and the last one may validate
        chosen = timed[3 * len(timed) // 4] if timed else None
        overlap = "no spans recorded: no timeline"
        if chosen is not None:
            overlap = build_timeline(*columns, chosen).title
        lines += [overlap, f"run folder: {folders[0]}"]
        page = build_page(folders[0], read[0], chosen)
    path = out or path
    write_whole(path, page)  # a browser that loads it again never sees half of it
    print(*lines, f"page: {path}", sep="\n")
