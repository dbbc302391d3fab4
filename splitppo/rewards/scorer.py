"""Scores rows by a weighted sum of reward functions.

Rules that take microseconds run in this process. All other functions run in worker processes: a function that is slow,
hangs, raises or ends its process costs its row the score, and costs other rows nothing.
"""

import asyncio
import itertools
import threading
from collections.abc import Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from splitppo.errors import UserError
from splitppo.rewards import frames
from splitppo.rewards.functions import (
    BY_DATA_SOURCE,
    FAST,
    Failure,
    Outcome,
    display_names,
    find_function,
    is_async,
    read_result,
    row_of,
    rules_of,
)
from splitppo.rewards.workers import Task, WorkerPool

if TYPE_CHECKING:
    from splitppo.rollout import Prompt


@dataclass(frozen=True)
class Scored:
    """The score of a row.

    Attributes:
        score: weighted sum of the functions' scores. A failure counts as `failed_score`.
        figures: the other numbers of a function that returned a dict. With several functions: each one's score and
            numbers, as `NAME/score` and `NAME/key`.
        failures: of the functions that gave no score, under their short names.
    """

    score: float
    figures: dict[str, float]
    failures: tuple[Failure, ...]


class Scorer:
    """Scores rows by reward functions. The worker processes start at once and end with this process.

    Args:
        functions: as `reward.function` names them, checked by check_rewards. `none` alone scores each row 0.
        weights: of each function; empty: 1 each.
        data_sources: of all rows that will be scored, for `auto`.
        workers: processes for plain functions; async functions have as many of their own.
        timeout: seconds per row and function, from when a worker begins the row.
        failed_score: score of a function that failed.
    """

    def __init__(
        self, functions: Sequence[str], weights: Sequence[float], data_sources: Set[str],
        *, workers: int, timeout: float, failed_score: float,
    ):  # fmt: skip
        self._functions = [function for function in functions if function != "none"]
        self._weights = list(weights) or [1.0] * len(self._functions)
        self._names = display_names(self._functions)
        self._failed_score = float(failed_score)
        slow = [f for f in self._functions if f != "auto" and f not in FAST]
        slow += [rule for rule in rules_of(self._functions, data_sources) if rule not in FAST]
        self._thread = _WorkerThread(list(dict.fromkeys(slow)), workers, timeout)

    def submit(self, rows: Sequence[tuple["Prompt", str]]) -> "Pending":
        """Starts to score the rows, each a prompt and the decoded response."""
        return Pending(self, [self._call(row_of(prompt, response)) for prompt, response in rows])

    def _call(self, row: dict[str, Any]) -> list[Outcome | Future[Outcome]]:
        names = [BY_DATA_SOURCE[row["data_source"]] if name == "auto" else name for name in self._functions]
        return [_apply_rule(name, row) if name in FAST else self._thread.submit(name, row) for name in names]

    def combine(self, outcomes: Sequence[Outcome]) -> Scored:
        """One row's outcomes, in the order of the functions, as its score."""
        total, figures, failures = 0.0, {}, []
        for name, weight, outcome in zip(self._names, self._weights, outcomes, strict=True):
            if isinstance(outcome, Failure):
                failures.append(replace(outcome, function=name))
                outcome = (self._failed_score, {})
            score, numbers = outcome
            total += weight * score
            if len(self._functions) == 1:
                figures = numbers
            else:
                figures |= {f"{name}/{key}": value for key, value in {"score": score, **numbers}.items()}
        return Scored(total, figures, tuple(failures))

    def close(self) -> None:
        """Ends the workers. Rows that have no score yet get none."""
        self._thread.close()


@dataclass(frozen=True)
class Pending:
    """Rows that are being scored: for each row, each function's outcome or a future of it."""

    scorer: Scorer
    rows: list[list[Outcome | Future[Outcome]]]

    def result(self) -> list[Scored]:
        """Waits for the scores of all rows, in the order of `submit`.

        Raises:
            UserError: a worker could not import its functions.
        """
        found = ([call.result() if isinstance(call, Future) else call for call in row] for row in self.rows)
        return [self.scorer.combine(outcomes) for outcomes in found]


def _apply_rule(name: str, row: dict[str, Any]) -> Outcome:
    try:
        return read_result(FAST[name](**row))
    except UserError as error:  # a ground truth that the rule can't use
        return Failure(name, "error", str(error))


def failure_line(failures: Sequence[tuple[int, Failure]]) -> str:
    """A step's failures in one line: the number of each function and kind, and the first of them."""
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for row, failure in failures:
        found.setdefault((failure.function, failure.kind), []).append((row, failure.text))
    parts = [
        f"{name}: {len(rows)} x {kind}, first of row {min(rows)[0]}: {min(rows)[1]}"
        for (name, kind), rows in sorted(found.items())
    ]
    return "rewards that failed: " + "; ".join(parts)


class _WorkerThread:
    """The worker pools and the thread whose event loop runs them.

    There is one pool for plain functions and one for async functions. Linux kills the workers when the thread ends.
    """

    def __init__(self, functions: Sequence[str], workers: int, timeout: float):
        self._pools: dict[str, WorkerPool] = {}
        kinds = {function: is_async(find_function(function)) for function in functions}
        for asynchronous in set(kinds.values()):
            names = [name for name, kind in kinds.items() if kind is asynchronous]
            self._pools |= dict.fromkeys(names, WorkerPool(names, workers, timeout, asynchronous=asynchronous))
        self._keys = itertools.count()
        self._open: set[Future[Outcome]] = set()
        self._error: BaseException | None = None  # why no row can be scored any more
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        # a daemon: a run that failed exits without closing the scorer
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, function: str, row: dict[str, Any]) -> Future[Outcome]:
        """Has a worker apply the function to the row."""
        pool, key = self._pools[function], next(self._keys)
        task = Task(key, function, frames.pack((key, pool.functions.index(function), row)), Future())
        self._loop.call_soon_threadsafe(self._put, pool, task)
        return task.outcome

    def close(self) -> None:
        """Ends workers and thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _put(self, pool: WorkerPool, task: Task) -> None:
        if self._error:
            task.outcome.set_exception(self._error)
            return
        self._open.add(task.outcome)
        task.outcome.add_done_callback(self._open.discard)
        pool.put(task)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        pools = [asyncio.create_task(pool.run()) for pool in set(self._pools.values())]
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait([*pools, closing], return_when=asyncio.FIRST_COMPLETED)
        for pool in pools:
            pool.cancel()
        ends = await asyncio.gather(*pools, return_exceptions=True)
        errors = [error.exceptions[0] for error in ends if isinstance(error, BaseExceptionGroup)]
        self._error = errors[0] if errors else RuntimeError("the scorer was closed before these rows were scored")
        for outcome in list(self._open):
            outcome.set_exception(self._error)
        await closing
