"""The pool of processes in which a rank runs reward functions, and what it makes of their results.

A function may be slow, hang, raise or end its process: that costs the row its score and is told beside it, and costs no
other row anything. Rules of ours are fast and sure: they run in the trainer's own process.
"""

import asyncio
import functools
import itertools
import threading
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
)
from splitppo.rewards.workers import Crew, Task

if TYPE_CHECKING:
    from splitppo.rollout import Prompt


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


def failure_line(failures: Sequence[tuple[int, Failure]]) -> str:
    """A step's failures in one line: how many of each function and kind, and the first of them."""
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for row, failure in failures:
        found.setdefault((failure.function, failure.kind), []).append((row, failure.text))
    parts = [
        f"{name}: {len(rows)} x {kind}, first of row {min(rows)[0]}: {min(rows)[1]}"
        for (name, kind), rows in sorted(found.items())
    ]
    return "rewards that failed: " + "; ".join(parts)


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


class _Pool:
    """The crews, and the thread that talks to them. It lives as long as they do: Linux ends them with it."""

    def __init__(self, functions: Sequence[str], workers: int, timeout: float):
        kinds = {function: is_async(find_function(function)) for function in functions}
        self._crews: dict[str, Crew] = {}
        for together in (False, True):
            if names := [name for name, kind in kinds.items() if kind is together]:
                crew = Crew(names, workers, timeout, together=together)
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
        tasks: list[tuple[Crew, Task]] = []
        for function, row in calls:
            crew, key = self._crews[function], next(self._keys)
            message = frames.pack((key, crew.functions.index(function), row))
            tasks.append((crew, Task(key, message, Future())))
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

    def _put(self, tasks: Sequence[tuple[Crew, Task]]) -> None:
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
