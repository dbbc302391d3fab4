"""The cost model of a step: how long it takes with another split of the GPUs.

With x actor ranks and y critic ranks, and the work of a phase in seconds of one GPU:

    actor column   G(x) + sync + (old log-probs [+ reference] + policy update) / x + P
                   where scoring late rows takes longer than the log-probs: the scoring in their
                   place
    critic column  (values and scores [+ reference] + value update) / y + V
    step           the longer of the two; colocated: x = y = all ranks, one column after the other

* G is the rollout: decode steps until the longest row ends. A decode step takes longer with more
  rows, so G goes as 1 + rows * (mean length / longest) / ROWS_THAT_DOUBLE. With fewer rows a rank,
  G shrinks only a little. Ranks that share an engine count as ranks with an engine each. Ranks of a
  set count as ranks that share the work of their rows: what they lose to messages in the set is in
  the measured times.
* The critic scores rows under the rollout as they end. After it, mean length / longest of the
  scoring is left: all of it if the rows are equally long.
* P and V are the parts of the updates that more GPUs don't shorten: a small model's layers wait for
  the host. If one update has far fewer FLOPs a second than the other, the time lost to that counts
  as P or V.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from splitppo.errors import UserError

WARM_UP = 2  # first steps of a run, in which kernels are compiled and memory grows
# a decode step of 1.5B on an H200: 2.2 ms with hardly any rows, 4.4 ms with 256
ROWS_THAT_DOUBLE = 250
SLOW = 0.6  # share of the other model's FLOPs a second below which an update waits for the host
Side = Literal["actor", "critic"]
Lines = Sequence[Mapping[str, Any]]  # a role's metrics, step by step


@dataclass(frozen=True)
class Split:
    """A placement; `critic` is 0 if it is colocated. `reference`: the group that holds it."""

    actor: int
    critic: int
    reference: Side = "actor"

    def __str__(self) -> str:
        groups = f"{self.actor}+{self.critic}, reference with the {self.reference}"
        return groups if self.critic else f"colocated on {self.actor}"


@dataclass(frozen=True)
class Work:
    """The costs of a step, in seconds."""

    batch: int  # rows of a step
    rollout: float  # a rollout of hardly any rows
    sync: float  # moving the weights into the engine
    other: float  # what an actor rank does beside the phases
    old: float  # old log-probs, on one GPU, as the next four
    reference: float
    score: float  # values and rewards
    policy: float  # the part of the policy's update that more GPUs shorten
    value: float  # the same of the value model's
    longest: float  # longest response by the mean one, no seconds
    policy_fixed: float = 0.0  # the other part, on any number of GPUs
    value_fixed: float = 0.0


def slowed(rows: float, longest: float) -> float:
    """A rollout's time with so many rows a rank, by its time with hardly any; `longest` as in
    Work."""
    return 1 + rows / longest / ROWS_THAT_DOUBLE


def columns(work: Work, split: Split) -> tuple[float, float]:
    """Seconds of a step in the actor's and in the critic's column."""
    x = split.actor
    y = split.critic or split.actor
    rollout = work.rollout * slowed(work.batch / x, work.longest)
    with_critic = work.reference if split.reference == "critic" else 0.0
    logprobs = (work.old + work.reference - with_critic) / x
    score = (work.score + with_critic) / y
    late = score / work.longest if split.critic else 0.0
    actor = (
        rollout + work.sync + work.other + max(logprobs, late) + work.policy / x + work.policy_fixed
    )
    return actor, score + work.value / y + work.value_fixed


def predict(work: Work, split: Split) -> float:
    """Seconds of a step."""
    both = columns(work, split)
    return max(both) if split.critic else sum(both)


def mean(lines: Lines, name: str) -> float:
    """Of a metric over all steps, 0 where a step lacks it."""
    return sum(line.get(name, 0.0) for line in lines) / len(lines)


def updates(lines: Lines) -> tuple[float, float]:
    """Seconds of an update and a rank's 10^12 model FLOPs a second in it. Steps without an update
    are left out: the critic's warm-up, and steps that trained on no row."""
    updating = [
        line for line in lines if "timing_s/update" in line and line.get("perf/update_tflop")
    ]
    if not updating:
        raise UserError("the run has no policy update after its warm-up yet; let it run longer")
    seconds = mean(updating, "timing_s/update")
    return seconds, mean(updating, "perf/update_tflop") / seconds


def waiting(rate: float, other: float) -> float:
    """The share of an update that waits for the host: all time beyond what the update would take
    with the other model's FLOPs a second. 0 unless the other's are many more, since models of one
    size differ a little, too."""
    return 1 - rate / other if rate < SLOW * other else 0.0


def measured(actor: Lines, critic: Lines, split: Split, batch: int) -> Work:
    """The work of a run's steps, from its metrics. A reference at the critic counts as large as the
    policy. Raises UserError if there are too few steps."""
    actor = actor[WARM_UP:]
    critic = critic[WARM_UP:]
    if not actor or not critic:
        raise UserError(
            f"the run has no step after its {WARM_UP} warm-up steps yet; let it run longer"
        )
    x = split.actor
    y = split.critic or split.actor
    policy, rate = updates(actor)
    # without a value model the critic has no update
    value, value_rate = (
        updates(critic) if any("perf/update_tflop" in line for line in critic) else (0.0, rate)
    )
    slower = waiting(rate, value_rate)
    value_slower = waiting(value_rate, rate)
    shortened = policy * (1 - slower) * x
    has_reference = "critic/ref_kl" in critic[0]
    has_old = (
        "actor/mismatch_mean" in actor[0]
    )  # else the old log-probs are the engine's, without a forward pass
    passes = has_old + (has_reference and split.reference == "actor")
    # of one forward pass; about a third of an update where the actor has none
    forward = mean(actor, "timing_s/logprobs") * x / passes if passes else shortened / 3
    reference = forward if has_reference else 0.0
    phases = {name for line in actor for name in line if name.startswith("timing_s/")} - {
        "timing_s/step"
    }
    other = mean(actor, "timing_s/step") - sum(mean(actor, name) for name in phases)
    longest = sum(
        line["response_length/max"] / line["response_length/mean"] for line in actor
    ) / len(actor)
    rollout = mean(actor, "timing_s/rollout") + mean(actor, "timing_s/barrier_wait")
    score = mean(critic, "timing_s/score") * y - (reference if split.reference == "critic" else 0.0)
    return Work(
        batch=batch,
        rollout=rollout / slowed(batch / x, longest),
        sync=mean(actor, "timing_s/sync"),
        other=max(0.0, other) if split.critic else 0.0,
        old=forward if has_old else 0.0,
        reference=reference,
        score=max(0.0, score),
        policy=shortened,
        value=value * (1 - value_slower) * y,
        longest=longest,
        policy_fixed=policy * slower,
        value_fixed=value * value_slower,
    )


def splits(gpus: int, *, movable: bool, sets: tuple[int, int] = (1, 1)) -> list[Split]:
    """All placements of so many GPUs; `movable`: whether the
    critic group can hold the reference. `sets`: ranks of a
    set in the actor and in the critic group."""
    sides: tuple[Side, ...] = ("actor", "critic") if movable else ("actor",)
    candidates = [Split(gpus, 0)] + [
        Split(x, gpus - x, side) for x in range(1, gpus) for side in sides
    ]
    return [
        split
        for split in candidates
        if split.actor % sets[0] == 0 and (split.critic or gpus) % sets[1] == 0
    ]


def advice(work: Work, split: Split, choices: Sequence[Split]) -> list[str]:
    """The run's own placement by the model, then the three fastest of the others."""
    actor, critic = columns(work, split)
    step = predict(work, split)
    lines = [
        f"{split}: {step:.2f} s a step, predicted; actor group {actor:.2f} s, "
        f"critic group {critic:.2f} s"
    ]
    others = [other for other in choices if other != split]
    for other in sorted(others, key=lambda other: predict(work, other))[:3]:
        seconds = predict(work, other)
        both = columns(work, other)
        idle = 1 - min(both) / max(both) if other.critic else 0.0
        lines.append(
            f"  {other}: {seconds:.2f} s, {step / seconds:.2f}x this run's speed, "
            f"idle group {idle:.0%}"
        )
    return lines
