"""The cost model of a step: what a split of the GPUs can and can't win (plan.py and bench.py use it).

With x actor ranks and y critic ranks, and the work of a phase in seconds of one GPU:

    actor column   G(x) + sync + (old log-probs [+ reference] + policy update) / x + P
                   where scoring late rows takes longer than the log-probs, that in their place
    critic column  (values and scores [+ reference] + value update) / y + V
    step           the longer of the two; colocated: x = y = all ranks, one column after the other

G is the rollout: decode steps until the longest row has ended, which take longer with more rows. So it goes as
1 + rows * (mean length / longest) / ROWS_THAT_DOUBLE, and with fewer rows a rank it gets a little faster only.
Ranks that share an engine are taken for as many with one each.
Rows are scored under the rollout as they end. What is left then is taken to be mean length / longest of the scoring,
which is all if they are equally long.
P and V are what the updates take however many GPUs share them: a small model's layers wait for the host. Where one
update has far fewer FLOPs a second than the other, it is what it takes longer than it would with as many.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from splitppo.errors import UserError
from splitppo.tools.timeline import read_column

# a decode step of 1.5B on an H200: 2.2 ms with hardly any rows, 4.4 ms with 256
ROWS_THAT_DOUBLE = 250
SLOW = 0.6  # of another model's FLOPs a second: fewer are a small model's, whose layers wait for the host
WARM_UP = 2  # first steps of a run, in which kernels are compiled and memory grows
Side = Literal["actor", "critic"]


@dataclass(frozen=True)
class Split:
    """A placement; `critic` is 0 if it is colocated. `reference`: the group that holds it."""

    actor: int
    critic: int
    reference: Side = "actor"

    def __str__(self) -> str:
        if not self.critic:
            return f"colocated on {self.actor}"
        return f"{self.actor}+{self.critic}, reference with the {self.reference}"


@dataclass(frozen=True)
class Work:
    """What a step costs, in seconds.

    Attributes:
        batch: rows of a step. longest: their longest response by the mean one.
        rollout: a rollout of hardly any rows. sync: the weights' way into the engine. rest: what an actor rank does
            beside the phases named here.
        old, reference, score, policy, value: on one GPU: old and reference log-probs, values with rewards, the updates.
        policy_fixed, value_fixed: of the updates, on any number of GPUs.
    """

    batch: int
    rollout: float
    sync: float
    rest: float
    old: float
    reference: float
    score: float
    policy: float
    value: float
    longest: float
    policy_fixed: float = 0.0
    value_fixed: float = 0.0


def slowed(rows: float, longest: float) -> float:
    """How many times as long as with hardly any rows a rollout takes with so many a rank; `longest` as in Work."""
    return 1 + rows / longest / ROWS_THAT_DOUBLE


def columns(work: Work, split: Split) -> tuple[float, float]:
    """Seconds of a step in the actor's and in the critic's column."""
    x, y = split.actor, split.critic or split.actor
    rollout = work.rollout * slowed(work.batch / x, work.longest)
    with_critic = work.reference if split.reference == "critic" else 0.0
    logprobs, score = (work.old + work.reference - with_critic) / x, (work.score + with_critic) / y
    late = score / work.longest if split.critic else 0.0
    actor = rollout + work.sync + work.rest + max(logprobs, late) + work.policy / x + work.policy_fixed
    return actor, score + work.value / y + work.value_fixed


def predict(work: Work, split: Split) -> float:
    """Seconds of a step."""
    both = columns(work, split)
    return max(both) if split.critic else sum(both)


def mean(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """Seconds of a span in a step, over all lines."""
    return sum(line.get(f"timing_s/{name}", 0.0) for line in lines) / len(lines)


def updates(lines: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds of an update, over the steps that had one (the policy has none while the critic warms up), and a rank's
    10^12 model FLOPs a second in it: 0 for a run of an older version, which did not tell."""
    found = [line for line in lines if "timing_s/update" in line and line.get("optimizer_steps") != []]
    if not found:
        raise UserError("the run has no policy update beyond its warm-up yet; let it go on")
    seconds = mean(found, "update")
    return seconds, sum(line.get("perf/update_tflop", 0.0) for line in found) / len(found) / seconds


def waiting(rate: float, other: float) -> float:
    """The share of an update that is no work but waits for the host: all beyond what it would take with the other
    model's FLOPs a second. None unless these are many more: models of one size differ, too, by what is not counted."""
    return 1 - rate / other if 0 < rate < SLOW * other else 0.0


def forward_passes(
    forward: float, policy: float, split: Split, *, has_reference: bool, by_engine: bool
) -> tuple[float, float]:
    """Old and reference log-probs' part, on one GPU, of the actor's `forward`; `policy` is its update.

    Args:
        by_engine: the old ones are the engine's, and take no forward pass.
    """
    if has_reference and split.reference == "actor":
        old = 0.0 if by_engine else forward / 2
        return old, forward - old
    old = 0.0 if by_engine else forward
    # a forward pass is a third of an update, where there is none to go by
    return old, (policy / 3 if by_engine else old) if has_reference else 0.0


def measured(actor: Sequence[Mapping[str, Any]], critic: Sequence[Mapping[str, Any]], split: Split, batch: int) -> Work:
    """The work of a run's steps, from the lines of its metrics; of the reference's it takes that it is the old
    log-probs', as it is with a reference of the policy's size.

    Raises:
        UserError: there are not enough steps.
    """
    actor, critic = actor[WARM_UP:], critic[WARM_UP:]
    if not actor or not critic:
        raise UserError(f"the run has no more than {WARM_UP} steps in both columns, which are warm-up; let it go on")

    x, y = split.actor, split.critic or split.actor
    forward, score = mean(actor, "logprobs") * x, mean(critic, "score") * y
    (policy, rate), (value, value_rate) = updates(actor), updates(critic)
    slower, value_slower = (waiting(own, other) for own, other in ((rate, value_rate), (value_rate, rate)))
    has_reference = "critic/ref_kl" in critic[0]
    by_engine = "actor/mismatch_mean" not in actor[0]  # whose log-probs are the old ones: no forward pass for them
    scales = policy * (1 - slower) * x
    old, reference = forward_passes(forward, scales, split, has_reference=has_reference, by_engine=by_engine)
    phases = ("sync", "rollout", "stragglers", "logprobs", "update", "validate", "checkpoint")
    named = {f"timing_s/{name}" for name in phases}
    known = named | {name for line in actor for name in line if name.startswith("timing_s/wait_")}
    beside = mean(actor, "step") - sum(mean(actor, name.removeprefix("timing_s/")) for name in known)
    rest = max(0.0, beside) if split.critic else 0.0
    longest = sum(line["response_length/max"] / line["response_length/mean"] for line in actor) / len(actor)
    return Work(
        batch=batch,
        rollout=(mean(actor, "rollout") + mean(actor, "stragglers")) / slowed(batch / x, longest),
        sync=mean(actor, "sync"),
        rest=rest,
        old=old,
        reference=reference,
        score=max(0.0, score - (reference if split.reference == "critic" else 0.0)),
        policy=scales,
        value=value * (1 - value_slower) * y,
        longest=longest,
        policy_fixed=policy * slower,
        value_fixed=value * value_slower,
    )


def run_work(folder: Path, split: Split, batch: int, start: int = 0) -> Work:
    """The work of a run's steps after `start`, from its folder.

    Raises:
        UserError: there are not enough steps.
    """
    columns = (read_column(folder / "metrics" / f"{role}.jsonl") for role in ("actor", "critic"))
    actor, critic = ([step.metrics for n, step in column.items() if n > start] for column in columns)
    return measured(actor, critic, split, batch)


def splits(gpus: int, *, movable: bool) -> list[Split]:
    """All placements of so many GPUs."""
    sides: tuple[Side, ...] = ("actor", "critic") if movable else ("actor",)
    return [Split(gpus, 0)] + [Split(x, gpus - x, side) for x in range(1, gpus) for side in sides]


def may_move(kl_coef: float, kl_loss_coef: float) -> bool:
    """Whether the reference can be the critic group's: only the KL in the reward can use it there."""
    return kl_coef > 0 and kl_loss_coef == 0


def advice(work: Work, split: Split, gpus: int, *, movable: bool) -> list[str]:
    """What the run's log and the command print: the columns as they are, and the placements that would be faster.

    Args:
        movable: whether the reference can be the critic group's (`may_move`).
    """
    actor, critic = columns(work, split)
    step = predict(work, split)
    lines = [f"{split}: {step:.2f} s a step by the model, actor column {actor:.2f} s, critic column {critic:.2f} s"]
    ranked = sorted(splits(gpus, movable=movable), key=lambda other: predict(work, other))
    for other in [other for other in ranked if other != split][:3]:
        seconds = predict(work, other)
        idle = 1 - min(columns(work, other)) / max(columns(work, other)) if other.critic else 0.0
        lines.append(f"  {other}: {seconds:.2f} s, {step / seconds:.2f}x, idle column {idle:.0%}")
    return lines


@dataclass(frozen=True)
class Traffic:
    """What a role moves in a step.

    Attributes:
        parameters: of its trained model.
        forwards, trains: micro-batches of a rank that run forward alone, and forward and backward.
    """

    parameters: int
    forwards: int
    trains: int

    def between(self, nodes: int, *, copies_on_nodes: bool = False) -> float:
        """Bytes that a node takes in for this role, over rings: weights in 2 bytes, gathered once in each forward and
        once in each backward pass; gradients in 4, reduced in each of the latter. Groups on one node move none.

        Args:
            nodes: that the role's group is spread over.
            copies_on_nodes: each holds the weights whole (`fsdp.shard_size`), and only gradients are summed.
        """
        share = (nodes - 1) / nodes * self.parameters
        gathered = 0.0 if copies_on_nodes else 2 * share * (self.forwards + 2 * self.trains)
        return gathered + (2 if copies_on_nodes else 1) * 4 * share * self.trains


def node_lines(actor: Traffic, critic: Traffic, wire: float, split: Split, nodes: int, gigabytes: float) -> list[str]:
    """What each way to place two groups on nodes moves into the busiest node in a step, the least first.

    Args:
        wire: bytes of a step between the groups. gigabytes: that a node takes in in a second.

    Returns:
        One line a placement that is possible; [] for one node.
    """
    if nodes == 1 or not split.critic:
        return []
    spread = {"actor": nodes * split.actor / (split.actor + split.critic)}
    spread["critic"] = nodes - spread["actor"]
    found = {
        "per_node": actor.between(nodes) + critic.between(nodes),
        "per_node, fsdp.shard_size=node": sum(role.between(nodes, copies_on_nodes=True) for role in (actor, critic)),
    }
    if all(part >= 1 and part == int(part) for part in spread.values()):
        of_roles = actor.between(int(spread["actor"])), critic.between(int(spread["critic"]))
        found["by_node"] = max(of_roles) + wire / min(spread.values())
    return [
        f"  {name}: {moved / 1e9:.2f} GB into a node a step, {moved / 1e9 / gigabytes:.2f} s at {gigabytes:g} GB/s"
        for name, moved in sorted(found.items(), key=lambda item: item[1])
    ]
