"""Where advantages come from (`ppo.baseline`): a value model by GAE, or a mean over rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from splitppo import algo
from splitppo.context import Context
from splitppo.critic.calibration import quality, summaries
from splitppo.errors import UserError
from splitppo.job.collectives import Group
from splitppo.models.batching import Fields, MicroBatch
from splitppo.models.heads import value_outputs
from splitppo.models.learner import Learner, learning_metrics, trainable_rows
from splitppo.placement import StepPlan, Streams
from splitppo.rollout import Rollout

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """Advantages of a step's rows.

    Attributes:
        advantages: `[N]`; of `Critic.advantages` whitened over the whole batch, of a baseline not.
        returns: `[N]`, rewards-to-go or the value model's targets.
        metrics: of the whole batch.
        columns: `[N]` by name, for figures and RUN/samples.
        likeliest: what a teacher says beside the sampled tokens' log-probs (`Teacher.read`).
        waits: whether the policy is not updated in this step. False in a step without rows,
            which needs no advantages.
    """

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    likeliest: Sequence[Tensor] = ()
    waits: bool = False

    @property
    def signals(self) -> list[Tensor]:
        """What the actor group gets of each token, `[N, ...]` each."""
        return [self.advantages, *self.likeliest]


class Baseline:
    """What a critic rank estimates advantages by. This is all that a baseline without a model does
    beside `estimate`."""

    learners: Sequence[Learner] = ()  # none or one

    def __init__(self, context: Context, group: Group):
        self.config = context.config
        self.group = group

    def warm_up(self) -> None:
        """Compiles what the first step would."""

    def values(self, rollout: Rollout) -> Tensor:
        """`[N]`: values of the states in which the response tokens were chosen, 0 without a value
        model. All ranks of the group call it."""
        return torch.zeros(rollout.tokens)

    def estimate(
        self,
        rollout: Rollout,
        rewards: Tensor,
        values: Tensor,
        *,
        spans: Tensor,
        first: bool,
        pretraining: bool,
    ) -> Estimate:
        """Advantages and returns; all ranks of the group call it.

        Args:
            rewards: `[N]`.
            values: `[N]`, of `values`; of the first rows they may be changed.
            spans: `[N]`, what of the rewards spans pay.
            first: whether no row had a score before these.
            pretraining: whether the value model alone is trained, with lambda 1 and epochs of its
                own (`value.pretrain_steps`; Yuan et al. 2025, VC-PPO, section 4.1).
        """
        raise NotImplementedError

    def update(
        self,
        plan: StepPlan,
        rollout: Rollout,
        values: Tensor,
        returns: Tensor,
        *,
        pretraining: bool,
    ) -> dict[str, Any]:
        """The value model's update; returns its metrics. `values`, `returns`: `[N]`."""
        return {"optimizer_steps": []}


class Mean(Baseline):
    """Rewards-to-go, less their mean over the batch's rows, or over the other rows of the prompt:
    what spans pay from the same token on, and the rest from the turn's beginning on. So no token
    is charged for what was paid before it."""

    def estimate(
        self, rollout: Rollout, rewards: Tensor, values: Tensor, *, spans: Tensor, **_: bool
    ) -> Estimate:
        lengths = rollout.episode_lengths
        to_go = partial(algo.rewards_to_go, lengths=lengths, gamma=self.config.ppo.gamma)
        returns = to_go(rewards)
        place = torch.cat([torch.zeros(0).long(), *map(torch.arange, lengths)])
        (paid,) = self.group.all_max([int(((place + 1) * (spans != 0)).max()) if len(place) else 0])
        # behind the last span of all rows nothing is left of any
        means = self.means(rollout, to_go(spans), place.clamp(max=paid))
        means = means + self.means(rollout, to_go(rewards - spans), rollout.turns())
        return Estimate(returns - means.to(returns.dtype), returns)

    def means(self, rollout: Rollout, returns: Tensor, turns: Tensor) -> Tensor:
        """`[N]` float64: what is subtracted from the returns `[N]`, by turns, or by any other cut
        of the rows."""
        samples = self.config.rollout.samples
        (count,) = self.group.all_max([max(turns.tolist(), default=0) + 1])
        # without a window, a step's rows are those of its slots
        streams = Streams(self.config.rollout.batch_size, samples)
        prompts = torch.tensor([streams.slot_prompt(row) for row in rollout.rows]).long()
        return algo.turn_baseline(
            returns,
            turns,
            rollout.episode_lengths,
            count=count,
            all_sum=self.group.all_sum,
            prompts=prompts if self.config.ppo.baseline == "group" else None,
            shape=(self.config.rollout.batch_size // samples, samples),
        )


class Values(Baseline):
    """A value model. Advantages are GAE's; it learns the returns by PPO's value loss."""

    def __init__(self, context: Context, learner: Learner):
        super().__init__(context, learner.runner.group)
        self.learner = learner
        self.learners = [learner]

    def warm_up(self) -> None:
        self.learner.warm_up(
            self._outputs,
            self._objective,
            columns=lambda _, zeros: {"old": zeros, "returns": zeros},
        )

    def values(self, rollout: Rollout) -> Tensor:
        return self.learner.forward(rollout, self._outputs)[0]

    def estimate(
        self,
        rollout: Rollout,
        rewards: Tensor,
        values: Tensor,
        *,
        spans: Tensor,
        first: bool,
        pretraining: bool,
    ) -> Estimate:
        ppo = self.config.ppo
        lengths = rollout.episode_lengths
        if first:
            self._start_at_mean(rollout, rewards, values)
        gae = partial(algo.gae, rewards, values, lengths, gamma=ppo.gamma)
        lam = algo.adaptive_lambda(lengths, ppo.lam_alpha) if ppo.lam == "adaptive" else ppo.lam
        advantages, returns = gae(lam=lam)
        lam_value = 1.0 if pretraining else ppo.lam_value
        if lam_value not in (None, ppo.lam):
            _, returns = gae(lam=lam_value)
        metrics = quality(
            rollout, values, rewards, ppo.gamma, self.group, cut=not ppo.mask_truncated
        )
        return Estimate(advantages, returns, metrics, {"value": values})

    def update(
        self,
        plan: StepPlan,
        rollout: Rollout,
        values: Tensor,
        returns: Tensor,
        *,
        pretraining: bool,
    ) -> dict[str, Any]:
        ppo = self.config.ppo
        mini_batches = ppo.value_mini_batches or ppo.mini_batches
        epochs = ppo.value_epochs or ppo.epochs
        figures = self.learner.update(
            rollout,
            trainable_rows(self.config, plan, rollout, "critic", self.group.dp_rank, mini_batches),
            {"old": values, "returns": returns},
            self._objective,
            step=plan.step,
            epochs=self.config.value.pretrain_epochs if pretraining else epochs,
        )
        metrics = learning_metrics("critic", "vf_loss", figures, ["vf_clipfrac", "vpred_mean"])
        return metrics | {"critic/lr": self.learner.learning_rate(plan.step)}

    def _start_at_mean(self, rollout: Rollout, rewards: Tensor, values: Tensor) -> None:
        """A head of zeros says the same of all states. Its bias becomes the mean reward-to-go, and
        so do the rows' values: with a rate that suits the body, to learn the mean takes many steps,
        in which nothing else is learned."""
        bounds = self.config.value.range
        start = algo.bounded_values(torch.zeros(1), bounds)
        if self.group.all_sum(torch.tensor([float((values != start).sum())])).any():
            return  # the head was drawn, or read from a folder
        to_go = algo.rewards_to_go(rewards, rollout.episode_lengths, gamma=self.config.ppo.gamma)
        (moments,) = algo.all_moments(self.group.all_gather, [to_go])
        bias = algo.bounded_logits(moments.mean.float(), bounds)
        self.learner.set_weight("score.bias", bias)
        values.fill_(algo.bounded_values(bias, bounds))

    def _outputs(self, model: nn.Module, batch: MicroBatch) -> list[Tensor]:
        return [value_outputs(model, batch, self.config.value.range)]

    def _objective(
        self, model: nn.Module, batch: MicroBatch, columns: Fields
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return algo.value_loss(
            value_outputs(model, batch),
            columns["old"],
            columns["returns"],
            batch.lengths,
            clip=self.config.ppo.value_clip,
            aggregate=self.config.ppo.aggregate,
        )


class BoundedValues(Values):
    """A value model whose values lie in `value.range`; it learns the returns by cross-entropy. Its
    head gives logits."""

    def estimate(self, *args: Any, **flags: Any) -> Estimate:
        """Raises UserError, on all ranks, if returns lie outside the range by more than
        rounding."""
        estimate = super().estimate(*args, **flags)
        low, high = cast(Bounds, self.config.value.range)
        ends = summaries({"returns": estimate.returns}, self.group)
        least = ends["returns/min"]
        most = ends["returns/max"]
        if max(low - least, most - high) > 1e-3 * (high - low):
            raise UserError(
                f"value.range={low:g} {high:g}: the step's returns, after shaping, lie between "
                f"{least:g} and {most:g}; widen the range so that it contains them"
            )
        return estimate

    def _objective(
        self, model: nn.Module, batch: MicroBatch, columns: Fields
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return algo.bounded_value_loss(
            value_outputs(model, batch),
            columns["returns"],
            batch.lengths,
            bounds=cast(Bounds, self.config.value.range),
            aggregate=self.config.ppo.aggregate,
        )


class UsersAdvantages(Baseline):
    """Advantages by a user's function of all rows of the step, in data order: so they do not
    depend on which rank has which. Values and their targets are those of a `baseline`."""

    def __init__(self, context: Context, baseline: Baseline, function: Callable[..., Tensor]):
        super().__init__(context, baseline.group)
        self.baseline = baseline
        self.learners = baseline.learners
        self.function = function
        self.warm_up = baseline.warm_up
        self.values = baseline.values
        self.update = baseline.update

    def estimate(self, rollout: Rollout, rewards: Tensor, values: Tensor, **step: Any) -> Estimate:
        estimate = self.baseline.estimate(rollout, rewards, values, **step)
        of_rows = [torch.tensor(x).long() for x in (rollout.rows, rollout.episode_lengths)]
        ranks = self.group.dp_size
        parts = [self.group.all_to_all([x] * ranks) for x in (*of_rows, rewards, values)]
        rows, lengths, all_rewards, all_values = map(torch.cat, parts)
        order = rows.repeat_interleave(lengths).argsort(stable=True)
        streams = Streams(self.config.rollout.batch_size, self.config.rollout.samples)
        advantages = self.function(
            rewards=all_rewards[order],
            values=all_values[order],
            lengths=lengths[rows.argsort()],
            prompts=torch.tensor([streams.prompt(row) for row in sorted(rows.tolist())]),
        )
        advantages = torch.zeros_like(all_rewards).index_copy(0, order, advantages)
        sizes = [len(part) for part in parts[2]]
        return replace(estimate, advantages=advantages.split(sizes)[self.group.dp_rank])
