"""Losses and entropy of packed tensors `[N]`: the response tokens of one row after another."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from splitppo.algo.advantages import LOG_RATIO, ROUNDING, check_shapes, clamp_log_ratio

Aggregate = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"]


def mean(x: Tensor) -> Tensor:
    """Mean of `x` `[N]`, a 0-d tensor. Without tokens 0, still connected to the graph."""
    return x.sum() / max(len(x), 1)


def _means(figures: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Detached means; of a condition, the share of tokens that fulfil it."""
    return {name: mean(x.detach().to(dtype)) for name, x in figures.items()}


def aggregate_loss(x: Tensor, lengths: Tensor, aggregate: Aggregate) -> Tensor:
    """Averages token losses `x` `[N]` of rows with `lengths` `[B]`. Without tokens 0, still
    connected to the graph.

    `token_mean`: over all tokens. `seq_mean_token_sum`, `seq_mean_token_mean`: sum or mean over
    each row's tokens, then mean over the rows that have tokens.
    """
    check_shapes(1, x=x)
    weight = aggregate_weight(lengths, aggregate).clamp(min=1)
    if aggregate == "seq_mean_token_mean":
        # of a known size: else the host would wait for the GPU to count
        x = x / lengths.repeat_interleave(lengths, output_size=len(x))
    return x.sum() / weight.to(x.dtype)


def aggregate_weight(lengths: Tensor, aggregate: Aggregate) -> Tensor:
    """The denominator of `aggregate_loss`, 0-d float64, for rows with `lengths` `[B]`: the number
    of tokens, or of rows that have tokens.

    However rows are split into parts, the mean of the parts' losses weighted by this is the loss of
    all rows. So a mini-batch gives the same loss and gradient however it is split.
    """
    if aggregate == "token_mean":
        return lengths.sum().double()
    return (lengths > 0).sum().double()


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
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

    Tensors are `[N]`, the rows' `lengths` `[B]`. With ratio = exp(logprobs - old_logprobs), whose
    log is clamped to 20 on either side (`clamp_log_ratio`), and advantage A, a token's loss is
    `max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))`. For A < 0, `dual_clip` c > 1
    bounds it by `-c * A` (Ye et al. 2020); without, it grows with the ratio. With the mode `mask`
    the loss is `-A * ratio` where 1 - clip_low < ratio < 1 + clip_high, else 0 (SAO,
    arXiv:2607.07508, eq. 3), without a dual clip. `weights` `[N]`, if given, multiply the tokens'
    losses (importance weights). Gradient flows into `logprobs` only.

    Metrics, detached means over the tokens: `ppo_kl` mean of old - new log-prob; `pg_clipfrac`
    share of tokens whose clipped term is the larger loss; `pg_clipfrac_lower` share that the dual
    clip bounds; `ratio_mean`; `ratio_square`; `ratio_clamped` share whose log-ratio is clamped;
    with `mask`, `pg_clipfrac` is the share of tokens left out, and `pg_lost` and `pg_advantage` are
    the means of the size of their advantages and of all.
    """
    check_shapes(1, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    advantages = advantages.detach()
    log_ratio = logprobs - old_logprobs.detach()
    ratio = clamp_log_ratio(log_ratio).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    changed = clipped > plain
    losses = torch.maximum(plain, clipped)
    if mode == "mask":
        changed = (ratio <= 1 - clip_low) | (ratio >= 1 + clip_high)
        losses = plain.masked_fill(changed, 0.0)
    bound = -advantages * (torch.inf if dual_clip is None else dual_clip)
    bounded = (advantages < 0) & (losses > bound)
    losses = torch.where(bounded, bound, losses)
    if weights is not None:
        check_shapes(1, weights=weights, logprobs=logprobs)
        losses = losses * weights.detach()
    figures = {
        "ppo_kl": -log_ratio,
        "pg_clipfrac": changed,
        "pg_clipfrac_lower": bounded,
        "ratio_mean": ratio,
        "ratio_square": ratio.square(),
    }
    figures["ratio_clamped"] = log_ratio.abs() > LOG_RATIO
    if mode == "mask":
        figures |= {"pg_lost": advantages.abs() * changed, "pg_advantage": advantages.abs()}
    return aggregate_loss(losses, lengths, aggregate), _means(figures, ratio.dtype)


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


def _without_rounding(losses: Tensor, errors: Tensor, size: Tensor | float) -> Tensor:
    """Token losses `[N]` of values that differ from their targets by `errors`. A token has no
    gradient if its error is within float32's rounding of numbers of this size: AdamW would make
    full steps of it."""
    return torch.where(errors.abs() < ROUNDING * size, losses.detach(), losses)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    lengths: Tensor,
    *,
    clip: float | None,
    aggregate: Aggregate,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the values, clipped as the policy is: `(loss, metrics)`, 0-d
    tensors.

    Tensors are `[N]`, the rows' `lengths` `[B]`.
    A token's loss is `0.5 * max((v - R)^2, (clip(v, old - clip, old + clip) -
    R)^2)`; `clip=None` keeps only the first term. A token whose error v - R is within float32's
    rounding of R has no gradient. The square is L^VF of Schulman et al. 2017, eq. 9;
    clip and half are those of its code (openai/baselines, ppo2). Gradient flows into `values` only.
    Metrics, detached means over the tokens: `vf_clipfrac` share of tokens whose clipped term is the
    larger loss; `vpred_mean`.
    """
    check_shapes(1, values=values, old_values=old_values, returns=returns)
    old_values = old_values.detach()
    returns = returns.detach()
    plain = clipped = (values - returns).square()
    if clip is not None:
        clipped = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    losses = 0.5 * torch.maximum(plain, clipped)
    losses = _without_rounding(losses, values - returns, returns.abs())
    metrics = _means({"vf_clipfrac": clipped > plain, "vpred_mean": values}, values.dtype)
    return aggregate_loss(losses, lengths, aggregate), metrics


def bounded_values(logits: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """`low + (high - low) * sigmoid(logits)`, any shape: values between two bounds, in the returns'
    unit (BPCO, arXiv:2608.23566). Without bounds the outputs are the values."""
    if bounds is None:
        return logits
    low, high = bounds
    return low + (high - low) * logits.sigmoid()


def bounded_logits(values: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """The inverse of `bounded_values`. Values are first moved at least 1 % of the range away from
    either bound."""
    if bounds is None:
        return values
    low, high = bounds
    return ((values - low) / (high - low)).logit(0.01)


def bounded_value_loss(
    logits: Tensor,
    returns: Tensor,
    lengths: Tensor,
    *,
    bounds: tuple[float, float],
    aggregate: Aggregate,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of bounded values (BPCO, arXiv:2608.23566): `(loss, metrics)`, 0-d tensors.

    Tensors are `[N]`, the rows' `lengths` `[B]`. With p = sigmoid(logits) and y = (R - low) / (high
    - low), a token's loss is `-y log p - (1 - y) log(1 - p)`, in nats; its gradient with respect to
    the logit is p - y. Returns R are Monte-Carlo returns in [low, high]: the loss is least where p
    is the mean of y. Gradient flows into `logits` only, and not where the value equals R within
    float32's rounding. Metrics as in `value_loss`: `vf_clipfrac` (always 0) and `vpred_mean` (of
    the values)."""
    check_shapes(1, logits=logits, returns=returns)
    low, high = bounds
    share = (returns.detach() - low) / (high - low)
    # log(1 - sigmoid(x)) is -softplus(x), and log(sigmoid(x)) is x - softplus(x): neither overflows
    losses = torch.nn.functional.softplus(logits) - share * logits
    values = bounded_values(logits, bounds)
    losses = _without_rounding(losses, values - returns, max(abs(low), abs(high)))
    figures = {"vf_clipfrac": torch.zeros_like(logits), "vpred_mean": values}
    return aggregate_loss(losses, lengths, aggregate), _means(figures, logits.dtype)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last axis: `[..., V]` to `[...]`, in float32
    (float64 stays). A logit of -inf (a token that can't be sampled) adds 0, also to the
    gradient."""
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    # p log p goes to 0 with p, but 0 * -inf is nan.
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(dim=-1)
