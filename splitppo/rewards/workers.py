"""Worker processes that apply reward functions to rows. A worker that hangs or ends is replaced."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from splitppo.errors import UserError
from splitppo.job.child import clean_environment
from splitppo.rewards import frames
from splitppo.rewards.functions import Failure, Outcome, timeout_failure

_GRACE = 2.0  # seconds that a worker has to exit by itself
_CANCEL = 1.0  # seconds that an async function has to end after it was cancelled at the time limit
_READ = 0.05  # seconds to read results that arrived in time while this thread could not run
_POLL = 0.5  # seconds between two checks of a worker's process
_TRIES = 3  # workers that may end with a row that they have not begun


@dataclass
class Task:
    """A function and a row. `message` is sent to a worker; `tries` counts the workers that got it."""

    key: int
    function: str
    message: bytes
    outcome: Future[Outcome]
    tries: int = 0


class Worker:
    """A worker's process and its tasks.

    Args:
        limit: seconds per task, after which the process is killed.
        capacity: tasks that the worker may hold at once.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        *, limit: float, capacity: int,
    ):  # fmt: skip
        self.process, self.limit = process, limit
        self.reader, self.writer = streams
        self.room = asyncio.Semaphore(capacity)
        self.tasks: dict[int, Task] = {}
        self.begun: dict[int, asyncio.TimerHandle] = {}  # of the tasks that the worker has begun: time limits
        self.late = False  # killed at a time limit

    async def load(self, functions: Sequence[str], timeout: float, *, asynchronous: bool) -> None:
        """Makes the worker import the functions. Raises UserError if that fails."""
        self.writer.write(frames.pack((sys.path, functions, timeout, asynchronous)))
        try:
            status, *why = await frames.read(self.reader)
        except EOFError:
            end = await self.end()
            raise UserError(f"{end} while it imported the reward {', '.join(functions)}; fix the file") from None
        if status != "ready":
            raise UserError(f"in a reward worker: {why[0]}")

    async def send_tasks(self, queue: asyncio.Queue[Task]) -> None:
        """Sends tasks of the queue while the worker has capacity."""
        while True:
            await self.room.acquire()
            task = await queue.get()
            task.tries += 1
            self.tasks[task.key] = task
            self.writer.write(task.message)

    async def read_results(self) -> None:
        """Reads the worker's messages until its connection ends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(EOFError):
            while True:
                status, key, *outcome = await frames.read(self.reader)
                if status == "began":
                    self.begun[key] = loop.call_later(self.limit, self._at_limit, key)
                else:
                    self.begun.pop(key).cancel()
                    self.tasks.pop(key).outcome.set_result(outcome[0])
                    self.room.release()

    async def watch(self) -> None:
        """Ends `read_results` after the process, even if a process that the worker forked holds the socket open."""
        while not _has_ended(self.process):
            await asyncio.sleep(_POLL)
        _kill(self.process)
        await asyncio.sleep(_POLL)  # for the last messages to be read
        self.writer.transport.abort()

    def _at_limit(self, key: int) -> None:
        self.begun[key] = asyncio.get_running_loop().call_later(_READ, self._expire)

    def _expire(self) -> None:
        self.late = True
        _kill(self.process)
        self.writer.transport.abort()

    async def end(self) -> str:
        """Ends the worker and all processes that it started. Returns how the worker ended, for messages."""
        for timer in self.begun.values():
            timer.cancel()
        self.writer.close()
        if self.process.returncode is None:
            until = time.monotonic() + _GRACE
            try:
                while not _has_ended(self.process) and time.monotonic() < until:
                    await asyncio.sleep(0.01)
            finally:  # if cancelled, too
                _kill(self.process)  # before it is reaped: until then no other group can have its number
                self.process.wait()
        status = self.process.wait()
        how = f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
        return f"its process {how}"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class WorkerPool:
    """Workers for plain or for async functions. A worker that ends is replaced.

    If a worker ends after it began one row, that row fails. Rows that it had not begun go to another worker. If an
    async worker had begun several rows, any of them may have ended it: each is run again alone.
    """

    def __init__(self, functions: Sequence[str], workers: int, timeout: float, *, asynchronous: bool):
        self.functions, self.timeout, self.asynchronous = functions, timeout, asynchronous
        shared: asyncio.Queue[Task] = asyncio.Queue()
        # an async worker takes all tasks of its queue at once, so each needs its own
        self._queues = [asyncio.Queue() if asynchronous else shared for _ in range(workers)]
        self._next = itertools.cycle(self._queues)
        self._alone: asyncio.Queue[Task] = asyncio.Queue()  # rows that are run again
        self._any_alone = asyncio.Event()

    def put(self, task: Task) -> None:
        """Queues the task."""
        next(self._next).put_nowait(task)

    async def run(self) -> None:
        """Runs the workers until it is cancelled or a worker can't import its functions."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues:
                group.create_task(self._run_worker(queue, capacity=sys.maxsize if self.asynchronous else 1))
            await self._any_alone.wait()
            group.create_task(self._run_worker(self._alone, capacity=1))

    async def _run_worker(self, queue: asyncio.Queue[Task], capacity: int) -> None:
        while True:
            worker = await self._start(capacity)
            helpers = [asyncio.create_task(worker.send_tasks(queue)), asyncio.create_task(worker.watch())]
            try:
                await worker.read_results()
            finally:
                for helper in helpers:
                    helper.cancel()
                end = await worker.end()
            self._clear(worker, end)

    def _clear(self, worker: Worker, end: str) -> None:
        """Fails the tasks of a worker that ended, or queues them again."""
        begun = [task for key, task in worker.tasks.items() if key in worker.begun]
        for key, task in worker.tasks.items():
            if key not in worker.begun and (begun or task.tries < _TRIES):  # another row ended the worker
                self.put(task)
            elif len(begun) > 1:
                self._alone.put_nowait(task)
                self._any_alone.set()
            elif worker.late and begun:
                task.outcome.set_result(timeout_failure(task.function, self.timeout, blocks=self.asynchronous))
            else:
                task.outcome.set_result(Failure(task.function, "crash", end))

    async def _start(self, capacity: int) -> Worker:
        """A new worker that has imported the functions. Raises UserError if the import fails."""
        ours, its = socket.socketpair()
        streams = await asyncio.open_connection(sock=ours)
        command = [sys.executable, "-u", "-m", "splitppo.rewards.worker_main", str(its.fileno()), str(os.getpid())]
        with its:
            process = subprocess.Popen(
                command, env=clean_environment(), stdin=subprocess.DEVNULL, pass_fds=[its.fileno()],
                start_new_session=True,  # so that _kill reaches all processes that a function starts
            )  # fmt: skip
        limit = self.timeout + (_CANCEL if self.asynchronous else 0)
        worker = Worker(process, streams, limit=limit, capacity=capacity)
        try:
            await worker.load(self.functions, self.timeout, asynchronous=self.asynchronous)
        except BaseException:
            await worker.end()
            raise
        return worker
