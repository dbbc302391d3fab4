"""The order of the prompts: which of them a step uses, as a pure function of the step's number and the seed."""

from collections.abc import Sequence

import numpy as np

# keep apart the random streams that are drawn from the same seed
_ORDER_STREAM, _DRAW_STREAM = 1, 5


def batch_indices(n_prompts: int, per_step: int, step: int, seed: int) -> list[int]:
    """The prompts of step `step` (from 1): `per_step` indices below `n_prompts`.

    Every epoch is a new seeded permutation of all prompts. A step may begin in one epoch and end in the next.
    """
    first, offset = divmod((step - 1) * per_step, n_prompts)
    epochs = range(first, first + (offset + per_step - 1) // n_prompts + 1)
    streams = ([_ORDER_STREAM, seed % 2**64, epoch] for epoch in epochs)
    orders = [np.random.default_rng(stream).permutation(n_prompts) for stream in streams]
    return np.concatenate(orders)[offset : offset + per_step].tolist()


def draw(sizes: Sequence[int], count: int, seed: int) -> list[int]:
    """`count` random indices below sum(sizes), ascending. Each part of `sizes` has its share, to within 1."""
    rng = np.random.default_rng([_DRAW_STREAM, seed % 2**64])
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    shuffled = np.concatenate([start + rng.permutation(size) for start, size in zip(starts, sizes, strict=True)])
    # equal strides over the parts, each in random order
    phase = int(rng.integers(len(shuffled)))
    return sorted(int(shuffled[(i * len(shuffled) + phase) // count]) for i in range(count))
