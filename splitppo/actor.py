"""What a rank of the actor group holds and can do: its verbs in the loops of train.py."""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from splitppo import algo
from splitppo.context import Shared, learning_metrics
from splitppo.engine import RolloutEngine, Sampling
from splitppo.errors import UserError
from splitppo.learner import Learner, made_up
from splitppo.models.heads import PolicyOutputs
from splitppo.models.reference import Reference
from splitppo.models.sharding import all_objects, all_sum
from splitppo.rewards.shaping import importance
from splitppo.rollout import MicroBatch, Request, Rollout, Sample
from splitppo.validation import Validator

PROGRESS_S = 15.0  # seconds between two words on a rollout that takes long
# nats a token, on average, that engine and trainer are apart: worth a warning, the end of the run. (Right runs: 1e-5 in
# float32 on CPUs, 0.03 in bfloat16; on GPUs, vLLM's attention is TF32 in float32.)
MISMATCH = {torch.float32: (0.03, 0.2), torch.bfloat16: (0.1, 0.5)}


class Actor:
    """A rank of the actor group: policy, reference, rollout engine.

    Args:
        rank: in the group.
        outputs: what is read off the policy.
        reference: None if no KL coefficient asks for one, or if it is the critic group's.
        validator: of the same engine.
    """

    def __init__(
        self,
        shared: Shared,
        policy: Learner,
        outputs: PolicyOutputs,
        reference: Reference | None,
        engine: RolloutEngine,
        *,
        engine_dtype: torch.dtype,
        validator: Validator,
    ):
        self.shared, self.policy, self.reference, self.engine = shared, policy, reference, engine
        self.mesh: DeviceMesh = policy.runner.mesh
        self.rank = self.mesh.get_local_rank()
        self.engine_dtype, self.validator = engine_dtype, validator
        self._outputs = outputs
        self.synced = -1
        self.compared = False  # whether the engine's log-probs were held against the trainer's
        self.trained = False  # whether an update has shown how much memory one takes
        self.best: tuple[float, int] | None = None  # score of the best validation, and its step
        self.metrics: dict[str, Any] = {}

    def warm_up(self) -> None:
        """Compiles what the first step would, while the engine is being built."""
        given = ["old", "ref", "advantages"]
        self.policy.warm_up(partial(self._outputs, entropy=True), self._objective, fields=2, given=given)
        if self.reference:
            self.reference.logprobs(made_up())
            self.reference.rest()

    def sync(self) -> None:
        """Brings the policy's weights into the engine, unless it has them."""
        stale = self.synced != self.policy.updates or not self.engine.loaded
        if all_sum(torch.tensor([float(stale)]), self.mesh).any():  # one engine may sleep while another stays awake
            self.policy.check_finite()
            self.engine.load_weights(self.policy.weights(self.engine_dtype))
            self.synced = self.policy.updates

    def generate(self, step: int) -> Iterator[list[Sample]]:
        """This rank's rows as they finish; empty lists in between. Says how far it is if it takes long."""
        rollout, batch = self.shared.config.rollout, self.shared.batch(step)
        rows = self.shared.ownership(step).all_rows("actor", self.rank)
        first = (step - 1) * rollout.batch_size
        lengths = self.shared.lengths or [None]
        requests = [Request(row, batch[row].tokens, lengths[(first + row) % len(lengths)]) for row in rows]
        done, told, seed = 0, time.monotonic(), self.shared.config.seed
        for finished in self.engine.generate(requests, Sampling.of(rollout), seed=seed, step=step):
            done += len(finished)
            if self.rank == 0 and time.monotonic() > told + PROGRESS_S:
                print(f"[actor]  step {step:>4}  rollout: {done} of this rank's {len(rows)} rows", flush=True)
                told = time.monotonic()
            yield finished
        self.engine.rest(trained=self.trained)

    def logprobs(self, rollout: Rollout) -> tuple[Tensor, ...]:
        """Old log-probs `[N]`, the trainer's or the engine's own, and the reference's if it is here."""
        sampled = torch.tensor([logprob for sample in rollout.samples for logprob in sample.logprobs])
        by_engine, old, sums = self.shared.config.ppo.old_logprobs == "engine", sampled, {}
        if not by_engine or not self.compared:
            outputs = partial(self._outputs, entropy=True)
            trainers, entropy = self.policy.runner.forward(self.policy.model, rollout, outputs, fields=2)
            if not self.compared:
                self._compare(sampled, trainers)
            if not by_engine:
                old = trainers
                sums = self._engine_sums(sampled, old) | {"actor/entropy": float(entropy.sum())}
        ref = []
        if self.reference:
            ref = [self.reference.logprobs(rollout)]
            self.reference.rest()
            kl = algo.kl_estimate(old, ref[0], self.shared.config.ppo.kl_kind)
            sums |= {"actor/ref_kl": float(kl.sum())}
        self.metrics = self._rollout_metrics(rollout, sums, (sampled - old).abs())
        return old, *ref

    def update(self, step: int, rollout: Rollout, logprobs: Sequence[Tensor], advantages: Tensor) -> dict[str, Any]:
        """PPO's policy update, none while the critic warms up; returns the step's metrics.

        Args:
            logprobs: what `logprobs` returned.
            advantages: `[N]`.
        """
        ppo, (old, *ref) = self.shared.config.ppo, logprobs
        names = ["ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "ratio_mean", "ratio_clamped"]
        names += ["kl_loss"] if ppo.kl_loss_coef > 0 else []
        fields = {"old": old, "advantages": advantages} | ({"ref": ref[0]} if ref else {})
        fields |= self._importance(rollout, old)
        if step <= ppo.critic_warmup:
            return self.metrics | learning_metrics("actor", "pg_loss", [], names) | {"actor/lr": 0.0}
        mini_batches = self.shared.learnt(rollout, self.shared.ownership(step).rows("actor", self.rank))
        figures = self.policy.update(rollout, mini_batches, fields, self._objective, step=step, epochs=ppo.epochs)
        metrics = self.metrics | learning_metrics("actor", "pg_loss", figures, names)
        self.trained |= len(metrics["optimizer_steps"]) > metrics["actor/skipped"]
        return metrics | {"actor/lr": self.policy.learning_rate(step)}

    def close(self) -> None:
        """Ends the engine and the processes of the validation's rewards."""
        self.engine.close()
        self.validator.scorer.close()

    @property
    def learner(self) -> Learner:
        return self.policy

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the learner."""
        return {"best": self.best}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self.best = tuple(state["best"]) if state["best"] else None

    def _importance(self, rollout: Rollout, old: Tensor) -> dict[str, Tensor]:
        """The field `weights`, if it is asked for."""
        ppo = self.shared.config.ppo
        if ppo.importance == "off":
            return {}
        engine = [torch.tensor(sample.logprobs) for sample in rollout.samples]
        weights, sums = importance(rollout.split(old), engine, ppo.importance, ppo.importance_cap)
        *totals, tokens = all_sum(torch.tensor([*sums.values(), float(rollout.tokens)]), self.mesh).tolist()
        self.metrics |= {f"actor/{name}": total / tokens for name, total in zip(sums, totals, strict=True)}
        return {"weights": torch.cat([*weights, torch.zeros(0)])}

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
        ppo, mask = self.shared.config.ppo, batch.mask
        with_entropy = ppo.entropy_coef > 0
        logprobs, entropy = self._outputs(model, batch, entropy=with_entropy)
        loss, metrics = algo.policy_loss(
            logprobs,
            fields["old"],
            fields["advantages"],
            mask,
            clip_low=ppo.clip_low,
            clip_high=ppo.clip_high,
            dual_clip=ppo.dual_clip,
            aggregate=ppo.aggregate,
            weights=fields.get("weights"),
        )
        if ppo.kl_loss_coef > 0:
            kl = algo.kl_estimate(logprobs, fields["ref"], ppo.kl_loss_kind)
            loss = loss + ppo.kl_loss_coef * algo.aggregate_loss(kl, mask, ppo.aggregate)
            metrics["kl_loss"] = algo.masked_mean(kl.detach(), mask)
        if with_entropy:
            loss = loss - ppo.entropy_coef * algo.aggregate_loss(entropy, mask, ppo.aggregate)
        return loss, metrics

    def _compare(self, sampled: Tensor, old: Tensor) -> None:
        """Whether engine and trainer have one model, by the first step's tokens; all ranks of the group call it.

        Raises:
            UserError: on all of them, if their log-probs are further apart than rounding explains.
        """
        self.compared, rollout = True, self.shared.config.rollout
        # those of a distribution that was cut are higher, by what it has kept of the whole
        kept = math.inf if rollout.top_k else -math.log(rollout.top_p)
        apart = (old - sampled).clamp(min=0) + (sampled - old - kept).clamp(min=0)
        total, tokens = all_sum(torch.tensor([float(apart.sum()), float(len(apart))]), self.mesh).tolist()
        mean, (much, most) = total / max(tokens, 1), MISMATCH[self.engine_dtype]
        dtype = str(self.engine_dtype).removeprefix("torch.")
        told = f"log-probs of engine and trainer are {mean:.2g} nats a token apart; {dtype} explains {{:g}}: "
        if not mean <= most:
            raise UserError(
                f"{told.format(most)}they run different models; try --engine.kind hf or --compute.packing off"
            )
        if mean > much and self.rank == 0:
            print(f"warning: {told.format(much)}compare a run with --compute.dtype float32", flush=True)

    def _engine_sums(self, sampled: Tensor, old: Tensor) -> dict[str, float]:
        """Sums over the tokens of how far the engine's log-probs are from the trainer's."""
        return {
            "actor/mismatch_mean": float((sampled - old).abs().sum()),
            "actor/mismatch_ratio": float(algo.clamp_log_ratio(old - sampled).exp().sum()),
            "actor/mismatch_k3": float(algo.kl_estimate(sampled, old, "k3").sum()),
        }

    def _rollout_metrics(self, rollout: Rollout, sums: dict[str, float], difference: Tensor) -> dict[str, float]:
        """Figures of the whole batch; `sums` are of this rank's tokens, `difference` is `[N]`."""
        prompts = sum(len(sample.prompt) for sample in rollout.samples)
        cut = sum(not sample.finished for sample in rollout.samples)
        counts = [len(rollout.rows), rollout.tokens, prompts, cut, *sums.values()]
        rows, tokens, prompts, cut, *totals = all_sum(
            torch.tensor([float(part) for part in counts]), self.mesh
        ).tolist()
        worst = float(difference.max()) if len(difference) else 0.0
        parts = all_objects((max(rollout.lengths, default=0), worst, self.engine.step_ms), self.mesh)
        longest, worsts, step_ms = zip(*parts, strict=True)
        means = {name: total / tokens for name, total in zip(sums, totals, strict=True)}
        if "actor/mismatch_mean" in means:
            means["actor/mismatch_max"] = max(worsts)
        return means | {
            "response_length/mean": tokens / rows,
            "response_length/max": max(longest),
            "response_length/clip_ratio": cut / rows,
            "prompt_length/mean": prompts / rows,
            "tokens": tokens + prompts,
            "perf/engine_step_ms/mean": sum(step_ms) / max(1, sum(map(bool, step_ms))),
            "perf/engine_step_ms/max": max(step_ms),
        }
