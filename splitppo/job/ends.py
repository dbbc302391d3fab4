"""How a rank ends before its work is done.

After a failure one rank explains the cause, last on the screen, and the others add one line each.
SIGTERM and SIGUSR1, which schedulers send before they take a node away, and Ctrl-C stop a run so
that it can resume.
"""

import os
import re
import signal
import socket
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from splitppo.errors import UserError, one_line, say
from splitppo.job.launch import ERROR_FILE, Launch, ends_quietly, record_error
from splitppo.job.runtime import Runtime
from splitppo.job.wire import WireError

DIED = "died without an error message: killed, perhaps because memory ran out"
# a killed process closes its connections at most so many seconds before it counts as dead
DYING = 1.0
# exit status after a stop to resume from: EX_TEMPFAIL of sysexits.h, "try again later"
RESUMABLE = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
early: list[int] = []  # SIGUSR1s that came before this rank had joined the others


def report_failure(error: BaseException, runtime: Runtime | None, launch: Launch) -> int:
    """Prints an error, with a traceback if this rank failed first and no user can fix it. Returns
    the exit status. `runtime` is None if the rank had not joined the others."""
    if runtime is None and launch.local_rank:
        # Most of these errors are the same on all ranks. torchrun ends the job as soon as one rank
        # has printed it and ended. So this rank waits: if it still lives then, the ranks before it
        # had no such error.
        time.sleep(2 + launch.local_rank)
    if isinstance(error, UserError):
        text = one_line("; ".join([str(error), *getattr(error, "__notes__", [])]))
        if runtime is None or runtime.status.report_failure():
            say(f"error: {text}", error=True)
        record_error(UserError(text))
        return 2
    if runtime is not None:
        causes = causes_of(error, runtime)  # before `report_failure`, which wakes suspended ranks
        killed = any(DIED in cause for cause in causes)  # then a traceback from here says nothing
        if not runtime.status.report_failure() or killed:
            what = str(error) if isinstance(error, WireError) else type(error).__name__
            why = "; ".join([what, *causes, *(getattr(error, "__notes__", []) if killed else [])])
            if not ends_quietly():
                say(f"rank {launch.rank} stops: another rank failed ({why})", error=True)
            if ERROR_FILE in os.environ:
                # torchrun reports the rank that ends first: let the failed rank be that rank
                time.sleep(2)
            return 1
        error.add_note(f"on {runtime.status.describe(launch.rank)}")
        for cause in causes:
            error.add_note(f"caused by: {cause}")
    say("".join(traceback.format_exception(error)).rstrip(), error=True)
    record_error(error)
    return 1


def causes_of(error: BaseException, runtime: Runtime) -> list[str]:
    """Problems of other ranks that may have caused this error."""
    deadline = time.monotonic() + DYING * bool(re.search("by peer|Broken pipe", str(error)))
    while (dead := runtime.status.dead_rank()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    causes = [f"{dead} {DIED}" if dead else runtime.heartbeat.lost_host()]
    with suppress(RuntimeError, dist.DistError):  # the store may be lost
        causes.append(runtime.status.suspended_ranks())
        # Gloo and NCCL name no rank, and the rank that the wire names may itself wait for another
        if isinstance(error, WireError | dist.DistError) or re.search(
            "imed out|closed by peer", str(error)
        ):
            causes.append(f"a rank did not reach a collective: {runtime.status.phases()}")
    return [cause for cause in causes if cause]


def keep_early_signals() -> None:
    """Keeps a SIGUSR1 that comes while the rank starts; by default it would end the rank."""
    signal.signal(signal.SIGUSR1, lambda number, _: early.append(number))


def mark_saved() -> None:
    """Tells the launch script that the stopped run is saved: makes the file that SPLITPPO_STOPPED
    names."""
    if marker := os.environ.get("SPLITPPO_STOPPED"):
        Path(marker).touch()


class StopSignals:
    """Handles the signals in a thread: the main thread may wait in C++, where Python runs no signal
    handler.

    A signal to any rank asks all ranks to stop after their current step, or the next. torchrun also
    sends SIGTERM when a rank has failed. Then no rank can finish its step, and this rank ends at
    once. So it does at the signal after a Ctrl-C: a second one, or what torchrun makes of it.
    """

    interrupted = False

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.before = signal.getsignal(signal.SIGINT)
        self.numbers, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()
        if early:
            self._handle(signal.SIGUSR1)

    def close(self) -> None:
        """Restores SIGTERM and Ctrl-C: from here on there is nothing to save."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, self.before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _listen(self) -> None:
        while data := self.numbers.recv(64):
            for number in sorted(set(data) & set(SIGNALS)):
                self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        status = self.runtime.status
        done = self.runtime.work_done
        dead = None
        if number == signal.SIGINT or self.interrupted:
            self._interrupt()
        # the store may be lost, with the rank or the torchrun that held it
        with suppress(RuntimeError):
            if number != signal.SIGTERM or (dead := status.dead_rank()) is None:
                status.request_stop(number.name)
        while number == signal.SIGTERM and not done.is_set() and dead is None:
            time.sleep(0.1)
            dead = status.dead_rank()
        if dead and not ends_quietly():
            saved = self.runtime.last_checkpoint()
            say(
                f"{dead} {DIED}",
                status.suspended_ranks(),
                f"the last good checkpoint is {saved}" if saved else "",
                error=True,
            )
        if dead is not None and not done.is_set():
            os._exit(1)

    def _interrupt(self) -> None:
        """Says what a Ctrl-C has begun, or ends this rank at once."""
        speaks = self.runtime.launch.local_rank == 0
        if not self.interrupted and speaks:
            say("interrupted: finishing and saving this step; Ctrl-C again ends the run now")
        if self.interrupted and not self.runtime.work_done.is_set():
            saved = self.runtime.last_checkpoint()
            if speaks and not ends_quietly():
                say("interrupted", f"the last good checkpoint is {saved}" * bool(saved), error=True)
            os._exit(128 + signal.SIGINT)
        self.interrupted = True
