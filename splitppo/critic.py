"""What a rank of the critic group holds and can do: its verbs in the loops of train.py."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from splitppo import algo
from splitppo.context import Shared, learning_metrics
from splitppo.errors import UserError
from splitppo.learner import Learner, made_up
from splitppo.models.heads import value_outputs
from splitppo.models.reference import Reference
from splitppo.models.sharding import all_moments, all_objects, all_sum
from splitppo.rewards.model import RewardModel
from splitppo.rewards.scorer import Failure, Pending, Scorer, failure_line
from splitppo.rewards.shaping import Steering, shape_scores, steer_kl
from splitppo.rollout import MicroBatch, Prompt, Rollout

HOPELESS_STEPS = 3  # in a row without one row that a reward function could score, after which it is to be mended


@dataclass(frozen=True)
class Scored:
    """Rows with the critic's first look: values `[N]`, raw scores `[B]`, the rewards' further figures by name, and
    (row, what failed in its reward). `ref` are the reference's log-probs `[N]`, if it is here."""

    rollout: Rollout
    values: Tensor
    scores: Tensor
    extra: dict[str, list[float]]
    failures: list[tuple[int, Failure]]
    ref: Tensor | None = None


class Critic:
    """A rank of the critic group: value model and reward. It owns judgement: scores, values, KL rewards, advantages."""

    def __init__(
        self,
        shared: Shared,
        value: Learner,
        scorer: Scorer,
        reward_model: RewardModel | None,
        reference: Reference | None = None,
    ):
        self.shared, self.value, self.scorer = shared, value, scorer
        self.reward_model, self.reference = reward_model, reference
        self.steering = Steering.start(shared.config.ppo)
        self.mesh: DeviceMesh = value.runner.mesh
        self.rank = self.mesh.get_local_rank()
        self.metrics: dict[str, Any] = {}
        self.hopeless: dict[str, int] = {}  # steps in a row in which a reward function failed on all rows

    def warm_up(self) -> None:
        """Compiles what the first step would, while the actor group's engine is being built."""
        self.value.warm_up(lambda m, b: [value_outputs(m, b)], self._objective, fields=1, given=["old", "returns"])
        if self.reference:
            self.reference.logprobs(made_up())
            self.reference.rest()

    def submit(self, step: int, rollout: Rollout) -> Pending:
        """Starts the reward functions on some rows of a step: they work under what comes next."""
        batch = self.shared.batch(step)
        rows = [(batch[sample.row], self.shared.decode(sample.response)) for sample in rollout.samples]
        return self.scorer.submit(rows)

    def score(self, step: int, rollout: Rollout, pending: Pending) -> Scored:
        """Values and reward scores of some rows of a step; all ranks of the group take part.

        Args:
            pending: what `submit` gave for them.
        """
        (values,) = self.value.runner.forward(self.value.model, rollout, lambda m, b: [value_outputs(m, b)], fields=1)
        ref = self.reference.logprobs(rollout) if self.reference else None
        prompts = [self.shared.batch(step)[sample.row] for sample in rollout.samples]
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
        config, (scores, cut) = self.shared.config.reward, self.reward_model.score(prompts, rollout.samples)
        told = f"reward.model={config.model} gave {{}}; look at its weights and at --compute.dtype"
        failures = [
            (row, Failure("reward_model", "invalid", told.format(score)))
            for row, score in zip(rollout.rows, scores.tolist(), strict=True)
            if not math.isfinite(score)
        ]
        scores = torch.where(scores.isfinite(), scores, config.failed_score)
        extra = {"reward_model": scores.tolist(), "reward_model_cut": cut.tolist()}
        return scores * config.model_weight, extra, failures

    def judge(self, scored: Scored, logprobs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Advantages, whitened over the whole batch, and returns, both `[N]`.

        Args:
            logprobs: the old ones `[N]`, and the reference's if it is the actor group's. Without a reference, the KL
                is 0.
        """
        for model in (self.reward_model, self.reference):
            if model:
                model.rest()
        old = logprobs[0]
        ref = logprobs[-1] if scored.ref is None else scored.ref
        ppo, rollout, mask = self.shared.config.ppo, scored.rollout, scored.rollout.mask()
        kl = algo.kl_estimate(rollout.pad(old), rollout.pad(ref), ppo.kl_kind)
        shaped, kl_coef = self._shape(scored), self.steering.kl_coef
        rewards = algo.token_rewards(shaped, kl, mask, kl_coef=kl_coef)
        values = rollout.pad(scored.values)
        advantages, returns = algo.gae(rewards, values, mask, gamma=ppo.gamma, lam=ppo.lam)
        if ppo.lam_value is not None:
            _, returns = algo.gae(rewards, values, mask, gamma=ppo.gamma, lam=ppo.lam_value)
        (moments,) = all_moments([algo.moments(advantages, mask)], self.mesh)
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
        self.metrics = self._judged_metrics(extra | figures) | self._failed(scored) | {"critic/kl_coef": kl_coef}
        self._steer(kl * mask, rollout, told=len(logprobs) > 1 or scored.ref is not None)
        return rollout.unpad(white), packed_returns

    def _shape(self, scored: Scored) -> Tensor:
        """The scores as they are learnt from; `[B]`."""
        config, samples = self.shared.config, scored.rollout.samples
        failed = {row for row, _ in scored.failures}  # their scores say nothing of the others'
        counted = torch.tensor([[row not in failed for row in scored.rollout.rows]], dtype=torch.bool)
        (batch,) = all_moments([algo.moments(scored.scores[None], counted)], self.mesh)
        self.steering.scores = algo.merge_moments([self.steering.scores, batch])
        moments = batch if config.reward.normalize == "batch" else self.steering.scores
        finished = [sample.finished for sample in samples]
        limit = config.rollout.max_new_tokens
        lengths = scored.rollout.lengths
        return shape_scores(scored.scores, lengths, finished, moments, config.reward, max_new_tokens=limit)

    def _steer(self, kl: Tensor, rollout: Rollout, *, told: bool) -> None:
        """The KL coefficient of the next step, from the KL `[B, T]` of this one; `told`: there is a reference."""
        ppo = self.shared.config.ppo
        sums = torch.tensor([float(kl.sum()), float(len(kl)), float(rollout.tokens)])
        total, rows, tokens = all_sum(sums, self.mesh).tolist()
        self.metrics |= {"critic/kl_row": total / rows} | ({"critic/ref_kl": total / tokens} if told else {})
        if ppo.kl_target is not None:
            how: Any = {"target": ppo.kl_target, "rows": round(rows), "horizon": ppo.kl_horizon}
            self.steering.kl_coef = steer_kl(self.steering.kl_coef, total / rows, **how)

    def _failed(self, scored: Scored) -> dict[str, float]:
        """Counts what failed in the rewards, and names it on the first rank's screen.

        Raises:
            UserError: a function has failed on all rows for some steps.
        """
        failures = [failure for part in all_objects(scored.failures, self.mesh) for failure in part]
        if self.rank == 0 and failures:
            print(f"[critic] {failure_line(failures)}", flush=True)
        rows, failed = self.shared.config.rollout.batch_size, Counter(failure.function for _, failure in failures)
        self.hopeless = {name: self.hopeless.get(name, 0) + 1 for name, count in failed.items() if count == rows}
        for name in (name for name, steps in self.hopeless.items() if steps == HOPELESS_STEPS):
            cause = next(failure.text for _, failure in failures if failure.function == name)
            raise UserError(f"reward {name} failed on all rows of the last {HOPELESS_STEPS} steps: {cause}; mend it")
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
        return self.steering.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self.steering.load(state, self.shared.config.ppo)

    def update(self, step: int, scored: Scored, returns: Tensor) -> dict[str, Any]:
        """The value model's update; returns the step's metrics."""
        ppo, fields = self.shared.config.ppo, {"old": scored.values, "returns": returns}
        rows = self.shared.ownership(step).critic_rows(self.rank, ppo.value_mini_batches or ppo.mini_batches)
        mini_batches = self.shared.learnt(scored.rollout, rows)
        epochs = ppo.value_epochs or ppo.epochs
        figures = self.value.update(scored.rollout, mini_batches, fields, self._objective, step=step, epochs=epochs)
        rate = {"critic/lr": self.value.learning_rate(step)}
        return self.metrics | learning_metrics("critic", "vf_loss", figures, ["vf_clipfrac", "vpred_mean"]) | rate

    def samples(self, step: int, scored: Scored) -> list[dict[str, Any]]:
        """The first rows held here, as they are written to the run's folder."""
        batch = self.shared.batch(step)
        kept = list(zip(scored.rollout.samples, scored.scores.tolist(), strict=True))[: self.shared.config.log.samples]
        return [
            {
                "step": step,
                "row": sample.row,
                "score": round(score, 6),
                "prompt": batch[sample.row].text,
                "response": self.shared.decode(sample.response),
                "finished": sample.finished,
                "data_source": batch[sample.row].data_source,
                "ground_truth": batch[sample.row].ground_truth,
            }
            for sample, score in kept
        ]

    def _objective(
        self, model: nn.Module, batch: MicroBatch, fields: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ppo = self.shared.config.ppo
        return algo.value_loss(
            value_outputs(model, batch),
            fields["old"],
            fields["returns"],
            batch.mask,
            clip=ppo.value_clip,
            aggregate=ppo.aggregate,
        )

    def _judged_metrics(self, figures: dict[str, Tensor]) -> dict[str, float]:
        """Mean, spread and range over the whole batch of figures that each rank has for its rows."""
        local = {
            name: (*map(float, (whole.count, whole.mean, whole.variance)), float(x.min()), float(x.max()))
            for name, x in figures.items()
            if len(x)
            for whole in (algo.moments(x[None], torch.ones_like(x[None])),)
        }
        gathered = all_objects(local, self.mesh)
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
