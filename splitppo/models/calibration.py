"""How good the value model is, measured against what happened: the scores of rows that ended by
themselves.

Explained variance against the value model's own targets flatters it: with a small lambda the
targets are mostly its own values. docs/critic.md says how to read these figures.
"""

from typing import Any

import torch
from torch import Tensor

from splitppo import algo
from splitppo.job.collectives import Group
from splitppo.rollout import Rollout

BINS = 10
PLACES = ("first", "third_1", "third_2", "third_3")  # the first token, and thirds of the response


def outcomes(rollout: Rollout, scores: Tensor, gamma: float) -> Tensor:
    """`[N]` the score of each token's row, discounted to the token; NaN in rows that were cut.
    `scores`: `[B]`."""
    sizes = torch.tensor(rollout.lengths, dtype=torch.int64)
    cut = torch.tensor([episode.truncated for episode in rollout.episodes], dtype=torch.bool)
    left = (
        sizes.cumsum(0).repeat_interleave(sizes) - 1 - torch.arange(rollout.tokens)
    )  # tokens after each
    return scores.masked_fill(cut, torch.nan).repeat_interleave(sizes) * gamma**left


def quality(
    rollout: Rollout, values: Tensor, scores: Tensor, gamma: float, group: Group
) -> dict[str, Any]:
    """Metrics of the whole batch; all ranks of the group call it. `values`: `[N]`. `scores`: `[B]`,
    as they become rewards.

    Returns:
        `critic/explained/PLACE` for the first token and each third of the response: 1 - var(score -
        value) / var(score) over the tokens there; 0 where scores don't vary.
        `critic/first_value_error`: mean of value less score at the first token.
        `critic/calibration`: for ten ranges of the values, equally wide, tokens, mean value, mean
        score.
    """
    targets = outcomes(rollout, scores, gamma)
    ended = ~targets.isnan() & values.isfinite()  # an update will say what is wrong
    sizes = torch.tensor(rollout.lengths, dtype=torch.int64)
    begins = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    where = (torch.arange(rollout.tokens) - begins) / sizes.repeat_interleave(sizes)
    masks = [ended & (where == 0), *(ended & ((where * 3).long() == i) for i in range(3))]
    errors = targets - values
    whole = group.all_moments([algo.moments(x[mask]) for mask in masks for x in (targets, errors)])
    explained = {
        f"critic/explained/{place}": algo.explained_variance(target, error)
        for place, target, error in zip(PLACES, whole[::2], whole[1::2], strict=True)
    }
    return explained | {
        "critic/first_value_error": -float(whole[1].mean),
        "critic/calibration": _calibration(values[ended], targets[ended], group),
    }


def _calibration(values: Tensor, targets: Tensor, group: Group) -> list[dict[str, float]]:
    """Tokens, mean value and mean outcome of each range that holds a token, lowest values first."""
    own = [float(values.min()), float(values.max())] if len(values) else []
    ends = [end for part in group.all_gather(own) for end in part]
    low = min(ends, default=0.0)
    high = max(ends, default=0.0)
    place = ((values - low) / max(high - low, 1e-12) * BINS).long().clamp(max=BINS - 1)
    sums = torch.zeros(3, BINS, dtype=torch.float64)
    for line, x in zip(sums, (torch.ones_like(values), values, targets), strict=True):
        line.index_add_(0, place, x.double())
    bins = group.all_sum(sums.flatten()).view(3, BINS).T.tolist()
    return [
        {"tokens": n, "value": value / n, "score": target / n} for n, value, target in bins if n
    ]
