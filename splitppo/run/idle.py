"""The critic group's idle time, and how many passes of the value model fit into it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from splitppo.config import Config

WARM_UP = 2  # first steps of a run, in which kernels are compiled and memory grows
LONGER = 0.01  # share of a step by which free passes may lengthen it


def free_value_epochs(critic: Sequence[Mapping[str, Any]], epochs: int) -> tuple[float, int]:
    """How many passes of the value model cost no time, from recorded seconds.

    The value model's update runs under the actor's next rollout. So what it takes longer comes off
    the next step's waits, as long as there are any.

    Args:
        critic: the group's metrics of each step, oldest first, without warm-up.
        epochs: passes in each of them.

    Returns:
        The share of a step that the group waits, and the passes, at least `epochs`, with which
        steps are at most 1 % longer.
    """
    timings = [
        (before["timing_s/update"] / epochs, after["perf/idle_share"], after["timing_s/step"])
        for before, after in pairwise(critic)
        if before.get("perf/update_tflop")  # rows were trained on
    ]
    if not timings:
        return 0.0, epochs
    step = fmean(seconds for *_, seconds in timings)

    def lost(more: int) -> float:
        return fmean(max(0.0, more * epoch - idle * seconds) for epoch, idle, seconds in timings)

    more = 0
    while lost(more + 1) <= LONGER * step:
        more += 1
    return fmean(idle * seconds for _, idle, seconds in timings) / step, epochs + more


def idle_line(critic: Sequence[Mapping[str, Any]], config: Config) -> str:
    """What a run's user is told about its free passes; nothing if there are none. `critic`: the
    group's metrics of each step from the first."""
    begun = max(WARM_UP, config.value.pretrain_steps, config.ppo.critic_warmup)
    epochs = config.ppo.value_epochs or config.ppo.epochs
    share, free = free_value_epochs(critic[begun:], epochs)
    ends = ("critic/score/min", "critic/score/max")
    scores = {step[end] for step in critic for end in ends if end in step}
    # where no score differs, there is nothing to learn in more passes
    if free == epochs or len(scores) == 1:
        return ""
    return (
        f"the critic waited {100 * share:.0f} % of a step: ppo.value_epochs = {free} costs nothing"
    )
