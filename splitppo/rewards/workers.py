"""Worker processes that apply reward functions to rows, kept alive: one that hangs or ends is replaced."""

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
from splitppo.rewards import frames
from splitppo.rewards.functions import Fault, Outcome, timeout_fault

# what a worker must not take for its own, if a function starts something distributed
_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_GRACE = 2.0  # seconds that a worker has to end by itself
_MARGIN = 1.0  # seconds beyond the time limit in which an async function must heed its cancelling
_HEARING = 0.05  # seconds between a deadline and the end
_WATCH = 0.5  # seconds between two looks at a worker's process
_TRIES = 3  # workers that may end before they begin a row that they were given


@dataclass
class Task:
    """A row for a function: `message` is what a worker is sent; `given` counts the workers that it was given to."""

    key: int
    message: bytes
    outcome: Future[Outcome]
    given: int = 0


class Worker:
    """A worker's process and the tasks that it has.

    Args:
        limit: seconds after which it is killed, for any task.
        capacity: tasks that it may have at the same time.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        *,
        limit: float,
        capacity: int,
    ):
        self.process, self.limit = process, limit
        self.reader, self.writer = streams
        self.room = asyncio.Semaphore(capacity)
        self.tasks: dict[int, Task] = {}
        self.begun: dict[int, asyncio.TimerHandle] = {}
        self.late = False  # it was killed for its lateness

    async def load(self, functions: Sequence[str], timeout: float, *, together: bool) -> None:
        """Has it import the functions. Raises UserError if it can't."""
        self.writer.write(frames.pack((sys.path, functions, timeout, together)))
        try:
            word, *why = await frames.read(self.reader)
        except EOFError:
            how = await self.end()
            raise UserError(f"{how} while it imported the reward {', '.join(functions)}; mend the file") from None
        if word != "ready":
            raise UserError(f"in a reward worker: {why[0]}")

    async def feed(self, queue: asyncio.Queue[Task]) -> None:
        """Gives it what comes, as far as it has room."""
        while True:
            await self.room.acquire()
            task = await queue.get()
            task.given += 1
            self.tasks[task.key] = task
            self.writer.write(task.message)

    async def listen(self) -> None:
        """Takes what it says, until its end."""
        with contextlib.suppress(EOFError):  # is its end
            while True:
                self._take(*await frames.read(self.reader))

    async def watch(self) -> None:
        """Ends `listen` with the process, also if one that it forked holds the socket."""
        while not _has_ended(self.process):
            await asyncio.sleep(_WATCH)
        _kill(self.process)
        await asyncio.sleep(_WATCH)  # for its last words to be read
        self.writer.transport.abort()

    def _take(self, word: str, key: int, outcome: Outcome | None = None) -> None:
        if word == "began":
            self.begun[key] = asyncio.get_running_loop().call_later(self.limit, self._hear_out, key)
        elif outcome is not None:
            self.begun.pop(key).cancel()
            self.tasks.pop(key).outcome.set_result(outcome)
            self.room.release()

    def _hear_out(self, key: int) -> None:
        """What it said in time while this thread had to wait for the trainer's is heard before it is killed."""
        self.begun[key] = asyncio.get_running_loop().call_later(_HEARING, self._expire)

    def _expire(self) -> None:
        self.late = True
        _kill(self.process)
        self.writer.transport.abort()

    async def end(self) -> str:
        """Ends it and what it started, if it hasn't ended; returns how it ended."""
        for timer in self.begun.values():
            timer.cancel()
        self.writer.close()
        if self.process.returncode is None:
            until = time.monotonic() + _GRACE
            try:
                while not _has_ended(self.process) and time.monotonic() < until:
                    await asyncio.sleep(0.01)
            finally:  # cancelled, too, it leaves no process
                _kill(self.process)  # before it is reaped: until then the number of its group is its own
                self.process.wait()
        status = self.process.wait()
        if status < 0:
            return f"its process was killed by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills it and what it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)


class Crew:
    """Workers of one kind, each kept alive: one that ends is replaced.

    Of one that ends, the row that it had begun failed; the rows it had not begun go to another. Where an async one had
    begun several, nobody knows which of them ended it: each is run again, alone.
    """

    def __init__(self, functions: Sequence[str], workers: int, timeout: float, *, together: bool):
        self.functions, self.timeout, self.together = functions, timeout, together
        shared: asyncio.Queue[Task] = asyncio.Queue()
        # async workers take what they are given at once: rows are dealt out before
        self._queues = [asyncio.Queue() if together else shared for _ in range(workers)]
        self._next = itertools.cycle(self._queues)
        self._alone: asyncio.Queue[Task] = asyncio.Queue()
        self._suspects = asyncio.Event()

    def put(self, task: Task) -> None:
        """Has a worker take it."""
        next(self._next).put_nowait(task)

    async def run(self) -> None:
        """Keeps the workers; ends by an exception or when it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues:
                group.create_task(self._keep(queue, capacity=sys.maxsize if self.together else 1))
            await self._suspects.wait()
            group.create_task(self._keep(self._alone, capacity=1))

    async def _keep(self, queue: asyncio.Queue[Task], capacity: int) -> None:
        while True:
            worker = await self._start(capacity)
            beside = [asyncio.create_task(worker.feed(queue)), asyncio.create_task(worker.watch())]
            try:
                await worker.listen()
            finally:
                for task in beside:
                    task.cancel()
                how = await worker.end()
            self._sort(worker, how)

    def _sort(self, worker: Worker, how: str) -> None:
        """Settles the tasks of a worker that ended, or gives them to another."""
        crash = Fault("crash", how)
        suspects = [task for key, task in worker.tasks.items() if key in worker.begun]
        for key, task in worker.tasks.items():
            if key not in worker.begun and (suspects or task.given < _TRIES):  # another row's fault is not its own
                self.put(task)
            elif key not in worker.begun:
                task.outcome.set_result(crash)
            elif len(suspects) == 1:
                task.outcome.set_result(timeout_fault(self.timeout, blocks=self.together) if worker.late else crash)
            else:
                self._alone.put_nowait(task)
                self._suspects.set()

    async def _start(self, capacity: int) -> Worker:
        """A new worker, when it has imported its functions. Raises UserError if it can't."""
        ours, its = socket.socketpair()
        streams = await asyncio.open_connection(sock=ours)
        command = [sys.executable, "-u", "-m", "splitppo.rewards.worker_main", str(its.fileno()), str(os.getpid())]
        with its:
            process = subprocess.Popen(
                command, env={name: value for name, value in os.environ.items() if name not in _TORCHRUN},
                stdin=subprocess.DEVNULL, pass_fds=[its.fileno()],
                start_new_session=True,  # so that what a function starts ends with the worker
            )  # fmt: skip
        limit = self.timeout + (_MARGIN if self.together else 0)
        worker = Worker(process, streams, limit=limit, capacity=capacity)
        try:
            await worker.load(self.functions, self.timeout, together=self.together)
        except BaseException:
            await worker.end()
            raise
        return worker
