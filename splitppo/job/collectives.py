"""The process groups, and what the ranks of a group exchange: sums, maxima, small objects, all
through host memory."""

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from splitppo.job.launch import Launch
from splitppo.placement import SetShape

# axes over which weights are sharded; the second alone if there is one replica
SHARDED = ("replica", "shard")


class Group:
    """The ranks that play one role, as one of them sees it. All of them must call each method.

    The mesh's axes have names. Rows belong to the ranks along `rows` (data parallelism). Ranks
    along all other axes are a set: they share rows, whatever for (sequence and
    tensor parallelism). So sums and
    gathers run along `rows` alone.

    Attributes:
        sizes: axis -> its length. set_axes: all but `rows`.
        dp_rank, dp_size: place along `rows`, and its length.
        set_rank, set_size: place in the set, the last axis running fastest, and its size.
        speaks: whether this rank is the first of its set, which sends and receives rows for all of
            it.
        is_first: whether this rank is the group's first, which writes and prints for all of it.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.sizes = dict(zip(cast(Any, mesh.mesh_dim_names), mesh.shape, strict=True))
        self.dp_rank = mesh.get_local_rank("rows")
        self.dp_size = self.sizes["rows"]
        self.set_axes = [axis for axis in self.sizes if axis != "rows"]
        self.set_rank = 0
        for axis in self.set_axes:
            self.set_rank = self.set_rank * self.sizes[axis] + mesh.get_local_rank(axis)
        self.set_size = mesh.size() // self.dp_size
        self.speaks = self.set_rank == 0
        self.is_first = self.speaks and self.dp_rank == 0

    def all_sum(self, values: Tensor) -> Tensor:
        """Element-wise sum of a CPU tensor over the data-parallel ranks, in float64."""
        return self._all_reduce(values.double(), dist.ReduceOp.SUM, "rows")

    def all_max(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over all ranks of the group."""
        reduced = torch.tensor(values, dtype=torch.int64)
        return self._all_reduce(reduced, dist.ReduceOp.MAX, *self.sizes).tolist()

    def all_gather(self, value: Any) -> list[Any]:
        """The small object of each data-parallel rank, in their order. For start-up and figures,
        never for batches."""
        gathered: list[Any] = [None] * self.dp_size
        dist.all_gather_object(gathered, value, group=self.mesh.get_group("rows"))
        return gathered

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Sends each data-parallel rank, in their order, its part: a 1-D CPU tensor, perhaps empty,
        of one dtype on all ranks. Returns what each of them sent to this rank."""
        if self.dp_size == 1:
            return list(parts)
        sizes = torch.tensor([len(part) for part in parts])
        due = torch.empty_like(sizes)
        line = self.mesh.get_group("rows")
        dist.all_to_all_single(due, sizes, group=line)
        received = parts[0].new_empty(int(due.sum()))
        dist.all_to_all_single(
            received, torch.cat(list(parts)), due.tolist(), sizes.tolist(), group=line
        )
        return list(received.split(due.tolist()))

    def barrier(self) -> None:
        """Waits for all ranks of the group. Nothing waits for the GPU's work."""
        self.all_max([0])

    def broadcast(self, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """To all ranks of a set what its first one has: a 1-D CPU tensor. The others give None."""
        if self.set_size == 1:
            return cast(Tensor, tensor)
        size = self._all_reduce(
            torch.tensor([0 if tensor is None else len(tensor)]), dist.ReduceOp.MAX, *self.set_axes
        )
        held = torch.zeros(int(size), dtype=dtype) if tensor is None else tensor.clone()
        return self._all_reduce(held, dist.ReduceOp.SUM, *self.set_axes)

    def gather_set(self, value: Any) -> list[Any]:
        """The small object of each rank of this rank's set."""
        gathered = [value]
        for axis in reversed(self.set_axes):
            parts = [gathered] * self.sizes[axis]
            dist.all_gather_object(parts, gathered, group=self.mesh.get_group(axis))
            gathered = [one for part in parts for one in part]
        return gathered

    def of_first(self, value: Callable[[], Any]) -> Any:
        """The small object that the first rank of this rank's set computes."""
        return self.gather_set(value() if self.speaks else None)[0]

    def _all_reduce(self, values: Tensor, op: Any, *axes: str) -> Tensor:
        for axis in axes:
            if self.sizes[axis] > 1 and values.numel():
                dist.all_reduce(values, op=op, group=self.mesh.get_group(axis))
        return values


class TensorSet:
    """Ranks that run each layer of a model together, as one of them sees them.

    Attributes:
        mesh: the axis `tensor` is the set, the others are those of `line`. A part of a weight
            belongs to each place.
        line: the mesh over which this rank's part of a layer is sharded; as in `Runtime.shards`.
        group, size: the set's process group, and its ranks.
    """

    def __init__(self, mesh: DeviceMesh, line: DeviceMesh):
        self.mesh = mesh
        self.line = line
        self.group = mesh.get_group("tensor")
        self.size = mesh["tensor"].size()


@dataclass(frozen=True)
class ModelSet:
    """The ranks that run a model's rows together, as one of them sees them.

    Attributes:
        sequence: process group of those that have the same weights and other tokens; or None.
        tensor: those that have the same tokens and other weights; or None.
        peers: the sets of the role's group that this set joins, as a group whose ranks have
            different rows; or None.
    """

    sequence: Any = None
    tensor: TensorSet | None = None
    peers: Group | None = None


def ranks_of(model: Any) -> ModelSet:
    """The set that runs a model, one rank or more."""
    return getattr(model, "ranks", None) or ModelSet()


def all_gather(values: Tensor, group: Any) -> Tensor:
    """What all ranks of a process group have, `[ranks, n, ...]`; each has a tensor `[n, ...]`."""
    ranks = dist.get_world_size(group)
    gathered = values.new_empty(ranks * len(values), *values.shape[1:])
    dist.all_gather_into_tensor(gathered, values, group=group)
    return gathered.view(ranks, *values.shape)


class GroupMaker:
    """Makes this rank's process groups (NCCL for GPUs, Gloo for host memory) and meshes. All ranks
    of the job make the same ones in the same order."""

    def __init__(self, launch: Launch, device: str, store: dist.Store, timeout: float):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):  # Gloo opens a file handle for each rank of each group
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        limit = timedelta(seconds=timeout)
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world, timeout=limit
        )
        self.rank = launch.rank
        self.device = device
        self.new_group = partial(dist.new_group, backend=backend, timeout=limit)
        self.made: dict[str, Any] = {}

    def line(self, lines: Tensor, **options: Any) -> Any:
        """Makes a process group of each row of `[groups, ranks]`, with torch's `options`; returns
        the one that holds this rank, or None."""
        if (key := f"{lines.tolist()} {options}") not in self.made:
            groups = [(self.new_group(ranks, **options), ranks) for ranks in lines.tolist()]
            self.made[key] = next((group for group, ranks in groups if self.rank in ranks), None)
        return self.made[key]

    def mesh(self, blocks: Tensor, *names: str) -> DeviceMesh | None:
        """The mesh of the block, of these `[blocks, ...]` of ranks, that holds this rank."""
        groups = [
            self.line(blocks.movedim(axis + 1, -1).flatten(0, -2)) for axis in range(len(names))
        ]
        blocks_here: Any = [block for block in blocks if self.rank in block]
        return (
            DeviceMesh.from_group(groups, self.device, mesh=blocks_here[0], mesh_dim_names=names)
            if blocks_here
            else None
        )

    def group(self, lines: Tensor, **axes: int) -> Group | None:
        """The group, of these `[groups, ranks]`, that holds this rank. `axes`: those of its sets,
        and their lengths."""
        wide = {axis: size for axis, size in axes.items() if size > 1}
        mesh = self.mesh(lines.unflatten(1, (-1, *wide.values())), "rows", *wide)
        return Group(mesh) if mesh else None

    def model_set(self, held: Tensor, shape: SetShape, least: SetShape) -> ModelSet:
        """The set of this shape that holds this rank. `held`: the role's ranks `[ranks]`, or
        `[replicas, ranks]`; the sets of its group have the shape `least`."""
        names = SHARDED[-held.ndim :]
        tensor = None
        if shape.tensor > 1:
            cut = held.unflatten(-1, (-1, shape.tensor)).movedim(-1, 0)
            if mesh := self.mesh(cut[None], "tensor", *names):
                tensor = TensorSet(mesh, mesh[names])
        sets = held.reshape(-1, shape.size)
        lines = sets.unflatten(1, shape).transpose(1, 2).flatten(0, 1)
        return ModelSet(
            self.line(lines) if shape.sequence > 1 else None,
            tensor,
            self.group(sets, **least._asdict()) if shape.size > least.size else None,
        )
