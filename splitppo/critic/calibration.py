"""How good the value model is, measured against what happened: the rewards-to-go of rows, before it
was trained on them. Not against its own targets: with a small lambda these are mostly its own
values. docs/critic.md says how to read these figures.
"""

from typing import Any

import torch
from torch import Tensor

from splitppo import algo
from splitppo.job.collectives import Group
from splitppo.rollout import Rollout

TURNS = 8  # with figures of their own


def quality(
    rollout: Rollout, values: Tensor, rewards: Tensor, gamma: float, group: Group, *, cut: bool
) -> dict[str, Any]:
    """Metrics of the whole batch; all ranks of the group call it. `values`, `rewards`: `[N]`.
    `cut`: unfinished rows count, too: the value model learns from them.

    Returns:
        `critic/explained/PLACE`: 1 - var(reward-to-go - value) / var(reward-to-go) over the tokens
        there; 0 where these rewards don't vary. Places: `first`, a row's first token; `token_K` for
        K = 2, 4, 8 and so on, tokens K to 2 K - 1; with several turns, `turn_K`, the tokens of
        turn K, up to the 8th. A place counts from a row's beginning, since a part of its length
        would tell how it ends. `critic/vf_explained_var`: the same over all tokens, with variances
        around the means at `first` and each `token_K`: else values that know a token's place and no
        more would explain a part, where rewards come on the way or length depends on success.
        `critic/first_value_error`: mean of value less reward-to-go at the first token.
    """
    lengths = rollout.episode_lengths
    targets = algo.rewards_to_go(rewards, lengths, gamma=gamma)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    rows = torch.tensor([cut or not e.is_unfinished for e in rollout.episodes], dtype=torch.bool)
    # an update will say what is wrong with values that are not finite
    counted = rows.repeat_interleave(sizes) & values.isfinite()
    errors = targets - values
    masks = places(rollout, group)
    figures = [x[counted & mask] for mask in masks.values() for x in (targets, errors)]
    moments = algo.all_moments(group.all_gather, figures)
    metrics: dict[str, Any] = {
        f"critic/explained/{place}": algo.explained_variance(target, error)
        for place, target, error in zip(masks, moments[::2], moments[1::2], strict=True)
    }
    metrics["critic/first_value_error"] = -float(moments[1].mean)  # `first` comes first
    tokens = moments[: 2 * sum(not place.startswith("turn") for place in masks)]
    inside = [algo.Moments(part.count, 0 * part.mean, part.variance) for part in tokens]
    every = map(algo.merge_moments, (inside[::2], inside[1::2]))
    return metrics | {"critic/vf_explained_var": algo.explained_variance(*every)}


def places(rollout: Rollout, group: Group) -> dict[str, Tensor]:
    """Place of a row, as `quality` counts them -> whether a token is there, `[N]`; the same places
    on all ranks of the group, which all call it."""
    position = torch.cat([torch.zeros(0).long(), *map(torch.arange, rollout.episode_lengths)])
    octave = (position + 1).double().log2().long()
    turn = rollout.turns()
    longest = [int(place.max()) + 1 if len(place) else 0 for place in (octave, turn)]
    octaves, most = group.all_max(longest)
    masks = {f"token_{2**k}" if k else "first": octave == k for k in range(octaves)}
    if most > 1:
        masks |= {f"turn_{k + 1}": turn == k for k in range(min(most, TURNS))}
    return masks


def summaries(figures: dict[str, Tensor], group: Group) -> dict[str, float]:
    """Mean, minimum and maximum over the whole batch of figures that each rank has for its
    rows."""
    parts = {
        name: [float(len(x)), *map(float, (algo.moments(x).mean, x.min(), x.max()))]
        for name, x in figures.items()
        if len(x)
    }
    gathered = group.all_gather(parts)
    metrics = {}
    for name in dict.fromkeys(name for part in gathered for name in part):
        counts, means, lows, highs = torch.tensor(
            [part[name] for part in gathered if name in part], dtype=torch.float64
        ).T
        metrics |= {
            f"{name}/mean": float((counts * means).sum() / counts.sum()),
            f"{name}/min": float(lows.min()),
            f"{name}/max": float(highs.max()),
        }
    return metrics
