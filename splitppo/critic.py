"""What a rank of the critic group holds, and its verbs in the loops of train.py."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from splitppo import algo
from splitppo.context import Context, learning_metrics, record
from splitppo.errors import UserError
from splitppo.learner import Learner
from splitppo.models.batching import MicroBatch, dummy_rollout
from splitppo.models.heads import value_outputs
from splitppo.models.runner import Reference
from splitppo.rewards.model import RewardModel
from splitppo.rewards.scorer import Failure, Pending, Scorer, failure_line
from splitppo.rewards.shaping import AdaptiveKL, shape_scores
from splitppo.rollout import Prompt, Rollout

FAILING_STEPS = 3  # steps in a row in which a reward function fails on every row; then the run ends


@dataclass(frozen=True)
class Scored:
    """Scored rows: values `[N]`, raw scores `[B]`, the rewards' further figures by name, (row, failure of its reward).
    `ref` are the reference's log-probs `[N]`, if the critic group holds it."""

    rollout: Rollout
    values: Tensor
    scores: Tensor
    extra: dict[str, list[float]]
    failures: list[tuple[int, Failure]]
    ref: Tensor | None = None


class Critic:
    """A rank of the critic group: value model and reward. It owns scores, values, KL rewards, GAE, whitening."""

    def __init__(
        self,
        context: Context,
        value: Learner,
        scorer: Scorer,
        reward_model: RewardModel | None,
        reference: Reference | None = None,
    ):
        self.context, self.value, self.scorer = context, value, scorer
        self.reward_model, self.reference = reward_model, reference
        self.group, ppo = value.runner.group, context.config.ppo
        self.kl = AdaptiveKL(ppo.kl_coef, ppo.kl_target, ppo.kl_horizon)
        nothing = torch.zeros((), dtype=torch.float64)
        self.past_scores = algo.Moments(nothing, nothing, nothing)  # of all raw scores so far
        self.failing: dict[str, int] = {}  # reward function -> steps in a row in which it failed on every row

    def warm_up(self) -> None:
        """Compiles what the first step would, while the actor group's engine is being built."""
        self.value.warm_up(lambda m, b: [value_outputs(m, b)], self._objective, fields=1, given=["old", "returns"])
        if self.reference:
            self.reference.logprobs(dummy_rollout())
            self.reference.release_memory()

    def submit(self, step: int, rollout: Rollout) -> Pending:
        """Starts the reward functions on some rows of a step. They run while the value model does."""
        batch = self.context.batch(step)
        rows = [(batch[sample.row], self.context.decode(sample.response)) for sample in rollout.samples]
        return self.scorer.submit(rows)

    def score(self, step: int, rollout: Rollout, pending: Pending) -> Scored:
        """Values and reward scores of some rows of a step; all ranks of the group take part.

        Args:
            pending: what `submit` returned for them.
        """
        (values,) = self.value.runner.forward(self.value.model, rollout, lambda m, b: [value_outputs(m, b)], fields=1)
        ref = self.reference.logprobs(rollout) if self.reference else None
        prompts = [self.context.batch(step)[sample.row] for sample in rollout.samples]
        scores, extra, wrong = self._learned_scores(prompts, rollout)
        results = pending.result()
        for result in results:
            for name, figure in result.figures.items():
                extra.setdefault(name, []).append(figure)
        failures = wrong + [(row, f) for row, r in zip(rollout.rows, results, strict=True) for f in r.failures]
        return Scored(rollout, values, scores + torch.tensor([r.score for r in results]), extra, failures, ref)

    def _learned_scores(
        self, prompts: Sequence[Prompt], rollout: Rollout
    ) -> tuple[Tensor, dict[str, list[float]], list[tuple[int, Failure]]]:
        """The reward model's part of the scores `[B]`, its figures, and the rows on which it failed."""
        if self.reward_model is None:
            return torch.zeros(len(prompts)), {}, []
        config, (scores, cut) = self.context.config.reward, self.reward_model.score(prompts, rollout.samples)
        wrong = f"reward.model={config.model} returned {{}}; check its weights and --compute.dtype"
        failures = [
            (row, Failure("reward_model", "invalid", wrong.format(score)))
            for row, score in zip(rollout.rows, scores.tolist(), strict=True)
            if not math.isfinite(score)
        ]
        scores = torch.where(scores.isfinite(), scores, config.failed_score)
        extra = {"reward_model": scores.tolist(), "reward_model_cut": cut.tolist()}
        return scores * config.model_weight, extra, failures

    def release_frozen(self) -> None:
        """No more rows in this step: offloaded models (reference, reward model) go to the CPU."""
        for model in filter(None, (self.reward_model, self.reference)):
            model.release_memory()

    def advantages(self, scored: Scored, logprobs: Sequence[Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Advantages `[N]`, whitened over the whole batch; returns `[N]`; metrics.

        Args:
            logprobs: the old ones `[N]`, and the reference's if the actor group holds it. Without a reference, the KL
                is 0.
        """
        old = logprobs[0]
        ref = logprobs[-1] if scored.ref is None else scored.ref
        ppo, rollout, mask = self.context.config.ppo, scored.rollout, scored.rollout.mask()
        kl = algo.kl_estimate(rollout.pad(old), rollout.pad(ref), ppo.kl_kind)
        shaped, kl_coef = self._shape(scored), self.kl.coef
        rewards = algo.token_rewards(shaped, kl, mask, kl_coef=kl_coef)
        values = rollout.pad(scored.values)
        advantages, returns = algo.gae(rewards, values, mask, gamma=ppo.gamma, lam=ppo.lam)
        if ppo.lam_value is not None:
            _, returns = algo.gae(rewards, values, mask, gamma=ppo.gamma, lam=ppo.lam_value)
        (moments,) = self.group.all_moments([algo.moments(advantages, mask)])
        white = algo.masked_whiten(advantages, mask, moments) if ppo.whiten else advantages
        packed_returns = rollout.unpad(returns)
        figures = {
            "critic/score": scored.scores,
            "critic/rewards": (rewards * mask).sum(-1),
            "critic/advantages": rollout.unpad(advantages),
            "critic/returns": packed_returns,
            "critic/values": scored.values,
            "error": packed_returns - scored.values,
        }
        extra = {f"critic/{name}": torch.tensor(values) for name, values in scored.extra.items()}
        # the trainer's own figures win over a reward's of the same name
        metrics = self._summaries(extra | figures) | self._failures(scored) | {"critic/kl_coef": kl_coef}
        kl_row, kl_token = self._kl(kl * mask, rollout)
        metrics |= {"critic/kl_row": kl_row}
        if len(logprobs) > 1 or scored.ref is not None:
            metrics |= {"critic/ref_kl": kl_token}
        return rollout.unpad(white), packed_returns, metrics

    def _shape(self, scored: Scored) -> Tensor:
        """The scores that become rewards: normalised, clipped, less penalties; `[B]`."""
        config, samples = self.context.config, scored.rollout.samples
        failed = {row for row, _ in scored.failures}  # their scores are no sample of the others' distribution
        counted = torch.tensor([[row not in failed for row in scored.rollout.rows]], dtype=torch.bool)
        (batch,) = self.group.all_moments([algo.moments(scored.scores[None], counted)])
        self.past_scores = algo.merge_moments([self.past_scores, batch])
        moments = batch if config.reward.normalize == "batch" else self.past_scores
        truncated = [sample.truncated for sample in samples]
        limit = config.rollout.max_new_tokens
        lengths = scored.rollout.lengths
        return shape_scores(scored.scores, lengths, truncated, moments, config.reward, max_new_tokens=limit)

    def _kl(self, kl: Tensor, rollout: Rollout) -> tuple[float, float]:
        """Means over the batch of the KL `[B, T]`, a row and a token; the next step's coefficient follows from them."""
        sums = torch.tensor([float(kl.sum()), float(len(kl)), float(rollout.tokens)])
        total, rows, tokens = self.group.all_sum(sums).tolist()
        self.kl.update(total / rows, round(rows))
        return total / rows, total / tokens

    def _failures(self, scored: Scored) -> dict[str, float]:
        """Counts the failures of the rewards, and prints them on the first rank's screen.

        Raises:
            UserError: a function has failed on every row for some steps.
        """
        failures = [failure for part in self.group.all_gather(scored.failures) for failure in part]
        if self.group.is_first and failures:
            print(f"[critic] {failure_line(failures)}", flush=True)
        rows, failed = self.context.config.rollout.batch_size, Counter(failure.function for _, failure in failures)
        self.failing = {name: self.failing.get(name, 0) + 1 for name, count in failed.items() if count == rows}
        for name in (name for name, steps in self.failing.items() if steps == FAILING_STEPS):
            cause = next(failure.text for _, failure in failures if failure.function == name)
            raise UserError(f"reward {name} failed on every row for {FAILING_STEPS} steps: {cause}; fix it")
        kinds = [failure.kind for _, failure in failures]
        by_kind = {f"critic/reward_failures/{kind}": float(kinds.count(kind)) for kind in sorted(set(kinds))}
        return {"critic/reward_failures": float(len(kinds))} | by_kind

    def close(self) -> None:
        """Ends the rewards' processes."""
        self.scorer.close()

    @property
    def learner(self) -> Learner:
        return self.value

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the learner."""
        past = self.past_scores
        return {"kl_coef": self.kl.coef, "scores": [float(part) for part in (past.count, past.mean, past.variance)]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned; a KL coefficient that does not adapt is the configuration's."""
        if self.kl.target is not None:
            self.kl.coef = state["kl_coef"]
        self.past_scores = algo.Moments(*(torch.tensor(part, dtype=torch.float64) for part in state["scores"]))

    def update(self, step: int, scored: Scored, returns: Tensor) -> dict[str, Any]:
        """The value model's update; returns its metrics."""
        ppo, fields = self.context.config.ppo, {"old": scored.values, "returns": returns}
        rows = self.context.ownership(step).rows("critic", self.group.dp_rank, ppo.value_mini_batches)
        mini_batches = self.context.trainable_rows(scored.rollout, rows)
        epochs = ppo.value_epochs or ppo.epochs
        figures = self.value.update(scored.rollout, mini_batches, fields, self._objective, step=step, epochs=epochs)
        rate = {"critic/lr": self.value.learning_rate(step)}
        return learning_metrics("critic", "vf_loss", figures, ["vf_clipfrac", "vpred_mean"]) | rate

    def samples(self, step: int, scored: Scored) -> list[dict[str, Any]]:
        """This rank's first rows, as they are written to the run's folder."""
        batch, decode = self.context.batch(step), self.context.decode
        kept = list(zip(scored.rollout.samples, scored.scores.tolist(), strict=True))[: self.context.config.log.samples]
        return [record(step, s.row, score, batch[s.row], decode(s.response), s.end) for s, score in kept]

    def _objective(
        self, model: nn.Module, batch: MicroBatch, fields: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ppo = self.context.config.ppo
        return algo.value_loss(
            value_outputs(model, batch),
            fields["old"],
            fields["returns"],
            batch.mask,
            clip=ppo.value_clip,
            aggregate=ppo.aggregate,
        )

    def _summaries(self, figures: dict[str, Tensor]) -> dict[str, float]:
        """Mean, minimum and maximum over the whole batch of figures that each rank has for its rows."""
        local = {
            name: (*map(float, (whole.count, whole.mean, whole.variance)), float(x.min()), float(x.max()))
            for name, x in figures.items()
            if len(x)
            for whole in (algo.moments(x[None], torch.ones_like(x[None])),)
        }
        gathered = self.group.all_gather(local)
        metrics, spread = {}, {}
        for name in dict.fromkeys(name for part in gathered for name in part):
            parts = [part[name] for part in gathered if name in part]
            whole = algo.merge_moments([algo.Moments(*torch.tensor(part[:3], dtype=torch.float64)) for part in parts])
            spread[name] = float(whole.variance)
            metrics[f"{name}/mean"] = float(whole.mean)
            metrics[f"{name}/min"] = min(part[3] for part in parts)
            metrics[f"{name}/max"] = max(part[4] for part in parts)
        total = spread["critic/returns"]
        metrics["critic/vf_explained_var"] = 1 - spread["error"] / total if total > 0 else 0.0
        return {name: value for name, value in metrics.items() if not name.startswith("error/")}


def join(parts: Sequence[Scored]) -> Scored:
    """The chunks of a step as one."""
    rollout = Rollout([sample for part in parts for sample in part.rollout.samples])

    def packed(tensors: Sequence[Tensor]) -> Tensor:
        rows = [zip(p.rollout.rows, p.rollout.split(x), strict=True) for p, x in zip(parts, tensors, strict=True)]
        return rollout.pack({row: piece for part in rows for row, piece in part})

    scores = {row: s for part in parts for row, s in zip(part.rollout.rows, part.scores.tolist(), strict=True)}
    names = dict.fromkeys(name for part in parts for name in part.extra)
    extra = {name: [figure for part in parts for figure in part.extra.get(name, [])] for name in names}
    failures = [failure for part in parts for failure in part.failures]
    refs = [part.ref for part in parts if part.ref is not None]
    ref, values = packed(refs) if refs else None, packed([part.values for part in parts])
    return Scored(rollout, values, torch.tensor([scores[row] for row in rollout.rows]), extra, failures, ref)
