"""The proof of a sync: each tensor that the trainer sends is in the engine, whole, with every number in its place.

Where vLLM's models put what they load (fused, cut for several GPUs, padded, held twice, in another order) is written
down nowhere. So the first load is traced: it shows which places of the engine's tensors are filled from which places of
the sent ones. In every sync, checksums that depend on the place of each number are compared at both.
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

Box = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides and offset, in numbers: a view of a tensor's memory
Piece = tuple[Box, str, Box]  # of a sent tensor; the engine's tensor that holds it, and where
Report = tuple[dict[str, int], dict[str, list[Box]], list[str]]  # checksums and pieces as they came; what differs now

STRETCH = 2**22  # numbers that are weighed at once, which takes 32 MiB
MOST_RUNS = 2**14  # stretches of a tensor that a loader reorders; beyond, it is taken for one that can't be compared
FACTOR = -7046029254386353131  # 2**64 by the golden ratio, as int64


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """`[STRETCH]` odd int64 numbers: splitmix64 of their indices, with arithmetic shifts."""
    word = torch.arange(1, STRETCH + 1, device=device) * FACTOR
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        word = (word ^ (word >> shift)) * factor
    return word | 1


def checksum(tensor: Tensor) -> Tensor:
    """The sum of the numbers' bit patterns, each times an odd weight of its place, modulo 2**64.

    An int64 on the tensor's device, the same on every device; 0 for zeros.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    numbers = tensor.detach().reshape(-1).view(integers)
    weights = _weights(numbers.device)
    sums = [(stretch * weights[: len(stretch)]).sum() for stretch in numbers.split(STRETCH)]
    return (torch.stack(sums) * weights[: len(sums)] ** 2).sum()  # squared: no two places have one weight


def part(tensor: Tensor, box: Box) -> Tensor:
    """A view of a tensor."""
    return tensor.as_strided(box[0], box[1], tensor.storage_offset() + box[2])


@functools.cache
def gaps(numbers: int, boxes: tuple[Box, ...]) -> list[tuple[int, int]]:
    """The stretches (first, end) of so many numbers that no box covers."""
    spread, unit = [], numbers
    for shape, strides, offset in boxes:
        axes = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
        run = 1
        while axes and axes[0][0] == run:
            run *= axes.pop(0)[1]
        spread.append((axes, run, offset))
        unit = math.gcd(unit, run, offset, *(stride for stride, _ in axes))
    covered = torch.ones(numbers // unit + 2, dtype=torch.int8)  # with one more at each end
    covered[1:-1] = 0
    for axes, run, offset in spread:
        sizes, strides = [size for _, size in axes], [stride // unit for stride, _ in axes]
        covered.as_strided([*sizes, run // unit], [*strides, 1], offset // unit + 1).fill_(1)
    edges = (covered.diff().nonzero()[:, 0] * unit).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class _Places:
    """Finds which of some tensors another one is a view of."""

    def __init__(self, named: Mapping[str, Tensor]):
        self.spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in named.items())

    def find(self, tensor: Any) -> tuple[str, int] | None:
        """Its name, and the number of it with which the view begins."""
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return None
        at = tensor.data_ptr()
        first, end, name = self.spans[max(0, bisect_right(self.spans, (at, math.inf)) - 1)]
        return (name, (at - first) // tensor.element_size()) if first <= at < end else None


class _Trace(TorchDispatchMode):
    """Watches `load_weights`: what of the `sent` tensors, views of one, is copied where."""

    def __init__(self, sent: Mapping[str, Tensor]):
        super().__init__()
        self.sent = _Places(sent)
        self.names = sorted(sent, key=lambda name: sent[name].storage_offset())
        self.firsts = torch.tensor([sent[name].storage_offset() for name in self.names])
        # copies that a loader makes on the way, by their memory: which of the sent numbers each of their numbers is
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.writes: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self.writes.append((args[0], args[1]))
        elif isinstance(out, Tensor) and not self._known(out) and any(map(self._known, tree_iter((args, kwargs)))):
            indices = tree_map_only(Tensor, self._indices, args)
            rest = {name: value for name, value in kwargs.items() if name not in ("dtype", "device")}
            with suppress(RuntimeError, TypeError):  # integers have no such function: it is no copy
                self._copied(out, func(*indices, **rest))
        return out

    def pieces(self, held: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
        """What was copied to tensors of the engine, by the name of what was sent."""
        places, found = _Places(held), {name: list[Piece]() for name in self.names}
        for to, source in self.writes:
            shape, at = tuple(to.shape), places.find(to)
            if at and (sent := self.sent.find(source)):
                box = shape, source.expand(shape).stride(), sent[1]
                found[sent[0]].append((box, at[0], (shape, to.stride(), at[1])))
            elif at and self._known(source) and to.is_contiguous():
                for name, first, count, start in self._runs(self._indices(source).expand(shape).reshape(-1)):
                    found[name].append((((count,), (1,), first), at[0], ((count,), (1,), at[1] + start)))
        return found

    def _runs(self, indices: Tensor) -> Iterator[tuple[str, int, int, int]]:
        """A copy's stretches of numbers that stand together in a sent tensor: its name, the first of them there, how
        many, and the first of them here."""
        owners = torch.bucketize(indices, self.firsts, right=True) - 1
        cuts = ((indices.diff() != 1) | (owners.diff() != 0)).nonzero()[:, 0] + 1
        if len(cuts) < MOST_RUNS:
            for start, end in pairwise([0, *cuts.tolist(), len(indices)]):
                if (owner := int(owners[start])) >= 0:
                    yield self.names[owner], int(indices[start] - self.firsts[owner]), end - start, start

    def _known(self, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor):
            return False
        return self.sent.find(tensor) is not None or tensor.untyped_storage().data_ptr() in self.copies

    def _indices(self, tensor: Tensor) -> Tensor:
        """Which of the sent numbers are in a view of a sent tensor or of a copy; -1 for other numbers."""
        shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        if copy := self.copies.get(tensor.untyped_storage().data_ptr()):
            return copy[1].as_strided(shape, strides, offset)
        if not self._known(tensor):
            return torch.full(shape, -1) if tensor.is_floating_point() else tensor.cpu()
        end = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return torch.arange(end).add_(offset).as_strided(shape, strides)

    def _copied(self, copy: Tensor, indices: Tensor) -> None:
        known = torch.full((copy.untyped_storage().nbytes() // copy.element_size(),), -1)
        known.as_strided(copy.shape, copy.stride(), copy.storage_offset()).copy_(indices)
        self.copies[copy.untyped_storage().data_ptr()] = copy, known


class Received:
    """What a model has of the tensors that were sent to it."""

    def __init__(self, model: Any):
        self.model = model
        self.pieces: dict[str, list[Piece]] = {}
        self.sums: dict[str, list[Tensor]] = {}  # of each tensor as it came, and of its pieces
        self.dtype = torch.float32

    def load(self, sent: Mapping[str, Tensor]) -> None:
        """Has the model load tensors, which are views of one tensor and have one dtype."""
        trace = None if sent.keys() <= self.pieces.keys() else _Trace(sent)
        with torch.no_grad(), trace or nullcontext():
            self.model.load_weights(iter(sent.items()))
        self.pieces |= trace.pieces(self._held()) if trace else {}
        for name, tensor in sent.items():
            self.dtype, whole = tensor.dtype, checksum(tensor)
            views = [part(tensor, box) for box, _, _ in self.pieces[name]]
            same = [view.is_contiguous() and view.numel() == tensor.numel() for view in views]
            sums = [whole if is_it else checksum(view) for is_it, view in zip(same, views, strict=True)]
            self.sums[name] = [whole, *sums]

    def report(self) -> Report:
        """What of them is where it belongs now."""
        held, boxes, checks = self._held(), defaultdict[str, list[Box]](list), []
        for name, pieces in self.pieces.items():
            for (_, at, box), due in zip(pieces, self.sums[name][1:], strict=True):
                boxes[at].append(box)
                # a model may keep a wider dtype, exactly
                checks.append((at, checksum(part(held[at], box).to(self.dtype)), due))
        for at in [at for at, tensor in held.items() if isinstance(tensor, nn.Parameter)]:
            for first, end in gaps(held[at].numel(), tuple(boxes[at])):  # what nothing is copied to is padding, zeros
                total = checksum(part(held[at], ((end - first,), (1,), first)))
                checks.append((at, total, torch.zeros_like(total)))
        differ = torch.stack([has != due for _, has, due in checks]).tolist() if checks else []
        wrong = {at for (at, _, _), is_wrong in zip(checks, differ, strict=True) if is_wrong}
        totals = torch.stack([whole for whole, *_ in self.sums.values()]).tolist() if self.sums else []
        pieces = {name: [box for box, _, _ in pieces] for name, pieces in self.pieces.items()}
        return dict(zip(self.sums, totals, strict=True)), pieces, sorted(wrong)

    def _held(self) -> dict[str, Tensor]:
        """The model's tensors, one for each piece of memory."""
        named = [*self.model.named_buffers(), *self.model.named_parameters()]
        return dict({tensor.data_ptr(): (name, tensor) for name, tensor in named if tensor.numel()}.values())


def judge(sent: Sequence[Mapping[str, tuple[int, int]]], reports: Sequence[Report]) -> tuple[list[str], list[str]]:
    """Compares what was sent with what came.

    Args:
        sent: name -> numbers and checksum, for each worker.
        reports: the workers'.

    Returns:
        the tensors of which not all is in the engine, and those that differ there.
    """
    boxes = {name: [box for _, pieces, _ in reports for box in pieces.get(name, [])] for name in sent[0]}
    lost = [name for name, (numbers, _) in sent[0].items() if gaps(numbers, tuple(boxes[name]))]
    wrong = [name for _, _, names in reports for name in names]
    for told, (sums, _, _) in zip(sent, reports, strict=True):
        wrong += [name for name, (_, total) in told.items() if sums.get(name) != total]
    return lost, [*dict.fromkeys(wrong)]
