"""What a rank and its vLLM engine's process say to each other, over a Unix socket.

A rank calls: it sends the name of a method of `host.Host`, and its arguments.

    hello, index, buckets    the rank's place among those of the engine, and what its two buckets
                             are mapped by; once, at first
    load, bucket, entries    a bucket, 0 or 1, is filled with these tensors
    verify, sums             all is sent: name -> (numbers, checksum) of each tensor
    sleep, level             vLLM's sleep level; 0: stay awake; the deepest of all ranks counts
    wake, tags               parts of vLLM's memory that are asleep: weights, kv_cache
    submit, asks, sampling, seed    rows to draw tokens for; lists of `Piece`s follow
    halt                     drops the rank's rows
    close                    the rank leaves

`load`, `verify`, `sleep` and `wake` are called by all ranks of an engine together: it does them
when all have called, and sends each the result. `submit` and `close` have no answer, that of `halt`
is None.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a bucket: `first` is the byte where it starts."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    first: int
