"""Worker processes that apply reward functions to rows. A worker that hangs or ends is replaced."""

import asyncio
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from splitppo.errors import UserError
from splitppo.job.child import clean_environment
from splitppo.rewards.functions import Failure, Outcome, timeout_failure

_GRACE = 2.0  # seconds that the workers have to exit by themselves when the pool closes
_CANCEL = 1.0  # seconds that an async function has to end after it was cancelled at the time limit


class Worker:
    """A place for a worker's process, on the running event loop. When a process ends, the next one
    starts.

    Attributes:
        rows: how many rows are here.
        loaded: whether the process could import the functions: "", or why not.
    """

    def __init__(self, functions: Sequence[str], timeout: float, *, asynchronous: bool):
        self.functions = functions
        self.timeout = timeout
        self.asynchronous = asynchronous
        self.limit = timeout + (_CANCEL if asynchronous else 0)
        self.loop = asyncio.get_running_loop()
        self.keys = itertools.count()
        self.rows = 0
        self._start()

    def _start(self) -> None:
        # those that the process owes
        self.answers: dict[int, asyncio.Future[tuple[Any, bool]]] = {}
        ours, its = socket.socketpair()
        # a worker that is stuck reads nothing: to send a long row to it must not wait for ever
        ours.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(self.limit) + 1, 0)
        )
        command = [sys.executable, "-u", "-m", "splitppo.rewards.worker_main"]
        with its:
            self.process = subprocess.Popen(
                [*command, str(its.fileno()), str(os.getpid())],
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                # so that `kill` reaches all processes that a function starts
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.ended = os.pidfd_open(self.process.pid)
        self.loop.add_reader(self.connection.fileno(), self._read)
        self.loop.add_reader(self.ended, self._restart)
        self.loaded = self.loop.create_task(self._load())

    async def _load(self) -> str:
        answer, _ = await self._ask(None, sys.path, self.functions, self.timeout, self.asynchronous)
        if isinstance(answer, Failure):
            return (
                f"{answer.text} while it imported the reward {', '.join(self.functions)}; "
                "fix the file"
            )
        return answer and f"in a reward worker: {answer}"

    async def apply(self, name: str, row: dict[str, Any]) -> tuple[Outcome, bool]:
        """A function's outcome for a row, and whether it is the row's: if the process ended while
        it had several rows, any of them may have ended it. Raises UserError if the functions can't
        be imported."""
        self.rows += 1
        try:
            while not self.loaded.done():
                await asyncio.shield(self.loaded)
            if why := self.loaded.result():
                raise UserError(why)
            return await self._ask(self.limit, name, row)
        finally:
            self.rows -= 1

    async def _ask(self, limit: float | None, *message: Any) -> tuple[Any, bool]:
        """Sends a message and waits for the answer or the end of the process, which is killed after
        `limit` seconds."""
        self.answers[key := next(self.keys)] = answer = self.loop.create_future()
        try:
            self.connection.send((key, *message))
        except OSError:
            self.kill()
        await asyncio.wait([answer], timeout=limit)
        if answer.done():
            return answer.result()
        self.kill()
        _, sure = await answer
        return timeout_failure(self.timeout, blocks=self.asynchronous), sure

    def _read(self) -> None:
        """Takes the answers that have arrived. The event loop does so before it looks at the
        limits, so what came in time counts."""
        try:
            while self.connection.poll():
                key, answer = self.connection.recv()
                self.answers.pop(key).set_result((answer, True))
        except (EOFError, OSError):
            self.loop.remove_reader(self.connection.fileno())

    def _restart(self) -> None:
        """The process has ended."""
        self._read()
        self.disconnect()
        failure = Failure("", "crash", self.end())
        for answer in self.answers.values():
            answer.set_result((failure, len(self.answers) == 1))
        if self.loaded.done() and not self.loaded.result():
            self._start()

    def kill(self) -> None:
        """Kills the process and all that it started. It must not be reaped yet: no other group can
        have its number."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def disconnect(self) -> None:
        """A process that is idle then exits by itself."""
        self.loop.remove_reader(self.connection.fileno())
        self.loop.remove_reader(self.ended)
        self.connection.close()

    def end(self) -> str:
        """Ends a process that is disconnected. Returns how it ended, for messages."""
        self.kill()
        os.close(self.ended)
        status = self.process.wait()
        return (
            f"its process ended with status {status}"
            if status >= 0
            else f"its process was killed by {signal.Signals(-status).name}"
        )


class WorkerPool:
    """Workers for plain or for async functions, on an event loop in a thread of this process.

    A plain worker has one row at a time. If a worker ends while it has several async rows, each is
    run again alone.
    """

    def __init__(
        self, functions: Sequence[str], workers: int, timeout: float, *, asynchronous: bool
    ):
        self._start = partial(Worker, functions, timeout, asynchronous=asynchronous)
        self._alone: list[Worker] = []  # one, when it is needed
        self._free = asyncio.Semaphore(sys.maxsize if asynchronous else workers)
        self._one = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        # a daemon: a run that failed exits without closing the scorer. Linux kills the workers when
        # the thread ends.
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()
        self._workers = asyncio.run_coroutine_threadsafe(self._open(workers), self._loop).result()

    async def _open(self, workers: int) -> list[Worker]:
        return [self._start() for _ in range(workers)]

    def submit(self, name: str, row: dict[str, Any]) -> Future[Outcome]:
        """Has a worker apply the function to the row. The future raises UserError if a worker can't
        import it."""
        return asyncio.run_coroutine_threadsafe(self._score(name, row), self._loop)

    async def _score(self, name: str, row: dict[str, Any]) -> Outcome:
        async with self._free:
            worker = min(self._workers, key=lambda worker: (worker.rows, not worker.loaded.done()))
            outcome, sure = await worker.apply(name, row)
        if not sure:
            async with self._one:
                self._alone = self._alone or [self._start()]
                outcome, _ = await self._alone[0].apply(name, row)
        return outcome

    def close(self) -> None:
        """Ends the workers. Rows that have no score yet are cancelled."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        workers = [
            worker for worker in (*self._workers, *self._alone) if worker.process.returncode is None
        ]
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for worker in workers:
            worker.disconnect()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        limit = time.monotonic() + _GRACE
        for worker in workers:
            wait([worker.ended], max(0.0, limit - time.monotonic()))
            worker.end()
