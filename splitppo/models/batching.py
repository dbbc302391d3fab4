"""Rows as inputs of a forward pass, and the cutting of rows into micro-batches."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Any

import torch
from torch import Tensor

from splitppo.models.sequence import SequenceSet
from splitppo.rollout import IDS, LOGPROBS, Episode, Rollout, Segment, tensor_of

Fields = dict[str, Tensor]  # packed per-token tensors `[N, ...]` by name
MiniBatches = Sequence[Sequence[int]]  # of each mini-batch, its episodes' places in a rollout
Cut = list[list[int]]  # micro-batches, as indices of rows
ROUND = 64  # a packed micro-batch has a multiple of this many tokens


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass, prompt and response together. Packed rows follow one another; their
    boundaries are inputs (attention.py). Padded rows have the padding on the right, where no token
    sees it: attention is causal.

    Where the ranks of a set run the rows together, the ids are a piece of all, and `before` and
    `responses` are of the response tokens that were chosen in it. What is computed of them becomes
    whole by `join`; `cut` is the inverse."""

    # the model's arguments; `input_ids` are int64, `[1, L]` if packed, `[B, L]` if padded
    inputs: dict[str, Any]
    before: Tensor  # `[N]` int64, the place before each response token in the flattened ids
    responses: Tensor  # `[N]` int64, the response tokens
    lengths: Tensor  # `[B]` int64, the response tokens of each row
    chosen: Tensor  # `[N]` int64, as `before`, in the ids of all ranks of the set
    # `[L, bytes]` uint8, the experts of the ids, packed as `Segment` has them; where no token was
    # chosen, or they are not known, all ones
    experts: Tensor
    sequence: SequenceSet | None = None
    here: Tensor | None = None  # which of `chosen` are in this rank's piece, if there are pieces

    def join(self, piece: Tensor) -> Tensor:
        """What is computed of this rank's response tokens, as `before`, to `[N, ...]` of all."""
        if self.sequence is None:
            return piece
        length = self.inputs["input_ids"].shape[1]
        ids = piece.new_zeros(length, *piece.shape[1:])
        return self.whole(ids.index_copy(0, self.before, piece))[self.chosen]

    def cut(self, column: Tensor) -> Tensor:
        """`[N, ...]` of all response tokens to those of this rank's."""
        return column if self.here is None else column[self.here]

    def whole(self, piece: Tensor) -> Tensor:
        """`[L, ...]` of the ids to a tensor of all ranks' ids."""
        return self.sequence.join(piece) if self.sequence else piece


def micro_batch(
    episodes: Sequence[Episode],
    device: torch.device,
    *,
    packed: bool = False,
    sequence: SequenceSet | None = None,
) -> MicroBatch:
    """The rows of one forward pass. Without rows, a dummy batch: the rank must take part in its
    group's passes. `sequence`: the ranks over which packed rows are cut."""
    rows = [episode.ids.long() for episode in episodes] or [torch.zeros(2, dtype=torch.int64)]
    sampled = [episode.places + len(episode.prompt) for episode in episodes] or [rows[0][:0]]
    inputs: dict[str, Any]
    if packed:
        inputs, starts = _packed_inputs(rows, sequence.size if sequence else 1)
    else:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        inputs = {"input_ids": ids}
        starts = [i * ids.shape[1] for i in range(len(rows))]
    chosen = torch.cat([places + start - 1 for places, start in zip(sampled, starts, strict=True)])
    responses = torch.cat([row[places] for row, places in zip(rows, sampled, strict=True)])
    lengths = torch.tensor([len(places) for places in sampled])
    experts = _experts(episodes, chosen, inputs["input_ids"].numel())
    before = chosen
    here = None
    if sequence:
        length = inputs["input_ids"].shape[1]
        places = sequence.places(length)
        for name in ("input_ids", "position_ids"):
            inputs[name] = inputs[name][:, places]
        # of all tokens, where each is among this rank's; -1: with another rank
        among = torch.full((length,), -1).index_copy(0, places, torch.arange(len(places)))
        here = (among[chosen] >= 0).nonzero().flatten()
        before = among[chosen[here]]
        responses = responses[here]
        experts = experts[places]
        inputs["sequence"] = sequence
    return MicroBatch(
        {name: to_device(x, device) if isinstance(x, Tensor) else x for name, x in inputs.items()},
        before=to_device(before, device),
        responses=to_device(responses, device),
        lengths=to_device(lengths, device),
        chosen=to_device(chosen, device),
        sequence=sequence,
        here=None if here is None else to_device(here, device),
        experts=to_device(experts, device),
    )


def _experts(episodes: Sequence[Episode], chosen: Tensor, length: int) -> Tensor:
    """`MicroBatch.experts` of `length` ids."""
    sampled = [s for episode in episodes for s in episode.segments if s.logprobs is not None]
    width = max((len(s.experts) // len(s.ids) for s in sampled if s.ids), default=0)
    unknown = b"\xff" * width
    packed = tensor_of((s.experts or unknown * len(s.ids) for s in sampled), torch.uint8)
    experts = torch.full((length, width), 255, dtype=torch.uint8)
    return experts.index_copy(0, chosen, packed.view(len(chosen), width))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to the device; the host does not wait for the GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _packed_inputs(rows: Sequence[Tensor], ranks: int) -> tuple[dict[str, Any], list[int]]:
    """The model's inputs, and where each row begins in the flattened ids. A row of zeros fills them
    up to a multiple of ROUND for each of the ranks: GPUs are faster at such sizes."""
    ids = list(rows)
    lengths = [len(row) for row in rows]
    if missing := -sum(lengths) % (ROUND * ranks):
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
    loads = [(0.0, k) for k in range(count)]  # a heap
    # of equal ones, the first comes first
    for i in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        full = []
        while loads and 0 < filled[loads[0][1]] > room - sizes[i]:
            full.append(heappop(loads))
        if not loads:
            return None
        load, k = loads[0]
        heapreplace(loads, (load + costs[i], k))
        bins[k].append(i)
        filled[k] += sizes[i]
        for bin_load in full:
            heappush(loads, bin_load)
    return bins


def dummy_rollout(tokens: int = 4096) -> Rollout:
    """Rows to compile with, of at least this many tokens. No dimension of a model has their sizes:
    the compiler would take a dimension of the same size to be the same dimension."""
    response = Segment(array(IDS, [0] * 99), array(LOGPROBS, [0.0] * 99))
    rows = range(-(-tokens // 106) | 1)
    return Rollout(Episode(row, array(IDS, [0] * 7), (response,), "eos") for row in rows)
