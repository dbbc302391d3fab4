"""The rollout engine: it takes the policy's weights, generates rows in the background and yields each when it ends."""

import hashlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitppo.config import RolloutConfig
from splitppo.rollout import IDS, LOGPROBS, End, Request, Sample, numbers, tensor_of

TICK = 0.005  # seconds between two empty lists of `generate`


@dataclass(frozen=True)
class Window:
    """How far each slot of a rollout decodes: so many tokens. A row that has not ended by then is cut.

    There are S `slots` on all ranks: row r is in slot r % S, and row r + S comes after it. `following`: row -> the
    request for the row after it. It is pure, and called in other threads and ahead of time. None: the slot stays empty.
    """

    tokens: int = sys.maxsize
    slots: int = sys.maxsize
    following: Callable[[int], Request] | None = None


WHOLE = Window()  # no window: rows are generated to their end


def row_seed(seed: int, row: int, tokens: int) -> int:
    """The 63-bit seed of a row's noise after so many of its tokens, for engines that take one seed per request."""
    digest = hashlib.blake2b(f"{seed}/{row}/{tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def extend(request: Request, tokens: Sequence[int], logprobs: Sequence[float], end: End) -> Sample:
    """A request's row with its new tokens. Raises FloatingPointError if one of their log-probs is NaN or infinite."""
    new = numbers(logprobs, LOGPROBS)
    if not tensor_of(new, LOGPROBS).isfinite().all():
        raise FloatingPointError(f"row {request.row}: the policy's logits are not finite")
    response = numbers(request.response, IDS) + numbers(tokens, IDS)
    return Sample(request.row, request.prompt, response, numbers(request.logprobs, LOGPROBS) + new, end)


def weight_names(model: nn.Module) -> dict[str, tuple[str, torch.Size]]:
    """Maps each weight and persistent buffer to its tensor's first name (tied weights share a tensor) and its shape."""
    first: dict[int, str] = {}
    named = model.state_dict(keep_vars=True).items()
    return {name: (first.setdefault(id(tensor), name), tensor.shape) for name, tensor in named}


def check_weights(
    weights: Iterable[tuple[str, Tensor]], names: Mapping[str, tuple[str, torch.Size]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor of a stream once, by its first name. `names` are those of `weight_names`. Raises ValueError if
    a name is unknown, a shape is wrong, or at the end a tensor is missing."""
    missing = {first for first, _ in names.values()}
    for name, tensor in weights:
        if name not in names:
            raise ValueError(f"unknown weight {name}: the policy has no tensor of this name")
        first, shape = names[name]
        if shape != tensor.shape:
            raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
        if first in missing:
            missing.remove(first)
            yield first, tensor
    if missing:
        raise ValueError(f"{len(missing)} weights are missing, among them {', '.join(sorted(missing)[:5])}")


class RolloutEngine:
    """Generates the rows of one actor rank. Each kind of engine has its `connect`, `_load`, `_rows` and `close`.

    Attributes:
        loaded: whether the engine has a complete set of weights. `release_memory` may drop them.
        step_ms: mean milliseconds of a decode step (one token for each open row) in the last complete `generate`;
            0 if that had no rows.
    """

    connect: Callable[[], str]  # waits until the engine is ready; returns a line about it for the log
    close: Callable[[], None]  # frees all memory; the engine cannot be used afterwards
    _load: Callable[[Iterable[tuple[str, Tensor]]], None]
    _rows: Callable[[Sequence[Request], RolloutConfig, int, Window], Iterator[list[Sample]]]  # the work of `generate`

    def __init__(self):
        self.loaded = self._running = False
        self.step_ms = 0.0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies the policy's weights and persistent buffers: full (unsharded) tensors by Hugging Face name, cast to
        the engine's dtype. Of tied weights, the stream may hold any of the names or all. After an error, as the
        ValueErrors of `check_weights`, the engine needs a complete new load."""
        if self._running:
            raise RuntimeError("load_weights while rows are being generated: finish or close the iterator first")
        self.loaded = False
        self._load(weights)
        self.loaded = True

    def generate(
        self, requests: Sequence[Request], sampling: RolloutConfig, *, seed: int, window: Window = WHOLE
    ) -> Generator[list[Sample], None, None]:
        """Generates every request once, in the background, from the first `next` on. A row's noise is a function of
        (seed, row, position) alone, or of (seed, row, tokens that it has, position).

        Of `sampling`, engines read temperature, max_new_tokens, stop, top_p and top_k. At temperature 0 they take the
        likeliest token, with log-probs at temperature 1, of all tokens. Only the response is searched for stop strings,
        never the prompt. top_k comes before top_p, and log-probs are those of the truncated distribution.

        Yields:
            the rows that have just ended, or that the window has cut (their end is `window`). Every few milliseconds an
            empty list, so that the caller can do other work. Closing or dropping the iterator (an exception in a `for`
            loop drops it) stops the background work first.

        Raises:
            RuntimeError: no weights are loaded.
            Exception: any error of the background work, with its traceback.
        """
        if not self.loaded:
            raise RuntimeError("generate before a complete load_weights")
        if self._running:
            raise RuntimeError("generate while rows are being generated: finish or close the first iterator")
        if empty := [request.row for request in requests if not request.prompt]:
            raise ValueError(f"row {empty[0]} has an empty prompt; it needs at least one token")
        self._running = True
        try:
            yield from self._rows(requests, sampling, seed, window)
        finally:
            self._running = False

    def release_memory(self, *, trained: bool) -> None:
        """Gives the trainer the device memory that it needs now. Afterwards `loaded` may be False. `trained`: whether
        the trainer's memory peak so far includes an update."""
