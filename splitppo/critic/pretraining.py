"""The value model's first steps, in which the policy waits."""

from collections.abc import Callable

from splitppo.context import Context


class Pretraining:
    """The steps before the first policy update, in which only the value model is trained. The
    critic alone knows which these are, and says so with their advantages.

    Plain warm-up (`ppo.critic_warmup`) trains the value model as in all other steps. Pretraining
    (`value.pretrain_steps`; Yuan et al. 2025, VC-PPO, section 4.1) has targets with lambda 1 and
    epochs of its own. After its last step all ranks of the group call `save`.
    """

    def __init__(self, context: Context, save: Callable[[], object]):
        self.steps = context.config.value.pretrain_steps
        self.warmup = context.config.ppo.critic_warmup
        self.save = save

    def policy_waits(self, step: int) -> bool:
        """Whether the policy is not updated in this step."""
        return step <= max(self.warmup, self.steps)

    def runs(self, step: int) -> bool:
        """Whether this is a step of pretraining."""
        return step <= self.steps

    def finish(self, step: int) -> None:
        """After the value model's update."""
        if step == self.steps:
            self.save()
