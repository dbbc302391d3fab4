"""What a process does first that must not outlive the rank that started it."""

import ctypes
import os
import signal
import sys


def end_with_parent(parent: int, what: str) -> None:
    """Linux ends this process when the thread that started it is gone, however it went; `what` it is, in words.

    A scheduler's signals, which all processes of a job may get, are the rank's.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(f"the rank that started this {what} is gone")
