"""`splitppo report`: a run as a page, or several runs over each other. Needs no torch."""

import fcntl
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import tyro

from splitppo.errors import UserError
from splitppo.run.files import write_whole
from splitppo.tools.page import build_comparison, build_page
from splitppo.tools.runs import as_text, read_runs, results_table, settings_table
from splitppo.tools.timeline import build_timeline, choose_step

PAUSE = 10  # seconds between two pages that follow a run, at least


def newest_run() -> Path:
    """The run under ./runs whose metrics were written last."""
    metrics = [*Path("runs").glob("**/metrics/actor.jsonl")]
    if not metrics:
        raise UserError(
            "./runs holds no run with metrics (RUN/metrics/actor.jsonl): name the run's folder"
        )
    return max(metrics, key=lambda path: path.stat().st_mtime).parent.parent


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
    follow: bool = False,
) -> None:
    """Print a run's results, and write it as a page: curves, timelines, rows, in one file that
    needs no network. Of several runs: their curves over each other, tables of their results and of
    the settings that differ.

    Args:
        runs: The runs' folders. Unset: the newest one under ./runs.
        step: The step of the timeline. Unset: a typical one of the run's last half.
        out: Where the page goes. Unset: RUN/report.html; of several runs report_RUN_RUN.html in
            this folder.
        follow: Write the page again while a run goes on; opened in a browser, it loads itself
            again. Ctrl-C ends that.
    """
    if step is not None and len(runs) > 1:
        raise UserError(f"--step {step} is for one run, and {len(runs)} are named: leave it out")
    folders = runs or (newest_run(),)
    show = True
    with suppress(KeyboardInterrupt):
        while follow and any(map(goes_on, folders)):
            began = time.monotonic()
            write(folders, step, out, follow=PAUSE, show=show)
            show = False
            # a long run takes seconds to read, and it needs the processors, too
            time.sleep(max(PAUSE, 10 * (time.monotonic() - began)))
    write(folders, step, out, show=show)


def write(
    folders: Sequence[Path],
    step: int | None,
    out: Path | None,
    *,
    follow: int | None = None,
    show: bool,
) -> None:
    """Writes the page of `report`'s arguments. `follow`: of `page.render`. `show`: whether to print
    the results and where the page is."""
    runs = read_runs(folders)
    lines = [*as_text(results_table(runs)), ""]
    if len(runs) > 1:
        names = [run.name.replace("/", "-") for run in runs]
        path = Path("_".join(["report", *names])[:200] + ".html")
        lines += [*as_text(settings_table(runs)), ""]
        page = build_comparison(runs, follow)
    else:
        path = folders[0] / "report.html"
        columns = runs[0].columns
        chosen = choose_step(*columns, step)
        overlap = "no spans recorded: no timeline"
        if chosen is not None:
            overlap = build_timeline(*columns, chosen).title
        lines += [overlap, f"run folder: {folders[0]}"]
        page = build_page(folders[0], runs[0], chosen, follow)
    path = out or path
    if path.is_file():
        write_whole(path, page)  # a browser that loads it again never sees half of it
    else:
        path.write_text(page, encoding="utf-8")
    if show:
        print(*lines, f"page: {path}", sep="\n", flush=True)
