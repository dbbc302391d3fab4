"""Lets one run at a time use a run's folder: the kernel's lock on RUN/lock, which names the owner.

The lock ends with its process, however that ends. If a host fails, the server of a network file
system drops its locks after a while, NFSv4 after 90 s by default.
"""

import errno
import fcntl
import itertools
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from splitppo.errors import UserError, say, warn

PATIENCE = 120  # seconds that a lock of another host is waited for


def take(folder: Path) -> TextIO:
    """Makes and locks the folder, until the returned file is closed. Waits while the owner's host
    may have failed. Raises UserError if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a+", errors="replace")
    place = f" on {socket.gethostname()} "
    for second in itertools.count():
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                warn(f"{folder} can't be locked ({error}): see that no other run uses it")
                break
        file.seek(0)
        owner = file.read() or "an unknown process"
        patience = 1 if place in owner else PATIENCE
        if second >= patience:
            raise UserError(
                f"run_dir={folder} is held by {owner}; wait for its end, "
                "or choose another --run-dir"
            )
        if second == 0:
            say(f"{folder} is held by {owner}: waiting {patience} s for its end")
        time.sleep(1)
    file.truncate(0)
    file.write(f"process {os.getpid()}{place}since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    return file
