"""Rewards that fail: counted over a group in each step. A run whose reward fails on every row
ends."""

from collections import Counter
from collections.abc import Mapping, Sequence

from splitppo.errors import UserError, say
from splitppo.job.collectives import Group
from splitppo.rewards.scorer import Failure, failure_line

# the run ends when a reward function fails on every row for so many steps in a row, and rows in
# them
FAILING_STEPS = 3
FAILING_ROWS = 16


def count_failures(
    group: Group,
    failing: Mapping[str, list[int]],
    rows: int,
    failures: Sequence[tuple[int, Failure]],
    *,
    never: bool,
) -> tuple[dict[str, list[int]], dict[str, float]]:
    """A step's failures over the ranks of a group, all of which call it; the first rank prints
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
    found = [failure for part in parts for failure in part]
    if group.is_first and found:
        say(f"[critic] {failure_line(found)}")
    failed = Counter(failure.function for _, failure in found)
    failing = {
        name: [*failing.get(name, ()), whole] for name, count in failed.items() if count == whole
    }
    for name, in_steps in failing.items():
        if never or (len(in_steps) >= FAILING_STEPS and sum(in_steps) >= FAILING_ROWS):
            cause = next(failure.text for _, failure in found if failure.function == name)
            steps = f"{len(in_steps)} step{'s' * (len(in_steps) > 1)}"
            raise UserError(f"reward {name} failed on every row for {steps}: {cause}; fix it")
    kinds = Counter(failure.kind for _, failure in found)
    metrics = {"critic/reward_failures": float(len(found))}
    metrics |= {f"critic/reward_failures/{kind}": float(kinds[kind]) for kind in sorted(kinds)}
    if failed:  # of the function that failed on the most rows
        metrics["critic/reward_failures/share"] = max(failed.values()) / whole
    return failing, metrics
