"""Worker processes that apply reward functions to rows. A worker that hangs or ends is replaced."""

import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from splitppo.errors import UserError
from splitppo.job.child import clean_environment
from splitppo.rewards.functions import Failure, Outcome, timeout_failure

_GRACE = 2.0  # seconds that a worker has to exit by itself
_CANCEL = 1.0  # seconds that an async function has to end after it was cancelled at the time limit
_TRIES = 3  # workers that may end with a row that they have not begun


@dataclass
class Task:
    """A function and a row. `tries` counts the workers that got it."""

    key: int
    function: str
    row: dict[str, Any]
    outcome: Future[Outcome]
    tries: int = 0


class TaskQueue:
    """Tasks that no worker has yet. `ready` is a file descriptor for `wait`."""

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()
        self.ready = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)

    def put(self, task: Task) -> None:
        self.tasks.append(task)
        os.eventfd_write(self.ready, 1)

    def get(self) -> Task | None:
        """The next task; None if another worker was faster."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.ready)
            return self.tasks.popleft()
        return None


class Worker:
    """A worker's process and its tasks. `limits`: of the tasks that it has begun, when they must have ended."""

    def __init__(self, limit: float):
        self.limit, self.late = limit, False
        self.tasks: dict[int, Task] = {}
        self.limits: dict[int, float] = {}
        ours, its = socket.socketpair()
        # a worker that is stuck reads nothing: to send a long row to it must not wait for ever
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(limit) + 1, 0))
        command = [sys.executable, "-u", "-m", "splitppo.rewards.worker_main", str(its.fileno()), str(os.getpid())]
        with its:
            self.process = subprocess.Popen(
                command, env=clean_environment(), stdin=subprocess.DEVNULL, pass_fds=[its.fileno()],
                start_new_session=True,  # so that `end` reaches all processes that a function starts
            )  # fmt: skip
        self.connection, self.ended = Connection(ours.detach()), os.pidfd_open(self.process.pid)

    def load(self, closing: int, functions: Sequence[str], timeout: float, *, asynchronous: bool) -> None:
        """Makes the worker import the functions. Raises UserError if that fails."""
        with suppress(EOFError, OSError):
            self.connection.send((sys.path, functions, timeout, asynchronous))
            if self.connection in wait([self.connection, self.ended, closing]):
                if why := self.connection.recv():
                    raise UserError(f"in a reward worker: {why}")
                return
        raise UserError(f"{self.end()} while it imported the reward {', '.join(functions)}; fix the file")

    def is_late(self) -> bool:
        """Whether a task is over its limit."""
        return any(limit <= time.monotonic() for limit in self.limits.values())

    def end(self) -> str:
        """Ends the worker and all processes that it started. Returns how the worker ended, for messages."""
        self.connection.close()
        if self.process.returncode is None:
            self.late = self.is_late()
            if not self.late:
                wait([self.ended], _GRACE)
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # not yet reaped: no other group can have its number
            os.close(self.ended)
        status = self.process.wait()
        how = f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
        return f"its process {how}"


class WorkerPool:
    """Workers for plain or for async functions, each with a thread of this process. A worker that ends is replaced.

    If a worker ends after it began one row, that row fails. A row that it had not begun goes to another worker. If an
    async worker had begun several rows, any of them may have ended it: each is run again alone.
    """

    def __init__(self, functions: Sequence[str], workers: int, timeout: float, *, asynchronous: bool):
        self.functions, self.timeout, self.asynchronous = functions, timeout, asynchronous
        self._queue, self._alone = TaskQueue(), TaskQueue()  # alone: rows that are run again
        self._keys, self._lock = itertools.count(), threading.Lock()
        self._open: dict[int, Task] = {}
        self._error: BaseException | None = None  # why no row can be scored any more
        self._closing = os.eventfd(0)
        self._threads: list[threading.Thread] = []
        for queue in [self._queue] * workers + [self._alone] * asynchronous:
            # a daemon: a run that failed exits without closing the scorer. Linux kills a worker when its thread ends.
            self._threads.append(threading.Thread(target=self._run, args=(queue,), name="rewards", daemon=True))
            self._threads[-1].start()

    def submit(self, function: str, row: dict[str, Any]) -> Future[Outcome]:
        """Has a worker apply the function to the row. The future raises UserError if a worker can't import it."""
        task = Task(next(self._keys), function, row, Future())
        with self._lock:
            if self._error:
                task.outcome.set_exception(self._error)
            else:
                self._open[task.key] = task
                self._queue.put(task)
        return task.outcome

    def close(self) -> None:
        """Ends the workers. Rows that have no score yet get none."""
        self._fail(RuntimeError("the scorer was closed before these rows were scored"))
        for thread in self._threads:
            thread.join()

    def _run(self, queue: TaskQueue) -> None:
        """A worker's thread."""
        try:
            if queue is self._alone:
                wait([queue.ready, self._closing])
            while not self._error:
                worker = Worker(self.timeout + (_CANCEL if self.asynchronous else 0))
                try:
                    worker.load(self._closing, self.functions, self.timeout, asynchronous=self.asynchronous)
                    self._serve(worker, queue)
                finally:
                    end = worker.end()
                self._clear(worker, end)
        except BaseException as error:
            self._fail(error)

    def _serve(self, worker: Worker, queue: TaskQueue) -> None:
        """Sends tasks and reads outcomes until the worker ends, has to end, or this pool closes."""
        ends, all_at_once = (worker.ended, self._closing), self.asynchronous and queue is not self._alone
        with suppress(EOFError, OSError):
            while True:
                # an async worker begins a row when it has read it; a stuck one must not be sent more
                has_room = len(worker.tasks) == (len(worker.limits) if all_at_once else 0)
                left = max(0.0, min(worker.limits.values()) - time.monotonic()) if worker.limits else None
                found = wait([worker.connection, *ends, *([queue.ready] if has_room else [])], left)
                self._read(worker)  # before the limits count: what has arrived came in time
                if worker.is_late() or set(ends) & set(found):
                    return
                if queue.ready in found and (task := queue.get()):
                    task.tries += 1
                    worker.tasks[task.key] = task
                    worker.connection.send((task.key, self.functions.index(task.function), task.row))

    def _read(self, worker: Worker) -> None:
        """Reads the messages that have arrived."""
        while worker.connection.poll():
            key, *outcome = worker.connection.recv()
            if outcome:
                del worker.limits[key]
                self._settle(worker.tasks.pop(key), outcome[0])
            else:
                worker.limits[key] = time.monotonic() + worker.limit

    def _clear(self, worker: Worker, end: str) -> None:
        """Fails the tasks of a worker that ended, or queues them again."""
        begun = worker.limits.keys()
        for key, task in worker.tasks.items():
            if key not in begun and (begun or task.tries < _TRIES):  # another row ended the worker
                self._queue.put(task)
            elif len(begun) > 1:
                self._alone.put(task)
            elif worker.late and begun:
                self._settle(task, timeout_failure(task.function, self.timeout, blocks=self.asynchronous))
            else:
                self._settle(task, Failure(task.function, "crash", end))

    def _settle(self, task: Task, outcome: Outcome) -> None:
        with self._lock:
            if self._open.pop(task.key, None):
                task.outcome.set_result(outcome)

    def _fail(self, error: BaseException) -> None:
        """Ends all workers' threads; rows without an outcome get the error, the first one."""
        with self._lock:
            if not self._error:
                self._error = error
                os.eventfd_write(self._closing, 1)
                for task in self._open.values():
                    task.outcome.set_exception(error)
                self._open.clear()
