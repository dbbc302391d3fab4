"""Continuous batching over a transformers model: rows enter and leave a batch, and no other row is computed again.

All rows share the cache's columns: the token drawn now is at column `at` of every row, whatever its place in the row. A
row that enters is run alone (with the others that enter), and its keys are copied to the columns before `at`. So one
mask `[R, C]` says it all, and keys, which were rotated by their place in the row, may lie anywhere.
"""

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

ROOM = 64  # columns that are allocated ahead
Draw = Callable[[Tensor, list["Row"]], tuple[list[int], list[float]]]


@dataclass(eq=False)
class Row:
    """A row that is decoded: `ids` is its context; `begun` is the place in its response of the first token to draw."""

    key: Any
    ids: list[int]
    begun: int
    most: int
    free: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str = ""


class _Columns(DynamicLayer):
    """Keys and values with room for further columns; `update` copies nothing but the new ones."""

    def __init__(self):
        super().__init__()
        self.at, self.is_initialized = 0, True
        self.keys: Any = None
        self.values: Any = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self.at + key_states.shape[-2]
        self.keys[:, :, self.at : end] = key_states
        self.values[:, :, self.at : end] = value_states
        self.at = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.at

    def remap(self, change: Callable[[Tensor], Tensor], at: int) -> None:
        self.keys, self.values, self.at = change(self.keys), change(self.values), at


def is_plain(config: Any) -> bool:
    """Whether a model's cache is keys and values by column, which `Decoder` can move."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception:
        return False

    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class Decoder:
    """Attributes: steps: forward passes for one token of each row; prefills: those in which rows enter; computed: ids
    that went through the model."""

    def __init__(
        self, model: Any, device: torch.device, pad: int, eos: set[int], max_rows: int, *, plain: bool | None = None
    ):
        self.model, self.device, self.pad, self.eos, self.max_rows = model, device, pad, eos, max_rows
        self.plain = is_plain(model.config) if plain is None else plain
        accepts = inspect.signature(model.forward).parameters
        self.positions, self.keep = "position_ids" in accepts, "logits_to_keep" in accepts
        self.cost = 1.0  # decode steps that a prefill takes
        self.steps = self.prefills = self.computed = 0
        self.clear()

    def clear(self) -> None:
        self.queue: deque[Row] = deque()
        self.places: list[Row | None] = []
        self.cache: Any = None
        self.mask = torch.zeros(0, 0, dtype=torch.long, device=self.device)
        self.at = 0
        self.lost = 0.0  # slot-steps that places have waited although a row was queued

    @property
    def busy(self) -> bool:
        return bool(self.queue) or any(self.places)

    def step(self, draw: Draw) -> list[Row]:
        """One token for each row; rows that wait enter first if it pays. Returns the rows that have ended."""
        live = [place for place, row in enumerate(self.places) if row]
        room = self.max_rows - len(live)
        ended: list[Row] = []
        if self.queue and room:
            self.lost += min(room, len(self.queue))
            # waiting has cost as much as a prefill will (ski rental): within 2x of the best, whatever the lengths are
            if not live or self.lost >= self.cost * len(self.places):
                self.lost = 0.0
                entering = [self.queue.popleft() for _ in range(min(room, len(self.queue)))]
                ended = self._enter(entering, draw)
                live = [place for place, row in enumerate(self.places) if row]
        if not live:
            self.places = []
            return ended
        if not self.queue and 2 * len(live) <= len(self.places):
            self._keep(live)
            live = list(range(len(live)))
        return ended + self._decode(live, draw)

    def _decode(self, live: list[int], draw: Draw) -> list[Row]:
        self._make_room(1)
        self.mask[:, self.at] = 1
        last = torch.tensor([[row.tokens[-1] if row else self.pad] for row in self.places], device=self.device)
        logits = self._forward(last, self.mask[:, : self.at + 1], self.cache, self.lengths)
        self.at += 1
        self.lengths += 1
        self.steps += 1
        whole = len(live) == len(self.places)
        return self._take(logits if whole else logits[torch.tensor(live, device=self.device)], live, draw)

    def _take(self, logits: Tensor, places: list[int], draw: Draw) -> list[Row]:
        rows: Any = [self.places[place] for place in places]
        tokens, logprobs = draw(logits, rows)
        ended = []
        for place, row, token, logprob in zip(places, rows, tokens, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if row.free and token in self.eos:
                row.end = "eos"
            elif not row.end and len(row.tokens) == row.most:
                row.end = "limit"
            if row.end:
                self.places[place] = None
                ended.append(row)
        return ended

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any, before: Tensor | None) -> Tensor:
        extra: dict[str, Any] = {}
        if self.positions:
            extra["position_ids"] = before[:, None] if before is not None else (mask.cumsum(-1) - 1).clamp(min=0)
        if self.keep:
            extra["logits_to_keep"] = 1
        self.computed += ids.numel()
        out = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
        return out.logits[:, -1].float()

    def _enter(self, entering: list[Row], draw: Draw) -> list[Row]:
        if not self.plain:  # all rows are computed again, with those that go on
            entering = [row for row in self.places if row] + entering
            self.places = []
        width = max(len(row.ids) + len(row.tokens) for row in entering)
        rows = [[*row.ids, *row.tokens] for row in entering]
        ids = torch.tensor([[self.pad] * (width - len(row)) + row for row in rows], device=self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        mask = (torch.arange(width, device=self.device) >= width - lengths[:, None]).long()
        alone = DynamicCache(config=None if self.plain else self.model.config)
        logits = self._forward(ids, mask, alone, None)
        self.prefills += 1
        free = [place for place, row in enumerate(self.places) if row is None]
        if not self.plain or len(free) == len(self.places):  # the batch begins
            places = list(range(len(entering)))
            self.places = list(entering)
            self.lengths, self.at = lengths, width
            self.mask = torch.nn.functional.pad(mask, (0, ROOM))
            self.cache = alone
            if self.plain:
                self.cache = Cache(layers=[_Columns() for _ in alone.layers])
                for mine, given in zip(self.cache.layers, alone.layers, strict=True):
                    if given.keys is not None:
                        mine.keys = torch.nn.functional.pad(given.keys, (0, 0, 0, ROOM))
                        mine.values = torch.nn.functional.pad(given.values, (0, 0, 0, ROOM))
                    mine.at = width
        else:
            if more := len(entering) - len(free):
                if more > 0:
                    free += self._add_places(more)
            places = free[: len(entering)]
            if width > self.at:
                self._shift(width - self.at)
            index, first = torch.tensor(places, device=self.device), self.at - width
            for mine, given in zip(self.cache.layers, alone.layers, strict=True):
                if given.keys is not None:
                    mine.keys[index, :, first : self.at] = given.keys
                    mine.values[index, :, first : self.at] = given.values
            self.mask[index] = 0
            self.mask[index, first : self.at] = mask
            self.lengths[index] = lengths
            for place, row in zip(places, entering, strict=True):
                self.places[place] = row
        return self._take(logits, places, draw)

    def _remap(self, change: Callable[[Tensor, int], Tensor], at: int) -> None:
        """`change` gets a tensor and its axis of columns (rows are axis 0)."""
        self.mask, self.at = change(self.mask, 1), at
        for layer in self.cache.layers if self.plain else ():
            if layer.keys is not None:
                layer.remap(lambda given: change(given, 2), at)

    def _make_room(self, columns: int) -> None:
        if self.at + columns <= self.mask.shape[1]:
            return
        starts = self.at - self.lengths  # a place that waits has length 0 or its old one: at worst it keeps columns
        live = [place for place, row in enumerate(self.places) if row]
        first = int(starts[torch.tensor(live, device=self.device)].min()) if self.plain else 0
        size = max(self.at - first + columns + ROOM, (5 * (self.at - first)) // 4)
        keep = self.at - first

        def move(given: Tensor, axis: int) -> Tensor:
            shape = list(given.shape)
            shape[axis] = size
            new = given.new_zeros(shape)
            new.narrow(axis, 0, keep).copy_(given.narrow(axis, first, keep))
            return new

        self._remap(move, keep)

    def _shift(self, columns: int) -> None:
        """Room before the first column: a row enters that is longer than all others."""

        def move(given: Tensor, axis: int) -> Tensor:
            shape = list(given.shape)
            shape[axis] += columns
            new = given.new_zeros(shape)
            new.narrow(axis, columns, self.at).copy_(given.narrow(axis, 0, self.at))
            return new

        self._remap(move, self.at + columns)

    def _add_places(self, more: int) -> list[int]:
        def add(given: Tensor, axis: int) -> Tensor:
            return torch.cat([given, given.new_zeros(more, *given.shape[1:])])

        self._remap(add, self.at)
        self.lengths = torch.cat([self.lengths, self.lengths.new_zeros(more)])
        self.places += [None] * more
        return list(range(len(self.places) - more, len(self.places)))

    def _keep(self, live: list[int]) -> None:
        index = torch.tensor(live, device=self.device)
        if self.plain:
            self._remap(lambda given, axis: given[index], self.at)
        else:
            self.cache.reorder_cache(index)
            self.mask = self.mask[index]
        self.lengths = self.lengths[index]
        self.places = [self.places[place] for place in live]
