"""Scores rows by a weighted sum of reward functions.

Rules that take microseconds run in this process. All other functions run in worker processes: a function that is slow,
hangs, raises or ends its process costs its row the score, and costs other rows nothing.
"""

from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from splitppo.errors import UserError
from splitppo.rewards.functions import (
    FAST,
    Failure,
    Outcome,
    display_names,
    find_function,
    is_async,
    read_result,
    row_of,
    scored_by,
)
from splitppo.rewards.workers import WorkerPool

if TYPE_CHECKING:
    from splitppo.rollout import Prompt


@dataclass(frozen=True)
class Scored:
    """The score of a row. `figures`: the other numbers of a function that returned a dict; with several functions each
    one's score and numbers, as `NAME/score` and `NAME/key`."""

    score: float  # weighted sum of the functions' scores; a failure counts as `failed_score`
    figures: dict[str, float]
    failures: tuple[Failure, ...]  # of the functions that gave no score, under their short names


Pending = Callable[[], list[Scored]]  # waits for the scores of rows


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
        used = {scored_by(function, source): None for function in self._functions for source in sorted(data_sources)}
        kinds = {function: is_async(find_function(function)) for function in used if function not in FAST}
        self._pools: dict[str, WorkerPool] = {}
        for asynchronous in set(kinds.values()):
            names = [name for name, kind in kinds.items() if kind is asynchronous]
            self._pools |= dict.fromkeys(names, WorkerPool(names, workers, timeout, asynchronous=asynchronous))

    def submit(self, rows: Sequence[tuple["Prompt", str]]) -> Pending:
        """Starts to score the rows, each a prompt and the decoded response. Returns a function that waits for their
        scores, in the order of the rows. It raises UserError if a worker could not import its functions."""
        calls = [self._call(row_of(prompt, response)) for prompt, response in rows]
        return lambda: [self.combine([c.result() if isinstance(c, Future) else c for c in row]) for row in calls]

    def _call(self, row: dict[str, Any]) -> list[Outcome | Future[Outcome]]:
        names = [scored_by(function, row["data_source"]) for function in self._functions]
        return [_apply_rule(name, row) if name in FAST else self._pools[name].submit(name, row) for name in names]

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
        for pool in set(self._pools.values()):
            pool.close()


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
