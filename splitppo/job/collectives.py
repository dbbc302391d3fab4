"""The process groups, and what the ranks of a group exchange: sums, maxima, small objects, all through host memory."""

import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from splitppo.algo import Moments, merge_moments
from splitppo.config import ShardSize
from splitppo.job.launch import Launch
from splitppo.placement import Placement, Role, replicas

SHARDED = ("replica", "shard")  # axes over which weights are sharded; the second alone if there is one replica


@dataclass(frozen=True)
class Group:
    """The ranks that play one role, as one of them sees it. All of them must call each method.

    The mesh's first axis is data parallelism, and rows belong to its ranks. Ranks along further axes (tensor or
    sequence parallelism) form a set that works on the same rows. So sums and gathers run along the first axis alone.

    Attributes:
        dp_rank, dp_size: place along the mesh's first axis, and its length.
        whole: process group of all its ranks.
    """

    mesh: DeviceMesh
    dp_rank: int
    dp_size: int
    whole: Any

    @classmethod
    def of(cls, mesh: DeviceMesh, whole: Any = None) -> "Group":
        """A group of a mesh; of one with several axes, `whole` is given."""
        return cls(mesh, mesh.get_local_rank(0), mesh.size(0), whole or mesh.get_group(0))

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of its set, which sends and receives rows for all of it."""
        return not any(self.mesh.get_local_rank(axis) for axis in range(1, self.mesh.ndim))

    @property
    def set_rank(self) -> int:
        """This rank's place in its set."""
        return self.mesh.get_local_rank(1) if self.mesh.ndim > 1 else 0

    @property
    def set_size(self) -> int:
        return self.mesh.size(1) if self.mesh.ndim > 1 else 1

    @property
    def is_first(self) -> bool:
        """Whether this rank is the group's first, which writes and prints for all of it."""
        return self.dp_rank == 0 and self.speaks

    def all_sum(self, values: Tensor) -> Tensor:
        """Element-wise sum of a CPU tensor over the data-parallel ranks, in float64."""
        return self._all_reduce(values.double(), dist.ReduceOp.SUM, range(1))

    def all_max(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over all ranks of the group."""
        own = torch.tensor(values, dtype=torch.int64)
        return self._all_reduce(own, dist.ReduceOp.MAX, range(self.mesh.ndim)).tolist()

    def all_gather(self, value: Any) -> list[Any]:
        """The small object of each data-parallel rank, in their order. For start-up and figures, never for batches."""
        gathered: list[Any] = [None] * self.dp_size
        dist.all_gather_object(gathered, value, group=self.mesh.get_group(0))
        return gathered

    def all_moments(self, own: Sequence[Moments]) -> list[Moments]:
        """Moments over all data-parallel ranks, of as many figures on every rank."""
        parts = self.all_gather([tuple(map(float, (m.count, m.mean, m.variance))) for m in own])
        wide = torch.tensor(parts, dtype=torch.float64)  # [ranks, figures, 3]
        return [merge_moments([Moments(*part[i]) for part in wide]) for i in range(len(own))]

    def barrier(self) -> None:
        """Waits for all ranks of the group. Nothing waits for the GPU's work."""
        self.all_max([0])

    def broadcast(self, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """To all ranks of a set what its first one has: a 1-D CPU tensor. The others give None."""
        within = range(1, self.mesh.ndim)
        if not within:
            return cast(Tensor, tensor)
        size = self._all_reduce(torch.tensor([0 if tensor is None else len(tensor)]), dist.ReduceOp.MAX, within)
        held = torch.zeros(int(size), dtype=dtype) if tensor is None else tensor.clone()
        return self._all_reduce(held, dist.ReduceOp.SUM, within)

    def gather_set(self, value: Any) -> list[Any]:
        """The small object of each rank of this rank's set."""
        gathered = [value] * self.set_size
        if self.set_size > 1:
            dist.all_gather_object(gathered, value, group=self.mesh.get_group(1))
        return gathered

    def of_first(self, value: Callable[[], Any]) -> Any:
        """The small object that the first rank of this rank's set computes."""
        return self.gather_set(value() if self.speaks else None)[0]

    def _all_reduce(self, values: Tensor, op: Any, axes: range) -> Tensor:
        for axis in axes if values.numel() else ():
            if self.mesh.size(axis) > 1:
                dist.all_reduce(values, op=op, group=self.mesh.get_group(axis))
        return values


@dataclass(frozen=True)
class TensorSet:
    """Ranks that run each layer of a model together, as one of them sees them.

    Attributes:
        mesh: its first axis is the set, the others are those of `line`. A part of a weight belongs to each place.
        line: the mesh over which this rank's part of a layer is sharded; as in `Runtime.shards`.
        peers: sets of the role's group that are joined in this set, as a group whose ranks have different rows. None if
            the set is one of the group's own.
    """

    mesh: DeviceMesh
    line: DeviceMesh
    peers: Group | None

    @property
    def group(self) -> Any:
        """The process group of the set."""
        return self.mesh.get_group(0)

    @property
    def size(self) -> int:
        return self.mesh.size(0)


class _Maker:
    """Makes this rank's process groups and meshes. All ranks of the job make the same ones in the same order."""

    def __init__(self, rank: int, device: str, new_group: Callable[[list[int]], Any]):
        self.rank, self.device, self.new_group = rank, device, new_group
        self.made: dict[str, Any] = {}

    def line(self, lines: Tensor) -> Any:
        """Makes a process group of each row of `[groups, ranks]`; returns the one that holds this rank, or None."""
        if (key := str(lines.tolist())) not in self.made:
            groups = [self.new_group(ranks) for ranks in lines.tolist()]
            self.made[key] = next((g for g, ranks in zip(groups, lines, strict=True) if self.rank in ranks), None)
        return self.made[key]

    def mesh(self, blocks: Tensor, *names: str) -> DeviceMesh | None:
        """The mesh of the block, of these `[blocks, ...]` of ranks, that holds this rank."""
        groups = [self.line(blocks.movedim(axis + 1, -1).flatten(0, -2)) for axis in range(len(names))]
        own: Any = [block for block in blocks if self.rank in block]
        return DeviceMesh.from_group(groups, self.device, mesh=own[0], mesh_dim_names=names) if own else None

    def group(self, wholes: Tensor, size: int) -> Group | None:
        """The group, of these `[groups, ranks]`, that holds this rank; its sets have `size` of them."""
        whole, blocks = self.line(wholes), wholes.unflatten(1, (-1, size)) if size > 1 else wholes
        mesh = self.mesh(blocks, *("rows", "set")[: blocks.ndim - 1])
        return Group.of(mesh, whole) if mesh else None

    def tensor_set(self, held: Tensor, size: int, least: int) -> TensorSet | None:
        """The set of `size` ranks that holds this rank. `held`: the role's ranks `[ranks]`, or `[replicas, ranks]`; the
        sets of its group have `least`."""
        names = SHARDED[-held.ndim :]
        mesh = self.mesh(held.unflatten(-1, (-1, size)).movedim(-1, 0)[None], "set", *names)
        peers = self.group(held.reshape(-1, size), least) if size > least else None
        return TensorSet(mesh, mesh[names], peers) if mesh else None


def make_groups(
    launch: Launch,
    placement: Placement,
    device: torch.device,
    store: dist.Store,
    timeout: float,
    shard_size: ShardSize,
    set_sizes: Mapping[Role, Sequence[int]],
) -> tuple[dict[Role, Group], dict[Role, DeviceMesh], dict[Role, dict[int, TensorSet]], dict[Role, Any], Any]:
    """Makes the process groups of all roles: NCCL for tensors on GPUs, Gloo for tensors in host memory.

    All ranks of the job call it. Returns `Runtime.groups`, `shards`, `sets`, `saving` and `wire`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # Gloo opens a file handle for each rank of each group
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    backend, limit = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world, timeout=limit)
    maker = _Maker(launch.rank, device.type, partial(dist.new_group, backend=backend, timeout=limit))
    wire = dist.new_group(backend=backend, timeout=2 * limit)  # longer than the channels' waits, which name the ranks
    groups, shards, sets, saving = {}, {}, {}, {}
    for role, ranks in placement.groups.items():
        own, *_ = sizes = set_sizes.get(role, [1])
        held = torch.tensor(replicas(role, placement, shard_size, local_world=launch.local_world)).squeeze(0)
        group = maker.group(torch.tensor([ranks]), own)
        mesh = maker.mesh(held[None], *SHARDED[-held.ndim :])
        made = {size: maker.tensor_set(held, size, own) for size in dict.fromkeys(sizes) if size > 1}
        if group and mesh:
            groups[role], shards[role] = group, mesh
            sets[role] = {size: found for size, found in made.items() if found}
        maker.made.clear()
        saving[role] = dist.new_group(list(ranks), backend="gloo", timeout=limit)
    return groups, shards, sets, saving, wire
