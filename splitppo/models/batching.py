"""Rows as inputs of a forward pass, and the cutting of rows into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Any

import torch
from torch import Tensor

from splitppo.rollout import Episode, Rollout, episode_of

Fields = dict[str, Tensor]  # per-token tensors by name, packed `[N]` or padded `[B, T]`
MiniBatches = Sequence[Sequence[int]]  # the rows of each mini-batch
Cut = list[list[int]]  # micro-batches, as indices of rows
ROUND = 64  # a packed micro-batch has a multiple of this many tokens


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass, prompt and response together. Packed rows follow one another; their
    boundaries are inputs (attention.py). Padded rows have the padding on the right, where no token
    sees it: attention is causal."""

    # the model's arguments; `input_ids` are int64, `[1, L]` if packed, `[B, L]` if padded
    inputs: dict[str, Any]
    before: Tensor  # `[N]` int64, the place before each response token in the flattened ids
    responses: Tensor  # `[N]` int64, the response tokens
    mask: Tensor  # `[B, T]` bool, True at response tokens; `[N]` tensors fill it row by row
    places: Tensor  # `[N]` int64, where in the flattened mask the response tokens are

    def pad(self, packed: Tensor) -> Tensor:
        """`[N]` -> `[B, T]`, 0 where padded."""
        # by index: the gradient through a mask would make the host wait for the GPU to count the
        # mask
        return (
            packed.new_zeros(self.mask.numel())
            .index_copy(0, self.places, packed)
            .view(self.mask.shape)
        )


def micro_batch(
    episodes: Sequence[Episode], device: torch.device, *, packed: bool = False
) -> MicroBatch:
    """The rows of one forward pass. Without rows, a dummy batch: the rank must take part in its
    group's passes."""
    rows = [episode.ids.long() for episode in episodes] or [torch.zeros(2, dtype=torch.int64)]
    sampled = [episode.places + len(episode.prompt) for episode in episodes] or [rows[0][:0]]
    if packed:
        inputs, starts = _packed_inputs(rows)
    else:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        inputs = {"input_ids": ids}
        starts = [i * ids.shape[1] for i in range(len(rows))]
    before = torch.cat([places + start - 1 for places, start in zip(sampled, starts, strict=True)])
    responses = torch.cat([row[places] for row, places in zip(rows, sampled, strict=True)])
    lengths = torch.tensor([len(places) for places in sampled])
    mask = torch.arange(max(int(lengths.max()), 1)) < lengths[:, None]
    places = mask.flatten().nonzero()[:, 0]
    return MicroBatch(
        {name: to_device(x, device) if isinstance(x, Tensor) else x for name, x in inputs.items()},
        *(to_device(tensor, device) for tensor in (before, responses, mask, places)),
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to the device; the host does not wait for the GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _packed_inputs(rows: Sequence[Tensor]) -> tuple[dict[str, Any], list[int]]:
    """The model's inputs, and where each row begins in the flattened ids. A row of zeros fills them
    up to a multiple of ROUND: GPUs are faster at such sizes."""
    ids = list(rows)
    lengths = [len(row) for row in rows]
    if missing := -sum(lengths) % ROUND:
        ids.append(torch.zeros(missing, dtype=torch.int64))
        lengths.append(missing)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    inputs = {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return inputs, starts[: len(rows)].tolist()


def cut_lengths(lengths: Sequence[int], budget: int, *, packed: bool = False) -> Cut:
    """Cuts rows of these lengths into micro-batches of at most `budget` tokens, padding counted. A
    longer row goes alone. The longest rows come first, so that memory peaks at once."""
    cut: Cut = []
    left: list[int] = []  # tokens left of each packed micro-batch's budget
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if packed:
            at = next((k for k, room in enumerate(left) if room >= lengths[i]), len(cut))
        else:  # the first row of a micro-batch is its longest
            fits = cut and (len(cut[-1]) + 1) * lengths[cut[-1][0]] <= budget
            at = len(cut) - 1 if fits else len(cut)
        if at == len(cut):
            cut.append([])
            left.append(budget)
        cut[at].append(i)
        left[at] -= lengths[i]
    return cut


def partition(
    costs: Sequence[float], count: int, *, sizes: Sequence[int] = (), room: int = 0
) -> list[list[int]] | None:
    """Greedy partition of items into `count` bins of nearly equal cost. Returns the item indices of
    each bin. With `sizes`, the items of a bin have at most `room` together, unless the bin holds
    one item. None: they don't fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    sizes = sizes or [0] * len(costs)
    cheapest = [(0.0, k) for k in range(count)]  # a heap
    # of equal ones, the first comes first
    for i in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        full = []  # cheaper bins, without room for the item
        while cheapest and bins[k := cheapest[0][1]] and filled[k] + sizes[i] > room:
            full.append(heappop(cheapest))
        if not cheapest:
            return None
        cost, k = cheapest[0]
        bins[k].append(i)
        filled[k] += sizes[i]
        heapreplace(cheapest, (cost + costs[i], k))
        for entry in full:
            heappush(cheapest, entry)
    return bins


def dummy_rollout(tokens: int = 4096) -> Rollout:
    """Rows to compile with, of at least this many tokens. No dimension of a model has their sizes:
    the compiler would take a dimension of the same size to be the same dimension."""
    return Rollout(episode_of(row, [0] * 7, [0] * 99) for row in range(-(-tokens // 106) | 1))
