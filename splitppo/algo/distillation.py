"""Divergences between a teacher's and the policy's next token (on-policy distillation, Agarwal et
al. 2024, arXiv:2306.13649)."""

import math
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["forward", "reverse", "jsd"]
REST = 1e-6  # least probability of the tokens that are not named
# nats, to which float16 rounds the teacher's log-probs: below, the two agree. The gradient of
# rounding is small, and AdamW would make whole steps of it
ALIKE = 1e-6


def buckets(logprobs: Tensor) -> Tensor:
    """Appends to log-probs `[..., k]` of some tokens that of all other tokens together, at least
    log `REST`: `[..., k + 1]`."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=REST)
    return torch.cat([logprobs, rest.log()], -1)


def divergence(logprobs: Tensor, teacher: Tensor, kind: Divergence) -> Tensor:
    """The divergence at each token, `[N]` in nats, over the teacher's k most likely tokens and one
    bucket for all others.

    `forward`: KL(teacher || policy). `reverse`: KL(policy || teacher). `jsd`: the mean of both
    sides' KL to their mixture. Gradient flows into `logprobs` only.

    Args:
        logprobs: `[N, k]`, the policy's of these tokens.
        teacher: `[N, k + 1]`, the teacher's `buckets`. They are normalised again, because rounding
            to float16 changes their sum to first order. What rounding remains counts as 0
            (`ALIKE`).
    """
    policy = buckets(logprobs)
    teacher = teacher.detach().to(policy.dtype).log_softmax(-1)
    if kind == "jsd":
        mixture = torch.logaddexp(policy, teacher) - math.log(2)
        nats = (_kl(policy, mixture) + _kl(teacher, mixture)) / 2
    else:
        nats = _kl(teacher, policy) if kind == "forward" else _kl(policy, teacher)
    return nats * (nats > ALIKE)


def _kl(logprobs: Tensor, other: Tensor) -> Tensor:
    return (logprobs.exp() * (logprobs - other)).sum(-1)
