"""The pool of processes in which a rank runs reward functions, and what it makes of their results.

A function may be slow, hang, raise or end its process: that costs the row its score and is told beside it, and costs no
other row anything. Rules of ours are fast and sure: they run in the trainer's own process.
"""

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from splitppo.errors import UserError
from splitppo.rewards import frames
from splitppo.rewards.functions import (
    BY_DATA_SOURCE,
    FAST,
    Fault,
    Kind,
    Outcome,
    check_rewards,
    check_sources,
    display_names,
    find_function,
    is_async,
    read_result,
    row_of,
    rules_of,
    timeout_fault,
)

if TYPE_CHECKING:
    from splitppo.rollout import Prompt

# what a worker must not take for its own, if a function starts something distributed
_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_GRACE = 2.0  # seconds that a worker has to end by itself
_MARGIN = 1.0  # seconds beyond the time limit in which an async function must heed its cancelling
_HEARING = 0.05  # seconds between a deadline and the end
_WATCH = 0.5  # seconds between two looks at a worker's process
_TRIES = 3  # workers that may end before they begin a row that they were given


@dataclass(frozen=True)
class Failure:
    """A function that gave no score for a row.

    Attributes:
        function: its short name.
        kind: `timeout`; `error` (it raised); `invalid` (what it returned is no finite number); `crash` (its process).
        text: a line: what it raised and where, or how its process ended.
    """

    function: str
    kind: Kind
    text: str


@dataclass(frozen=True)
class Scored:
    """What the functions made of one row.

    Attributes:
        score: the weighted sum of their scores; one that failed counts as `failed_score`.
        figures: further numbers of a function that returned a dict. Of several functions, each one's score and numbers,
            as `NAME/score` and `NAME/key`.
        failures: of the functions that gave no score.
    """

    score: float
    figures: dict[str, float]
    failures: tuple[Failure, ...]


class Pending:
    """Rows that are being scored."""

    def __init__(self, combine: Callable[[int], Scored], rows: int):
        self._combine, self._rows = combine, rows

    def result(self) -> list[Scored]:
        """Waits for all rows; they come in the order they were given in.

        Raises:
            UserError: a worker could not import its functions.
        """
        return [self._combine(row) for row in range(self._rows)]


class Scorer:
    """Scores rows by a weighted sum of reward functions. Its workers start at once and end with this process.

    Args:
        functions: as `reward.function` names them; `none` alone scores each row 0.
        weights: of each function; empty: 1 each.
        data_sources: of all rows that will be scored, for `auto`.
        workers: processes for the functions that are no fast rules; as many again for those that are async.
        timeout: seconds that a function may take for a row, from when a worker begins it.
        failed_score: what a function that failed counts as.

    Raises:
        UserError: as check_rewards and check_sources.
    """

    def __init__(
        self,
        functions: Sequence[str],
        weights: Sequence[float],
        data_sources: Set[str],
        *,
        workers: int,
        timeout: float,
        failed_score: float,
    ):
        check_rewards(functions)
        check_sources(functions, data_sources)
        self._functions = [function for function in functions if function != "none"]
        self._weights = list(weights) or [1.0] * len(self._functions)
        self._names = display_names(self._functions)
        self._failed_score = float(failed_score)
        slow = [f for f in self._functions if f != "auto" and f not in FAST]
        slow += [rule for rule in rules_of(self._functions, data_sources) if rule not in FAST]
        self._pool = _Pool(list(dict.fromkeys(slow)), workers, timeout) if slow else None

    def submit(self, rows: Sequence[tuple["Prompt", str]]) -> Pending:
        """Has the workers score the rows, each a prompt and the decoded response; returns at once."""
        given = [row_of(prompt, response) for prompt, response in rows]
        places = itertools.product(range(len(given)), range(len(self._functions)))
        chosen = {(row, index): _chosen(self._functions[index], given[row]) for row, index in places}
        slow = {place: function for place, function in chosen.items() if function not in FAST}
        asked: dict[tuple[int, int], Future[Outcome]] = {}
        if self._pool:
            outcomes = self._pool.ask([(function, given[row]) for (row, _), function in slow.items()])
            asked = dict(zip(slow, outcomes, strict=True))
        return Pending(functools.partial(self._combine, given, asked), len(given))

    def close(self) -> None:
        """Ends the workers. Rows that are not scored yet never will be."""
        if self._pool:
            self._pool.close()

    def _combine(
        self, rows: Sequence[dict[str, Any]], asked: Mapping[tuple[int, int], Future[Outcome]], number: int
    ) -> Scored:
        total, figures, failures = 0.0, {}, []
        for index, (function, weight, name) in enumerate(zip(self._functions, self._weights, self._names, strict=True)):
            place, row = (number, index), rows[number]
            outcome = asked[place].result() if place in asked else _apply_rule(_chosen(function, row), row)
            if isinstance(outcome, Fault):
                failures.append(Failure(name, outcome.kind, outcome.text))
                outcome = (self._failed_score, {})
            score, numbers = outcome
            total += weight * score
            if len(self._functions) == 1:
                figures = numbers
            else:
                figures |= {f"{name}/{key}": value for key, value in {"score": score, **numbers}.items()}
        return Scored(total, figures, tuple(failures))


def _chosen(function: str, row: Mapping[str, Any]) -> str:
    return BY_DATA_SOURCE[row["data_source"]] if function == "auto" else function


def _apply_rule(rule: str, row: dict[str, Any]) -> Outcome:
    """A fast rule, here. It fails only on a truth that it can't use."""
    try:
        return read_result(FAST[rule](**row))
    except UserError as error:
        return Fault("error", str(error))


@dataclass
class _Task:
    """A row for a function: `message` is what a worker is sent; `given` counts the workers that it was given to."""

    key: int
    message: bytes
    outcome: Future[Outcome]
    given: int = 0


class _Worker:
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
        self.tasks: dict[int, _Task] = {}
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

    async def feed(self, queue: asyncio.Queue[_Task]) -> None:
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


class _Crew:
    """Workers of one kind, each kept alive: one that ends is replaced.

    Of one that ends, the row that it had begun failed; the rows it had not begun go to another. Where an async one had
    begun several, nobody knows which of them ended it: each is run again, alone.
    """

    def __init__(self, functions: Sequence[str], workers: int, timeout: float, *, together: bool):
        self.functions, self.timeout, self.together = functions, timeout, together
        shared: asyncio.Queue[_Task] = asyncio.Queue()
        # async workers take what they are given at once: rows are dealt out before
        self._queues = [asyncio.Queue() if together else shared for _ in range(workers)]
        self._next = itertools.cycle(self._queues)
        self._alone: asyncio.Queue[_Task] = asyncio.Queue()
        self._suspects = asyncio.Event()

    def put(self, task: _Task) -> None:
        """Has a worker take it."""
        next(self._next).put_nowait(task)

    async def run(self) -> None:
        """Keeps the workers; ends by an exception or when it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for queue in self._queues:
                group.create_task(self._keep(queue, capacity=sys.maxsize if self.together else 1))
            await self._suspects.wait()
            group.create_task(self._keep(self._alone, capacity=1))

    async def _keep(self, queue: asyncio.Queue[_Task], capacity: int) -> None:
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

    def _sort(self, worker: _Worker, how: str) -> None:
        """Settles the tasks of a worker that ended, or gives them to another."""
        crash = Fault("crash", how)
        suspects = [task for key, task in worker.tasks.items() if key in worker.begun]
        for key, task in worker.tasks.items():
            if key not in worker.begun and task.given < _TRIES:
                self.put(task)
            elif key not in worker.begun:
                task.outcome.set_result(crash)
            elif len(suspects) == 1:
                task.outcome.set_result(timeout_fault(self.timeout) if worker.late else crash)
            else:
                self._alone.put_nowait(task)
                self._suspects.set()

    async def _start(self, capacity: int) -> _Worker:
        """A new worker, when it has imported its functions. Raises UserError if it can't."""
        ours, its = socket.socketpair()
        streams = await asyncio.open_connection(sock=ours)
        command = [sys.executable, "-u", "-m", "splitppo.rewards.worker", str(its.fileno()), str(os.getpid())]
        with its:
            process = subprocess.Popen(
                command, env={name: value for name, value in os.environ.items() if name not in _TORCHRUN},
                stdin=subprocess.DEVNULL, pass_fds=[its.fileno()],
                start_new_session=True,  # so that what a function starts ends with the worker
            )  # fmt: skip
        limit = self.timeout + (_MARGIN if self.together else 0)
        worker = _Worker(process, streams, limit=limit, capacity=capacity)
        try:
            await worker.load(self.functions, self.timeout, together=self.together)
        except BaseException:
            await worker.end()
            raise
        return worker


class _Pool:
    """The crews, and the thread that talks to them. It lives as long as they do: Linux ends them with it."""

    def __init__(self, functions: Sequence[str], workers: int, timeout: float):
        kinds = {function: is_async(find_function(function)) for function in functions}
        self._crews: dict[str, _Crew] = {}
        for together in (False, True):
            if names := [name for name, kind in kinds.items() if kind is together]:
                crew = _Crew(names, workers, timeout, together=together)
                self._crews |= dict.fromkeys(names, crew)
        self._keys = itertools.count()
        self._open: set[Future[Outcome]] = set()
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        # no daemon would wait for it at the end of a run that failed
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def ask(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Future[Outcome]]:
        """Has workers call the functions, each with its row."""
        tasks: list[tuple[_Crew, _Task]] = []
        for function, row in calls:
            crew, key = self._crews[function], next(self._keys)
            message = frames.pack((key, crew.functions.index(function), row))
            tasks.append((crew, _Task(key, message, Future())))
        self._loop.call_soon_threadsafe(self._put, tasks)
        return [task.outcome for _, task in tasks]

    def close(self) -> None:
        """Ends workers and thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    def _put(self, tasks: Sequence[tuple[_Crew, _Task]]) -> None:
        for crew, task in tasks:
            if self._error:
                task.outcome.set_exception(self._error)
                continue
            self._open.add(task.outcome)
            task.outcome.add_done_callback(self._open.discard)
            crew.put(task)

    async def _main(self) -> None:
        crews = [asyncio.create_task(crew.run()) for crew in dict.fromkeys(self._crews.values())]
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait([*crews, closing], return_when=asyncio.FIRST_COMPLETED)
        for crew in crews:
            crew.cancel()
        ends = await asyncio.gather(*crews, return_exceptions=True)
        errors = [error.exceptions[0] for error in ends if isinstance(error, BaseExceptionGroup)]
        self._fail(errors[0] if errors else RuntimeError("the scorer was closed before these rows were scored"))
        await closing

    def _fail(self, error: BaseException) -> None:
        """No row will be scored any more."""
        self._error = error
        for outcome in list(self._open):
            outcome.set_exception(error)
