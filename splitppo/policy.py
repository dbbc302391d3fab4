"""The policy on a rank of the actor group, and its verbs in the loops of train.py."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from splitppo import algo
from splitppo.context import Context
from splitppo.engine import Weights
from splitppo.errors import UserError, say, warn
from splitppo.models.batching import Fields, MicroBatch, dummy_rollout
from splitppo.models.heads import PolicyOutputs
from splitppo.models.learner import Learner, learning_metrics, trainable_rows
from splitppo.models.runner import Reference
from splitppo.placement import StepPlan
from splitppo.rollout import Rollout

# Mean difference of the engine's and the trainer's log-probs, nats a token: above the first number
# the run warns, above the second it ends. (Correct runs: 1e-5 in float32 on CPUs, 0.03 in bfloat16;
# on GPUs, vLLM's attention is TF32 in float32.)
MISMATCH = {torch.float32: (0.03, 0.2), torch.bfloat16: (0.1, 0.5)}


class Policy:
    """The policy's learner, and the reference's log-probs.

    Args:
        outputs: what is read off the policy.
        reference: None if no KL coefficient asks for one, or if the critic group holds it.
        dtype: of the engine's weights.
    """

    def __init__(
        self,
        context: Context,
        learner: Learner,
        outputs: PolicyOutputs,
        reference: Reference | None,
        *,
        dtype: torch.dtype,
    ):
        self.context = context
        self.learner = learner
        self.learners = [learner]
        self.reference = reference
        self.group = learner.runner.group
        self.dtype = dtype
        self.surrogate = Surrogate(context)  # the loss of the advantages
        # what the critic group sends of each token, by name; here without tokens
        self.signals: Fields = {"advantages": torch.zeros(0)}
        if context.config.has_teacher:
            k = context.config.distill.top_k or 1
            self.signals["teacher_ids"] = torch.zeros(0, k, dtype=torch.int32)
            self.signals["teacher_logprobs"] = torch.zeros(0, k + 1, dtype=torch.float16)
        self._outputs = outputs
        load = cast(Any, learner.model).load
        if context.config.policy.router_aux_coef:
            load.keep_logits()
        if outputs.replays:
            load.drive()
        self.compared = False  # whether the engine's log-probs have been, with the trainer's
        self.trained = False  # whether an update has shown how much memory one takes

    def warm_up(self) -> None:
        """Compiles what the first step would, while the engine is being built."""
        self.learner.warm_up(
            partial(self._outputs, entropy=True),
            self._objective,
            columns=lambda rollout, zeros: self._columns(
                rollout,
                [zeros, zeros],
                [x.new_zeros(len(zeros), *x.shape[1:]) for x in self.signals.values()],
            ),
        )
        if self.reference:
            self.reference.logprobs(dummy_rollout())
            self.reference.release_memory()

    def weights(self) -> Weights:
        """The policy's weights as they are now, for an engine."""

        def stream() -> Iterator[tuple[str, Tensor]]:
            self.learner.check_finite()
            return self.learner.weights(self.dtype)

        return Weights(self.learner.updates, stream)

    def logprobs(self, rollout: Rollout) -> tuple[list[Tensor], dict[str, Any]]:
        """Log-probs of the response tokens: `[N]` old ones, the trainer's or the engine's own;
        `[N]` the reference's, if it is here. Also returns their metrics."""
        sampled = rollout.logprobs()
        by_engine = self.context.config.old_logprobs == "engine"
        old = sampled
        sums = {}  # over the tokens
        if not by_engine or not self.compared:
            trainers, entropy = self.learner.forward(rollout, partial(self._outputs, entropy=True))
            if not self.compared:
                sampled_now = rollout.ages() == 0
                self._compare(sampled[sampled_now], trainers[sampled_now])
            if not by_engine:
                old = trainers
                sums = {
                    "actor/mismatch_mean": float((sampled - old).abs().sum()),
                    "actor/mismatch_ratio": float(algo.clamp_log_ratio(old - sampled).exp().sum()),
                    "actor/mismatch_k3": float(algo.kl_estimate(sampled, old, "k3").sum()),
                    "actor/entropy": float(entropy.sum()),
                }
        ref = [self.reference.logprobs(rollout)] if self.reference else []
        if ref:
            kl = algo.kl_estimate(old, ref[0], self.context.config.ppo.kl_kind)
            sums["actor/ref_kl"] = float(kl.sum())
        means, tokens = self._token_means(rollout, sums)
        if tokens and not by_engine:
            largest = float((sampled - old).abs().max()) if rollout.tokens else 0.0
            means["actor/mismatch_max"] = max(self.group.all_gather(largest))
        return [old, *ref], means if tokens else {}

    def release_reference(self) -> None:
        """No more log-probs in this step: an offloaded reference goes to the CPU."""
        if self.reference:
            self.reference.release_memory()

    def update(
        self,
        plan: StepPlan,
        rollout: Rollout,
        logprobs: Sequence[Tensor],
        signals: Sequence[Tensor],
        *,
        waits: bool,
    ) -> dict[str, Any]:
        """PPO's policy update; returns its metrics.

        Args:
            logprobs: the tensors that `logprobs` returned.
            signals: what the critic group sent, `Estimate.signals`.
            waits: whether only the value model is trained in this step; said to one rank at least,
                if any has rows.
        """
        ppo = self.context.config.ppo
        step = plan.step
        names = [
            *self.surrogate.metrics,
            *["kl_loss"] * (ppo.kl_loss_coef > 0),
            *["router_aux"] * (self.context.config.policy.router_aux_coef > 0),
            *["teacher_agrees", "divergence"] * self.context.config.has_teacher,
        ]
        weights, importance = self._importance(rollout, logprobs[0])
        figures = []
        waits = bool(self.group.all_max([waits])[0])
        if not waits:
            figures = self.learner.update(
                rollout,
                trainable_rows(self.context.config, plan, rollout, "actor", self.group.dp_rank),
                self._columns(rollout, logprobs, signals) | weights,
                self._objective,
                step=step,
                epochs=ppo.epochs,
            )
        # or no step before had an update, either
        if not figures and (waits or self.learner.waited == step - 1):
            self.learner.waited = step
        if not figures and not waits and self.group.is_first:
            say(f"[actor]  step {step:>4}  trains nothing: no row to train on has ended")
        metrics = learning_metrics("actor", "pg_loss", figures, names)
        metrics |= importance
        # 0 in a step without an update
        squares = metrics.pop("actor/ratio_square") or 1.0
        metrics["actor/ratio_ess"] = metrics["actor/ratio_mean"] ** 2 / squares
        self.trained |= len(figures) > metrics["actor/skipped"]
        rate = self.learner.learning_rate(step) if step > self.learner.waited else 0.0
        return metrics | {"actor/lr": rate}

    def state(self) -> dict[str, Any]:
        """Its part of the group's state in a checkpoint, beside the learner."""
        return {"waited": self.learner.waited}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self.learner.waited = state["waited"]

    def _columns(
        self, rollout: Rollout, logprobs: Sequence[Tensor], signals: Sequence[Tensor]
    ) -> Fields:
        """What `_objective` reads of each token, `[N, ...]` by name."""
        return {
            **dict(zip(("old", "ref"), logprobs, strict=False)),
            **dict(zip(self.signals, signals, strict=True)),
        }

    def _objective(
        self, model: nn.Module, batch: MicroBatch, columns: Fields
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ppo = self.context.config.ppo
        distill = self.context.config.distill
        logprobs, entropy, likeliest, highest = self._outputs.beside(
            model, batch, columns.get("teacher_ids"), entropy=ppo.entropy_coef > 0
        )
        loss, metrics = self.surrogate.run(logprobs, columns, batch.lengths)
        terms = []  # further losses of the tokens, `[N]`, with their weights
        if self.context.config.has_teacher:
            divergence = algo.divergence(likeliest, columns["teacher_logprobs"], distill.divergence)
            # without `top_k` the advantages have the teacher's part
            terms.append((distill.coef if distill.top_k else 0.0, divergence))
            metrics["divergence"] = algo.mean(divergence.detach())
            metrics["teacher_agrees"] = algo.mean((likeliest[:, 0] >= highest[:, 0]).float())
        if ppo.kl_loss_coef > 0:
            kl = algo.kl_estimate(logprobs, columns["ref"], ppo.kl_loss_kind)
            terms.append((ppo.kl_loss_coef, kl))
            metrics["kl_loss"] = algo.mean(kl.detach())
        if ppo.entropy_coef > 0:
            terms.append((-ppo.entropy_coef, entropy))
        for coef, losses in terms:
            loss = loss + coef * algo.aggregate_loss(losses, batch.lengths, ppo.aggregate)
        if coef := self.context.config.policy.router_aux_coef:
            balance = cast(Any, model).load.balance_loss(batch)
            loss = loss + coef * balance
            metrics["router_aux"] = balance.detach()
        return loss, metrics

    def _importance(self, rollout: Rollout, old: Tensor) -> tuple[Fields, dict[str, float]]:
        """The column `weights`, if it is asked for, and its metrics."""
        ppo = self.context.config.ppo
        if ppo.importance == "off":
            return {}, {}
        engine = rollout.split(rollout.logprobs())
        weights, sums = algo.importance_weights(
            rollout.split(old), engine, ppo.importance, ppo.importance_cap
        )
        means, _ = self._token_means(rollout, sums)
        metrics = {f"actor/{name}": mean for name, mean in means.items()}
        return {"weights": torch.cat([*weights, torch.zeros(0)])}, metrics

    def _token_means(
        self, rollout: Rollout, sums: dict[str, float]
    ) -> tuple[dict[str, float], float]:
        """Means over the batch's response tokens, 0 if there are none, of what each rank has summed
        over its own. Also returns how many tokens these are."""
        *totals, tokens = self.group.all_sum(
            torch.tensor([*sums.values(), float(rollout.tokens)])
        ).tolist()
        means = [total / max(tokens, 1) for total in totals]
        return dict(zip(sums, means, strict=True)), tokens

    def _compare(self, sampled: Tensor, trainers: Tensor) -> None:
        """Compares the engine's log-probs `[N]` of the first step with the trainer's; all ranks of
        the group call it. Raises UserError on all of them if rounding does not explain the
        difference."""
        rollout = self.context.config.rollout
        # top-p and top-k raise the engine's log-probs by the log of the probability that they keep
        raised = math.inf if rollout.top_k else -math.log(rollout.top_p)
        difference = (trainers - sampled).clamp(min=0) + (sampled - trainers - raised).clamp(min=0)
        total, tokens = self.group.all_sum(
            torch.tensor([float(difference.sum()), float(len(difference))])
        ).tolist()
        self.compared = tokens > 0
        mean = total / max(tokens, 1)
        much, most = MISMATCH[self.dtype]
        message = (
            f"log-probs of engine and trainer differ by {mean:.2g} nats a token; "
            f"{str(self.dtype).removeprefix('torch.')} explains {{:g}}: "
        )
        if not math.isfinite(mean):
            self.learner.check_finite()
        if not mean <= most:
            raise UserError(
                f"{message.format(most)}they run different models; "
                "try --engine.kind hf or --compute.packing off"
            )
        if mean > much and self.group.is_first:
            warn(f"{message.format(much)}compare a run with --compute.dtype float32")


class Surrogate:
    """The loss of the advantages: here PPO's. `metrics`: names of those that it has; `ratios`: of
    those that any loss has."""

    ratios = ("ppo_kl", "ratio_mean", "ratio_square", "ratio_clamped")

    def __init__(self, context: Context):
        self.ppo = context.config.ppo
        self.metrics = [*self.ratios, "pg_clipfrac", "pg_clipfrac_lower"]
        self.metrics += ["pg_lost", "pg_advantage"] * (self.ppo.clip_mode == "mask")

    def run(
        self, logprobs: Tensor, columns: Fields, lengths: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics, 0-d, of the policy's new log-probs `[N]` of rows with so many tokens,
        `lengths` `[B]`. `columns`: `[N]`, as `Policy._columns`."""
        return algo.policy_loss(
            logprobs,
            columns["old"],
            columns["advantages"],
            lengths,
            weights=columns.get("weights"),
            clip_low=self.ppo.clip_low,
            clip_high=self.ppo.clip_high,
            mode=self.ppo.clip_mode,
            dual_clip=self.ppo.dual_clip,
            aggregate=self.ppo.aggregate,
        )


class UsersLoss(Surrogate):
    """A user's function says what each token loses."""

    def __init__(self, context: Context, function: Callable[..., Tensor]):
        super().__init__(context)
        self.function = function
        self.metrics = [*self.ratios]

    def run(
        self, logprobs: Tensor, columns: Fields, lengths: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses = self.function(
            logprobs=logprobs,
            old_logprobs=columns["old"],
            advantages=columns["advantages"],
            lengths=lengths,
            reference_logprobs=columns.get("ref"),
        )
        _, metrics = super().run(logprobs.detach(), columns, lengths)
        loss = algo.aggregate_loss(
            losses * columns.get("weights", 1.0), lengths, self.ppo.aggregate
        )
        return loss, {name: metrics[name] for name in self.metrics}
