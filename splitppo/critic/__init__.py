"""What a rank of the critic group holds, and its verbs in the loops of train.py."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from splitppo import algo
from splitppo.context import Context
from splitppo.critic.baselines import Baseline, Estimate
from splitppo.critic.calibration import summaries
from splitppo.critic.teacher import Teacher
from splitppo.job.collectives import Group
from splitppo.models.batching import dummy_rollout
from splitppo.models.runner import Reference
from splitppo.placement import StepPlan
from splitppo.rewards.model import RewardModel
from splitppo.rewards.samples import record, token_figures
from splitppo.rewards.scorer import (
    Failure,
    Pending,
    Scored,
    Scorer,
    beyond_float32,
    count_failures,
    to_score,
)
from splitppo.rewards.shaping import place_spans, shape_scores, spread_of
from splitppo.rollout import Rollout, add_turn_rewards, digest
from splitppo.rollout.wire import pack


@dataclass(frozen=True)
class ScoredRows:
    """What is known of rows before their log-probs.

    Attributes:
        values: `[N]`, 0 without a value model.
        scores: `[B]`, raw.
        extra: further figures by name, `[B]` each; those of reward functions begin with `reward/`.
        failures: (row, failure of its reward).
        refs: the reference's log-probs `[N]`, if the critic group holds it; else empty.
        spans: what of the scores was paid on the way, `[N]`. Where a reward said so of a row,
            `extra` has the number of its `spans`.
        taught: what the teacher says of the tokens (`Teacher.read`).
    """

    rollout: Rollout
    values: Tensor
    scores: Tensor
    extra: dict[str, list[float]]
    failures: list[tuple[int, Failure]]
    refs: Sequence[Tensor] = ()
    spans: Sequence[Tensor] = ()
    taught: Sequence[Tensor] = ()

    @property
    def totals(self) -> Tensor:
        """`[B]`: the scores with the rewards of the turns."""
        return add_turn_rewards(self.scores, self.rollout.episodes)


class Critic:
    """A rank of the critic group: baseline (a value model, if the run has one) and reward. It owns
    scores, values, KL rewards, advantages, whitening."""

    def __init__(
        self,
        context: Context,
        group: Group,
        baseline: Baseline,
        scorer: Scorer,
        reward_model: RewardModel | None,
        reference: Reference | None = None,
        teacher: Teacher | None = None,
    ):
        self.context = context
        self.baseline = baseline
        self.learners = baseline.learners
        self.scorer = scorer
        self.decoder = ThreadPoolExecutor(1, "decode")
        # the first steps, in which the policy waits: the critic alone knows which these are
        self.pretrain_steps = context.config.value.pretrain_steps
        self.reward_model = reward_model
        self.reference = reference
        self.teacher = teacher
        self.group = group
        self.kl_coef = context.config.ppo.kl_coef  # of the next step
        reward = context.named.reward
        scored_by = attrgetter("function", "weights", "model", "model_weight")
        steps = filter(None, (reward.label, reward.steps, reward.step_token))
        # True: as the checkpoints of earlier versions have it
        self.scored_by = digest(*scored_by(reward), True, *steps)
        self.past_scores = algo.moments(torch.zeros(0))  # of all raw scores so far
        # reward function -> rows of each step, to the last, of which none got a score
        self.failing: dict[str, list[int]] = {}

    def warm_up(self) -> None:
        """Compiles what the first step would, while the actor group's engine is being built."""
        self.baseline.warm_up()
        for model in filter(None, (self.teacher, self.reference)):
            model.run(dummy_rollout().episodes)
            model.release_memory()

    def submit(self, step: int, rollout: Rollout) -> Pending:
        """Starts a thread that decodes some rows of a step and starts the reward functions on them.
        They run while the value model does."""
        prompts = map(self.context.prompt, rollout.rows)
        rows = (to_score(self.context, *row) for row in zip(prompts, rollout.episodes, strict=True))
        started = self.decoder.submit(lambda: self.scorer.submit([*rows]))
        return lambda: started.result()()

    def score(self, step: int, rollout: Rollout, pending: Pending) -> ScoredRows:
        """Values and reward scores of some rows of a step; all ranks of the group take part.
        `pending`: what `submit` returned for them."""
        values = self.baseline.values(rollout)
        refs = [self.reference.logprobs(rollout)] if self.reference else []
        taught = self.teacher.read(rollout) if self.teacher else []
        scores = torch.zeros(len(rollout.rows), dtype=torch.float64)
        extra: dict[str, list[float]] = {}
        failures: list[tuple[int, Failure]] = []
        sources: dict[str, list[Scored]] = {}  # by how the names of their figures begin
        if self.reward_model:
            prompts = [self.context.prompt(row) for row in rollout.rows]
            sources[""] = self.reward_model.score(
                prompts, rollout.episodes, self.context.config.reward
            )
        sources["reward/"] = self.group.of_first(pending)
        for prefix, results in sources.items():
            for row, result in zip(rollout.rows, results, strict=True):
                for name, figure in result.figures.items():
                    extra.setdefault(f"{prefix}{name}", []).append(figure)
                failures += [(row, failure) for failure in result.failures]
            scores += torch.tensor([result.score for result in results], dtype=torch.float64)
        paid = [
            [result.spans for result in results if result.spans is not None]
            for results in zip(*sources.values(), strict=True)
        ]
        if counts := [float(sum(map(len, of_row))) for of_row in paid if of_row]:
            extra["spans"] = counts
        spans = [place_spans(rollout, [[*chain(*of_row)] for of_row in paid], self.context.decode)]
        # each part is a float32, and their sum may be none
        totals = add_turn_rewards(scores, rollout.episodes)
        for place in (totals.abs() > torch.finfo(torch.float32).max).nonzero().flatten().tolist():
            failure = beyond_float32("score", float(totals[place]))
            failures.append((rollout.rows[place], failure))
            scores[place] = self.context.config.reward.failed_score
        return ScoredRows(rollout, values, scores.float(), extra, failures, refs, spans, taught)

    def release_models(self) -> None:
        """No more rows in this step: models with `offload` go to host memory until their next
        turn."""
        models = (self.reward_model, self.reference, *self.learners, self.teacher)
        for model in filter(None, models):
            model.release_memory()

    def advantages(self, step: int, scored: ScoredRows, logprobs: Sequence[Tensor]) -> Estimate:
        """KL rewards, the baseline's advantages and whitening of a step's rows.

        Args:
            logprobs: the old ones `[N]`, and the reference's if the actor group holds it. Without a
                reference, the KL is 0.
        """
        rollout = scored.rollout
        old, *refs = [*logprobs, *scored.refs]
        ppo = self.context.config.ppo
        # of all rows that ended in this step, failed and truncated ones too
        kl = algo.kl_estimate(old, refs[0] if refs else old, ppo.kl_kind)
        counts = len(rollout.rows), rollout.tokens, "spans" in scored.extra
        sums = torch.tensor([float(kl.sum()), *map(float, counts)])
        kl_sum, rows, tokens, with_spans = self.group.all_sum(sums).tolist()
        metrics: dict[str, Any] = {"critic/kl_coef": self.kl_coef}
        if not rows:  # none has ended in this step
            nothing = Estimate(torch.zeros(0), torch.zeros(0), metrics)
            return (
                self.teacher.lead(nothing, rollout, old, scored.taught) if self.teacher else nothing
            )
        metrics |= {"critic/kl_row": kl_sum / rows}
        metrics |= {"critic/ref_kl": kl_sum / tokens} if refs else {}
        first = not self.past_scores.count
        # a row would gain by each part that it has or lacks, of whose mean it were less
        centered = not (with_spans or self.context.config.has_env)
        rewards, spans = self._rewards(scored, kl, centered=centered)
        waits = step <= self.pretrain_steps
        if not waits:
            self.kl_coef = algo.adapt_kl_coef(
                self.kl_coef, kl_sum / rows, rows, target=ppo.kl_target, horizon=ppo.kl_horizon
            )
        estimate = self.baseline.estimate(
            rollout, rewards, scored.values, spans=spans, first=first, pretraining=waits
        )
        never = step == self.context.config.steps and not self.past_scores.count
        self.failing, failed = count_failures(
            self.group, self.failing, len(rollout.rows), scored.failures, never=never
        )
        metrics |= failed
        metrics |= self._summaries(scored, rewards, estimate) | estimate.metrics
        (moments,) = algo.all_moments(self.group.all_gather, [estimate.advantages])
        white = algo.whiten(estimate.advantages, moments)
        estimate = replace(
            estimate,
            advantages=white if ppo.whiten else estimate.advantages,
            metrics=metrics,
            columns={"advantage": estimate.advantages, "reward": rewards, **estimate.columns},
            waits=waits,
        )
        return (
            self.teacher.lead(estimate, rollout, old, scored.taught) if self.teacher else estimate
        )

    def _rewards(self, scored: ScoredRows, kl: Tensor, *, centered: bool) -> tuple[Tensor, Tensor]:
        """`[N]`: the rewards of turns, each at its turn's last token; those of spans; at the row's
        last token what is left of the row's whole score; less the KL penalty. The whole score is
        normalised and clipped, less penalties. And of these the rewards of spans."""
        config = self.context.config
        rollout = scored.rollout
        # Failed rows have no real score: leave them out of the moments.
        failed = {row for row, _ in scored.failures}
        failed |= {episode.row for episode in rollout.episodes if episode.end == "failed"}
        with_score = torch.tensor([row not in failed for row in rollout.rows], dtype=torch.bool)
        (batch,) = algo.all_moments(self.group.all_gather, [scored.totals[with_score]])
        self.past_scores = algo.merge_moments([self.past_scores, batch])
        moments = batch if config.reward.normalize == "batch" else self.past_scores
        shaped = shape_scores(
            scored.totals,
            rollout.episode_lengths,
            [episode.truncated for episode in rollout.episodes],
            moments,
            config.reward,
            max_new_tokens=config.rollout.max_new_tokens,
            centered=centered,
        )
        scale = 1.0 if config.reward.normalize == "off" else float(spread_of(moments))
        spans = sum(scored.spans, torch.zeros(rollout.tokens)) / scale
        paid = rollout.turn_rewards() / scale + spans
        last = shaped - rollout.sums(paid)
        rewards = algo.token_rewards(last, kl, rollout.episode_lengths, kl_coef=self.kl_coef)
        return paid + rewards, spans

    def _summaries(
        self, scored: ScoredRows, rewards: Tensor, estimate: Estimate
    ) -> dict[str, float]:
        """Mean, minimum and maximum of what the rewards said and the baseline estimated."""
        rollout = scored.rollout
        figures = {name: torch.tensor(of_rows) for name, of_rows in scored.extra.items()} | {
            "score": scored.totals,
            "rewards": rollout.sums(rewards),
            "advantages": estimate.advantages,
            "returns": estimate.returns,
        }
        for name, column in estimate.columns.items():
            figures[f"{name}s"] = column
        return summaries({f"critic/{name}": x for name, x in figures.items()}, self.group)

    def close(self) -> None:
        """Ends the rewards' processes."""
        self.decoder.shutdown()
        self.scorer.close()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the learner."""
        return {
            "kl_coef": self.kl_coef,
            "scores": [float(part) for part in vars(self.past_scores).values()],
            "scored_by": self.scored_by,
            "failing": self.failing,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned; a KL coefficient that does not adapt is the
        configuration's, and moments of another reward's scores are left out."""
        if self.context.config.ppo.kl_target is not None:
            self.kl_coef = state["kl_coef"]
        if state["scored_by"] == self.scored_by:
            self.past_scores = algo.Moments(*torch.tensor(state["scores"], dtype=torch.float64))
        self.failing = state["failing"]

    def update(self, plan: StepPlan, scored: ScoredRows, estimate: Estimate) -> dict[str, Any]:
        """The value model's update, if the run has one; returns its metrics."""
        return self.baseline.update(
            plan,
            scored.rollout,
            scored.values,
            estimate.returns,
            pretraining=plan.step <= self.pretrain_steps,
        )

    def samples(self, step: int, scored: ScoredRows, estimate: Estimate) -> list[dict[str, Any]]:
        """This rank's first rows, as they are written to the run's folder. `Run.write_samples`
        calls it in a thread."""
        context = self.context
        episodes = scored.rollout.episodes
        tokens = token_figures(scored.rollout, estimate.columns, context.decode)
        rows = zip(episodes, scored.totals.tolist(), tokens, strict=True)
        return [
            record(context, step, context.prompt(episode.row), episode, score, figures)
            for episode, score, figures in islice(rows, context.config.log.samples)
        ]


def join(parts: Sequence[ScoredRows]) -> ScoredRows:
    """The chunks of a step as one."""
    rollout = Rollout(episode for part in parts for episode in part.rollout.episodes)
    places = rollout.places(row for part in parts for row in part.rollout.rows)

    def packed(tensors: Sequence[Tensor]) -> Tensor:
        pieces = [
            piece for part, x in zip(parts, tensors, strict=True) for piece in part.rollout.split(x)
        ]
        return pack(pieces, places, tensors[0][:0])

    scores = torch.cat([part.scores for part in parts])[torch.tensor(places).long().argsort()]
    extra = {
        name: [figure for part in parts for figure in part.extra.get(name, [])]
        for name in dict.fromkeys(name for part in parts for name in part.extra)
    }
    failures = [failure for part in parts for failure in part.failures]
    values = packed([part.values for part in parts])
    refs = [packed(tensors) for tensors in zip(*(part.refs for part in parts), strict=True)]
    spans = [packed(tensors) for tensors in zip(*(part.spans for part in parts), strict=True)]
    taught = [packed(tensors) for tensors in zip(*(part.taught for part in parts), strict=True)]
    return ScoredRows(rollout, values, scores, extra, failures, refs, spans, taught)
