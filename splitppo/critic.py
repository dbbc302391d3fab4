"""What a rank of the critic group holds, and its verbs in the loops of train.py."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from splitppo import algo
from splitppo.context import Context
from splitppo.job.collectives import Group
from splitppo.learner import Learner, learning_metrics, start_at_mean, trainable_rows
from splitppo.models.batching import Fields, MicroBatch, dummy_rollout
from splitppo.models.calibration import quality, summaries
from splitppo.models.heads import head_outputs, value_outputs
from splitppo.models.runner import Reference
from splitppo.placement import StepPlan, Streams
from splitppo.pretraining import Pretraining
from splitppo.rewards.model import RewardModel
from splitppo.rewards.samples import record, token_figures
from splitppo.rewards.scorer import Failure, Pending, Scorer, count_failures, to_score
from splitppo.rewards.shaping import AdaptiveKL, check_range, shape_scores, spread_of
from splitppo.rollout import Rollout, digest, pack


@dataclass(frozen=True)
class ScoredRows:
    """What `Critic.score` found: values `[N]` (0 without a value model), raw scores `[B]`, further
    figures of rows by name (those of reward functions begin with `reward/`), (row, failure of its
    reward). `ref`: the reference's log-probs `[N]`, if the critic group holds it."""

    rollout: Rollout
    values: Tensor
    scores: Tensor
    extra: dict[str, list[float]]
    failures: list[tuple[int, Failure]]
    ref: Tensor | None = None

    @property
    def totals(self) -> Tensor:
        """`[B]`: the scores with the rewards of the turns."""
        return self.scores + self.rollout.sums(self.rollout.turn_rewards())


@dataclass(frozen=True)
class Estimate:
    """What `Critic.advantages` found.

    Attributes:
        advantages: `[N]`, whitened over the whole batch.
        returns: `[N]`, the value model's targets.
        waits: whether the policy is not updated in this step. False in a step without rows,
            which needs no advantages.
        figures: `[N]` by name, for RUN/samples.
    """

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, Any]
    waits: bool = False
    figures: dict[str, Tensor] = field(default_factory=dict)


class Critic:
    """A rank of the critic group: value model, if the run has one, and reward. It owns scores,
    values, KL rewards, GAE or another baseline, whitening. `pretrained` is called after the last
    step of pretraining, on all ranks of the group."""

    def __init__(
        self,
        context: Context,
        group: Group,
        learner: Learner | None,
        scorer: Scorer,
        reward_model: RewardModel | None,
        reference: Reference | None = None,
        pretrained: Callable[[], object] = lambda: None,
    ):
        self.context = context
        self.learner = learner
        self.scorer = scorer
        self.decoder = ThreadPoolExecutor(1, "decode")
        self.pretraining = Pretraining(context.config, pretrained)
        self.reward_model = reward_model
        self.reference = reference
        self.group = group
        ppo = context.config.ppo
        self.kl = AdaptiveKL(ppo.kl_coef, ppo.kl_target, ppo.kl_horizon)
        # what gave the scores, as this version says it and as earlier ones did
        scored_by = attrgetter("function", "weights", "model", "model_weight", "model_chat")
        self.scored_by = [digest(*scored_by(config.reward)) for config in context.configs]
        self.past_scores = algo.moments(torch.zeros(0))  # of all raw scores so far
        # reward function -> rows of each step, to the last, of which none got a score
        self.failing: dict[str, list[int]] = {}

    def warm_up(self) -> None:
        """Compiles what the first step would, while the actor group's engine is being built."""
        if self.learner:
            self.learner.warm_up(
                _outputs, self._objective, fields=1, columns=lambda _, zeros: _columns(zeros, zeros)
            )
        if self.reference:
            self.reference.logprobs(dummy_rollout())
            self.reference.release_memory()

    def submit(self, step: int, rollout: Rollout) -> Pending:
        """Starts a thread that decodes some rows of a step and starts the reward functions on them.
        They run while the value model does."""

        def start() -> Pending:
            prompts = map(self.context.prompt, rollout.rows)
            parts = zip(prompts, rollout.episodes, strict=True)
            return self.scorer.submit([to_score(self.context, *part) for part in parts])

        started = self.decoder.submit(start)
        return lambda: started.result()()

    def score(self, step: int, rollout: Rollout, pending: Pending) -> ScoredRows:
        """Values and reward scores of some rows of a step; all ranks of the group take part.
        `pending`: what `submit` returned for them."""
        values = torch.zeros(rollout.tokens)
        if self.learner:
            (values,) = self.learner.forward(rollout, _outputs, fields=1)
        ref = self.reference.logprobs(rollout) if self.reference else None
        scores = torch.zeros(len(rollout.rows))
        extra: dict[str, list[float]] = {}
        failures: list[tuple[int, Failure]] = []
        if self.reward_model:
            prompts = [self.context.prompt(row) for row in rollout.rows]
            scores, extra, failures = self.reward_model.weighted(
                prompts, rollout.episodes, self.context.config.reward
            )
        results = self.group.of_first(pending)
        for row, result in zip(rollout.rows, results, strict=True):
            for name, figure in result.figures.items():
                extra.setdefault(f"reward/{name}", []).append(figure)
            failures += [(row, failure) for failure in result.failures]
        scores = scores + torch.tensor([result.score for result in results])
        return ScoredRows(rollout, values, scores, extra, failures, ref)

    def release_models(self) -> None:
        """No more rows in this step: models with `offload` go to host memory until their next
        turn."""
        for model in filter(None, (self.reward_model, self.reference)):
            model.release_memory()
        if self.learner:
            self.learner.release_memory(changed=False)

    def advantages(self, step: int, scored: ScoredRows, logprobs: Sequence[Tensor]) -> Estimate:
        """KL rewards, GAE and whitening of a step's rows.

        Args:
            logprobs: the old ones `[N]`, and the reference's if the actor group holds it. Without a
                reference, the KL is 0.
        """
        ppo = self.context.config.ppo
        rollout = scored.rollout
        old, *refs = logprobs if scored.ref is None else [logprobs[0], scored.ref]
        kl = algo.kl_estimate(old, refs[0] if refs else old, ppo.kl_kind)
        sums = torch.tensor([float(kl.sum()), float(len(rollout.rows)), float(rollout.tokens)])
        kl_sum, rows, tokens = self.group.all_sum(sums).tolist()
        kl_coef = self.kl.coef
        if not rows:  # none has ended in this step
            return Estimate(torch.zeros(0), torch.zeros(0), {"critic/kl_coef": kl_coef})
        waits = self.pretraining.policy_waits(step)
        if not waits:
            self.kl.update(kl_sum / rows, round(rows))  # the next step's coefficient
        first = not self.past_scores.count
        shaped, turns = self._shape(scored)
        last = shaped - rollout.sums(turns)  # what is left for the row's last token
        rewards = turns + algo.token_rewards(last, kl, rollout.episode_lengths, kl_coef=kl_coef)
        if first and self.learner:
            start_at_mean(self.learner, scored.values, rewards, rollout, self.context.config)
        values = scored.values
        plain, returns = self._estimate(step, rollout, rewards, values)
        moments, of_returns, of_errors = algo.all_moments(
            self.group.all_gather, [plain, returns, returns - values]
        )
        white = algo.whiten(plain, moments) if ppo.whiten else plain
        figures = {
            "critic/score": scored.totals,
            "critic/rewards": rollout.sums(rewards),
            "critic/advantages": plain,
            "critic/returns": returns,
        }
        if self.learner:
            figures["critic/values"] = values
        if self.learner and self.context.config.has_env:
            figures["critic/turn_values"] = values[rollout.turn_starts()]
        extra = {f"critic/{name}": torch.tensor(of_rows) for name, of_rows in scored.extra.items()}
        metrics = summaries(extra | figures, self.group)
        never = step == self.context.config.steps and not self.past_scores.count
        self.failing, failed = count_failures(
            self.group, self.failing, len(rollout.rows), scored.failures, never=never
        )
        metrics |= failed
        kept = {"advantage": plain, "reward": rewards}
        if self.learner:
            kept["value"] = values
            metrics["critic/vf_explained_var"] = algo.explained_variance(of_returns, of_errors)
            metrics |= quality(
                rollout, values, rewards, ppo.gamma, self.group, cut=not ppo.mask_truncated
            )
        if bounds := self.context.config.value.range:
            check_range(metrics["critic/returns/min"], metrics["critic/returns/max"], *bounds)
        metrics |= {"critic/kl_coef": kl_coef, "critic/kl_row": kl_sum / rows}
        metrics |= {"critic/ref_kl": kl_sum / tokens} if refs else {}
        return Estimate(white, returns, metrics, waits, kept)

    def _estimate(
        self, step: int, rollout: Rollout, rewards: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Advantages, and the value model's targets or, without one, rewards-to-go; all `[N]`."""
        ppo = self.context.config.ppo
        lengths = rollout.episode_lengths
        if not self.learner:
            returns, _ = algo.gae(rewards, values, lengths, gamma=ppo.gamma, lam=1.0)
            return returns - self._baseline(rollout, returns).to(returns.dtype), returns
        lam = algo.adaptive_lambda(lengths, ppo.lam_alpha) if ppo.lam == "adaptive" else ppo.lam
        lam_value = lam if ppo.lam_value is None else ppo.lam_value
        if self.pretraining.runs(step):
            lam_value = 1.0
        estimate = partial(algo.gae, rewards, lengths=lengths, gamma=ppo.gamma)
        advantages, returns = estimate(values, lam=lam_value)
        same = lam is lam_value if isinstance(lam, Tensor) else lam == lam_value
        return advantages if same else estimate(values, lam=lam)[0], returns

    def _baseline(self, rollout: Rollout, returns: Tensor) -> Tensor:
        """What stands for values where there are none; `[N]`, and so are `returns`."""
        config = self.context.config
        samples = config.rollout.samples
        turns = rollout.turns()
        (count,) = self.group.all_max([max(turns.tolist(), default=0) + 1])
        # without a window, a step's rows are those of its slots
        streams = Streams(config.rollout.batch_size, samples)
        slot_prompts = [streams.slot_prompt(row) for row in rollout.rows]
        return algo.turn_baseline(
            returns,
            turns,
            rollout.episode_lengths,
            count=count,
            all_sum=self.group.all_sum,
            prompts=torch.tensor(slot_prompts).long() if config.ppo.baseline == "group" else None,
            shape=(config.rollout.batch_size // samples, samples),
        )

    def _shape(self, scored: ScoredRows) -> tuple[Tensor, Tensor]:
        """The rows' whole scores that become rewards: normalised, clipped, less penalties; `[B]`.
        And what of them are turns' rewards, each at its turn's last token; `[N]`."""
        config = self.context.config
        rollout = scored.rollout
        # their scores are no sample of the others' distribution
        failed = {row for row, _ in scored.failures}
        failed |= {episode.row for episode in rollout.episodes if episode.end == "failed"}
        counted = torch.tensor([row not in failed for row in rollout.rows], dtype=torch.bool)
        (batch,) = algo.all_moments(self.group.all_gather, [scored.totals[counted]])
        self.past_scores = algo.merge_moments([self.past_scores, batch])
        moments = batch if config.reward.normalize == "batch" else self.past_scores
        shaped = shape_scores(
            scored.totals,
            rollout.episode_lengths,
            [episode.truncated for episode in rollout.episodes],
            moments,
            config.reward,
            max_new_tokens=config.rollout.max_new_tokens,
            centered=not config.has_env,
        )
        scale = 1.0 if config.reward.normalize == "off" else float(spread_of(moments))
        return shaped, rollout.turn_rewards() / scale

    def close(self) -> None:
        """Ends the rewards' processes."""
        self.decoder.shutdown()
        self.scorer.close()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the learner."""
        return {
            "kl_coef": self.kl.coef,
            "scores": [float(part) for part in vars(self.past_scores).values()],
            "scored_by": self.scored_by[0],
            "failing": self.failing,
            "pretraining": self.pretraining.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned; a KL coefficient that does not adapt is the
        configuration's, and moments of another reward's scores are left out."""
        if self.kl.target is not None:
            self.kl.coef = state["kl_coef"]
        if state.get("scored_by", self.scored_by[0]) in self.scored_by:
            self.past_scores = algo.Moments(*torch.tensor(state["scores"], dtype=torch.float64))
        self.failing = state.get("failing", {})  # of older checkpoints: none
        self.pretraining.load_state(state.get("pretraining", self.pretraining.state()))

    def update(self, plan: StepPlan, scored: ScoredRows, found: Estimate) -> dict[str, Any]:
        """The value model's update; returns its metrics."""
        if not self.learner:
            return {"optimizer_steps": []}
        ppo = self.context.config.ppo
        rows = scored.rollout
        count = ppo.value_mini_batches or ppo.mini_batches
        mini_batches = trainable_rows(
            self.context.config, plan, rows, "critic", self.group.dp_rank, count
        )
        epochs = ppo.value_epochs or ppo.epochs
        if self.pretraining.runs(plan.step):
            epochs = self.context.config.value.pretrain_epochs
        columns = _columns(scored.values, found.returns)
        figures = self.learner.update(
            rows, mini_batches, columns, self._objective, step=plan.step, epochs=epochs
        )
        self.pretraining.finish(plan.step, found.metrics.get("critic/vf_explained_var"))
        metrics = learning_metrics("critic", "vf_loss", figures, ["vf_clipfrac", "vpred_mean"])
        return metrics | {"critic/lr": self.learner.learning_rate(plan.step)}

    def samples(self, step: int, scored: ScoredRows, found: Estimate) -> list[dict[str, Any]]:
        """This rank's first rows, as they are written to the run's folder. `Run.write_samples`
        calls it in a thread."""
        context = self.context
        episodes = scored.rollout.episodes
        tokens = token_figures(scored.rollout, found.figures, context.decode)
        rows = zip(episodes, scored.totals.tolist(), tokens, strict=True)
        return [
            record(context, step, context.prompt(episode.row), episode, score, figures)
            for episode, score, figures in islice(rows, context.config.log.samples)
        ]

    def _objective(
        self, model: nn.Module, batch: MicroBatch, columns: Fields
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ppo = self.context.config.ppo
        if bounds := self.context.config.value.range:
            return algo.bounded_value_loss(
                head_outputs(model, batch),
                columns["returns"],
                batch.lengths,
                bounds=bounds,
                aggregate=ppo.aggregate,
            )
        return algo.value_loss(
            value_outputs(model, batch),
            columns["old"],
            columns["returns"],
            batch.lengths,
            clip=ppo.value_clip,
            aggregate=ppo.aggregate,
        )


def _columns(values: Tensor, returns: Tensor) -> Fields:
    """What `Critic._objective` reads of each token, `[N]` by name."""
    return {"old": values, "returns": returns}


def _outputs(model: nn.Module, batch: MicroBatch) -> list[Tensor]:
    return [value_outputs(model, batch)]


def join(parts: Sequence[ScoredRows]) -> ScoredRows:
    """The chunks of a step as one."""
    rollout = Rollout(episode for part in parts for episode in part.rollout.episodes)
    places = rollout.places(row for part in parts for row in part.rollout.rows)

    def packed(tensors: Sequence[Tensor]) -> Tensor:
        pieces = [
            piece for part, x in zip(parts, tensors, strict=True) for piece in part.rollout.split(x)
        ]
        return pack(pieces, places)

    scores = torch.cat([part.scores for part in parts])[torch.tensor(places).long().argsort()]
    extra = {
        name: [figure for part in parts for figure in part.extra.get(name, [])]
        for name in dict.fromkeys(name for part in parts for name in part.extra)
    }
    failures = [failure for part in parts for failure in part.failures]
    refs = [part.ref for part in parts if part.ref is not None]
    values = packed([part.values for part in parts])
    return ScoredRows(rollout, values, scores, extra, failures, packed(refs) if refs else None)
