"""What a rank of the actor group holds, and its verbs in the loops of train.py."""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitppo import algo
from splitppo.context import Context, learning_metrics
from splitppo.engine import RolloutEngine
from splitppo.errors import UserError, say, warn
from splitppo.learner import Learner
from splitppo.models.batching import MicroBatch, dummy_rollout
from splitppo.models.heads import PolicyOutputs
from splitppo.models.runner import Reference
from splitppo.placement import StepPlan
from splitppo.rollout import Episode, Rollout, digest
from splitppo.sampler import Sampler
from splitppo.validation import Validator

PROGRESS_S = 15.0  # seconds between two lines about a long rollout
# Mean difference of the engine's and the trainer's log-probs, nats a token: above the first number
# the run warns, above the second it ends. (Correct runs: 1e-5 in float32 on CPUs, 0.03 in bfloat16;
# on GPUs, vLLM's attention is TF32 in float32.)
MISMATCH = {torch.float32: (0.03, 0.2), torch.bfloat16: (0.1, 0.5)}


class Actor:
    """A rank of the actor group: policy, reference, rollout engine.

    Args:
        outputs: what is read off the policy.
        reference: None if no KL coefficient asks for one, or if the critic group holds it.
        validator: of the same engine.
    """

    def __init__(
        self,
        context: Context,
        policy: Learner,
        outputs: PolicyOutputs,
        reference: Reference | None,
        engine: RolloutEngine,
        sampler: Sampler,
        *,
        engine_dtype: torch.dtype,
        validator: Validator,
    ):
        self.context = context
        self.policy = policy
        self.reference = reference
        self.engine = engine
        self.group = policy.runner.group
        self.learners = [policy]
        self.engine_dtype = engine_dtype
        self.validator = validator
        self._outputs = outputs
        self.sampler = sampler
        self.synced = -1
        self.compared = False  # whether the engine's log-probs have been, with the trainer's
        self.trained = False  # whether an update has shown how much memory one takes
        self.best: tuple[float, int] | None = None  # score of the best validation, and its step
        # what that score belongs to, as this version says it and as earlier ones did
        self.validated_on = [
            digest(
                [(prompt.tokens, prompt.ground_truth) for prompt in context.held_out],
                config.reward.validation or (config.reward.function, config.reward.weights),
                config.log.validate_samples,
                config.log.validate_temperature,
            )
            for config in context.configs
        ]

    def warm_up(self) -> None:
        """Compiles what the first step would, while the engine is being built."""
        self.policy.warm_up(
            partial(self._outputs, entropy=True),
            self._objective,
            fields=2,
            given=["old", "ref", "advantages", *["sampled", "age"] * (self.sampler.window > 0)],
        )
        if self.reference:
            self.reference.logprobs(dummy_rollout())
            self.reference.release_memory()

    def sync(self) -> None:
        """Brings the policy's weights into the engine, unless it has them."""
        # engines decide on their own whether they sleep, so the group must agree
        if self.group.all_max([self.synced != self.policy.updates or not self.engine.loaded])[0]:
            self.policy.check_finite()
            self.engine.load_weights(self.policy.weights(self.engine_dtype))
            self.synced = self.policy.updates

    def move_open_rows(self, plan: StepPlan) -> None:
        """Moves the rows that go on to the ranks that own their slots in this step."""
        self.sampler.move_open(self.group, plan.of_ranks("actor"))

    def generate(self, plan: StepPlan) -> Iterator[list[Episode]]:
        """The rows of this rank's slots as they end; empty lists in between. Prints its progress if
        it takes long."""
        config = self.context.config
        slots = plan.all_slots("actor", self.group.dp_rank)
        done = 0
        printed = time.monotonic()
        for ended in self.sampler.generate(
            self.engine, plan.step, slots, config.rollout, config.seed, self.group
        ):
            done += len(ended)
            if self.group.is_first and time.monotonic() > printed + PROGRESS_S:
                say(
                    f"[actor]  step {plan.step:>4}  rollout: {done} rows have ended in this rank's "
                    f"{len(slots)} slots"
                )
                printed = time.monotonic()
            yield ended

    def release_engine(self) -> None:
        """The trainer needs the GPU now: the engine gives back the memory that an update will
        need."""
        self.engine.release_memory(trained=self.trained)

    def gather_open_rows(self) -> dict[str, Any]:
        """Tells all actor ranks which rows go on; returns, as metrics, what the first slots have
        decoded."""
        player = self.sampler.player
        return {
            "slots": self.sampler.gather_open(self.group),
            **(player.metrics(self.group) if player else {}),
        }

    def logprobs(self, rollout: Rollout) -> tuple[list[Tensor], dict[str, Any]]:
        """Log-probs of the response tokens: `[N]` old ones, the trainer's or the engine's own;
        `[N]` the reference's, if it is here. Also returns the rollout's metrics."""
        sampled = rollout.logprobs()
        by_engine = self.context.config.old_logprobs == "engine"
        old = sampled
        sums = {}
        if not by_engine or not self.compared:
            trainers, entropy = self.policy.forward(
                rollout, partial(self._outputs, entropy=True), fields=2
            )
            if not self.compared:
                fresh = rollout.ages() == 0
                self._compare(sampled[fresh], trainers[fresh])
            if not by_engine:
                old = trainers
                # over the tokens; the first three of the differences between engine and trainer
                sums = {
                    "actor/mismatch_mean": float((sampled - old).abs().sum()),
                    "actor/mismatch_ratio": float(algo.clamp_log_ratio(old - sampled).exp().sum()),
                    "actor/mismatch_k3": float(algo.kl_estimate(sampled, old, "k3").sum()),
                    "actor/entropy": float(entropy.sum()),
                }
        ref = [self.reference.logprobs(rollout)] if self.reference else []
        if ref:
            sums["actor/ref_kl"] = float(
                algo.kl_estimate(old, ref[0], self.context.config.ppo.kl_kind).sum()
            )
        return [old, *ref], self._rollout_metrics(rollout, sums, (sampled - old).abs())

    def release_reference(self) -> None:
        """No more log-probs in this step: an offloaded reference goes to the CPU."""
        if self.reference:
            self.reference.release_memory()

    def update(
        self,
        plan: StepPlan,
        rollout: Rollout,
        logprobs: Sequence[Tensor],
        advantages: Tensor,
        *,
        waits: bool,
    ) -> dict[str, Any]:
        """PPO's policy update; returns its metrics.

        Args:
            logprobs: the tensors that `logprobs` returned.
            advantages: `[N]`.
            waits: whether only the value model is trained in this step; said to one rank at least,
                if any has rows.
        """
        ppo = self.context.config.ppo
        step = plan.step
        old, *ref = logprobs
        names = [
            *("ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "ratio_mean", "ratio_clamped"),
            *["kl_loss"] * (ppo.kl_loss_coef > 0),
            *["pg_lost", "pg_advantage"] * (ppo.clip_mode == "mask"),
        ]
        fields = {"old": old, "advantages": advantages} | ({"ref": ref[0]} if ref else {})
        if self.sampler.window:
            fields |= {"sampled": rollout.logprobs(), "age": rollout.ages().float()}
        weights, found = self._importance(rollout, old)
        figures = []
        waits = bool(self.group.all_max([waits])[0])
        if not waits:
            figures = self.policy.update(
                rollout,
                self.context.trainable_rows(plan, rollout, "actor", self.group.dp_rank),
                fields | weights,
                self._objective,
                step=step,
                epochs=ppo.epochs,
            )
        # or no step before had an update, either
        if not figures and (waits or self.policy.waited == step - 1):
            self.policy.waited = step
        if not figures and not waits and self.group.is_first:
            say(f"[actor]  step {step:>4}  nothing is trained: no row to train on has ended")
        metrics: dict[str, Any] = found | learning_metrics("actor", "pg_loss", figures, names)
        if figures and self.sampler.window:  # of the first optimizer step alone: before the update
            metrics |= {f"actor/{name}": figures[0][name] for name in algo.STALENESS}
            metrics["window/ess"] = figures[0]["stale_ratio"] ** 2 / figures[0]["stale_square"]
        self.trained |= len(metrics["optimizer_steps"]) > metrics["actor/skipped"]
        return metrics | {
            "actor/lr": self.policy.learning_rate(step) if step > self.policy.waited else 0.0
        }

    def close(self) -> None:
        """Ends the engine, environments, and the processes of the validation's rewards."""
        self.engine.close()
        if self.sampler.player:
            self.sampler.player.pool.close()
        self.validator.scorer.close()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the learner; all ranks of the group call it, and the first
        one's is whole."""
        return {
            "best": self.best,
            "validated_on": self.validated_on[0],
            "open": self.sampler.state(self.group),
            "waited": self.policy.waited,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned. The best of another validation is left out."""
        known = state.get("validated_on", self.validated_on[0]) in self.validated_on
        self.best = tuple(state["best"]) if state["best"] and known else None
        # an older checkpoint's schedule goes on as it began
        self.policy.waited = state.get("waited", 0)
        self.sampler.load_state(state.get("open", ()))

    def _importance(
        self, rollout: Rollout, old: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The field `weights`, if it is asked for, and its metrics."""
        ppo = self.context.config.ppo
        if ppo.importance == "off":
            return {}, {}
        engine = rollout.split(rollout.logprobs())
        weights, sums = algo.importance_weights(
            rollout.split(old), engine, ppo.importance, ppo.importance_cap
        )
        *totals, tokens = self.group.all_sum(
            torch.tensor([*sums.values(), float(rollout.tokens)])
        ).tolist()
        return {"weights": torch.cat([*weights, torch.zeros(0)])}, {
            f"actor/{name}": total / max(tokens, 1)
            for name, total in zip(sums, totals, strict=True)
        }

    def validate(self, step: int) -> dict[str, float]:
        """The metrics of the held-out prompts, if a validation is due after this step."""
        if not self.validator.due(step):
            return {}
        self.sync()
        metrics = self.validator.run(step)
        if self.best is None or metrics["val/score/mean"] > self.best[0]:
            self.best = metrics["val/score/mean"], step
        return metrics | {"val/best_so_far": self.best[0], "val/best_step": float(self.best[1])}

    def _objective(
        self, model: nn.Module, batch: MicroBatch, fields: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ppo = self.context.config.ppo
        logprobs, entropy = self._outputs(model, batch, entropy=ppo.entropy_coef > 0)
        loss, metrics = algo.policy_loss(
            logprobs,
            fields["old"],
            fields["advantages"],
            batch.lengths,
            weights=fields.get("weights"),
            clip_low=ppo.clip_low,
            clip_high=ppo.clip_high,
            mode=ppo.clip_mode,
            dual_clip=ppo.dual_clip,
            aggregate=ppo.aggregate,
        )
        if "age" in fields:
            metrics |= algo.staleness(
                logprobs,
                fields["sampled"],
                fields["age"],
                clip_low=ppo.clip_low,
                clip_high=ppo.clip_high,
            )
        if ppo.kl_loss_coef > 0:
            kl = algo.kl_estimate(logprobs, fields["ref"], ppo.kl_loss_kind)
            loss = loss + ppo.kl_loss_coef * algo.aggregate_loss(kl, batch.lengths, ppo.aggregate)
            metrics["kl_loss"] = algo.mean(kl.detach())
        if ppo.entropy_coef > 0:
            loss = loss - ppo.entropy_coef * algo.aggregate_loss(
                entropy, batch.lengths, ppo.aggregate
            )
        return loss, metrics

    def _compare(self, sampled: Tensor, old: Tensor) -> None:
        """Compares the engine's log-probs `[N]` of the first step with the trainer's; all ranks of
        the group call it. Raises UserError on all of them if rounding does not explain the
        difference."""
        rollout = self.context.config.rollout
        # top-p and top-k raise the engine's log-probs by the log of the probability that they keep
        kept = math.inf if rollout.top_k else -math.log(rollout.top_p)
        apart = (old - sampled).clamp(min=0) + (sampled - old - kept).clamp(min=0)
        total, tokens = self.group.all_sum(
            torch.tensor([float(apart.sum()), float(len(apart))])
        ).tolist()
        self.compared = tokens > 0
        mean = total / max(tokens, 1)
        much, most = MISMATCH[self.engine_dtype]
        found = (
            f"log-probs of engine and trainer differ by {mean:.2g} nats a token; "
            f"{str(self.engine_dtype).removeprefix('torch.')} explains {{:g}}: "
        )
        if not math.isfinite(mean):
            self.policy.check_finite()
        if not mean <= most:
            raise UserError(
                f"{found.format(most)}they run different models; "
                "try --engine.kind hf or --compute.packing off"
            )
        if mean > much and self.group.is_first:
            warn(f"{found.format(much)}compare a run with --compute.dtype float32")

    def _rollout_metrics(
        self, rollout: Rollout, sums: dict[str, float], difference: Tensor
    ) -> dict[str, float]:
        """Metrics of the whole batch; `sums` are of this rank's tokens, `difference` is `[N]`.
        Means over rows and tokens are left out if no row has ended."""
        ages = rollout.ages()
        own = [
            len(rollout.rows),
            rollout.tokens,
            sum(len(episode.prompt) for episode in rollout.episodes),
            sum(episode.truncated for episode in rollout.episodes),
            sum(rollout.totals),
            int(ages.sum()),
            int((ages == 0).sum()),
            *sums.values(),
        ]
        rows, tokens, prompts, cut, whole, age, now, *totals = self.group.all_sum(
            torch.tensor([float(part) for part in own])
        ).tolist()
        longest, oldest, worsts, step_ms = zip(
            *self.group.all_gather(
                (
                    max(rollout.lengths, default=0),
                    int(ages.max()) if len(ages) else 0,
                    float(difference.max()) if len(difference) else 0.0,
                    self.engine.step_ms,
                )
            ),
            strict=True,
        )
        found = {
            "tokens": whole,
            "perf/engine_step_ms/mean": sum(step_ms) / max(1, sum(map(bool, step_ms))),
            "perf/engine_step_ms/max": max(step_ms),
        }
        if self.sampler.window:
            now += sum(row.fresh for row in self.sampler.open.values())
            lengths = [row.tokens for row in self.sampler.open.values()]
            found |= {
                "window/rows": rows,
                "window/sampled": now,
                "window/age/max": max(oldest),
                "window/open_length/mean": sum(lengths) / len(lengths),
                "window/open_length/max": max(lengths),
            }
        if not rows:
            return found
        return {
            **found,
            **{name: total / tokens for name, total in zip(sums, totals, strict=True)},
            **({"actor/mismatch_max": max(worsts)} if "actor/mismatch_mean" in sums else {}),
            **({"window/age/mean": age / tokens} if self.sampler.window else {}),
            "response_length/mean": tokens / rows,
            "response_length/max": max(longest),
            "response_length/clip_ratio": cut / rows,
            "prompt_length/mean": prompts / rows,
        }
