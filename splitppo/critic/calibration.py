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
        `critic/vf_explained_var`: 1 - var(reward-to-go - value) / var(reward-to-go) over all
        tokens; 0 where these rewards don't vary. Both are around their means at the same token of
        the same turn: else values that know how far a row has come, and no more, would explain a
        part, where rewards come on the way or length depends on success.
        `critic/explained/PLACE`: the same over the tokens there. Places: `first`, a row's first
        token; `token_K` for K = 2, 4, 8 and so on, tokens K to 2 K - 1; with several turns,
        `turn_K`, the tokens of turn K, up to the 8th. A place counts from a row's beginning, since
        a part of its length would tell how it ends. `critic/first_value_error`: mean of value less
        reward-to-go at the first token.
    """
    lengths = rollout.episode_lengths
    targets = algo.rewards_to_go(rewards, lengths, gamma=gamma)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    rows = torch.tensor([cut or not e.is_unfinished for e in rollout.episodes], dtype=torch.bool)
    # an update will say what is wrong with values that are not finite
    counted = rows.repeat_interleave(sizes) & values.isfinite()
    errors = targets - values
    centred = _centred(rollout, [targets, errors], counted, group)
    masks = {"critic/vf_explained_var": torch.ones_like(counted)}
    masks |= {f"critic/explained/{place}": at for place, at in places(rollout, group).items()}
    figures = [x[counted & at] for at in masks.values() for x in centred]
    first = errors[counted & masks["critic/explained/first"]]
    *moments, of_first = algo.all_moments(group.all_gather, [*figures, first])
    metrics: dict[str, Any] = {
        name: algo.explained_variance(target, error)
        for name, target, error in zip(masks, moments[::2], moments[1::2], strict=True)
    }
    return metrics | {"critic/first_value_error": -float(of_first.mean)}


def _centred(
    rollout: Rollout, figures: list[Tensor], counted: Tensor, group: Group
) -> list[Tensor]:
    """The figures `[N]`, less their means over the counted tokens, of all ranks, that are as far
    from the row's beginning in the same turn (from turn TURNS on: in any of these)."""
    position = torch.cat([torch.zeros(0).long(), *map(torch.arange, rollout.episode_lengths)])
    turn = rollout.turns().clamp(max=TURNS - 1)
    longest, most = group.all_max([max(x.tolist(), default=-1) + 1 for x in (position, turn)])
    columns = torch.stack([torch.ones_like(figures[0]), *figures])[:, counted].double()
    place = turn * longest + position
    sums = columns.new_zeros(len(columns), most * longest)
    rows, *totals = group.all_sum(sums.index_add_(1, place[counted], columns))
    means = [total / rows.clamp(min=1) for total in totals]
    return [x - mean[place] for x, mean in zip(figures, means, strict=True)]


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
