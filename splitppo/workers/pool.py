"""A pool of workers, on an event loop in a thread of this process. A worker that hangs or ends is
replaced."""

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
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from splitppo.errors import UserError
from splitppo.job.child import clean_environment
from splitppo.workers import Failure, Work, describe

_GRACE = 2.0  # seconds that the workers have to exit by themselves when the pool closes
_CANCEL = 1.0  # seconds that an async function has to end after it was cancelled at the time limit
BLOCKS = ", and never awaited: await what takes long, or write a plain def"


class Worker:
    """A place for a worker's process, on the running event loop. When a process ends, the next one
    starts.

    Attributes:
        rows: how many rows are here; the pool counts them.
        loaded: whether the process could import the user's files: "", or why not.
    """

    def __init__(self, work: Work):
        self.work = work
        self.limit = work.timeout + (_CANCEL if work.asynchronous else 0)
        self.loop = asyncio.get_running_loop()
        self.free = asyncio.Semaphore(sys.maxsize if work.asynchronous else 1)
        self.keys = itertools.count()
        self.rows = 0
        self._start()

    def _start(self) -> None:
        # those that the process owes
        self.answers: dict[int, asyncio.Future[Any]] = {}
        ours, its = socket.socketpair()
        # a worker that is stuck reads nothing: to send a long row to it must not wait for ever
        ours.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(self.limit) + 1, 0)
        )
        with its:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "splitppo.workers.main",
                    str(its.fileno()),
                    str(os.getpid()),
                ],
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,  # what a terminal sends is for the trainer
            )
        self.connection = Connection(ours.detach())
        self.loop.add_reader(self.connection.fileno(), self._read)
        self.loaded = self.loop.create_task(self._load())

    async def _load(self) -> str:
        answer = await self._ask(None, sys.path, self.work)
        if isinstance(answer, Failure):
            return f"{answer.text} while it imported {self.work.names}; fix the file"
        return answer and f"in a worker: {answer}"

    async def call(self, *message: Any) -> Any:
        """The answer to a message. Raises UserError if the user's files can't be imported."""
        async with self.free:
            while not self.loaded.done():
                await asyncio.shield(self.loaded)
            if why := self.loaded.result():
                raise UserError(why)
            return await self._ask(self.limit, *message)

    async def _ask(self, limit: float | None, *message: Any) -> Any:
        """Sends a message and waits for the answer or the end of the process, which is killed after
        `limit` seconds."""
        self.answers[key := next(self.keys)] = answer = self.loop.create_future()
        try:
            self.connection.send((key, *message))
        except OSError:
            self.process.send_signal(signal.SIGHUP)
        except Exception as error:  # what is nested too deep can't be pickled; nothing was sent
            del self.answers[key]
            return Failure("", "invalid", describe(error))
        await asyncio.wait([answer], timeout=limit)
        if answer.done():
            return answer.result()
        self.process.send_signal(signal.SIGHUP)
        return self.work.timed_out(
            BLOCKS if self.work.asynchronous else "", sure=getattr(await answer, "sure", True)
        )

    def _read(self) -> None:
        """Takes the answers that have arrived. The event loop does so before it looks at the
        limits, so what came in time counts."""
        try:
            while self.connection.poll():
                key, answer = self.connection.recv()
                self.answers.pop(key).set_result(answer)
                if getattr(answer, "kind", "") == "memory":
                    # others of its rows may have taken it, and the next process has it again
                    raise EOFError
        except (EOFError, OSError):  # the process has ended, with all that it started
            self.disconnect()
            failure = Failure("", "crash", self.end(), sure=len(self.answers) == 1)
            for answer in self.answers.values():
                answer.set_result(failure)
            if self.loaded.done() and not self.loaded.result():
                self._start()

    def disconnect(self) -> None:
        """A process that is idle then exits by itself."""
        self.loop.remove_reader(self.connection.fileno())
        self.connection.close()

    def end(self, limit: float = 0.0) -> str:
        """Ends a process that is disconnected, by itself within `limit` seconds. Returns how it
        ended, for messages."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(limit)
        self.process.send_signal(signal.SIGHUP)  # it kills all that it has started
        status = self.process.wait()
        killed = {128 + number: f"was killed by {number.name}" for number in signal.Signals}
        return f"its process {killed.get(status, f'ended with status {status}')}"


class Pool:
    """Workers that all do the same."""

    def __init__(self, work: Work, workers: int):
        self.work = work
        self._alone: list[Worker] = []  # one, when it is needed
        most = work.concurrency or sys.maxsize
        self._free = asyncio.Semaphore(most if work.asynchronous else workers)
        self._one = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        # a daemon: a run that failed exits without closing the pool. Linux ends the workers when
        # the thread ends.
        self._thread = threading.Thread(target=self._loop.run_forever, name="workers", daemon=True)
        self._thread.start()
        self._run = partial(asyncio.run_coroutine_threadsafe, loop=self._loop)
        self._workers = self._run(self._open(workers)).result()

    async def _open(self, workers: int) -> list[Worker]:
        return [Worker(self.work) for _ in range(workers)]

    def submit(self, *message: Any) -> Future[Any]:
        """Has the next free worker answer the message. The future raises UserError if the worker
        can't import the user's files."""
        return self._run(self._submit(message))

    async def _submit(self, message: tuple[Any, ...]) -> Any:
        async with self._free:
            worker = min(self._workers, key=lambda worker: (worker.rows, not worker.loaded.done()))
            worker.rows += 1
            try:
                return await self._settle(worker, lambda chosen: chosen.call(*message))
            finally:
                worker.rows -= 1

    async def _settle(self, worker: Worker, ask: Callable[[Worker], Awaitable[Any]]) -> Any:
        """What `ask` gets from the worker; if another row may be the cause of its failure, what it
        gets from a worker that has nothing else. It tries twice there: an earlier row may have
        broken that spare worker."""
        answer = await ask(worker)
        if getattr(answer, "sure", True):
            return answer
        async with self._one:
            self._alone = self._alone or [Worker(self.work)]
            answer = await ask(self._alone[0])
            return answer if getattr(answer, "sure", True) else await ask(self._alone[0])

    def close(self) -> None:
        """Ends the workers. What has no answer yet is cancelled."""
        self._run(self._close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        # what waits for a cancelled answer may submit something more
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        workers = [
            worker for worker in (*self._workers, *self._alone) if not worker.connection.closed
        ]
        for worker in workers:
            worker.disconnect()
        limit = time.monotonic() + _GRACE
        for worker in workers:
            worker.end(max(0.0, limit - time.monotonic()))
