"""Reads the files of runs while they are written, as people and tools do: curves, page, trackers,
notices, samples. `faults.py` has it run beside jobs that are killed.

    python tests/helpers/readers.py FOLDER

FOLDER holds the runs' folders. The reading ends when FOLDER/done is there. What goes wrong is in
FOLDER/readers.log; a run that has no step yet is nothing wrong. FOLDER/readers.count holds how
often each file was read.
"""

import json
import sys
import time
import traceback
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, cast

from splitppo.config import Config, LogConfig
from splitppo.errors import UserError
from splitppo.run import trackers
from splitppo.run.files import Tail, parse_record
from splitppo.run.notices import follow
from splitppo.tools.page import read_samples
from splitppo.tools.report import report

PAUSE = 0.02  # seconds between two readings


class Recorder:
    """A tracker that keeps what it gets."""

    def __init__(self, *_: Any):
        self.steps: list[int] = []

    def write(self, step: int, *_: Any) -> None:
        self.steps.append(step)

    def close(self) -> None: ...


class Reader:
    """Reads one run's folder again and again."""

    def __init__(self, run: Path):
        self.run = run
        self.notices = follow(run)
        self.tails = [Tail(path) for path in (run / "metrics").glob("*.jsonl")]
        self.trackers = trackers.Trackers(
            Config(log=LogConfig(trackers=cast(Any, ("tensorboard",)))), run, 0
        )
        self.inode = self._inode()

    def _inode(self) -> list[int]:
        return [path.stat().st_ino for path in sorted((self.run / "metrics").glob("*.jsonl"))]

    def read(self) -> None:
        """Reads all; raises what a reader must not meet."""
        if self._inode() != self.inode:  # a resume has written the files anew
            self.__init__(self.run)
        for tail in self.tails:
            for line, where in tail:
                parse_record(line, where)
        next(self.notices)
        self.trackers.update()
        for name in ("samples", "validation"):
            read_samples(self.run / name)
        try:
            report((self.run,), out=self.run / "page.html")
        except UserError as error:
            if "no step" not in str(error):
                raise


def main(folder: Path) -> None:
    trackers.TRACKERS["tensorboard"] = Recorder  # type: ignore[assignment]
    readers: dict[Path, Reader] = {}
    counts: dict[str, int] = {}
    while not (folder / "done").exists():
        for metrics in folder.glob("*/metrics"):
            run = metrics.parent
            try:
                with redirect_stderr(StringIO()):  # notes about lines that are being written
                    readers.setdefault(run, Reader(run)).read()
                counts[run.name] = counts.get(run.name, 0) + 1
            except Exception:
                with (folder / "readers.log").open("a") as log:
                    log.write(f"{run}\n{traceback.format_exc()}\n")
        time.sleep(PAUSE)
    (folder / "readers.count").write_text(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
