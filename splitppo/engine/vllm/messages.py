"""What a rank and its vLLM engine's process say to each other, over a Unix socket."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from splitppo.config import RolloutConfig
from splitppo.engine import Ask, Piece


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a bucket: `first` is the byte where it starts."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    first: int


# From a rank to the engine. All ranks of an engine send Hello once, then Load, Verify, Sleep and
# Wake together: the engine does it when all have asked, and answers each with Done. Submit and
# Halt are of one rank alone.


@dataclass(frozen=True)
class Hello:
    """The rank's place among those of the engine, and what its two buckets are mapped by."""

    index: int
    buckets: Sequence[Any]


@dataclass(frozen=True)
class Load:
    """A bucket, 0 or 1, is filled with these tensors."""

    bucket: int
    entries: Sequence[Entry]


@dataclass(frozen=True)
class Verify:
    """All is sent: name -> (numbers, checksum) of each tensor."""

    sums: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Sleep:
    """vLLM's sleep level; 0: stay awake. The deepest of all ranks counts."""

    level: int


@dataclass(frozen=True)
class Wake:
    """The parts of vLLM's memory to wake: `weights`, `kv_cache`. They are asleep: vLLM ignores a
    call that names an awake part."""

    tags: Sequence[str]


@dataclass(frozen=True)
class Submit:
    """Rows to draw tokens for. No answer; `Pieces` follow."""

    asks: Sequence[Ask]
    sampling: RolloutConfig
    seed: int


@dataclass(frozen=True)
class Halt:
    """Drops the rank's rows. Done answers it."""


@dataclass(frozen=True)
class Close:
    """The rank leaves. No answer."""


# From the engine to a rank.


@dataclass(frozen=True)
class Pieces:
    """What has ended of the rank's rows. `step_ms`: mean milliseconds of a decode step since the
    first of them."""

    pieces: Sequence[Piece]
    step_ms: float


@dataclass(frozen=True)
class Done:
    """The answer to a message."""

    value: Any = None
