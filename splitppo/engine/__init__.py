"""The rollout engine: it takes the policy's weights and draws tokens for the rows that are
submitted."""

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
    """A model's weights as they are now. `version`: grows with each of its updates. `stream`: what
    `RolloutEngine.load_weights` takes; all ranks of the model's group must call and consume it."""

    version: int
    stream: Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Ask:
    """Tokens to draw for a row.

    Attributes:
        row: its number in the data order; seeds its noise.
        ids: the prompt and all that the row has so far.
        begun: response tokens among them.
        tokens: to draw at most.
        may_stop: whether an end token or stop string ends the row; if not, it gets all `tokens`.
    """

    row: int
    ids: Sequence[int]
    begun: int
    tokens: int
    may_stop: bool = True


@dataclass(frozen=True)
class Piece:
    """What was drawn for an `Ask`: the tokens with their log-probs. `end`: `eos`, `stop`, or
    `limit`: it has all tokens that were asked for."""

    row: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    end: End


@dataclass(eq=False)
class OpenPiece:
    """An ask in work, and what has been drawn for it. `rank`: whose it is, where an engine serves
    several."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rank: int = 0

    @property
    def length(self) -> int:
        """Tokens of the row so far."""
        return len(self.ask.ids) + len(self.tokens)

    @property
    def left(self) -> int:
        """Tokens that may still be drawn."""
        return self.ask.tokens - len(self.tokens)


# of each row, whether a stop string ends in its last token
Stops = Callable[[Sequence[OpenPiece]], list[bool]]


def find_stops(tokenizer: Any, strings: Sequence[str]) -> Stops:
    """What looks for these strings in what was drawn for rows, never in their prompts."""
    if not strings:
        return lambda rows: [False] * len(rows)
    criteria: Any = StopStringCriteria(tokenizer, list(strings))
    most = criteria.maximum_token_len  # it looks at so many tokens

    def stops(rows: Sequence[OpenPiece]) -> list[bool]:
        last = [[NO_TOKEN] * (most - len(row.tokens)) + row.tokens[-most:] for row in rows]
        return criteria(torch.tensor(last), None).tolist() if rows else []

    return stops


def row_seed(seed: int, row: int, tokens: int) -> int:
    """The 63-bit seed of a row's noise after so many of its tokens, for engines that take one seed
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
    """Draws tokens for the rows of one actor rank, as many rows at once as it can. A row's noise is
    a function of (seed, row, position) alone, or of (seed, row, `begun`, position).

    Of `sampling`, engines read temperature, stop, top_p and top_k. At temperature 0 they take the
    likeliest token, with log-probs at temperature 1, of all tokens. Only drawn tokens are searched
    for stop strings, never the prompt. top_k comes before top_p, and log-probs are those of the
    truncated distribution.

    Attributes:
        loaded: whether the engine has a complete set of weights. `release_memory` may drop them.
        open: asks without a piece yet.
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
        Face name, cast to the engine's dtype. Of tied weights, the stream may hold any of the names
        or all. After an error, as the ValueErrors of `check_weights`, the engine needs a complete
        new load."""
        self._check_idle("load_weights")
        self.loaded = False
        self._load(weights)
        self.loaded = True

    def begin(self, sampling: RolloutConfig, seed: int) -> None:
        """Makes ready to draw. Raises RuntimeError if rows are open, or no weights are loaded."""
        self._check_idle("begin")
        if not self.loaded:
            raise RuntimeError("begin before a complete load_weights")
        self._begin(sampling, seed)

    def submit(self, asks: Sequence[Ask]) -> None:
        """Begins to draw for more rows; returns at once."""
        self.open += len(asks)
        if asks:
            self._submit(asks)

    def poll(self) -> list[Piece]:
        """What has ended since the last call, each ask once; waits for it no longer than `TICK`.
        Raises FloatingPointError if a log-prob is NaN or infinite, and any error of the engine's
        work."""
        pieces = self._poll()
        self.open -= len(pieces)
        for piece in pieces:
            if not np.isfinite(piece.logprobs).all():
                raise FloatingPointError(f"row {piece.row}: the policy's logits are not finite")
        return pieces

    def abort(self) -> None:
        """Drops all open rows; the engine's work has stopped then."""
        if self.open:
            self._abort()
        self.open = 0

    @abstractmethod
    def release_memory(self, *, trained: bool) -> None:
        """Gives the trainer the device memory that it needs now. Afterwards `loaded` may be False.
        `trained`: whether the trainer's memory peak so far includes an update."""

    @abstractmethod
    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _begin(self, sampling: RolloutConfig, seed: int) -> None: ...

    @abstractmethod
    def _submit(self, asks: Sequence[Ask]) -> None: ...

    @abstractmethod
    def _poll(self) -> list[Piece]: ...

    @abstractmethod
    def _abort(self) -> None: ...

    def _check_idle(self, call: str) -> None:
        if self.open:
            raise RuntimeError(f"{call} while {self.open} rows are open: poll them or abort first")
