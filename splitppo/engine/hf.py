"""The embedded engine: an unsharded replica of the policy and the transformers library's generate(), in a thread.

Two hooks are ours: a logits processor draws the token, so that a row's noise depends on the row alone, and a stopping
criterion hands each row over when it ends. The library can't fill a row's place. With windows a call ends when a
quarter of its slots wait, and the next one computes prefixes again.
"""

import copy
import functools
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.initialization import no_init_weights

from splitppo.config import RolloutConfig
from splitppo.engine import TICK, Ask, Piece, RolloutEngine, check_weights, weight_names
from splitppo.engine.decoder import Decoder, Row
from splitppo.models.build import code_of
from splitppo.models.tokenizer import eos_ids, vocabulary_size
from splitppo.rollout import End

# cuDNN is left out: it plans again for each length of the cache, so at each token (H200, torch 2.11: 0.9 ms a call).
# Applies to the process during `generate`.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
DRAW_ROWS = 128  # rows drawn at once: limits the float64 tensors to 128 V numbers (156 MB at V = 152k)


def uniforms(seed: int, rows: np.ndarray, positions: np.ndarray | int) -> np.ndarray:
    """`[R]` float64 numbers in [0, 1) with 53 random bits, a pure function of seed, rows `[R]` (numbers in the data
    order) and positions of the token in each row's response."""
    word = np.zeros(1, dtype=np.uint64)
    for part in (seed, rows, positions):
        part = np.atleast_1d(np.asarray(part)).astype(np.int64).view(np.uint64)
        word = (word ^ part) + np.uint64(0x9E3779B97F4A7C15)  # splitmix64; arrays wrap modulo 2**64
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
    return (word >> np.uint64(11)) * 2.0**-53


def draw(logits: Tensor, noise: Tensor, sampling: RolloutConfig) -> tuple[Tensor, Tensor]:
    """Draws a token for each row by inverting the cumulative distribution; at temperature 0, takes the likeliest.

    Takes `[R, V]` float32 logits and `[R]` float64 noise in [0, 1). Returns `[R]` int64 tokens and their `[R]` float32
    log-probs under softmax(logits / temperature), truncated by top-k and top-p.
    """
    if not sampling.temperature:
        tokens, logprobs = logits.argmax(dim=-1), torch.log_softmax(logits, dim=-1)
    else:
        logprobs = torch.log_softmax(_truncate(logits / sampling.temperature, sampling), dim=-1)
        probs = logprobs.exp()
        # A parallel sum may be non-monotone in the last bit. Without the fill, a token of probability 0 could win.
        cdf = probs.cumsum(dim=-1, dtype=torch.float64).masked_fill_(probs == 0, 0.0)
        passed = cdf > noise[:, None] * cdf.amax(dim=-1, keepdim=True)
        tokens = passed.to(torch.uint8).argmax(dim=-1)  # the first of the ones
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _truncate(logits: Tensor, sampling: RolloutConfig) -> Tensor:
    """Sets the logits `[R, V]` of the tokens outside top-k and top-p to -inf."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # of the likelier tokens: the token that passes top_p is kept
        ordered = ordered.masked_fill(before >= sampling.top_p, -math.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits


class HFEngine(RolloutEngine):
    """An unsharded replica of the policy on this rank. Its memory belongs to the trainer's own allocator.

    Args:
        config: the policy's. Its attention implementation is ignored: generate() needs one of the library's.
        max_rows: rows generated at once. More rows run as several batches, shortest prompts first.
        folder: the model's, for the end ids in generation_config.json. Its other settings are ignored.
    """

    def __init__(
        self, config: PretrainedConfig, tokenizer: Any, *,
        device: torch.device, dtype: torch.dtype, max_rows: int, folder: Path | None = None,
    ):  # fmt: skip
        super().__init__()
        config = copy.deepcopy(config)  # the library writes into it
        with no_init_weights(), device:
            options: Any = {"attn_implementation": None, "trust_remote_code": bool(code_of(config))}
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()
        self.model.tie_weights()  # no_init_weights leaves this out, too
        self.model.generation_config = GenerationConfig()  # the defaults of every call
        eos = eos_ids(config, tokenizer, folder)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos, default=0)
        self.eos = torch.tensor(sorted(eos), dtype=torch.long, device=device)
        self.device, self.max_rows = device, max_rows
        self.vocabulary = vocabulary_size(tokenizer)
        self.decoder = Decoder(self.model, device, self.pad, set(eos), max_rows)
        self.stop_criteria = functools.cache(lambda strings: StopStringCriteria(tokenizer, list(strings)))

    def connect(self) -> str:
        return "generate() of the transformers library"

    def close(self) -> None:
        self.loaded = False
        self.model.to("meta")

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self.model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in check_weights(weights, weight_names(self.model)):
                own[name].copy_(tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the caller may have copied on its own stream

    def release_memory(self, *, trained: bool) -> None:
        """The cache is the trainer's allocator's, and gone when no row is open."""

    def _begin(self, sampling: RolloutConfig, seed: int) -> None:
        self._sampling, self._seed = sampling, seed
        self._stop = self.stop_criteria(sampling.stop) if sampling.stop else None
        self.decoder.eos = set(self.eos.tolist())
        self.decoder.max_rows = self.max_rows
        self._seconds = 0.0
        self._steps = 0

    def _submit(self, asks: Sequence[Ask]) -> None:
        self.decoder.queue.extend(Row(ask.row, list(ask.ids), ask.begun, ask.tokens, ask.free) for ask in asks)

    def _poll(self) -> list[Piece]:
        start, before = time.monotonic(), self.decoder.steps + self.decoder.prefills
        ended: list[Row] = []
        with torch.inference_mode(), sdpa_kernel(ATTENTION):
            while self.decoder.busy and not ended:
                ended = self.decoder.step(self._draw)
                if time.monotonic() > start + TICK:
                    break
        self._steps += self.decoder.steps + self.decoder.prefills - before
        self._seconds += time.monotonic() - start
        self.step_ms = 1e3 * self._seconds / self._steps if self._steps else 0.0
        return [Piece(row.key, row.tokens, row.logprobs, cast(End, row.end)) for row in ended]

    def _abort(self) -> None:
        self.decoder.clear()  # the cache's memory too

    def _draw(self, logits: Tensor, rows: list[Row]) -> tuple[list[int], list[float]]:
        """A token for each row, with its log-prob; sets the `end` of rows that a stop string ends."""
        numbers = np.asarray([row.key for row in rows])
        places = np.asarray([row.begun + len(row.tokens) for row in rows])
        noise = torch.from_numpy(uniforms(self._seed, numbers, places)).to(logits.device, non_blocking=True)
        parts = zip(logits[:, : self.vocabulary].split(DRAW_ROWS), noise.split(DRAW_ROWS), strict=True)
        drawn, logprobs = zip(*(draw(some, own, self._sampling) for some, own in parts), strict=True)
        tokens, found = torch.stack([torch.cat(drawn).double(), torch.cat(logprobs).double()]).tolist()
        tokens = [int(token) for token in tokens]
        if self._stop is not None:
            for row, token in zip(rows, tokens, strict=True):
                if row.free and bool(self._stop(torch.tensor([[*row.tokens, token]]), None)[0]):
                    row.end = "stop"
        return tokens, found
