"""What a run says once when nothing can be learned: rules over its metrics, and a sentence for each
(docs/failures.md).

The thresholds are such that healthy runs keep silent: tests/run/test_notices.py plays 21 of them.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from operator import itemgetter, sub
from pathlib import Path
from statistics import fmean

from splitppo.errors import DOCS
from splitppo.placement import ROLES, Role
from splitppo.run.files import Tail
from splitppo.run.resolve import Resolved

STEPS = 5  # that a rule looks at, at least
ROWS = 300  # in them, where a few rows could look the same by chance
# the metrics that the rules read
READ = (
    r"step|tokens|critic/(score/(mean|min|max)|vf_explained_var|vf_loss|kl_row)"
    r"|critic/reward_failures(/share)?|actor/(pg_loss|grad_norm|lr|entropy)"
    r"|response_length/(mean|clip_ratio)|prompt_length/mean"
    r"|val/(score/mean|rows|failures)|perf/alloc_retries"
)
SENTENCES = {
    "failing": f"a reward fails on every row: fix it, or check its service ({DOCS}/rewards.md)",
    "nothing": "score, loss and gradient are 0: the reward pays nothing for any response "
    f"({DOCS}/rewards.md)",
    "flat": "all rows have the same score: can the reward parse the responses? "
    f"({DOCS}/rewards.md)",
    "cut": "every row ends at a limit: raise rollout.max_new_tokens, or see why no turn ends "
    f"({DOCS}/failures.md)",
    "critic": "the values predict far worse than a constant: lower value.optim.lr "
    f"({DOCS}/critic.md)",
    "kl": "the KL to the reference is over 10 nats per row: raise ppo.kl_coef "
    f"({DOCS}/failures.md)",
    "entropy": "the entropy is near 0, so nothing new is explored: lower policy.optim.lr "
    f"({DOCS}/failures.md)",
    "memory": f"GPU memory is short: the allocator had to free its cache ({DOCS}/memory.md)",
    "held-out": "held-out scores fall while training scores rise: stop earlier, or use more data "
    f"({DOCS}/failures.md)",
}


def last(steps: Sequence[Mapping[str, float]], name: str, count: int = STEPS) -> list[float]:
    """A metric in the last steps; NaN alone, which no rule holds for, if one lacks it or there are
    fewer steps."""
    values = [step[name] for step in steps[-count:] if name in step]
    return values if len(values) == count else [math.nan]


def true_of(
    actor: Sequence[Mapping[str, float]],
    critic: Sequence[Mapping[str, float]],
    lowest: float,
    highest: float,
) -> dict[str, bool]:
    """Which `SENTENCES` are true of a run.

    Args:
        actor: its steps so far, oldest first.
        critic: the same, of those in which rows have ended.
        lowest: score of a row so far.
        highest: score of a row so far.
    """
    spread = highest - lowest
    tokens = last(actor, "response_length/mean", 1)[0] + last(actor, "prompt_length/mean", 1)[0]
    rows = last(actor, "tokens", 1)[0] / tokens
    many = max(STEPS, math.ceil(ROWS / rows)) if rows > 0 else STEPS
    # a rare reward that was seen before may stay away for a while
    long = 4 * many if spread else many
    best = last(critic, "critic/score/max", long)
    spreads = map(sub, best, last(critic, "critic/score/min", long))
    flat = max(spreads) == 0 and not any(last(critic, "critic/reward_failures", long))
    moves = [*best, *last(actor, "actor/pg_loss"), *last(actor, "actor/grad_norm")]
    nothing = flat and not any(moves) and min(last(actor, "actor/lr")) > 0
    explained = last(critic, "critic/vf_explained_var", 2 * STEPS)
    scores = last(critic, "critic/score/mean", 4 * STEPS)
    low = min(fmean(scores[: 2 * STEPS]) + 0.01 * spread, highest - 0.1 * spread)
    return {
        "failing": last(critic, "critic/reward_failures/share", 1) == [1]
        or last(actor, "val/failures", 1)[0] == last(actor, "val/rows", 1)[0],
        "nothing": nothing,
        # a run that has solved its task has one score, too: the highest
        "flat": flat and not nothing and (spread == 0 or best[-1] < highest),
        "cut": min(last(actor, "response_length/clip_ratio", many)) == 1,
        "critic": max(explained) < -1
        and min(last(critic, "critic/vf_loss", 2 * STEPS)) > 0.01 * spread**2
        and sum(explained[STEPS:]) < 0.5 * sum(explained[:STEPS]),
        "kl": min(last(critic, "critic/kl_row")) > 10,
        "entropy": max(last(actor, "actor/entropy")) < 0.01
        and sum(scores[2 * STEPS :]) / (2 * STEPS) < low,
        "memory": any(last(steps, "perf/alloc_retries", 1)[0] > 1 for steps in (actor, critic)),
        "held-out": not math.isnan(last(actor, "val/score/mean", 1)[0])
        and _overfits(actor, critic, spread),
    }


def _overfits(
    actor: Sequence[Mapping[str, float]], critic: Sequence[Mapping[str, float]], spread: float
) -> bool:
    """Whether the last three held-out scores are below the best by more than chance and by a
    quarter of what was gained, and training's score has risen since."""
    validations = [step for step in actor if "val/score/mean" in step]
    best = max(validations, key=itemgetter("val/score/mean"))
    lost = best["val/score/mean"] - max(step["val/score/mean"] for step in validations[-3:])
    gained = best["val/score/mean"] - validations[0]["val/score/mean"]
    chance = 2 * spread / math.sqrt(actor[-1]["val/rows"])  # four standard deviations at most
    since = [step["critic/score/mean"] for step in critic if step["step"] > best["step"]]
    part = max(1, len(since) // 3)
    risen = sum(since[-part:]) - sum(since[:part]) > 0.05 * spread * part
    return risen and lost > max(chance, gained / 4)


def silent(resolved: Resolved) -> set[str]:
    """The sentences that say nothing of this run: its settings ask for what they warn of."""
    config = resolved.config
    unscored = config.reward.function == ("none",) and not config.reward.model
    policy = resolved.models["policy"]
    reference = resolved.models.get("reference", policy)  # or its base; or there is no KL
    # another model, and no earlier state of the policy: to follow it is what is learned
    is_teacher = config.has_teacher or (
        reference.name != policy.name
        and (unscored or reference.counts.parameters != policy.counts.parameters)
    )
    silenced = {
        "nothing": unscored,
        "flat": unscored or is_teacher,
        "cut": not config.data.chat and not config.rollout.stop,  # texts go on to the limit
        "kl": is_teacher or reference.name == "tiny" or reference.random_init,
    }
    return {name for name, holds in silenced.items() if holds}


def follow(run_dir: Path, said: Set[str] = frozenset()) -> Iterator[list[str]]:
    """Each `next` reads the steps that were written to RUN/metrics since the last one, and returns
    the sentences that became true with them. Each sentence comes once, and those of `said`
    never."""
    steps: dict[Role, list[dict[str, float]]] = {role: [] for role in ROLES}
    tails = {role: Tail(run_dir / "metrics" / f"{role}.jsonl") for role in ROLES}
    lowest = math.inf  # score of a row
    highest = -math.inf
    while True:
        new_steps: list[tuple[Role, dict[str, float]]] = [
            (role, {name: value for name, value in record.items() if re.fullmatch(READ, name)})
            for role in ROLES
            for record in (json.loads(line) for line, _ in tails[role])
        ]
        sentences = []
        for role, step in sorted(new_steps, key=lambda one: one[1]["step"]):
            if role == "critic" and "critic/score/mean" not in step:
                continue  # no row has ended
            steps[role].append(step)
            lowest = min(lowest, step.get("critic/score/min", math.inf))
            highest = max(highest, step.get("critic/score/max", -math.inf))
            true = true_of(steps["actor"], steps["critic"], lowest, highest)
            new = [name for name, holds in true.items() if holds and name not in said]
            said = {*said, *new}
            sentences += [f"step {step['step']}: {SENTENCES[name]}" for name in new]
        yield sentences
