"""Continuous batching over a transformers model: rows enter and leave a batch while others go on.

All rows share the columns of the cache: the token drawn now goes into the same column of every row, whatever its place
in the row. So a row fills the last columns of its place without a gap, as with padding on the left, and one mask says
which. Rows that enter run through the model alone; their keys and values are copied into the columns before the next
one. A key may lie in any column, since it was rotated by its place in the row.

Models whose cache holds more than keys and values by column (linear attention, convolutions) can't take single rows
in. When rows enter there, all rows are computed again.
"""

import inspect
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.stopping_criteria import StopStringCriteria

from splitppo.engine import TICK, Ask, Piece
from splitppo.rollout import End

# cuDNN is left out: it plans again for each length of the cache, so at each token (H200, torch 2.11: 0.9 ms a call).
# Applies to the process during `poll`.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CACHES = ("cache", "past_key_values", "cache_params")  # what a model calls its cache, by its type and the version
ROOM = 64  # columns allocated ahead, at least
PREFILL = 4096  # tokens, padding included, that enter in one forward pass: limits its activations
RECOMPUTED = 1024  # tokens that a forward pass computes in about the time of a decode step
NO_TOKEN = 2**31 - 1  # beyond every vocabulary: no part of a stop string

# logits `[R, V]`, rows `[R]`, positions in their responses `[R]` -> tokens `[R]` and their log-probs `[R]`
Draw = Callable[[Tensor, np.ndarray, np.ndarray], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class _Row:
    """A row in a place or in the queue, and what has been drawn for it."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of its context; the last one drawn is not in the cache yet."""
        return len(self.ask.ids) + len(self.tokens)

    @property
    def left(self) -> int:
        return self.ask.tokens - len(self.tokens)


class _Columns(DynamicLayer):
    """A layer's keys and values `[P, H, C, D]` of P places, with room for more columns: those of open rows begin at
    `first`, the next token's is `at`. Only the new column is written, where the library's layer copies all of them."""

    def __init__(self, like: DynamicLayer, places: int, columns: int):
        super().__init__()
        self.is_initialized = True
        self.first = self.at = 0
        if like.keys is not None:  # None: the layer reads another one's
            self.keys = like.keys.new_zeros(places, like.keys.shape[1], columns, like.keys.shape[3])
            self.values = like.values.new_zeros(places, like.values.shape[1], columns, like.values.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, self.at] = key_states[:, :, 0]
        self.values[:, :, self.at] = value_states[:, :, 0]
        self.at += 1
        return self.keys[:, :, self.first : self.at], self.values[:, :, self.first : self.at]

    def get_seq_length(self) -> int:
        return self.at - self.first


class Decoder:
    """Draws tokens for rows, as many rows at once as it has places. Noise and truncation are the caller's `draw`.

    Args:
        model: a causal language model, in eval mode.
        pad: an id to fill up with; it is masked.
        eos: the ids that end a row.
        max_rows: rows decoded at once. Others wait until one has ended.

    Attributes:
        movable: whether rows enter and leave alone. If not, all rows are computed again when some enter.
        busy: whether rows are open.
        steps: decode steps since `begin`: one token for each row in a place, or for each that enters.
        seconds: spent in them.
    """

    def __init__(self, model: Any, *, device: torch.device, pad: int, eos: set[int], max_rows: int):
        self.model, self.device = model, device
        self.pad, self.eos, self.max_rows = pad, eos, max_rows
        accepts = inspect.signature(model.forward).parameters
        self._cache_name = next(name for name in CACHES if name in accepts)
        self._takes_positions = "position_ids" in accepts
        self._takes_keep = "logits_to_keep" in accepts
        self.movable = is_movable(model.config)
        self.abort()

    @property
    def busy(self) -> bool:
        return bool(self._queue) or any(self._places)

    def begin(self, draw: Draw, stop: StopStringCriteria | None = None) -> None:
        """How tokens are drawn for the rows to come. `stop` gets what was drawn for a row, never the prompt."""
        self._draw = draw
        self._stop = stop
        self.steps = 0
        self.seconds = 0.0

    def submit(self, asks: Sequence[Ask]) -> None:
        """Rows to decode, in this order if they are more than there are places."""
        self._queue.extend(_Row(ask) for ask in asks)

    def poll(self) -> list[Piece]:
        """Decodes until rows end, but no longer than `TICK` and a step. Returns those rows."""
        start = time.monotonic()
        ended: list[Piece] = []
        with torch.inference_mode(), sdpa_kernel(ATTENTION):
            while self.busy and not ended and time.monotonic() < start + TICK:
                ended = self._step()
        self.seconds += time.monotonic() - start
        if not self.busy:
            self.abort()
        return ended

    def abort(self) -> None:
        """Drops all rows, and the cache."""
        self._queue: deque[_Row] = deque()
        self._places: list[_Row | None] = []
        self._cache: Any = None
        self._mask = torch.zeros(0, 1, 0, 1, dtype=torch.long, device=self.device)  # as the keys, `[P, 1, C, 1]`
        self._at = 0  # the column of the next token
        self._idle = 0  # places without a row, summed over decode steps since the batch last changed

    def _step(self) -> list[Piece]:
        """A token for each row in a place, or for those that enter: once idle places have lost as much as that costs.
        So the sum of both is at most twice the least possible, whatever lengths the rows have."""
        live = len(self._live())
        count = min(self.max_rows - live, len(self._queue))
        if count or self.movable:
            self._idle += max(len(self._places) - live, count)
            if not live or self._idle >= self._cost(count) * len(self._places):
                return self._enter([self._queue.popleft() for _ in range(count)])
        return self._decode()

    def _cost(self, count: int) -> float:
        """What it costs, in decode steps, that so many rows enter: what a prefill costs beside its tokens."""
        if self.movable:
            return 1.0
        rows = [row for row in self._places if row] + [self._queue[index] for index in range(count)]
        return 1.0 + sum(row.length for row in rows) / RECOMPUTED

    def _live(self) -> list[int]:
        return [place for place, row in enumerate(self._places) if row]

    def _decode(self) -> list[Piece]:
        live = self._live()
        if self._at == self._mask.shape[2]:
            live = self._arrange([])
        first = self._at + 1 - max(self._places[place].length for place in live)  # type: ignore[union-attr]
        self._mask[:, :, self._at] = 1
        for layer in self._cache.layers if self.movable else ():
            layer.first = first
            layer.at = self._at
        self._at += 1
        self.steps += 1
        newest = [(row.tokens[-1], row.length - 1) if row else (self.pad, 0) for row in self._places]
        ids, positions = torch.tensor(newest, device=self.device).T.unsqueeze(-1)
        mask = self._mask[:, 0, first if self.movable else 0 : self._at, 0]
        logits = self._forward(ids, mask, positions)
        return self._take(logits if len(live) == len(self._places) else logits[live], live)

    def _enter(self, rows: list[_Row]) -> list[Piece]:
        """Rows get places and their first token."""
        self._idle = 0
        ended: list[Piece] = []
        if not self.movable:
            rows = [row for row in self._places if row] + rows
            self._places = []
        rows.sort(key=lambda row: row.length, reverse=True)
        taken = self._live()
        free = len(self._places) - len(taken)
        if free != len(rows) or (rows and rows[0].length > self._at):
            taken = self._arrange(rows)
        places = [place for place in range(len(self._places)) if place not in set(taken)]
        self.steps += bool(rows)
        while rows:  # the longest first: a pass is as wide as its first row
            count = max(1, PREFILL // rows[0].length) if self.movable else len(rows)
            ended += self._prefill(rows[:count], places[:count])
            rows, places = rows[count:], places[count:]
        return ended

    def _prefill(self, rows: list[_Row], places: list[int]) -> list[Piece]:
        """One forward pass of rows alone, and a token for each."""
        contexts = [torch.tensor([*row.ask.ids, *row.tokens]) for row in rows]
        ids = pad_sequence(contexts, batch_first=True, padding_value=-1, padding_side="left").to(self.device)
        mask = (ids >= 0).long()
        kept, self._cache = self._cache, DynamicCache() if self.movable else None
        logits = self._forward(ids.where(ids >= 0, self.pad), mask, (mask.cumsum(-1) - 1).clamp(min=0))
        columns = slice(self._at - ids.shape[1], self._at)
        self._mask[places] = 0
        self._mask[places, :, columns] = mask[:, None, :, None]
        if self.movable:
            alone, shape = self._cache, self._mask.shape
            self._cache = kept or Cache(layers=[_Columns(layer, shape[0], shape[2]) for layer in alone.layers])
            for layer, given in zip(self._cache.layers, alone.layers, strict=True):
                if given.keys is not None:
                    layer.keys[places, :, columns] = given.keys
                    layer.values[places, :, columns] = given.values
        for place, row in zip(places, rows, strict=True):
            self._places[place] = row
        return self._take(logits, places)

    def _arrange(self, entering: list[_Row]) -> list[int]:
        """Makes the batch anew: places for open rows and for those that enter, columns for the longest and room for
        more. Returns the places of open rows, the first ones."""
        live = self._live()
        rows = [row for row in self._places if row]
        used = max((row.length - 1 for row in rows), default=0)
        at = max([used, *(row.length for row in entering)])
        room = max(row.left for row in rows + entering)
        columns = at + (min(room, at // 4 + ROOM) if self.movable else room)

        def moved(given: Tensor) -> Tensor:
            new = given.new_zeros(len(rows) + len(entering), given.shape[1], columns, given.shape[3])
            new[: len(live), :, at - used : at] = given[live, :, self._at - used : self._at]
            return new

        self._mask = moved(self._mask)
        for layer in self._cache.layers if rows else ():
            if layer.keys is not None:
                layer.keys = moved(layer.keys)
                layer.values = moved(layer.values)
        if not rows:
            self._cache = None
        self._at = at
        self._places = rows + [None] * len(entering)
        return list(range(len(rows)))

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Runs ids `[R, T]` at these positions after the cache, which takes them in, with the mask `[R, C + T]`
        of both. Returns the logits of the last ones, `[R, V]` float32."""
        given: dict[str, Any] = {self._cache_name: self._cache}
        if self._takes_positions:
            given["position_ids"] = positions
        if self._takes_keep:
            given["logits_to_keep"] = 1
        out = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **given)
        self._cache = out[self._cache_name]
        return out.logits[:, -1].float()

    def _take(self, logits: Tensor, places: list[int]) -> list[Piece]:
        """Draws a token for the rows in these places, from logits `[R, V]`. Rows that end leave."""
        rows: list[_Row] = [row for place in places if (row := self._places[place])]
        numbers = np.asarray([row.ask.row for row in rows])
        positions = np.asarray([row.ask.begun + len(row.tokens) for row in rows])
        drawn = [part.double() for part in self._draw(logits, numbers, positions)]
        tokens, logprobs = torch.stack(drawn).tolist()  # the only wait for the device in a step
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.tokens.append(int(token))
            row.logprobs.append(logprob)
        ended = []
        for place, row, stopped in zip(places, rows, self._stopped(rows), strict=True):
            if end := self._end(row, stopped=stopped):
                self._places[place] = None
                ended.append(Piece(row.ask.row, row.tokens, row.logprobs, end))
        return ended

    def _end(self, row: _Row, *, stopped: bool) -> End | None:
        if row.ask.free and row.tokens[-1] in self.eos:
            return "eos"
        if row.ask.free and stopped:
            return "stop"
        return None if row.left else "limit"

    def _stopped(self, rows: list[_Row]) -> list[bool]:
        """For each row, whether a stop string ends in its last token."""
        if self._stop is None:
            return [False] * len(rows)
        most = self._stop.maximum_token_len  # it looks at so many tokens
        ends = [[NO_TOKEN] * (most - len(row.tokens)) + row.tokens[-most:] for row in rows]
        scores: Any = None
        return self._stop(torch.tensor(ends), scores).tolist()


def is_movable(config: PretrainedConfig) -> bool:
    """Whether a model's cache is keys and values by column alone. Sliding windows are; the mask has their bounds."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in plain for layer in DynamicCache(config=config).layers)
