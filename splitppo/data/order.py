"""The order of the prompts: which of them a step uses, as a pure function of the step's number and the seed."""

from collections.abc import Sequence

import numpy as np

# keep apart the random streams that are drawn from the same seed
_ORDER_STREAM, _FILE_STREAM, _OFFSET_STREAM, _STEP_STREAM, _DRAW_STREAM = range(1, 6)


def batch_indices(n_prompts: int, per_step: int, step: int, seed: int) -> list[int]:
    """The prompts of step `step` (from 1): `per_step` indices below `n_prompts`.

    Every epoch is a new seeded permutation of all prompts. A step may begin in one epoch and end in the next.
    """
    return _from_epochs(n_prompts, (step - 1) * per_step, per_step, [_ORDER_STREAM, seed % 2**64])


def mixed_indices(sizes: Sequence[int], weights: Sequence[float], per_step: int, step: int, seed: int) -> list[int]:
    """The prompts of step `step` (from 1) if every file has a fixed share of each step.

    Let w_f be the weight of file f over the sum of weights, and u_f in [0, 1) random from the seed. File f takes turns
    at the times (j + u_f) / w_f, j = 0, 1, ...; the run takes the turns of all files in the order of their times. So f
    has w_f * n of any n successive turns, to within 1 + w_f * len(sizes). A step's prompts are then shuffled. Each file
    has epochs of its own. The cost of a step does not depend on its number.

    Args:
        sizes: prompts of each file; the indices count the files' prompts one file after the other.
    """
    seed %= 2**64  # numpy takes no negative seed
    shares = np.asarray(weights, dtype=float) / np.sum(weights)
    offsets = np.random.default_rng([_OFFSET_STREAM, seed]).random(len(sizes))
    start = (step - 1) * per_step
    # before time T there are T turns, to within len(sizes): these bounds enclose the step's turns
    margin = len(sizes) + 1
    begin = np.maximum(np.ceil((start - margin) * shares - offsets), 0).astype(int).tolist()
    end = np.ceil((start + per_step + margin) * shares - offsets).astype(int).tolist()
    turns = sorted(
        ((j + offset) / share, file, j)
        for file, (offset, share) in enumerate(zip(offsets.tolist(), shares.tolist(), strict=True))
        for j in range(begin[file], end[file])
    )
    skip = start - sum(begin)
    own: dict[int, list[int]] = {}
    for _, file, j in turns[skip : skip + per_step]:
        own.setdefault(file, []).append(j)
    chosen: list[int] = []
    for file, js in sorted(own.items()):
        first = sum(sizes[:file])
        chosen += [first + i for i in _from_epochs(sizes[file], js[0], len(js), [_FILE_STREAM, seed, file])]
    return np.random.default_rng([_STEP_STREAM, seed, step]).permutation(chosen).tolist()


def _from_epochs(size: int, start: int, count: int, stream: list[int]) -> list[int]:
    """`count` indices, from position `start`, of an endless sequence of epochs: permutations of range(size)."""
    first, offset = divmod(start, size)
    epochs = range(first, first + (offset + count - 1) // size + 1)
    orders = [np.random.default_rng([*stream, epoch]).permutation(size) for epoch in epochs]
    return np.concatenate(orders)[offset : offset + count].tolist()


def draw(sizes: Sequence[int], count: int, seed: int) -> list[int]:
    """`count` random indices below sum(sizes), ascending. Each part of `sizes` has its share, to within 1."""
    rng = np.random.default_rng([_DRAW_STREAM, seed % 2**64])
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    shuffled = np.concatenate([start + rng.permutation(size) for start, size in zip(starts, sizes, strict=True)])
    # equal strides over the parts, each in random order
    phase = int(rng.integers(len(shuffled)))
    return sorted(int(shuffled[(i * len(shuffled) + phase) // count]) for i in range(count))
