"""For processes that a rank starts: their environment, and that they end with the rank. Imports no
torch."""

import ctypes
import mmap
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

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
SAID = mmap.mmap(-1, 1 << 14)  # shared with a supervised process: the end of what it printed
ASK = b"\0\x05\0"  # asks the process that prints it to be up to date
OUTPUT = 1 << 16  # bytes that a supervised process may print in a second


def clean_environment() -> dict[str, str]:
    """This process's environment without torchrun's variables: a child process is no rank of the
    job. Python's sets have the same order in all children: what a user wrote says the same at any
    rank, and after a resume."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN and not name.startswith(("TORCHELASTIC_", "ROLE_"))
    }
    return variables | {"PYTHONHASHSEED": "0"}


def kill_with_parent(by: int = signal.SIGKILL) -> None:
    """Makes Linux send this process a signal when the thread that started it ends, for whatever
    reason."""
    ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG


def end_with_parent(parent: int, what: str, by: int = signal.SIGKILL) -> None:
    """As `kill_with_parent`, for a process, named `what`, that the rank `parent` (a process id)
    starts. It ignores what schedulers send to all processes of a job: the rank handles that."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    kill_with_parent(by)
    if os.getppid() != parent:
        sys.exit(f"the rank that started this {what} has ended")


def fork_supervised(parent: int) -> None:
    """Goes on in a new process. This one supervises it: it prints what is printed there, but no
    flood. When the new process or the rank `parent` ends, or at SIGHUP, it kills all that was
    started there, in whatever way, and ends as the new process did: with its status, or 128 + the
    signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end_with_parent(parent, "worker", signal.SIGHUP)
    # orphans become children of this process, also those that left their group and session
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        kill_with_parent()
        os.setsid()
        for stream in (1, 2):
            os.dup2(sink, stream)
        return
    signal.signal(signal.SIGHUP, lambda *_: _kill_children())
    os.close(sink)
    printing = threading.Thread(target=_print_from, args=[source], daemon=True)
    printing.start()
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):  # all have ended
        while True:
            ended.setdefault(*os.wait())
            if child in ended:
                _kill_children()
    printing.join(1)
    status = os.waitstatus_to_exitcode(ended[child])
    os._exit(status if status >= 0 else 128 - status)


def _kill_children() -> None:
    """Kills the children of this process that it has not waited for yet."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def _print_from(source: int) -> None:
    """Prints what comes from a pipe until all have closed it: in a second `OUTPUT` bytes, and not
    the rest."""
    more = f"\n[workers print more than {OUTPUT} bytes a second: the rest is left out]\n".encode()
    paid = 0.0  # the time until which the printed bytes are enough
    while text := os.read(source, 4096):
        now = time.monotonic()
        paid = max(paid, now - 1)
        if paid < now:
            paid += len(text) / OUTPUT
            with suppress(OSError):  # who reads it has gone
                os.write(1, text.replace(ASK, b"") + more * (paid >= now))
        # the end of what has come, behind spaces
        SAID[:] = (SAID[:] + text)[-len(SAID) :]


def forget_words() -> None:
    """Of a supervised process: what was printed so far is of no interest any more."""
    SAID[:] = bytes(len(SAID))


def last_words() -> str:
    """Of a supervised process: the last error that was printed there since `forget_words`, or the
    last line. Its children's output is among it."""
    SAID[:] = SAID[:].replace(ASK, bytes(len(ASK)))
    os.write(2, ASK)  # a pipe keeps the order: what came before it has been read with it
    end = time.monotonic() + 1
    while ASK not in SAID[:] and time.monotonic() < end:
        time.sleep(0.01)
    lines = SAID[:].replace(ASK, b"").decode(errors="replace").split("\n")
    lines = list(filter(None, (line.strip(" \r\0") for line in lines)))
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)]
    return (errors or lines or [""])[-1][:300]
