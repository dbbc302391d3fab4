"""A teacher: a frozen model that says how likely it finds the policy's tokens, and which it would
choose (on-policy distillation)."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from splitppo.context import Context
from splitppo.critic.baselines import Estimate
from splitppo.critic.calibration import places
from splitppo.errors import UserError
from splitppo.models.heads import PolicyOutputs
from splitppo.models.runner import Frozen, Runner
from splitppo.rollout import IDS, Episode, Rollout


class NoTeacher:
    """Says nothing, and changes nothing."""

    def read(self, rollout: Rollout) -> list[Tensor]:
        """What it says of the response tokens; all ranks of the group call it. A teacher gives
        their log-probs, `[N]`; its k most likely tokens, `[N, k]` int32; their log-probs and that
        of all others together, `[N, k + 1]` float16. k is `distill.top_k`, or 1."""
        return []

    def release_memory(self) -> None:
        """With `offload`, gives back the shards' memory on the device."""

    def lead(
        self, estimate: Estimate, rollout: Rollout, old: Tensor, taught: Sequence[Tensor]
    ) -> Estimate:
        """The estimate with what the policy follows; all ranks of the group call it.

        Args:
            old: `[N]`, the policy's log-probs before the update.
            taught: what `read` returned of these rows.
        """
        return estimate


class Teacher(Frozen, NoTeacher):
    """The teacher; `outputs` are the policy's."""

    def __init__(self, context: Context, model: nn.Module, runner: Runner, outputs: PolicyOutputs):
        self.distill = context.config.distill
        self.prompt = context.prompt
        self.group = runner.group
        super().__init__(
            model,
            runner,
            partial(outputs.likeliest, k=self.distill.top_k or 1),
            offload=context.config.teacher.offload,
        )

    def read(self, rollout: Rollout) -> list[Tensor]:
        return self.run([*map(self._as_it_reads, rollout.episodes)])

    def _as_it_reads(self, episode: Episode) -> Episode:
        """The row behind the teacher's own prompt, if it has one."""
        prompt = self.prompt(episode.row).teacher
        return replace(episode, prompt=array(IDS, prompt.tokens)) if prompt else episode

    def lead(
        self, estimate: Estimate, rollout: Rollout, old: Tensor, taught: Sequence[Tensor]
    ) -> Estimate:
        """Each token's advantage gets c (d - mean of d): d is the teacher's log-prob less the
        policy's, the mean is over the whole batch. Without the mean each further token would cost
        a policy that is behind, and rows would shrink to nothing."""
        logprobs, *likeliest = taught
        behind = (old - logprobs).double()  # its mean estimates KL(policy || teacher)
        masks = {"distill/kl": torch.ones_like(old, dtype=torch.bool)}
        masks |= {f"distill/kl/{name}": at for name, at in places(rollout, self.group).items()}
        parts = [[float(behind[at].sum()), float(at.sum())] for at in masks.values()]
        parts.append([float((~logprobs.isfinite()).sum()), 0.0])
        sums = self.group.all_sum(torch.tensor(parts, dtype=torch.float64)).tolist()
        if wrong := sums.pop()[0]:
            raise UserError(
                f"teacher.path: {wrong:.0f} of its log-probs are not finite; check its weights, "
                "and compute.dtype"
            )
        means = {
            name: total / tokens
            for name, (total, tokens) in zip(masks, sums, strict=True)
            if tokens
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
