"""A teacher: a frozen model that says how likely it finds the policy's tokens, and which it would
choose (on-policy distillation)."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from splitppo import algo
from splitppo.context import Context
from splitppo.critic.baselines import Estimate
from splitppo.critic.calibration import places
from splitppo.errors import UserError
from splitppo.models.heads import PolicyOutputs
from splitppo.models.runner import Frozen, Runner
from splitppo.rollout import IDS, Rollout


class Teacher(Frozen):
    """The teacher; `outputs` are the policy's."""

    def __init__(self, context: Context, model: nn.Module, runner: Runner, outputs: PolicyOutputs):
        self.distill = context.config.distill
        self.prompt = context.prompt
        super().__init__(
            model,
            runner,
            partial(outputs.likeliest, k=self.distill.top_k or 1),
            offload=context.config.teacher.offload,
        )

    def read(self, rollout: Rollout) -> list[Tensor]:
        """What it says of the response tokens; all ranks of the group call it: their log-probs,
        `[N]`; its k most likely tokens, `[N, k]` int32; their log-probs and that of all others
        together, `[N, k + 1]` float16. k is `distill.top_k`, or 1. Where it has a prompt of its
        own, it reads that in place of the policy's."""
        prompts = [self.prompt(row).teacher for row in rollout.rows]
        return self.run(
            [
                replace(episode, prompt=array(IDS, prompt.tokens)) if prompt else episode
                for episode, prompt in zip(rollout.episodes, prompts, strict=True)
            ]
        )

    def lead(
        self, estimate: Estimate, rollout: Rollout, old: Tensor, taught: Sequence[Tensor]
    ) -> Estimate:
        """The estimate with what the policy follows; all ranks of the group call it. Each token's
        advantage gets c (d - mean of d): d is the teacher's log-prob less the policy's, the mean is
        over the whole batch. Without the mean each further token would cost a policy that is
        behind, and rows would shrink to nothing.

        Args:
            old: `[N]`, the policy's log-probs before the update.
            taught: what `read` returned of these rows.
        """
        logprobs, *likeliest = taught
        behind = (old - logprobs).double()  # its mean estimates KL(policy || teacher)
        group = self.runner.group
        masks = {
            "distill/kl": torch.ones_like(old, dtype=torch.bool),
            **{f"distill/kl/{name}": at for name, at in places(rollout, group).items()},
        }
        figures = [logprobs, *(behind[at] for at in masks.values())]
        scores, *of_places = algo.all_moments(group.all_gather, figures)
        if not scores.mean.isfinite():
            raise UserError(
                "the teacher's log-probs are not finite; check the weights in teacher.path, and "
                "compute.dtype"
            )
        means = {
            name: float(moments.mean)
            for name, moments in zip(masks, of_places, strict=True)
            if moments.count
        }
        # with `top_k` the update has a divergence in the place of this
        coef = 0.0 if self.distill.top_k else self.distill.coef
        term = coef * (means.get("distill/kl", 0.0) - behind)
        return replace(
            estimate,
            advantages=estimate.advantages + term.to(old.dtype),
            likeliest=likeliest,
            metrics=estimate.metrics | means,
            columns=estimate.columns | {"surprise": -logprobs},
        )
