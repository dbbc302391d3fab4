"""Draws tokens from logits: noise that depends on the row alone, neither on the rows beside it nor
on the asks that its tokens were drawn for."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from splitppo.config import RolloutConfig


def uniforms(seed: int, rows: np.ndarray, positions: np.ndarray | int) -> np.ndarray:
    """`[R]` float64 numbers in [0, 1) with 53 random bits, a pure function of seed, rows `[R]`
    (numbers in the data order) and positions of the token in each row's response."""
    word = np.zeros(1, dtype=np.uint64)
    for part in (seed, rows, positions):
        part = np.atleast_1d(np.asarray(part)).astype(np.int64).view(np.uint64)
        word = (word ^ part) + np.uint64(0x9E3779B97F4A7C15)  # splitmix64; arrays wrap modulo 2**64
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
    return (word >> np.uint64(11)) * 2.0**-53


def draw(logits: Tensor, noise: Tensor, sampling: RolloutConfig) -> tuple[Tensor, Tensor]:
    """Draws a token for each row by inverting the cumulative distribution; at temperature 0, takes
    the likeliest.

    Takes `[R, V]` float32 logits and `[R]` float64 noise in [0, 1). Returns `[R]` int64 tokens and
    their `[R]` float32 log-probs under softmax(logits / temperature), truncated by top-k and top-p.
    """
    if not sampling.temperature:
        tokens = logits.argmax(dim=-1)
        logprobs = torch.log_softmax(logits, dim=-1)
    else:
        logits = logits / sampling.temperature
        ids: Any = None  # these functions of the library look at the logits alone
        if sampling.top_k > 0:
            logits = TopKLogitsWarper(sampling.top_k)(ids, logits)
        if sampling.top_p < 1:
            logits = TopPLogitsWarper(sampling.top_p)(ids, logits)
        logprobs = torch.log_softmax(logits, dim=-1)
        probs = logprobs.exp()
        # A parallel sum may be non-monotone in the last bit. Without the fill, a token of
        # probability 0 could win.
        cdf = probs.cumsum(dim=-1, dtype=torch.float64).masked_fill_(probs == 0, 0.0)
        passed = cdf > noise[:, None] * cdf.amax(dim=-1, keepdim=True)
        tokens = passed.to(torch.uint8).argmax(dim=-1)  # the first of the ones
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
