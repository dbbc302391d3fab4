"""How good the value model is, measured against the scores of rows that ended by themselves (docs/critic.md)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from splitppo import algo
from splitppo.config import Config
from splitppo.job.collectives import Group
from splitppo.rollout import Rollout

BINS = 10
PLACES = ("first", "third_1", "third_2", "third_3")  # the first token, and thirds of the response


def outcomes(rollout: Rollout, scores: Tensor, gamma: float) -> Tensor:
    """`[N]` the score of each token's row, discounted to the token; NaN in rows that were cut. `scores`: `[B]`."""
    rows = zip(scores.tolist(), rollout.samples, rollout.lengths, strict=True)
    parts = [
        torch.full((length,), torch.nan if sample.truncated else score) * gamma ** torch.arange(length).flip(0)
        for score, sample, length in rows
    ]
    return torch.cat([torch.zeros(0), *parts])


def quality(rollout: Rollout, values: Tensor, scores: Tensor, gamma: float, group: Group) -> dict[str, Any]:
    """Metrics of the whole batch; all ranks of the group call it. `values`: `[N]`. `scores`: `[B]`, as they become
    rewards. They are: explained variance of the outcomes at each place; mean of value less outcome at the first token;
    for ten ranges of the values, equally wide, tokens, mean value, mean outcome."""
    targets = outcomes(rollout, scores, gamma)
    ended = ~targets.isnan() & values.isfinite()  # an update will say what is wrong
    where = torch.cat([torch.zeros(0), *(torch.arange(n) / n for n in rollout.lengths)])
    third = (where * 3).long()
    masks = [ended & (where == 0), *(ended & (third == i) for i in range(3))]
    figures = [algo.moments(x[None], mask[None]) for mask in masks for x in (targets, targets - values)]
    whole = group.all_moments(figures)
    explained = {}
    for place, target, error in zip(PLACES, whole[::2], whole[1::2], strict=True):
        explained[f"critic/explained/{place}"] = algo.explained_variance(target, error)
    explained["critic/first_value_error"] = -float(whole[1].mean)
    return explained | {"critic/calibration": _calibration(values[ended], targets[ended], group)}


def _calibration(values: Tensor, targets: Tensor, group: Group) -> list[dict[str, float]]:
    """Tokens, mean value and mean outcome of each range that holds a token, lowest values first."""
    gathered = group.all_gather([float(values.min()), float(values.max())] if len(values) else [])
    ends = [end for part in gathered for end in part]
    low, high = min(ends, default=0.0), max(ends, default=0.0)
    place = ((values - low) / max(high - low, 1e-12) * BINS).long().clamp(max=BINS - 1)
    sums = torch.zeros(3, BINS, dtype=torch.float64)
    for line, x in zip(sums, (torch.ones_like(values), values, targets), strict=True):
        line.index_add_(0, place, x.double())
    bins = group.all_sum(sums.flatten()).view(3, BINS).T.tolist()
    return [{"tokens": n, "value": value / n, "score": target / n} for n, value, target in bins if n]


class Pretraining:
    """The steps before the first policy update, in which only the value model is trained.

    Plain warm-up (`ppo.critic_warmup`) trains the value model as in all other steps. Pretraining
    (`value.pretrain_steps`; Yuan et al. 2025, VC-PPO, section 4.1) has targets with lambda 1 and epochs of its own, and
    ends early when the explained variance on fresh rows stops rising. Then all ranks of the group call `save`.
    """

    def __init__(self, config: Config, save: Callable[[], object]):
        self.value, self.warmup, self.save = config.value, config.ppo.critic_warmup, save
        self.ended = False
        self.best, self.stale = float("-inf"), 0  # highest explained variance, steps since then

    def policy_waits(self, step: int) -> bool:
        """Whether the policy is not updated in this step."""
        return step <= self.warmup or self.runs(step)

    def runs(self, step: int) -> bool:
        """Whether this is a step of pretraining."""
        return step <= self.value.pretrain_steps and not self.ended

    def finish(self, step: int, returns: algo.Moments, errors: algo.Moments) -> None:
        """After the value model's update. `returns`: over the step's tokens, the value model's targets. `errors`: these
        less the values that the model had before it was trained on the rows."""
        if not self.runs(step):
            return
        if returns.count:  # rows have ended in this step
            explained = algo.explained_variance(returns, errors)
            self.stale = 0 if explained > self.best else self.stale + 1
            self.best = max(self.best, explained)
        if step == self.value.pretrain_steps or 0 < self.value.pretrain_patience <= self.stale:
            self.ended = True
            self.save()

    def state(self) -> dict[str, Any]:
        return {"ended": self.ended, "best": self.best if self.best > float("-inf") else None, "stale": self.stale}

    def load_state(self, state: dict[str, Any]) -> None:
        self.ended, self.stale = state["ended"], state["stale"]
        self.best = float("-inf") if state["best"] is None else state["best"]
