"""The value model's first steps, in which the policy waits."""

from collections.abc import Callable
from typing import Any

from splitppo.context import Context


class Pretraining:
    """The steps before the first policy update, in which only the value model is trained. The
    critic alone knows which these are, and says so with their advantages.

    Plain warm-up (`ppo.critic_warmup`) trains the value model as in all other steps. Pretraining
    (`value.pretrain_steps`; Yuan et al. 2025, VC-PPO, section 4.1) has targets with lambda 1 and
    epochs of its own, and ends early when the explained variance on fresh rows stops rising. Then
    all ranks of the group call `save`.
    """

    def __init__(self, context: Context, save: Callable[[], object]):
        self.value = context.config.value
        self.warmup = context.config.ppo.critic_warmup
        self.save = save
        self.ended = False
        # highest explained variance, steps since then
        self.best = float("-inf")
        self.stale = 0

    def policy_waits(self, step: int) -> bool:
        """Whether the policy is not updated in this step."""
        return step <= self.warmup or self.runs(step)

    def runs(self, step: int) -> bool:
        """Whether this is a step of pretraining."""
        return step <= self.value.pretrain_steps and not self.ended

    def finish(self, step: int, explained: float | None) -> None:
        """After the value model's update. `explained`: the explained variance of the rewards-to-go
        by the values that it had before it was trained on the rows; None: no row has ended."""
        if not self.runs(step):
            return
        if explained is not None:
            self.stale = 0 if explained > self.best else self.stale + 1
            self.best = max(self.best, explained)
        if step == self.value.pretrain_steps or 0 < self.value.pretrain_patience <= self.stale:
            self.ended = True
            self.save()

    def state(self) -> dict[str, Any]:
        return {
            "ended": self.ended,
            "best": self.best if self.best > float("-inf") else None,
            "stale": self.stale,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.ended = state["ended"]
        self.stale = state["stale"]
        self.best = float("-inf") if state["best"] is None else state["best"]
