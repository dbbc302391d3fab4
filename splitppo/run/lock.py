"""Lets one run at a time use a run's folder: RUN/lock, created exclusively (over NFS, too), names
the process.

The owner touches it every `HEARTBEAT` seconds. On its machine others see whether it lives. On other
machines it counts as dead when the file has not been touched for `STALE` seconds of the file
system's clock; they wait that long.
"""

import itertools
import json
import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from splitppo.errors import UserError
from splitppo.job.launch import end_rank
from splitppo.job.nodes import Peer, process_state
from splitppo.run.files import BROKEN

HEARTBEAT = 10.0
STALE = 60.0


class Lock:
    """A process's hold on a run's folder. The process ends if another one takes it while this is
    stopped."""

    def __init__(self, own: Peer):
        self.own = own
        self.released = threading.Event()
        self.path = Path()
        self.text = json.dumps(
            {
                "host": own.host,
                "pid": own.pid,
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                "machine": own.machine,
                "started": process_state(own.pid)[1],
            }
        )

    def take(self, folder: Path) -> Path:
        """Makes and locks the folder. Waits while its last owner may be dead. Raises UserError if
        one holds it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "lock"
        first = 0
        for seconds in itertools.count():
            with suppress(FileExistsError), path.open("x") as file:
                file.write(self.text)
                break
            with suppress(FileNotFoundError):  # the owner has just released it
                first = self._check_owner(path, first, seconds)
        self.path = path
        threading.Thread(target=self._heartbeat, args=(path,), daemon=True).start()
        return folder

    def release(self) -> None:
        """Unlocks the folder, if this process holds one."""
        self.released.set()
        with suppress(OSError):
            if self.path.read_bytes() == self.text.encode():
                self.path.unlink()

    def _check_owner(self, path: Path, first: int, waited: int) -> int:
        """Removes a dead process's lock, or waits a second. Returns when the file had been touched
        last at the first check, `waited` seconds ago: `first`, 0 at that check."""
        # opening a file fetches its state from an NFS server, and a new file has the server's time
        with path.open(errors="replace") as file, tempfile.TemporaryFile(dir=path.parent) as new:
            text = file.read()
            touched = os.fstat(file.fileno()).st_mtime_ns
            age = (os.fstat(new.fileno()).st_mtime_ns - touched) / 1e9
        owner = "an unknown process"
        here = False
        dead = max(age, waited) > STALE
        with suppress(*BROKEN):  # the owner is writing the file, or its host failed meanwhile
            held = json.loads(text)
            owner = f"process {held['pid']} on {held['host']} since {held['since']}"
            if here := held["machine"] == self.own.machine:
                started = process_state(held["pid"])[1]
                dead = held["pid"] == self.own.pid or started != held["started"]
        if dead:
            path.unlink()
            return touched
        if here or touched != (first or touched):
            raise UserError(
                f"run_dir={path.parent} is held by {owner}; wait for its end, "
                "or choose another --run-dir"
            )
        if not first:
            print(
                f"{path.parent} was last held by {owner}: "
                f"waiting up to {STALE - max(age, 0):.0f} s to see whether it is alive",
                flush=True,
            )
        time.sleep(1)
        return first or touched

    def _heartbeat(self, path: Path) -> None:
        while not self.released.wait(HEARTBEAT):
            with suppress(OSError):
                if path.read_bytes() == self.text.encode():
                    os.utime(path)
                    continue
                end_rank(
                    f"{path}: another process has taken the run's folder; "
                    "this process was stopped for long"
                )
