"""Stopping a run so that it can go on: SIGTERM and SIGUSR1, as schedulers send them before they take a node away."""

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from splitppo.job.failure import GONE
from splitppo.job.runtime import Runtime

RESUMABLE = 75  # exit status after such a stop: EX_TEMPFAIL of sysexits.h, come again later
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


early: list[int] = []  # SIGUSR1s before there were others to tell


def note_early() -> None:
    """Keeps a SIGUSR1 that comes while the rank starts: it would end it."""
    signal.signal(signal.SIGUSR1, lambda number, _: early.append(number))


def tell_launcher() -> None:
    """Leaves a file where SPLITPPO_STOPPED says: that the run was told to end, and is saved."""
    if marker := os.environ.get("SPLITPPO_STOPPED"):
        Path(marker).touch()


class StopSignals:
    """Hears the signals in a thread: the main one may be waiting in C++, where Python's handlers don't reach it.

    A signal to any rank asks all of them to stop after the step that they are in, or the next (`Runtime.ask_to_stop`).
    torchrun also sends SIGTERM when another rank has failed: then there is no step to end, and the rank ends at once.
    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.heard, told = socket.socketpair()
        told.setblocking(False)
        self.told = told
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()
        if early:
            self._hear(signal.SIGUSR1)

    def close(self) -> None:
        """From here on there is nothing to save: SIGTERM ends the process, as it would without this."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _listen(self) -> None:
        while data := self.heard.recv(64):
            for number in sorted(set(data) & set(SIGNALS)):
                self._hear(signal.Signals(number))

    def _hear(self, number: signal.Signals) -> None:
        with suppress(RuntimeError):  # the store may be gone, with the rank or the launcher that held it
            self.runtime.ask_to_stop(number.name)
        lost = None
        while number == signal.SIGTERM and not self.runtime.over and (lost := self.runtime.lost()) is None:
            time.sleep(0.1)
        if lost:
            good = self.runtime.last_good()
            kept = f"; the last good checkpoint is {good}" if good else ""
            held = f"; {stopped}" if (stopped := self.runtime.stopped()) else ""
            print(f"{lost} {GONE}{held}{kept}", file=sys.stderr, flush=True)
        if lost is not None and not self.runtime.over:
            os._exit(1)
