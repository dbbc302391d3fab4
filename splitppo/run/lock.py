"""One run at a time in a run's folder: RUN/lock names the process that holds it.

The file is made exclusively, over NFS, too, and its owner touches it every `BEAT` seconds. Who finds it on the owner's
machine sees whether that process lives. On another machine the owner counts as dead when the file has not been touched
for `STALE` seconds, by the file system's clock; a newcomer waits until it is touched or that old.
"""

import itertools
import json
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from splitppo.errors import UserError
from splitppo.job.failure import end_rank
from splitppo.job.nodes import Peer, started
from splitppo.run.files import BROKEN

BEAT, STALE = 10.0, 60.0


class Lock:
    """A process's hold on a run's folder. The process ends if another one has taken the folder from it, which may be
    when it was stopped for long."""

    def __init__(self, own: Peer):
        self.own, self.over = own, threading.Event()
        held = {"host": own.host, "pid": own.pid, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self.text = json.dumps(held | {"machine": own.machine, "started": started(own.pid)})
        self.path: Path | None = None

    def take(self, folder: Path) -> Path:
        """Makes the folder this process's, and waits for that while its last owner may be dead; returns it.

        Raises:
            UserError: another process holds it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path, first = folder / "lock", None
        for waited in itertools.count():
            with suppress(FileExistsError), path.open("x") as file:
                file.write(self.text)
                break
            with suppress(FileNotFoundError):  # its owner has let go
                first = self._look(path, first, waited)
        self.path = path
        threading.Thread(target=self._beat, args=(path,), daemon=True).start()
        return folder

    def release(self) -> None:
        """Lets go, if this process holds a folder."""
        self.over.set()
        with suppress(OSError):
            if self.path and self.path.read_bytes() == self.text.encode():
                self.path.unlink()

    def _look(self, path: Path, first: int | None, waited: int) -> int:
        """Removes a dead process's lock, or waits a second; returns when it was touched last, at the first of these
        looks, `waited` seconds ago."""
        # a file that is opened shows what the server of an NFS has, and a new one has its time
        with path.open(errors="replace") as file, tempfile.TemporaryFile(dir=path.parent) as new:
            text, touched = file.read(), os.fstat(file.fileno()).st_mtime_ns
            age = (os.fstat(new.fileno()).st_mtime_ns - touched) / 1e9
        owner, here, dead = "a process that is no more known", False, max(age, waited) > STALE
        with suppress(*BROKEN):  # it is being written, or was when its host died
            held = json.loads(text)
            owner = f"process {held['pid']} on {held['host']} since {held['since']}"
            if here := held["machine"] == self.own.machine:
                dead = held["pid"] == self.own.pid or started(held["pid"]) != held["started"]
        if dead:
            path.unlink()
            return touched
        if here or touched != (first or touched):
            raise UserError(f"run_dir={path.parent} is held by {owner}; wait for its end, or choose another --run-dir")
        if first is None:
            left = f"up to {STALE - max(age, 0):.0f} s to see whether it is alive"
            print(f"{path.parent} was last held by {owner}: waiting {left}", flush=True)
        time.sleep(1)
        return first or touched

    def _beat(self, path: Path) -> None:
        while not self.over.wait(BEAT):
            with suppress(OSError):
                if path.read_bytes() == self.text.encode():
                    os.utime(path)
                    continue
                told = f"{path}: another process has taken the run's folder from this one, which was stopped for long"
                print(told, file=sys.stderr, flush=True)
                end_rank(None, RuntimeError(told), store_lost=False)
