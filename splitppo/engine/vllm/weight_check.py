"""The proof of a sync: the engine has every tensor that the trainer sent, complete and unchanged.

vLLM's models fuse, shard, pad and duplicate what they load, and document it nowhere. So the first
load is traced, to see which part of a sent tensor is copied where. Each sync then compares
checksums of these parts. What a model reorders before it is copied counts as lost.
"""

import functools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# shape, strides and offset of a view, in numbers
Box = tuple[tuple[int, ...], tuple[int, ...], int]
# a part of a sent tensor; the engine's tensor that holds it; the part of that tensor
Piece = tuple[Box, str, Box]
# name -> (count of numbers, checksum) of each tensor that was sent
Sums = Mapping[str, tuple[int, int]]
# checksums as received; parts loaded; what differs
Report = tuple[dict[str, int], dict[str, list[Box]], list[str]]

BLOCK = 2**22  # numbers that are weighted at once; takes 32 MiB


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """`[BLOCK]` cubes of odd numbers, modulo 2**64."""
    return torch.arange(1, 2 * BLOCK, 2, device=device) ** 3


def checksum(tensor: Tensor) -> Tensor:
    """The sum of the numbers' bit patterns, each times an odd weight of its position, modulo 2**64:
    an int64 on the tensor's device, the same on all devices, and 0 for zeros."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = tensor.detach().reshape(-1).view(integers[tensor.element_size()])
    weights = _weights(numbers.device)
    sums = [(block * weights[: len(block)]).sum() for block in numbers.split(BLOCK)]
    # squared: no two positions have the same weight
    return (torch.stack(sums) * weights[: len(sums)] ** 2).sum()


def part(tensor: Tensor, box: Box) -> Tensor:
    """The view of a tensor that `box` describes."""
    return tensor.as_strided(box[0], box[1], tensor.storage_offset() + box[2])


@functools.cache
def gaps(numbers: int, boxes: tuple[Box, ...]) -> list[tuple[int, int]]:
    """The ranges (first, end) of a tensor of `numbers` numbers that no box covers."""
    covered = torch.ones(numbers + 2, dtype=torch.int8)  # with a border at each end
    covered[1:-1] = 0
    for shape, strides, offset in boxes:
        covered.as_strided(shape, strides, offset + 1).fill_(1)
    edges = covered.diff().nonzero()[:, 0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class _Owners:
    """Finds the tensor that a view belongs to."""

    def __init__(self, named: Mapping[str, Tensor]):
        self.spans = sorted(
            (t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in named.items()
        )

    def find(self, tensor: Any) -> tuple[str, int] | None:
        """The owner's name, and the view's offset in it, in numbers."""
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return None
        at = tensor.data_ptr()
        first, end, name = self.spans[max(0, bisect_right(self.spans, (at, math.inf)) - 1)]
        return (name, (at - first) // tensor.element_size()) if first <= at < end else None


class _Trace(TorchDispatchMode):
    """Records what is copied where during `load_weights`."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []  # to, from

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def pieces(
        self, sent: Mapping[str, Tensor], held: Mapping[str, Tensor]
    ) -> dict[str, list[Piece]]:
        """The pieces of each tensor of `sent` that were copied to the engine's tensors `held`."""
        senders = _Owners(sent)
        owners = _Owners(held)
        pieces = {name: list[Piece]() for name in sent}
        for to, source in self.copies:
            place = owners.find(to)
            origin = senders.find(source)
            if place and origin:
                shape = tuple(to.shape)
                box = shape, source.expand(shape).stride(), origin[1]
                pieces[origin[0]].append((box, place[0], (shape, to.stride(), place[1])))
        return pieces


class Received:
    """Loads sent tensors into a vLLM model, and checks what the model holds of them."""

    def __init__(self, model: Any):
        self.model = model
        self.pieces: dict[str, list[Piece]] = {}
        # checksums of each tensor as received, and of its pieces
        self.sums: dict[str, list[Tensor]] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def load(self, sent: Mapping[str, Tensor]) -> None:
        """Loads tensors of one dtype that are views of one bucket."""
        trace = None if sent.keys() <= self.pieces.keys() else _Trace()
        with torch.no_grad(), trace or nullcontext():
            self.model.load_weights(iter(sent.items()))
        held = self._held()
        self.pieces |= trace.pieces(sent, held) if trace else {}
        for name, tensor in sent.items():
            self.dtypes[name] = tensor.dtype
            whole = checksum(tensor)
            views = [
                # the model may hold a narrower dtype
                part(tensor, box).to(held[owner].dtype).to(tensor.dtype)
                for box, owner, _ in self.pieces[name]
            ]
            # all of it, as it is
            same = (
                (view.data_ptr(), view.numel()) == (tensor.data_ptr(), tensor.numel())
                and view.is_contiguous()
                for view in views
            )
            self.sums[name] = [
                whole,
                *(whole if s else checksum(v) for s, v in zip(same, views, strict=True)),
            ]

    def report(self) -> Report:
        """Compares the model's tensors with the tensors as received. Parts that were never loaded
        must be zero."""
        held = self._held()
        boxes = defaultdict[str, list[Box]](list)
        checks = []
        for name, pieces in self.pieces.items():
            for (_, owner, box), expected in zip(pieces, self.sums[name][1:], strict=True):
                boxes[owner].append(box)
                # The model may hold a wider dtype. Casting back is exact.
                there = part(held[owner], box).to(self.dtypes[name])
                checks.append((owner, checksum(there) - expected))
        for owner, tensor in held.items():
            if isinstance(tensor, nn.Parameter):
                for first, end in gaps(tensor.numel(), tuple(boxes[owner])):  # padding
                    checks.append((owner, checksum(part(tensor, ((end - first,), (1,), first)))))
        return (
            {name: int(whole) for name, (whole, *_) in self.sums.items()},
            {name: [box for box, _, _ in pieces] for name, pieces in self.pieces.items()},
            sorted({owner for owner, difference in checks if difference}),
        )

    def _held(self) -> dict[str, Tensor]:
        """The model's tensors by name; of tensors that share memory, one."""
        named = [*self.model.named_buffers(), *self.model.named_parameters()]
        return dict(
            {tensor.data_ptr(): (name, tensor) for name, tensor in named if tensor.numel()}.values()
        )


def compare(sent: Sequence[Sums], reports: Sequence[Report]) -> tuple[list[str], list[str]]:
    """Compares the tensors `sent` to each worker (name -> count of numbers and checksum) with the
    workers' reports. Returns the names of those that the workers together do not hold completely,
    and of tensors that differ."""
    boxes = {
        name: [box for _, loaded, _ in reports for box in loaded.get(name, [])] for name in sent[0]
    }
    lost = [name for name, (numbers, _) in sent[0].items() if gaps(numbers, tuple(boxes[name]))]
    different = [name for _, _, names in reports for name in names]
    for tensors, (received, _, _) in zip(sent, reports, strict=True):
        different += [name for name, (_, total) in tensors.items() if received.get(name) != total]
    return lost, [*dict.fromkeys(different)]
