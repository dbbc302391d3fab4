"""The rollout engine takes the policy's weights and samples tokens for submitted rows."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import StopStringCriteria

from splitppo.config import RolloutConfig
from splitppo.models.names import ties_of
from splitppo.rollout import End

NO_TOKEN = 2**31 - 1  # beyond every vocabulary: no part of a stop string
TICK = 0.005  # seconds that `poll` waits, or works, at most before it returns without a piece


@dataclass(frozen=True)
class Weights:
    """A model's current weights. `version` grows with each update. `stream` yields the tensors for
    `RolloutEngine.load_weights`; all ranks of the model's group must call and consume it."""

    version: int
    stream: Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Ask:
    """A request to sample tokens for a row.

    Attributes:
        row: the row's number in the data order, which seeds its noise.
        ids: the prompt and everything after it so far.
        begun: number of response tokens among `ids`.
        tokens: most tokens to sample.
        may_stop: whether an end token or stop string ends the row. If not, it gets all `tokens`.
    """

    row: int
    ids: Sequence[int]
    begun: int
    tokens: int
    may_stop: bool = True


@dataclass(frozen=True)
class Piece:
    """The tokens sampled for an `Ask`, with their log-probs. `end`: `eos`, `stop`, or `limit` if
    all requested tokens were sampled. `experts`: as in `Segment`."""

    row: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    end: End
    experts: bytes = b""


@dataclass(eq=False)
class OpenPiece:
    """A request in progress, and what has been sampled for it. `rank`: the rank that made it, if an
    engine serves several."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rank: int = 0
    experts: bytearray = field(default_factory=bytearray)

    def piece(self, end: End) -> Piece:
        """What was drawn for a row that has ended."""
        return Piece(self.ask.row, self.tokens, self.logprobs, end, bytes(self.experts))

    @property
    def length(self) -> int:
        """Tokens of the row so far."""
        return len(self.ask.ids) + len(self.tokens)

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return self.ask.tokens - len(self.tokens)


# of each row, whether a stop string ends in its last token
Stops = Callable[[Sequence[OpenPiece]], list[bool]]


def find_stops(tokenizer: Any, strings: Sequence[str]) -> Stops:
    """A function that looks for these strings in sampled tokens, never in prompts."""
    if not strings:
        return lambda rows: [False] * len(rows)
    criteria: Any = StopStringCriteria(tokenizer, list(strings))
    most = criteria.maximum_token_len  # it looks at so many tokens

    def stops(rows: Sequence[OpenPiece]) -> list[bool]:
        last = [[NO_TOKEN] * (most - len(row.tokens)) + row.tokens[-most:] for row in rows]
        return criteria(torch.tensor(last), None).tolist() if rows else []

    return stops


def row_seed(seed: int, row: int, tokens: int) -> int:
    """The 63-bit seed of a row's noise after this number of tokens, for engines that take one seed
    per request."""
    digest = hashlib.blake2b(f"{seed}/{row}/{tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def weight_names(model: nn.Module) -> dict[str, tuple[str, torch.Size]]:
    """Maps each weight and persistent buffer to its tensor's first name (tied weights share a
    tensor) and its shape."""
    ties = ties_of(model)
    return {
        name: (ties.get(name, name), tensor.shape) for name, tensor in model.state_dict().items()
    }


def check_weights(
    weights: Iterable[tuple[str, Tensor]], names: Mapping[str, tuple[str, torch.Size]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor of a stream once, by its first name. `names` are those of `weight_names`.
    Raises ValueError if a name is unknown, a shape is wrong, or at the end a tensor is missing."""
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
        raise ValueError(
            f"{len(missing)} weights are missing, among them {', '.join(sorted(missing)[:5])}"
        )


class RolloutEngine(ABC):
    """Samples tokens for the rows of one actor rank, as many rows at once as fit. A row's noise is
    a function of (seed, row, position) alone, or of (seed, row, `begun`, position).

    Engines read temperature, stop, top_p and top_k from `sampling`. At temperature 0 they take the
    most likely token, with log-probs at temperature 1 over all tokens. top_k is applied before
    top_p, and log-probs are those of the truncated distribution. Stop strings are looked for in
    sampled tokens only.

    Attributes:
        loaded: whether the engine has a complete set of weights. `release_memory` may drop them.
        open: number of requests without an answer.
    """

    loaded = False
    open = 0

    @abstractmethod
    def connect(self) -> str:
        """Waits until the engine is ready; returns a line about it for the log."""

    @abstractmethod
    def close(self) -> None:
        """Frees all memory; the engine cannot be used afterwards."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies the policy's weights and persistent buffers: full (unsharded) tensors by Hugging
        Face name, cast to the engine's dtype. Tied weights may come under any or all of their
        names. After an error (such as a ValueError of `check_weights`) load everything again."""
        if self.open:
            raise RuntimeError(f"load_weights while {self.open} rows are open: abort first")
        self.loaded = False
        self._load(weights)
        self.loaded = True

    def submit(self, asks: Sequence[Ask], sampling: RolloutConfig, seed: int) -> None:
        """Starts to sample for more rows. Returns at once. All open rows have the same `sampling`
        and `seed`. Raises RuntimeError if no weights are loaded."""
        if not self.loaded:
            raise RuntimeError("submit before a complete load_weights")
        self.open += len(asks)
        if asks:
            self._submit(asks, sampling, seed)

    def poll(self) -> list[Piece]:
        """The requests that ended since the last call. Waits for one no longer than `TICK`. Raises
        FloatingPointError if a log-prob is NaN or infinite, and any error of the engine."""
        pieces = self._poll()
        self.open -= len(pieces)
        for piece in pieces:
            if not np.isfinite(piece.logprobs).all():
                raise FloatingPointError(f"row {piece.row}: the policy's logits are not finite")
        return pieces

    def abort(self) -> None:
        """Drops all open requests, and waits until the engine has stopped working on them."""
        if self.open:
            self._abort()
        self.open = 0

    @abstractmethod
    def release_memory(self, *, trained: bool) -> None:
        """Frees the device memory that the trainer needs now. Afterwards `loaded` may be False.
        `trained`: whether the trainer's memory peak so far includes an update."""

    @abstractmethod
    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _submit(self, asks: Sequence[Ask], sampling: RolloutConfig, seed: int) -> None: ...

    @abstractmethod
    def _poll(self) -> list[Piece]: ...

    @abstractmethod
    def _abort(self) -> None: ...
