"""The proof of a sync: the engine has every tensor that the trainer sent, complete and unchanged.

vLLM's models fuse, shard, pad, duplicate and reorder what they load, and document it nowhere. So
the first load is traced, to see which part of a sent tensor goes where. Each sync then compares
checksums of these parts.
"""

import functools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

# shape, strides and offset of a view, in numbers
Box = tuple[tuple[int, ...], tuple[int, ...], int]
# a part of a sent tensor; the engine's tensor that holds it; the part of that tensor
Piece = tuple[Box, str, Box]
# name -> (count of numbers, checksum) of each tensor that was sent
Sums = Mapping[str, tuple[int, int]]
# checksums as received; parts loaded; what differs
Report = tuple[dict[str, int], dict[str, list[Box]], list[str]]

BLOCK = 2**22  # numbers that are weighted at once; takes 32 MiB
# runs of a reordered tensor; with more, the tensor counts as one that can't be compared
MAX_RUNS = 2**14
FACTOR = -7046029254386353131  # 2**64 divided by the golden ratio, as int64


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """`[BLOCK]` odd int64 numbers: splitmix64 of their indices, with arithmetic shifts."""
    word = torch.arange(1, BLOCK + 1, device=device) * FACTOR
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        word = (word ^ (word >> shift)) * factor
    return word | 1


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
    """Records during `load_weights` which parts of the `sent` tensors (views of one bucket) are
    copied where."""

    def __init__(self, sent: Mapping[str, Tensor]):
        super().__init__()
        self.sent = _Owners(sent)
        self.names = sorted(sent, key=lambda name: sent[name].storage_offset())
        self.firsts = torch.tensor([sent[name].storage_offset() for name in self.names])
        # The loader's temporary tensors by memory address, each with the index in the bucket of
        # each of its numbers.
        self.temporaries: dict[int, tuple[Tensor, Tensor]] = {}
        self.writes: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self.writes.append((args[0], args[1]))
        elif (
            isinstance(out, Tensor)
            and not self._tracks(out)
            and any(map(self._tracks, tree_iter((args, kwargs))))
        ):
            indices = tree_map_only(Tensor, self._indices, args)
            others = {name: x for name, x in kwargs.items() if name not in ("dtype", "device")}
            # an error: integers do not support this function, so it is no copy
            with suppress(RuntimeError, TypeError):
                storage = out.untyped_storage()
                whole = torch.full((storage.nbytes() // out.element_size(),), -1)
                whole.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(
                    func(*indices, **others)
                )
                self.temporaries[storage.data_ptr()] = out, whole
        return out

    def pieces(self, held: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
        """The pieces of each sent tensor that were copied to the engine's tensors `held`."""
        owners = _Owners(held)
        copied = {name: list[Piece]() for name in self.names}
        for to, source in self.writes:
            shape = tuple(to.shape)
            at = owners.find(to)
            if at and (sent := self.sent.find(source)):
                box = shape, source.expand(shape).stride(), sent[1]
                copied[sent[0]].append((box, at[0], (shape, to.stride(), at[1])))
            elif at and self._tracks(source) and to.is_contiguous():
                for name, first, count, start in self._runs(
                    self._indices(source).expand(shape).reshape(-1)
                ):
                    box = (count,), (1,), first
                    copied[name].append((box, at[0], ((count,), (1,), at[1] + start)))
        return copied

    def _runs(self, indices: Tensor) -> Iterator[tuple[str, int, int, int]]:
        """Runs of consecutive indices in a sent tensor: its name, first number there, length, first
        number here."""
        owners = torch.bucketize(indices, self.firsts, right=True) - 1
        cuts = ((indices.diff() != 1) | (owners.diff() != 0)).nonzero()[:, 0] + 1
        if len(cuts) < MAX_RUNS:
            for start, end in pairwise([0, *cuts.tolist(), len(indices)]):
                if (owner := int(owners[start])) >= 0:
                    first = int(indices[start] - self.firsts[owner])
                    yield self.names[owner], first, end - start, start

    def _tracks(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and (
            tensor.untyped_storage().data_ptr() in self.temporaries
            or self.sent.find(tensor) is not None
        )

    def _indices(self, tensor: Tensor) -> Tensor:
        """The index in the bucket of each number of a view of a sent or temporary tensor; -1 for
        other numbers."""
        shape = tuple(tensor.shape)
        strides = tensor.stride()
        offset = tensor.storage_offset()
        if temporary := self.temporaries.get(tensor.untyped_storage().data_ptr()):
            return temporary[1].as_strided(shape, strides, offset)
        if not self._tracks(tensor):
            return torch.full(shape, -1) if tensor.is_floating_point() else tensor.cpu()
        end = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return torch.arange(end).add_(offset).as_strided(shape, strides)


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
        trace = None if sent.keys() <= self.pieces.keys() else _Trace(sent)
        with torch.no_grad(), trace or nullcontext():
            self.model.load_weights(iter(sent.items()))
        held = self._held()
        self.pieces |= trace.pieces(held) if trace else {}
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
