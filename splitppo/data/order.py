"""The order of the prompts: a pure function of the seed."""

import functools
from collections.abc import Sequence

import numpy as np

# keep apart the random streams that are drawn from the same seed
_ORDER_STREAM, _DRAW_STREAM = 1, 5


def prompt_index(n_prompts: int, place: int, seed: int) -> int:
    """The index, below `n_prompts`, of the prompt at a place of the data order, from 0.

    Every epoch is a new seeded permutation of all prompts.
    """
    epoch, place = divmod(place, n_prompts)
    return int(_permutation(n_prompts, epoch, seed)[place])


@functools.lru_cache(maxsize=16)  # slots may be in several epochs at once
def _permutation(n_prompts: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([_ORDER_STREAM, seed % 2**64, epoch]).permutation(n_prompts)


def draw(sizes: Sequence[int], count: int, seed: int) -> list[int]:
    """`count` random indices below sum(sizes), ascending. Each part of `sizes` has its share, to within 1."""
    rng = np.random.default_rng([_DRAW_STREAM, seed % 2**64])
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    shuffled = np.concatenate([start + rng.permutation(size) for start, size in zip(starts, sizes, strict=True)])
    # equal strides over the parts, each in random order
    phase = int(rng.integers(len(shuffled)))
    return sorted(int(shuffled[(i * len(shuffled) + phase) // count]) for i in range(count))
