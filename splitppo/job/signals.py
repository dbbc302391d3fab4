"""Stopping a run so that it can resume: SIGTERM and SIGUSR1, which schedulers send before they take
a node away."""

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from splitppo.errors import say
from splitppo.job.failure import DIED
from splitppo.job.launch import ends_quietly
from splitppo.job.runtime import Runtime

RESUMABLE = 75  # exit status after such a stop: EX_TEMPFAIL of sysexits.h, "try again later"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

early: list[int] = []  # SIGUSR1s that came before this rank had joined the others


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
    once.
    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.numbers, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()
        if early:
            self._handle(signal.SIGUSR1)

    def close(self) -> None:
        """Restores SIGTERM: from here on there is nothing to save."""
        signal.set_wakeup_fd(-1)
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
        # the store may be lost, with the rank or the torchrun that held it
        with suppress(RuntimeError):
            status.request_stop(number.name)
        while (
            number == signal.SIGTERM and not done.is_set() and (dead := status.dead_rank()) is None
        ):
            time.sleep(0.1)
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
