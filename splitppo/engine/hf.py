"""The embedded engine: an unsharded replica of the policy in the trainer's own process, with
continuous batching: rows enter and leave a batch while others go on.

All rows share the columns of the cache: the token drawn now goes into the same column of every row,
whatever its place in the row. So a row fills the last columns of its place without a gap, as with
padding on the left, and one mask says which. Rows that enter run through the model alone; their
keys and values are copied into the columns before the next one. A key may lie in any column, since
it was rotated by its place in the row.

Models whose cache holds more than keys and values by column (linear attention, convolutions) can't
take single rows in. When rows enter there, all rows are computed again; where there is no cache at
all, at each token.
"""

import copy
import functools
import inspect
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.initialization import no_init_weights

from splitppo.config import RolloutConfig
from splitppo.engine import (
    TICK,
    Ask,
    OpenPiece,
    Piece,
    RolloutEngine,
    check_weights,
    find_stops,
    weight_names,
)
from splitppo.engine.draw import draw, uniforms
from splitppo.models.build import code_of
from splitppo.models.experts import Load
from splitppo.models.tokenizer import eos_ids, vocabulary_size
from splitppo.rollout import End

# cuDNN is left out: it plans again for each length of the cache, so at each token (H200, torch
# 2.11: 0.9 ms a call). Applies to the process during `poll`.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# what a model calls its cache, by its type and the version
CACHES = ("cache", "past_key_values", "cache_params")
ROOM = 64  # columns allocated ahead, at least
PREFILL = 4096  # tokens, padding included, that enter in one forward pass: limits its activations
RECOMPUTED = 1024  # tokens that a forward pass computes in about the time of a decode step
# rows drawn at once: limits the float64 tensors to 128 V numbers (156 MB at V = 152k)
DRAW_ROWS = 128


class _Columns(DynamicLayer):
    """A layer's keys and values `[P, H, C, D]` of P places, with room for more columns: those of
    open rows begin at `first`, the next token's is `at`. Only the new column is written, where the
    library's layer copies all of them."""

    first = at = 0

    def __init__(self, like: Any, places: int, columns: int):
        super().__init__()
        self.is_initialized = True
        if like.keys is not None:  # if not, the layer reads another one's
            self.keys: Any = _zeros(like.keys, places, columns)
            self.values: Any = _zeros(like.values, places, columns)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[:, :, self.at] = key_states[:, :, 0]
        self.values[:, :, self.at] = value_states[:, :, 0]
        self.at += 1
        return self.keys[:, :, self.first : self.at], self.values[:, :, self.first : self.at]

    def get_seq_length(self) -> int:
        return self.at - self.first


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

    Attributes:
        movable: whether rows enter and leave alone: the cache is keys and values by column. If
            not, all rows are computed again when some enter.
        load: of a mixture whose rows are told their tokens' experts.
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
        self.load = Load(self.model) if routes else None
        self.device = device
        self.eos = set(eos_ids(config, tokenizer, folder))
        # an id to fill up with; it is masked
        pad = tokenizer.pad_token_id
        self.pad = min(self.eos, default=0) if pad is None else pad
        self.max_rows = max_rows
        self.vocabulary = vocabulary_size(tokenizer)
        self._find_stops = functools.cache(functools.partial(find_stops, tokenizer))
        self._accepts = inspect.signature(self.model.forward).parameters
        self._cached = any(name in self._accepts for name in CACHES)
        # where a layer sees the nearest tokens alone, the mask says so
        self.movable = self._cached and all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            for layer in DynamicCache(config=self.model.config).layers
        )
        self._abort()

    def connect(self) -> str:
        return "transformers, in this process; " + (
            "rows enter and leave one by one"
            if self.movable
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

    def _submit(self, asks: Sequence[Ask], sampling: RolloutConfig, seed: int) -> None:
        """Rows wait in this order if they are more than there are places."""
        self._sampling = sampling
        self._seed = seed
        self._stops = self._find_stops(sampling.stop)
        self._queue += [OpenPiece(ask) for ask in asks]

    def _poll(self) -> list[Piece]:
        """Decodes until rows end, but no longer than `TICK` and a step."""
        start = time.monotonic()
        ended: list[Piece] = []
        with torch.inference_mode(), sdpa_kernel(ATTENTION):
            while self.open and not ended and time.monotonic() < start + TICK:
                ended = self._step()
        if len(ended) == self.open:
            self._abort()  # frees the cache
        return ended

    def _abort(self) -> None:
        """Drops all rows, and the cache."""
        self._queue: list[OpenPiece] = []
        self._rows: dict[int, OpenPiece] = {}  # by place
        self._cache: Any = None
        # as the keys, `[P, 1, C, 1]`
        self._mask = torch.zeros(0, 1, 0, 1, dtype=torch.long, device=self.device)
        self._at = 0  # the column of the next token
        # places without a row, summed over decode steps since the batch last changed
        self._idle = 0

    def _step(self) -> list[Piece]:
        """A token for each row in a place, or for those that enter: once idle places have lost as
        much as that costs. So the sum of both is at most twice the least possible, whatever lengths
        the rows have."""
        entering = self._queue[: self.max_rows - len(self._rows)]
        places = self._mask.shape[0]
        idle = max(places - len(self._rows) if self.movable else 0, len(entering))
        self._idle += idle
        # in decode steps: of a forward pass beside what its tokens take, which waiting does not
        # save
        recomputed = [] if self.movable else [*self._rows.values(), *entering]
        cost = 1.0 + sum(row.length for row in recomputed) / RECOMPUTED
        if not self._cached or (idle and (not self._rows or self._idle >= cost * places)):
            del self._queue[: len(entering)]
            return self._enter(entering)
        return self._decode()

    def _decode(self) -> list[Piece]:
        if self._at == self._mask.shape[2]:
            self._arrange([])
        first = self._at + 1 - max(row.length for row in self._rows.values()) if self.movable else 0
        for layer in self._cache.layers if self.movable else ():
            layer.first = first
            layer.at = self._at
        self._mask[:, :, self._at] = 1
        self._at += 1
        newest = [(self.pad, 0)] * self._mask.shape[0]
        for place, row in self._rows.items():
            newest[place] = row.tokens[-1], row.length - 1
        ids, positions = torch.tensor(newest, device=self.device).T[:, :, None]
        logits = self._forward(ids, self._mask[:, 0, first : self._at, 0], positions, self._cache)
        return self._take(logits, dict(self._rows), [*self._rows])

    def _enter(self, rows: list[OpenPiece]) -> list[Piece]:
        """Rows get places and their first token. Without any, the places are as many as the open
        rows."""
        self._idle = 0
        if not self.movable:
            rows = [*self._rows.values(), *rows]
            self._rows = {}
            self._at = 0  # a new cache
        rows.sort(key=lambda row: row.length, reverse=True)
        if len(self._rows) + len(rows) != self._mask.shape[0] or rows[0].length > self._at:
            self._arrange(rows)
        places = [place for place in range(self._mask.shape[0]) if place not in self._rows]
        ended: list[Piece] = []
        while rows:  # the longest first: a pass is as wide as its first row
            count = max(1, PREFILL // rows[0].length) if self.movable else len(rows)
            ended += self._prefill(dict(zip(places, rows[:count], strict=False)))
            del rows[:count], places[:count]
        return ended

    def _prefill(self, rows: dict[int, OpenPiece]) -> list[Piece]:
        """One forward pass of rows alone, by place, and a token for each."""
        ids = pad_sequence(
            [torch.tensor([*row.ask.ids, *row.tokens]) for row in rows.values()],
            batch_first=True,
            padding_value=-1,
            padding_side="left",
        ).to(self.device)
        mask = (ids >= 0).long()
        cache: Any = DynamicCache(config=None if self.movable else self.model.config)
        logits = self._forward(
            ids.where(ids >= 0, self.pad), mask, (mask.cumsum(-1) - 1).clamp(min=0), cache
        )
        places = list(rows)
        columns = slice(self._at - ids.shape[1], self._at)
        self._mask[places] = 0
        self._mask[places, :, columns] = mask[:, None, :, None]
        if not self.movable:
            self._cache = cache
        elif not self._cache:
            size = self._mask.shape
            self._cache = Cache(
                layers=[_Columns(layer, size[0], size[2]) for layer in cache.layers]
            )
        for layer, alone in zip(self._cache.layers, cache.layers, strict=True):
            if self.movable and alone.keys is not None:
                layer.keys[places, :, columns] = alone.keys
                layer.values[places, :, columns] = alone.values
        self._rows |= rows
        return self._take(logits, rows, range(len(rows)))

    def _arrange(self, entering: list[OpenPiece]) -> None:
        """Makes the batch anew: places for open rows, the first ones, and for those that enter;
        columns for the longest, and room for more."""
        rows = list(self._rows.values())
        live = list(self._rows)
        end = self._at
        used = max((row.length - 1 for row in rows), default=0)
        self._at = max([used, *(row.length for row in entering)])
        room = max(row.left for row in [*rows, *entering])
        columns = self._at + (min(room, self._at // 4 + ROOM) if self.movable else room)

        def moved(cached: Tensor) -> Tensor:
            new = _zeros(cached, len(rows) + len(entering), columns)
            new[: len(rows), :, self._at - used : self._at] = cached[live, :, end - used : end]
            return new

        self._rows = dict(enumerate(rows))
        self._mask = moved(self._mask)
        self._cache = self._cache if rows else None
        for layer in self._cache.layers if rows else ():
            if layer.keys is not None:
                layer.keys = moved(layer.keys)
                layer.values = moved(layer.values)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Runs ids `[R, T]` at these positions after the cache, which takes them in, with the mask
        `[R, C + T]` of both. Returns the logits of the last ones, `[R, V]`."""
        inputs = dict.fromkeys(CACHES, cache) | {"position_ids": positions, "logits_to_keep": 1}
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            attention_mask=mask,
            use_cache=True,
            is_first_iteration=ids.shape == mask.shape,
            **{name: value for name, value in inputs.items() if name in self._accepts},
        )
        return self.model(**inputs).logits[:, -1]

    def _take(
        self, logits: Tensor, rows: dict[int, OpenPiece], lines: Sequence[int]
    ) -> list[Piece]:
        """Draws a token for each row, by place, from its line of the last forward pass's logits,
        `[R, V]`. Rows that end leave."""
        drawn = self._draw(
            logits[[*lines]].float(),
            np.asarray([row.ask.row for row in rows.values()]),
            np.asarray([row.ask.begun + len(row.tokens) for row in rows.values()]),
        )
        # the only wait for the device in a step
        tokens, logprobs = torch.stack([part.double() for part in drawn]).tolist()
        for row, token, logprob in zip(rows.values(), tokens, logprobs, strict=True):
            row.tokens.append(int(token))
            row.logprobs.append(logprob)
        if self.load:
            experts = self.load.last(len(logits))[[*lines]].cpu().numpy()
            for row, packed in zip(rows.values(), experts, strict=True):
                row.experts += packed.tobytes()
        ended = []
        for (place, row), stopped in zip(
            rows.items(), self._stops(list(rows.values())), strict=True
        ):
            stop: End | None = "eos" if row.tokens[-1] in self.eos else "stop" if stopped else None
            end = (row.ask.may_stop and stop) or (None if row.left else "limit")
            if end:
                del self._rows[place]
                ended.append(row.piece(end))
        return ended

    def _draw(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Logits `[R, V]`, rows `[R]`, positions in their responses `[R]` -> tokens `[R]` and their
        log-probs `[R]`."""
        noise = torch.from_numpy(uniforms(self._seed, rows, positions))
        # non-blocking: else the copy waits for the forward pass
        parts = zip(
            logits[:, : self.vocabulary].split(DRAW_ROWS),
            noise.to(logits.device, non_blocking=True).split(DRAW_ROWS),
            strict=True,
        )
        tokens, logprobs = zip(*(draw(*part, self._sampling) for part in parts), strict=True)
        return torch.cat(tokens), torch.cat(logprobs)


def _zeros(like: Tensor, places: int, columns: int) -> Tensor:
    """`[P, H, C, D]`, with the heads and the width of `like`."""
    return like.new_zeros(places, like.shape[1], columns, like.shape[3])
