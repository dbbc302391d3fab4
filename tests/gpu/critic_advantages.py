"""Advantages of critic_block.py's arms, for `--ppo.advantages` (docs/parts.md)."""

import torch
from torch import Tensor


def rewards_to_go(rewards: Tensor, lengths: Tensor) -> Tensor:
    """`[N]` float64."""
    rows = [row.double().flip(0).cumsum(0).flip(0) for row in rewards.split(lengths.tolist())]
    return torch.cat(rows)


def first_tokens(lengths: Tensor) -> Tensor:
    """`[B]`: where each row's tokens begin in the packed ones."""
    return lengths.cumsum(0) - lengths


def class_means(x: Tensor, classes: Tensor) -> Tensor:
    """Mean of x `[K]` over each one's class, `[K]` float64; classes are int64 from 0."""
    count = int(classes.max()) + 1
    total = torch.zeros(count, dtype=torch.float64).index_add_(0, classes, x.double())
    return (total / torch.bincount(classes, minlength=count).clamp(min=1))[classes]


def positive(rewards: Tensor, lengths: Tensor, **_: Tensor) -> Tensor:
    """The score less the batch's mean, by its deviation, where that is above 0: tokens of negative
    advantage have no part (negative token filtering, arXiv:2606.17250). `ppo.whiten` is off: it
    would shift what is 0."""
    scores = rewards_to_go(rewards, lengths)[first_tokens(lengths)]
    advantages = (scores - scores.mean()) / (scores.std(correction=0) + 1e-8)
    return advantages.clamp(min=0).repeat_interleave(lengths).float()


def fused(rewards: Tensor, values: Tensor, lengths: Tensor, prompts: Tensor, **_: Tensor) -> Tensor:
    """The score less a mean of the prompt's scores and of what the value model says at the first
    token. The value's weight is that of the least squared error: e / (e + bias^2), with e the
    mean's squared error, and bias^2 the squared difference of the two, less e, not below 0.

    After V0.5 (arXiv:2603.10848) as its abstract tells: there the value model is not trained with
    the policy, and prompts whose mean contradicts it get more responses; neither is here.
    """
    first = first_tokens(lengths)
    scores = rewards_to_go(rewards, lengths)[first]
    classes = prompts.unique(return_inverse=True)[1]
    mean = class_means(scores, classes)
    prior = class_means(values[first], classes)
    rows = torch.bincount(classes)[classes]
    error = class_means((scores - mean).square(), classes) / (rows - 1).clamp(min=1)
    bias = ((mean - prior).square() - error).clamp(min=0)
    weight = error / (error + bias).clamp(min=1e-12)
    baseline = weight * prior + (1 - weight) * mean
    return (scores - baseline).repeat_interleave(lengths).float()


def of_prompt(rewards: Tensor, values: Tensor, lengths: Tensor, **_: Tensor) -> Tensor:
    """Rewards-to-go less what the prompt tells of them: at each position, the line through this
    step's returns by the value of the row's first token (least squares). So the value model counts
    for what it knows before the response, and for nothing that it sees in it."""
    returns = rewards_to_go(rewards, lengths)
    position = torch.cat([torch.arange(length) for length in lengths.tolist()])
    known = values[first_tokens(lengths)].double().repeat_interleave(lengths)
    x = known - class_means(known, position)
    y = returns - class_means(returns, position)
    spread = class_means(x * x, position)
    slope = class_means(x * y, position) / spread.clamp(min=1e-12)
    return (y - torch.where(spread > 1e-12, slope, 0.0) * x).float()
