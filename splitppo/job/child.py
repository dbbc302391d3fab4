"""For processes that a rank starts: their environment, and that they end with the rank. Imports no
torch."""

import ctypes
import os
import signal
import sys

TORCHRUN = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}


def clean_environment() -> dict[str, str]:
    """This process's environment without torchrun's variables: a child process is no rank of the
    job."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN and not name.startswith(("TORCHELASTIC_", "ROLE_"))
    }


def kill_with_parent() -> None:
    """Makes Linux kill this process when the thread that started it ends, for whatever reason."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_with_parent(parent: int, what: str) -> None:
    """As `kill_with_parent`, for a process, named `what`, that the rank `parent` (a process id)
    starts. It ignores what schedulers send to all processes of a job: the rank handles that."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    kill_with_parent()
    if os.getppid() != parent:
        sys.exit(f"the rank that started this {what} has ended")
