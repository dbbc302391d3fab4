"""A command on a pseudo-terminal, and what its screen shows."""

import fcntl
import logging
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from ranks import fresh_process
from runs import _forked_rank
from torch.distributed import run as torchrun

from splitppo import __main__ as tools
from splitppo import train
from splitppo.run.launcher import RANK


class Terminal:
    """`splitppo WORDS...` as a user types it. The process is forked, its ranks too, so that nothing
    is imported anew.

    Args:
        before: called in the process before the command.
        anew: the process and its ranks are new interpreters after all.
    """

    def __init__(
        self, words: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None, anew: bool = False, width: int = 120,
    ) -> None:  # fmt: skip
        self.width, self._said = width, b""
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        env = {**os.environ, **(env or {})}
        self.process = fresh_process(
            _type, os.ttyname(self._slave), list(words), str(folder), env, before, anew
        )

    def until(self, pattern: str, limit: float = 60) -> None:
        """Waits until the screen has shown the pattern."""
        end = time.monotonic() + limit
        while not re.search(pattern, self.said):
            assert time.monotonic() < end, f"{pattern} did not come:\n{self.said}"
            assert self._read() or self.process.exitcode is None, (
                f"ended without {pattern}:\n{self.said}"
            )

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait(self, limit: float = 60) -> int:
        """The exit status; 124 if the command had to be killed."""
        end = time.monotonic() + limit
        while self.process.exitcode is None and time.monotonic() < end:
            self._read()
        late = self.process.exitcode is None
        if late:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        while self._read():
            pass
        os.close(self._master)
        os.close(self._slave)
        return 124 if late else self.process.exitcode or 0

    def _read(self) -> bool:
        ready = bool(select.select([self._master], [], [], 0.05)[0])
        if ready:
            self._said += os.read(self._master, 65536)
        return ready

    @property
    def said(self) -> str:
        """All that was written, with the terminal's commands."""
        return self._said.decode(errors="replace")

    def lines(self) -> list[str]:
        """The lines that the screen shows in the end, if it is high enough."""
        rows, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", self.said):
            if token == "\n" or (token.isprintable() and column == self.width):
                row += 1
                rows += [""] * (row == len(rows))
            if token in "\r\n" or column == self.width:
                column = 0 if token != "\n" else column  # the terminal's driver writes \r\n
            if token == "\x1b[K":
                rows[row] = rows[row][:column]
            elif token.isprintable() and len(token) == 1:
                rows[row] = rows[row].ljust(column)[:column] + token + rows[row][column + 1 :]
                column += 1
        return [line for line in rows if line.strip()]


def _type(
    tty: str, words: list[str], folder: str, env: dict[str, str], before: Any, anew: bool
) -> None:
    os.setsid()
    screen = os.open(tty, os.O_RDWR)  # becomes the terminal of this session: Ctrl-C is a signal
    for number in (0, 1, 2):
        os.dup2(screen, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    if anew:
        os.execve(sys.executable, [sys.executable, "-m", "splitppo", *words], env)
    if before:
        before()
    fork_ranks()
    sys.argv = ["splitppo", *words]
    status = tools.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fork_ranks() -> None:
    """torchrun in this process starts ranks of splitppo.train as forks of this process."""
    made = torchrun.config_from_args

    def forking(args: Any) -> tuple[Any, Any, list]:
        config, *_ = made(args)
        config.start_method = "fork"
        return config, _rank, args.training_script_args[2:]

    torchrun.config_from_args = forking


def _rank(code: str, *argv: str) -> None:
    os.setsid()  # as torchrun's ranks: what the terminal sends is for the launcher
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # a new interpreter has not torchrun's handlers
    logging.disable(logging.NOTSET)
    if code == RANK:
        _forked_rank(train.main, [*argv])
        return
    sys.argv = ["-c", *argv]
    # a fork returns its result
    with mock.patch.object(os, "_exit", sys.exit), suppress(SystemExit):
        exec(code, {})
