"""From scores to advantages, on packed tokens: those that the policy sampled, one row after
another, with the rows' `lengths`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]

_ALIKE = 1e-12  # variance of targets that are alike but for rounding
# nats; a log-ratio is clamped to this on either side before its exponential is taken
LOG_RATIO = 20.0
ROUNDING = 8 * torch.finfo(torch.float32).eps  # of a few operations, relative to their operands


def check_shapes(axes: int, **tensors: Tensor) -> None:
    """Refuse tensors that are not of one shape: broadcasting `[B]` against `[B, T]` would be silent
    and wrong."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != axes for shape in shapes.values()):
        raise ValueError(f"want tensors of one shape with {axes} axes, got {shapes}")


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamps to `LOG_RATIO` on either side, so that a ratio beyond e^20, which is a defect, does
    not become inf. Clamped values have no gradient."""
    return log_ratio.clamp(-LOG_RATIO, LOG_RATIO)


@dataclass(frozen=True)
class Moments:
    """Count, mean and unbiased variance of some tokens: 0-d float64 tensors. Without tokens the
    mean is 0; with fewer than two the variance is 0."""

    count: Tensor
    mean: Tensor
    variance: Tensor


@torch.no_grad()
def moments(x: Tensor) -> Moments:
    """Moments of `x` `[N]`, by two passes in float64."""
    check_shapes(1, x=x)
    wide = x.double()
    count = torch.tensor(float(len(x)), dtype=torch.float64)
    mean = wide.sum() / count.clamp(min=1)
    squares = (wide - mean).square().sum()
    return Moments(count, mean, squares / (count - 1).clamp(min=1))


def merge_moments(parts: Sequence[Moments]) -> Moments:
    """Moments of all the tokens of the parts: the squares inside them plus the squares between them
    (Chan, Golub & LeVeque 1979, "Updating formulae"). Raises ValueError when there is no part."""
    columns = zip(*((part.count, part.mean, part.variance) for part in parts), strict=True)
    counts, means, variances = map(torch.stack, columns)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    within = ((counts - 1).clamp(min=0) * variances).sum()
    between = (counts * (means - mean).square()).sum()
    return Moments(count, mean, (within + between) / (count - 1).clamp(min=1))


def all_moments(
    all_gather: Callable[[list[list[float]]], list[Any]], figures: Sequence[Tensor]
) -> list[Moments]:
    """Moments of each tensor over all ranks. `all_gather` returns each rank's list, in the order of
    the ranks. Every rank passes the same number of tensors."""
    parts = all_gather(
        [[float(m.count), float(m.mean), float(m.variance)] for m in map(moments, figures)]
    )
    wide = torch.tensor(parts, dtype=torch.float64)  # [ranks, figures, 3]
    return [merge_moments([Moments(*part) for part in wide[:, i]]) for i in range(len(figures))]


def explained_variance(targets: Moments, errors: Moments) -> float:
    """`1 - var(target - value) / var(target)`; 0 if the targets differ only by rounding."""
    spread = float(targets.variance)
    return 1 - float(errors.variance) / spread if spread > _ALIKE else 0.0


@torch.no_grad()
def whiten(x: Tensor, over: Moments | None = None) -> Tensor:
    """`(x - mean) * rsqrt(variance + 1e-8)`; 0 for a single token.

    `x`: `[N]`. `over`: statistics over more tokens than these, as for a batch spread over ranks.
    Returns `x`'s dtype, without gradient, since advantages are constants in the policy's loss.
    """
    stats = moments(x) if over is None else over
    return ((x.double() - stats.mean) * torch.rsqrt(stats.variance + 1e-8)).to(x.dtype)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, in nats; any one shape, `[N]` or
    `[B, T]`.

    With `r = ref / policy`, the ratio of the probabilities (Schulman 2020): `k1` = -log r,
    unbiased, may be negative; `k2` = (log r)^2 / 2, biased, low variance; `k3` = r - 1 - log r,
    unbiased and never negative. `k3` is that of the clamped log r, and has no gradient where it is
    clamped (`clamp_log_ratio`). Gradient flows into `logprobs` only. Both must be finite
    everywhere, padding included, if a gradient is taken.
    """
    check_shapes(logprobs.dim(), logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_r = ref_logprobs.detach() - logprobs
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return 0.5 * log_r.square()
    # expm1: near log_r = 0, exp(log_r) - 1 would lose the digits that the estimate consists of.
    return torch.expm1(clamped := clamp_log_ratio(log_r)) - clamped


def _sizes(lengths: Sequence[int], *packed: Tensor) -> Tensor:
    """The lengths `[B]`, as int64. Raises ValueError unless each of the packed tensors has as many
    tokens."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    tokens = int(sizes.sum())
    if any(x.shape != (tokens,) for x in packed):
        shapes = [tuple(x.shape) for x in packed]
        raise ValueError(
            f"want tensors of one shape, ({tokens},) for rows of these lengths, got {shapes}"
        )
    return sizes


def adapt_kl_coef(
    coef: float, kl: float, rows: float, *, target: float | None, horizon: int
) -> float:
    """The KL coefficient of the next step (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).
    `kl`: this step's mean KL of a row, summed over its tokens, in nats. Without a target the
    coefficient stays."""
    error = 0.0 if target is None else min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * rows / horizon)


@torch.no_grad()
def token_rewards(scores: Tensor, kl: Tensor, lengths: Sequence[int], *, kl_coef: float) -> Tensor:
    """Reward of each token `[N]`: `-kl_coef * kl`, plus the row's score at its last token (a row
    may have no token). `scores`: `[B]`, in the reward's unit. `kl`: `[N]`."""
    sizes = _sizes(lengths, kl)
    if scores.shape != sizes.shape:
        raise ValueError(f"want one score a row, {tuple(sizes.shape)}, got {tuple(scores.shape)}")
    last = sizes.cumsum(0) - 1
    return (kl * -kl_coef).index_add_(0, last[sizes > 0], scores[sizes > 0].to(kl.dtype))


def adaptive_lambda(lengths: Sequence[int], alpha: float) -> Tensor:
    """Length-adaptive lambda (Yue et al. 2025, VAPO), `[B]`: `max(0, 1 - 1 / (alpha * l))` for a
    row of l tokens, 0 for a row without tokens."""
    return (1 - 1 / (alpha * torch.tensor(lengths, dtype=torch.int64))).clamp(min=0)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, lengths: Sequence[int], *, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: Schulman et al. 2016, eq. 16; `(advantages, returns)`.

    `rewards`, `values`: `[N]` on the CPU; a value is that of the state before its token. `gamma`
    and `lam` lie in [0, 1]; `lam` may be `[B]`, one per row. The value after a row's last token is
    0: every row ends there, without bootstrapping. A residual within float32's rounding of reward
    and value is 0. Returns are advantages + values, the targets of the value model. Both `[N]`,
    without gradient.

    The recursion runs back in time over all rows at once. Tokens are sorted by time, and within a
    time by the length of their rows, longest first. So the tokens of one time are neighbours, and
    nothing is padded.
    """
    sizes = _sizes(lengths, rewards, values)
    ends = sizes.cumsum(0)
    next_value = values.roll(-1).index_fill_(0, (ends - 1)[sizes > 0], 0.0)
    residual = rewards + gamma * next_value - values
    size = torch.maximum(rewards.abs(), values.abs())
    # else whitening and AdamW would make full steps of rounding where every reward is alike
    residual[residual.abs() < ROUNDING * size] = 0.0
    order = sizes.argsort(descending=True, stable=True)
    time = torch.arange(len(values)) - (ends - sizes).repeat_interleave(sizes)
    # rows with a token at each time
    active = len(sizes) - torch.bincount(sizes, minlength=1).cumsum(0)[:-1]
    begins = active.cumsum(0) - active
    place = begins[time] + order.argsort().repeat_interleave(sizes)
    by_time = torch.empty_like(residual).index_copy_(0, place, residual).numpy()
    decay = torch.as_tensor(gamma * lam, dtype=values.dtype).expand(len(sizes))[order].numpy()
    carry = np.zeros(len(sizes), by_time.dtype)
    # numpy: a call of torch on a few numbers takes several times as long, and the longest row needs
    # one for each token
    for first, count in zip(reversed(begins.tolist()), reversed(active.tolist()), strict=True):
        carry[:count] *= decay[:count]
        carry[:count] += by_time[first : first + count]
        by_time[first : first + count] = carry[:count]
    advantages = torch.from_numpy(by_time)[place]
    return advantages, advantages + values


def rewards_to_go(rewards: Tensor, lengths: Sequence[int], *, gamma: float) -> Tensor:
    """The discounted sum of each token's reward and all later ones, `[N]`. `rewards`: `[N]`."""
    return gae(rewards, torch.zeros_like(rewards), lengths, gamma=gamma, lam=1.0)[0]


@torch.no_grad()
def turn_baseline(
    returns: Tensor, turns: Tensor, lengths: Sequence[int], *, count: int,
    all_sum: Callable[[Tensor], Tensor], prompts: Tensor | None, shape: tuple[int, int],
) -> Tensor:  # fmt: skip
    """A baseline without a value model: the mean over rows of the reward-to-go at the first token
    of the token's turn; `[N]` float64.

    The mean is over the batch's rows that have the turn. With `prompts` it is over the prompt's
    other rows, where a row without the turn counts as 0, since its episode has ended.

    Args:
        returns: `[N]`, rewards-to-go.
        turns: `[N]` int64, each token's turn, below `count`.
        all_sum: sums a tensor over the parts of the batch.
        prompts: `[B]` int64, each row's prompt. None: the mean is over the batch.
        shape: (prompts, rows per prompt, at least 2) of the whole batch, used with `prompts`.
    """
    sizes = _sizes(lengths, returns, turns)
    row = torch.arange(len(sizes)).repeat_interleave(sizes)
    begins = (row * count + turns).diff(prepend=torch.tensor([-1])) > 0
    first = returns[begins].double()
    place = turns if prompts is None else prompts[row] * count + turns
    places = count if prompts is None else count * shape[0]
    sums = first.new_zeros(2, places)
    sums.index_add_(1, place[begins], torch.stack([first, torch.ones_like(first)]))
    total, rows = all_sum(sums)[:, place]
    if prompts is None:
        return total / rows
    return (total - first[begins.cumsum(0) - 1]) / (shape[1] - 1)
