"""Scores rows by a weighted sum of reward functions.

Rules that take microseconds run in this process. All other functions run in worker processes: if a
function is slow, hangs, raises or ends its process, only its own row loses its score.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from splitppo.config import RewardConfig
from splitppo.context import Context
from splitppo.errors import UserError
from splitppo.rewards.functions import (
    BY_DATA_SOURCE,
    BY_NAME,
    FAST,
    NEEDS,
    RULES,
    Outcome,
    Spans,
    asks_for,
    display_names,
    find_function,
    handler_of,
    scored_by,
)
from splitppo.rollout import Episode, Prompt, dialogue
from splitppo.workers import FAILING_STEPS, FLOAT32_MAX, Failure, Work, is_async, say_failures
from splitppo.workers.pool import Pool

FAILING_ROWS = 16  # the run ends when a function fails on every row, and on so many, in these steps


@dataclass(frozen=True)
class Scored:
    """The score of a row. `figures`: the other numbers of a function that returned a dict. With
    several functions: each function's score and numbers, as `NAME/score` and `NAME/key`."""

    score: float  # weighted sum of the functions' scores; a failure counts as `failed_score`
    figures: dict[str, float]
    failures: tuple[Failure, ...]  # of the functions that gave no score, under their short names
    spans: Spans | None = None  # what of the score was paid on the way; None: nothing was said


# a prompt, the decoded response (the last turn), and what makes messages of the row
ToScore = tuple[Prompt, str, *tuple[Callable[[], Any], ...]]
Pending = Callable[[], list[Scored]]  # waits for the scores of rows


def to_score(context: Context, prompt: Prompt, episode: Episode) -> ToScore:
    """A row as `Scorer.submit` gets it."""
    messages = partial(dialogue, prompt, episode, context.decode)
    return prompt, context.decode(episode.turns[-1][0]), messages


def check_prompts(
    functions: Sequence[str], prompts: Mapping[int, Prompt], setting: str = "reward.function"
) -> dict[int, UserError]:
    """Applies the rules among the functions to every prompt with an empty response. Returns the
    errors of the ground truths that a rule can't use. Raises UserError if `auto` has no rule for a
    data source, or `math` lacks its library."""
    sources = {prompt.data_source.partition(":")[0] for prompt in prompts.values()}
    if "auto" in functions and (unknown := sorted(sources - BY_DATA_SOURCE.keys())):
        none = ", or to none if only a reward model or an environment gives rewards"
        raise UserError(
            f"{setting}=auto: no rule for data_source {', '.join(map(repr, unknown))} "
            f"(known: {', '.join(BY_DATA_SOURCE)}); set --{setting} to {', '.join(RULES)} or "
            f"path/to/file.py:name{none * (setting == 'reward.function')}"
        )
    for rule in NEEDS.keys() & {scored_by(f, source) for f in functions for source in sources}:
        find_function(rule, setting)  # it needs a library
    errors: dict[int, UserError] = {}
    for index, prompt in prompts.items():
        try:
            for function in functions:
                if rule := BY_NAME.get(scored_by(function, prompt.data_source)):
                    rule(**row_of(prompt, ""))
        except UserError as error:
            errors[index] = error
    return errors


def row_of(prompt: Prompt, response: str) -> dict[str, Any]:
    """The keyword arguments of a reward function; `response` is decoded, without special tokens."""
    return {
        "data_source": prompt.data_source,
        "solution_str": response,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }


class Scorer:
    """Scores rows by the functions of `reward`, which check_rewards has checked. `none` alone
    scores each row 0.

    The worker processes start at once and end with this process. Async functions have as many of
    their own. `data_sources`: of all rows that will be scored, for `auto`.
    """

    def __init__(self, reward: RewardConfig, data_sources: Set[str]):
        weights = reward.weights or [1.0] * len(reward.function)
        self._weights = {
            name: weight
            for name, weight in zip(reward.function, weights, strict=True)
            if name != "none"
        }
        self._names = display_names(list(self._weights))
        self._failed_score = reward.failed_score
        used = {scored_by(name, source) for name in self._weights for source in data_sources}
        functions = {name: find_function(name) for name in sorted(used - FAST.keys())}
        self._asks = {name: asks_for(function) for name, function in functions.items()}
        self._pools: dict[str, Pool] = {}
        for asynchronous in {is_async(function) for function in functions.values()}:
            names = [name for name in functions if is_async(functions[name]) is asynchronous]
            work = Work(
                partial(handler_of, names), "reward", f"the reward {', '.join(names)}",
                reward.timeout, asynchronous, concurrency=reward.concurrency,
            )  # fmt: skip
            self._pools |= dict.fromkeys(names, Pool(work, reward.workers))

    def submit(self, rows: Sequence[ToScore]) -> Pending:
        """Starts to score the rows. Returns a function that waits for their scores, in the order of
        the rows. It raises UserError if a worker could not import its functions."""
        calls = [self._call(row[0], row[1], *row[2:]) for row in rows]
        return lambda: [
            self._combine([c.result() if isinstance(c, Future) else c for c in row])
            for row in calls
        ]

    def _call(
        self, prompt: Prompt, response: str, messages: Callable[[], Any] = list
    ) -> list[Outcome | Future[Outcome]]:
        row = row_of(prompt, response)
        more = {"prompt": lambda: prompt.column, "messages": messages}
        return [
            (FAST[name](**row), {}, None)
            if name in FAST
            else self._pools[name].submit(name, row | {n: more[n]() for n in self._asks[name]})
            for name in (scored_by(function, prompt.data_source) for function in self._weights)
        ]

    def _combine(self, outcomes: Sequence[Outcome]) -> Scored:
        """One row's outcomes, in the order of the functions, as its score."""
        total = 0.0
        figures = {}
        failures = []
        spans: Spans | None = None
        for name, weight, outcome in zip(
            self._names, self._weights.values(), outcomes, strict=True
        ):
            if isinstance(outcome, Failure):
                failures.append(replace(outcome, function=name))
                outcome = (self._failed_score, {}, None)
            score, numbers, parts = outcome
            total += weight * score
            if parts is not None:
                spans = [*(spans or ()), *((end, weight * reward) for end, reward in parts)]
            figures |= (
                {f"{name}/{key}": value for key, value in {"score": score, **numbers}.items()}
                if len(self._weights) > 1
                else numbers
            )
        most = max(abs(total), sum(abs(reward) for _, reward in spans or ()))
        if most > FLOAT32_MAX:
            failures.append(beyond_float32("reward", most))
            total = self._failed_score
            spans = None
        return Scored(total, figures, tuple(failures), spans)

    def close(self) -> None:
        """Ends the workers. Rows that have no score yet get none."""
        for pool in set(self._pools.values()):
            pool.close()


def beyond_float32(function: str, number: float) -> Failure:
    """A row whose rewards are numbers, and their sum is too large to train on."""
    return Failure(
        function,
        "invalid",
        f"the row's weighted rewards sum to {number:g}, which overflows float32 (3.4e38); scale "
        "them down",
    )


def count_failures(
    group: Any,
    failing: Mapping[str, list[int]],
    rows: int,
    failures: Sequence[tuple[int, Failure]],
    *,
    never: bool,
) -> tuple[dict[str, list[int]], dict[str, float]]:
    """A step's failures over the ranks of a `Group`, all of which call it; the first rank prints
    them. Returns `failing` as it is after the step, and the metrics.

    Args:
        failing: reward function -> rows of each step, to the last, of which none got a score.
        rows: of this rank. failures: (row, what failed on it).
        never: whether the run ends here, and no row of it was scored.

    Raises:
        UserError: a function has failed on every row for some steps, and on enough rows; or, if
            `never`, in this step.
    """
    counts, parts = zip(*group.all_gather((rows, failures)), strict=True)
    whole = sum(counts)
    every = [failure for part in parts for failure in part]
    if group.is_first:
        say_failures("[critic] ", every)
    failed = Counter(failure.function for _, failure in every)
    failing = {
        name: [*failing.get(name, ()), whole] for name, count in failed.items() if count == whole
    }
    for name, in_steps in failing.items():
        if never or (len(in_steps) >= FAILING_STEPS and sum(in_steps) >= FAILING_ROWS):
            cause = next(failure.text for _, failure in every if failure.function == name)
            raise UserError(
                f"reward {name} failed on every row for {len(in_steps)} "
                f"step{'s' * (len(in_steps) > 1)}: {cause}; fix it"
            )
    kinds = Counter(failure.kind for _, failure in every)
    metrics = {
        "critic/reward_failures": float(len(every)),
        **{f"critic/reward_failures/{kind}": float(kinds[kind]) for kind in sorted(kinds)},
    }
    if failed:  # of the function that failed on the most rows
        metrics["critic/reward_failures/share"] = max(failed.values()) / whole
    return failing, metrics
