"""The embedded engine: an unsharded replica of the policy in the trainer's own process, and what
draws its tokens.

A row's noise depends on the row alone: neither on the rows beside it nor on the asks that its
tokens were drawn for.
"""

import copy
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper
from transformers.initialization import no_init_weights

from splitppo.config import RolloutConfig
from splitppo.engine import Ask, Piece, RolloutEngine, check_weights, find_stops, weight_names
from splitppo.engine.decoder import Decoder
from splitppo.models.build import code_of
from splitppo.models.experts import Load
from splitppo.models.tokenizer import eos_ids, vocabulary_size

# rows drawn at once: limits the float64 tensors to 128 V numbers (156 MB at V = 152k)
DRAW_ROWS = 128


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


class HFEngine(RolloutEngine):
    """An unsharded replica of the policy on this rank. Its memory belongs to the trainer's own
    allocator.

    Args:
        config: the policy's. Its attention implementation is ignored: the cache needs one of the
            library's.
        max_rows: rows decoded at once. Others wait until one has ended.
        folder: the model's, for the end ids in generation_config.json. Its other settings are
            ignored.
        routes: whether it tells each token's experts.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        tokenizer: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_rows: int,
        folder: Path | None = None,
        routes: bool = False,
    ):
        config = copy.deepcopy(config)  # the library writes into it
        with no_init_weights(), device:
            self.model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=None,
                trust_remote_code=bool(code_of(config)),
            ).eval()
        self.model.tie_weights()  # no_init_weights leaves this out, too
        eos = set(eos_ids(config, tokenizer, folder))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos, default=0)
        self.decoder = Decoder(
            self.model,
            device=device,
            pad=pad,
            eos=eos,
            max_rows=max_rows,
            load=Load(self.model) if routes else None,
        )
        self.device = device
        self.vocabulary = vocabulary_size(tokenizer)
        self._find_stops = functools.cache(functools.partial(find_stops, tokenizer))

    def connect(self) -> str:
        return "transformers, in this process; " + (
            "rows enter and leave one by one"
            if self.decoder.movable
            else "all rows are computed again as some enter"
        )

    def close(self) -> None:
        self.loaded = False
        self.model.to("meta")

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        held = self.model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in check_weights(weights, weight_names(self.model)):
                held[name].copy_(tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the caller may have copied on its own stream

    def release_memory(self, *, trained: bool) -> None:
        """The cache is the trainer's allocator's, and gone when no row is open."""

    def _begin(self, sampling: RolloutConfig, seed: int) -> None:
        draw = functools.partial(self._draw, sampling, seed)
        self.decoder.begin(draw, self._find_stops(sampling.stop))

    def _submit(self, asks: Sequence[Ask]) -> None:
        self.decoder.submit(asks)

    def _poll(self) -> list[Piece]:
        return self.decoder.poll()

    def _abort(self) -> None:
        self.decoder.abort()

    def _draw(
        self,
        sampling: RolloutConfig,
        seed: int,
        logits: Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        noise = torch.from_numpy(uniforms(seed, rows, positions))
        # non-blocking: else the copy waits for the forward pass
        parts = zip(
            logits[:, : self.vocabulary].split(DRAW_ROWS),
            noise.to(logits.device, non_blocking=True).split(DRAW_ROWS),
            strict=True,
        )
        tokens, logprobs = zip(*(draw(*part, sampling) for part in parts), strict=True)
        return torch.cat(tokens), torch.cat(logprobs)
