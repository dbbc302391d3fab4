"""The maths of PPO as pure functions on tensors: nothing here knows a model, a config or another
rank.

Shapes: `B` rows, `T` padded length, `N` packed tokens, `V` vocabulary. Losses take padded tensors:
a mask is bool or 0/1 and is 1 where the policy sampled a token; what lies outside is never read,
and not-a-number there changes no result. What leads from scores to advantages takes packed tokens:
those that the policy sampled, row after row, and the rows' `lengths`. Log-probs, KL and entropy are
in nats. Shapes that don't fit and settings out of their range are a ValueError. Parts of a batch
add up: the caller may cut it as it likes (`moments` / `merge_moments`, `aggregate_weight`).

Sources: PPO: Schulman et al. 2017 (arXiv:1707.06347). GAE: Schulman et al. 2016 (arXiv:1506.02438).
Dual clip: Ye et al. 2020 (arXiv:1912.09729). KL: Schulman, "Approximating KL divergence", 2020
(joschu.net/blog/kl-approx.html).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Aggregate = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"]
KLKind = Literal["k1", "k2", "k3", "abs"]

_ALIKE = 1e-12  # variance of targets that are alike but for rounding
STALENESS = ("stale_age_0", "stale_age_1", "stale_age_2_or_more", "stale_ratio", "stale_square")
# nats; a log-ratio is clamped to this on either side before its exponential is taken
LOG_RATIO = 20.0


def _check_shapes(axes: int, **tensors: Tensor) -> None:
    """Refuse tensors that are not of one shape: broadcasting `[B]` against `[B, T]` would be silent
    and wrong."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != axes for shape in shapes.values()):
        raise ValueError(f"want tensors of one shape with {axes} axes, got {shapes}")


def _keep(x: Tensor, mask: Tensor) -> Tensor:
    """`x` inside the mask, 0 outside. Selects rather than multiplies, for 0 * nan is nan."""
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamped to `LOG_RATIO` on either side: a ratio beyond e^20 is a defect, and must not become
    inf. No gradient flows into what is clamped."""
    return log_ratio.clamp(-LOG_RATIO, LOG_RATIO)


@dataclass(frozen=True)
class Moments:
    """Count, mean and unbiased variance of some tokens: 0-d float64 tensors. Without tokens the
    mean is 0; with fewer than two the variance is 0."""

    count: Tensor
    mean: Tensor
    variance: Tensor


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` `[B, T]` over the mask `[B, T]`: a 0-d tensor, 0 (still on the graph) when the
    mask is empty."""
    return aggregate_loss(x, mask, "token_mean")


def _means(figures: dict[str, Tensor], mask: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Detached means over the mask; of a condition, the share of tokens that fulfil it."""
    return {name: masked_mean(x.detach().to(dtype), mask) for name, x in figures.items()}


@torch.no_grad()
def moments(x: Tensor) -> Moments:
    """Moments of `x` `[N]`, by two passes in float64."""
    _check_shapes(1, x=x)
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


def explained_variance(targets: Moments, errors: Moments) -> float:
    """`1 - var(target - value) / var(target)`; 0 where the targets differ by no more than
    rounding."""
    spread = float(targets.variance)
    return 1 - float(errors.variance) / spread if spread > _ALIKE else 0.0


@torch.no_grad()
def whiten(x: Tensor, over: Moments | None = None) -> Tensor:
    """`(x - mean) * rsqrt(variance + 1e-8)`; 0 for a token that is alone.

    `x`: `[N]`. `over` is given when the statistics are over more tokens than these, as with a batch
    spread over ranks. Returns `x`'s dtype, without gradient: advantages are constants of the
    policy's loss.
    """
    stats = moments(x) if over is None else over
    return ((x.double() - stats.mean) * torch.rsqrt(stats.variance + 1e-8)).to(x.dtype)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, in nats; any one shape, `[N]` or
    `[B, T]`.

    With `r = ref / policy`, the ratio of the probabilities (Schulman 2020): `k1` = -log r,
    unbiased, may be negative; `k2` = (log r)^2 / 2, biased, low variance; `k3` = r - 1 - log r,
    unbiased and never negative; `abs` = |log r|. `k3` is that of the clamped log r, and has no
    gradient where it is clamped (`clamp_log_ratio`). Gradient flows into `logprobs` only. Both must
    be finite everywhere, padding included, if a gradient is taken.
    """
    _check_shapes(logprobs.dim(), logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_r = ref_logprobs.detach() - logprobs
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return 0.5 * log_r.square()
    if kind == "abs":
        return log_r.abs()
    if kind != "k3":
        raise ValueError(f"unknown KL estimator {kind!r}: want k1, k2, k3 or abs")
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


@torch.no_grad()
def token_rewards(scores: Tensor, kl: Tensor, lengths: Sequence[int], *, kl_coef: float) -> Tensor:
    """Reward of each token `[N]`: `-kl_coef * kl`, plus the row's score at its last token, if it
    has one. `scores`: `[B]`, in the reward's unit. `kl`: `[N]`."""
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

    `rewards`, `values`: `[N]` on the CPU; a value is of the state before its token. `gamma` and
    `lam` lie in [0, 1]; `lam` may be `[B]`, one a row. After a row's last token the value is 0:
    every row ends there, and there is no bootstrap. Returns are advantages + values, the targets of
    the value model. Both `[N]`, without gradient.

    The recursion goes back in time over all rows at once. The tokens are sorted by time and, of one
    time, the longest rows first: so each time's tokens are neighbours, and nothing is padded.
    """
    sizes = _sizes(lengths, rewards, values)
    ends = sizes.cumsum(0)
    next_value = values.roll(-1).index_fill_(0, (ends - 1)[sizes > 0], 0.0)
    residual = rewards + gamma * next_value - values
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


@torch.no_grad()
def turn_baseline(
    returns: Tensor, turns: Tensor, lengths: Sequence[int], *, count: int,
    all_sum: Callable[[Tensor], Tensor], prompts: Tensor | None, shape: tuple[int, int],
) -> Tensor:  # fmt: skip
    """What stands for values where there are none: a mean over rows of the reward-to-go with which
    the token's turn begins; `[N]` float64.

    Over the rows of the batch that have the turn. Or, with `prompts`, over the other rows of the
    prompt, and a row that lacks the turn counts 0: its episode has ended.

    Args:
        returns: `[N]`, rewards-to-go.
        turns: `[N]` int64, each token's turn, below `count`.
        all_sum: adds up a tensor over the parts of the batch.
        prompts: `[B]` int64, each row's prompt; None: the mean is the batch's.
        shape: (prompts, rows of a prompt, at least 2) of the whole batch, where `prompts` count.
    """
    sizes = _sizes(lengths, returns, turns)
    row = torch.arange(len(sizes)).repeat_interleave(sizes)
    begins = (row * count + turns).diff(prepend=torch.tensor([-1])) > 0
    first, has = torch.zeros(2, len(sizes), count, dtype=torch.float64)
    first[row[begins], turns[begins]] = returns[begins].double()
    has[row, turns] = 1
    if prompts is None:
        total, rows = all_sum(torch.stack([first.sum(0), has.sum(0)]))
        return (total / rows.clamp(min=1))[turns]
    total = all_sum(first.new_zeros(shape[0], count).index_add_(0, prompts, first))
    return ((total[prompts] - first) / (shape[1] - 1))[row, turns]


def aggregate_loss(x: Tensor, mask: Tensor, aggregate: Aggregate) -> Tensor:
    """One number from token losses `x` `[B, T]` over the mask `[B, T]`; 0 (still on the graph) when
    it is empty.

    `token_mean`: every token counts alike. `seq_mean_token_sum`, `seq_mean_token_mean`: the sum or
    the mean over each row's tokens, then the mean over the rows with a non-empty mask.
    """
    _check_shapes(2, x=x, mask=mask)
    lengths = mask.bool().sum(dim=1)
    weight = aggregate_weight(lengths, aggregate).clamp(min=1)  # refuses an unknown name
    row_sums = _keep(x, mask).sum(dim=1)
    if aggregate == "seq_mean_token_mean":
        row_sums = row_sums / lengths.clamp(min=1)
    return row_sums.sum() / weight.to(x.dtype)


def aggregate_weight(lengths: Tensor, aggregate: Aggregate) -> Tensor:
    """`aggregate_loss`'s denominator, 0-d float64, for rows with so many tokens in the mask `[B]`:
    the tokens, or the rows that have one.

    Over any cut of the rows into parts, the mean of the parts' losses, weighted by this, is the
    loss of the whole: so a mini-batch gives the same loss and gradient however it is cut.
    """
    _check_shapes(1, lengths=lengths)
    if aggregate == "token_mean":
        return lengths.sum().double()
    if aggregate in ("seq_mean_token_sum", "seq_mean_token_mean"):
        return (lengths > 0).sum().double()
    raise ValueError(
        f"unknown aggregate {aggregate!r}:"
        " want token_mean, seq_mean_token_sum or seq_mean_token_mean"
    )


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    aggregate: Aggregate,
    weights: Tensor | None = None,
    mode: Literal["clip", "mask"] = "clip",
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), negated: `(loss, metrics)`, 0-d
    tensors.

    All tensors `[B, T]`. With ratio = exp(logprobs - old_logprobs), clamped to e^20 on either side,
    where it has no gradient (`clamp_log_ratio`), and advantage A, a token loses `max(-A * ratio, -A
    * clip(ratio, 1 - clip_low, 1 + clip_high))`; for A < 0, `dual_clip` c > 1 bounds that by `-c *
    A` (Ye et al. 2020), since a ratio that ran away would otherwise make it as large as it likes.
    With the mode `mask` a token loses `-A * ratio` where 1 - clip_low < ratio < 1 + clip_high, else
    0 (SAO, arXiv:2607.07508, eq. 3); there is no dual clip. `weights` `[B, T]`, if given, multiply
    the tokens' losses (importance weights). Gradient flows into `logprobs` only.

    Metrics, detached means over the mask: `ppo_kl` mean of old - new log-prob; `pg_clipfrac` share
    of tokens whose clipped term is the larger loss; `pg_clipfrac_lower` share that the dual clip
    bounds; `ratio_mean`; `ratio_clamped` share whose log-ratio is clamped; with `mask`,
    `pg_clipfrac` is the share of tokens left out, and `pg_lost` and `pg_advantage` are the means of
    the size of their advantages and of all.
    """
    _check_shapes(2, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    if clip_low < 0 or clip_high < 0 or (dual_clip is not None and dual_clip <= 1):
        raise ValueError(
            "want clip_low, clip_high >= 0 and dual_clip > 1,"
            f" got {clip_low}, {clip_high}, {dual_clip}"
        )
    advantages = advantages.detach()
    # Masked here, not only in the mean: what overflows in the padding would give its log-probs a
    # gradient of nan.
    log_ratio = _keep(logprobs - old_logprobs.detach(), mask)
    ratio = clamp_log_ratio(log_ratio).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    changed = clipped > plain
    losses = torch.maximum(plain, clipped)
    if mode == "mask":
        changed = (ratio <= 1 - clip_low) | (ratio >= 1 + clip_high)
        losses = _keep(plain, ~changed)
    bound = -advantages * (torch.inf if dual_clip is None else dual_clip)
    bounded = (advantages < 0) & (losses > bound)
    losses = torch.where(bounded, bound, losses)
    if weights is not None:
        _check_shapes(2, weights=weights, mask=mask)
        losses = losses * weights.detach()
    figures = {
        "ppo_kl": -log_ratio,
        "pg_clipfrac": changed,
        "pg_clipfrac_lower": bounded,
        "ratio_mean": ratio,
    }
    figures["ratio_clamped"] = log_ratio.abs() > LOG_RATIO
    if mode == "mask":
        figures |= {"pg_lost": _keep(advantages.abs(), changed), "pg_advantage": advantages.abs()}
    return aggregate_loss(losses, mask, aggregate), _means(figures, mask, ratio.dtype)


def staleness(
    logprobs: Tensor,
    sampled: Tensor,
    age: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Tensor]:
    """How far the policy has moved from those that sampled the tokens; `STALENESS`, 0-d tensors.

    All tensors `[B, T]`; `sampled`: the behaviour log-probs; `age`: steps since a token was
    sampled. The shares are of all tokens of the mask: those of an age whose ratio to the behaviour
    policy lies outside the clip range. Then the means of the ratio and of its square: the square of
    the one over the other is the ratios' effective sample size.
    """
    _check_shapes(2, logprobs=logprobs, sampled=sampled, age=age, mask=mask)
    ratio = clamp_log_ratio(_keep(logprobs - sampled, mask)).exp()
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    figures = [
        *(outside & of_age for of_age in (age == 0, age == 1, age >= 2)),
        ratio,
        ratio.square(),
    ]
    return _means(dict(zip(STALENESS, figures, strict=True)), mask, ratio.dtype)


def importance_weights(
    old: Sequence[Tensor], engine: Sequence[Tensor], kind: str, cap: float
) -> tuple[list[Tensor], dict[str, float]]:
    """Truncated importance weights (Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"): min(pi_trainer / pi_engine, cap), of each token, or (`sequence`)
    of its whole response.

    `old`, `engine`: log-probs `[T_i]` of each row. Returns weights `[T_i]`, and sums over tokens:
    `importance_mean`, `importance_capped`.
    """
    logs = [row - other for row, other in zip(old, engine, strict=True)]
    ratios = [
        clamp_log_ratio(log.sum().expand_as(log) if kind == "sequence" else log).exp()
        for log in logs
    ]
    weights = [ratio.clamp(max=cap) for ratio in ratios]
    capped = sum(float((ratio > cap).sum()) for ratio in ratios)
    return weights, {
        "importance_mean": sum(float(w.sum()) for w in weights),
        "importance_capped": capped,
    }


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None,
    aggregate: Aggregate,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the values, clipped as the policy is: `(loss, metrics)`, 0-d
    tensors.

    All tensors `[B, T]`. A token loses `0.5 * max((v - R)^2, (clip(v, old - clip, old + clip) -
    R)^2)`; `clip=None` leaves the first term. The square is L^VF of Schulman et al. 2017, eq. 9;
    clip and half are those of its code (openai/baselines, ppo2). Gradient flows into `values` only.
    Metrics, detached means over the mask: `vf_clipfrac` share of tokens whose clipped term is the
    larger loss; `vpred_mean`.
    """
    _check_shapes(2, values=values, old_values=old_values, returns=returns, mask=mask)
    if clip is not None and clip < 0:
        raise ValueError(f"clip must be at least 0 or None, got {clip}")
    old_values = old_values.detach()
    returns = returns.detach()
    kept = _keep(values, mask)
    plain = clipped = (kept - returns).square()
    if clip is not None:
        clipped = (torch.clamp(kept, old_values - clip, old_values + clip) - returns).square()
    metrics = _means({"vf_clipfrac": clipped > plain, "vpred_mean": kept}, mask, kept.dtype)
    return aggregate_loss(0.5 * torch.maximum(plain, clipped), mask, aggregate), metrics


def bounded_values(logits: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """`low + (high - low) * sigmoid(logits)`, any shape: values between two bounds, in the returns'
    unit. Without bounds the outputs are the values."""
    if bounds is None:
        return logits
    low, high = bounds
    return low + (high - low) * logits.sigmoid()


def bounded_logits(values: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """The inverse of `bounded_values`. A value nearer to a bound than 1 % of the range counts as
    that near."""
    if bounds is None:
        return values
    low, high = bounds
    return ((values - low) / (high - low)).logit(0.01)


def bounded_value_loss(
    logits: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float],
    aggregate: Aggregate,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of bounded values: `(loss, metrics)`, 0-d tensors.

    All tensors `[B, T]`. With p = sigmoid(logits) and y = (R - low) / (high - low), a token loses
    `-y log p - (1 - y) log(1 - p)`, in nats; its gradient by the logit is p - y. Returns R are
    Monte-Carlo returns in [low, high]: of the losses for a probability, this one makes p their
    mean. Gradient flows into `logits` only. Metrics, as of `value_loss`: `vf_clipfrac`, always 0;
    `vpred_mean`, of the values.
    """
    _check_shapes(2, logits=logits, returns=returns, mask=mask)
    low, high = bounds
    kept = _keep(logits, mask)
    share = _keep((returns.detach() - low) / (high - low), mask)
    # log(1 - sigmoid(x)) is -softplus(x), and log(sigmoid(x)) is x - softplus(x): neither overflows
    losses = torch.nn.functional.softplus(kept) - share * kept
    figures = {"vf_clipfrac": torch.zeros_like(kept), "vpred_mean": bounded_values(kept, bounds)}
    return aggregate_loss(losses, mask, aggregate), _means(figures, mask, kept.dtype)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last axis: `[..., V]` to `[...]`, in float32
    (float64 stays). A logit of -inf is a token that can't be sampled: it adds 0, to the gradient as
    well."""
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    # p log p goes to 0 with p, but 0 * -inf is nan.
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(dim=-1)
