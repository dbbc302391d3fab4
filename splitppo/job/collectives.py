"""The process groups, and what the ranks of a group exchange: sums, maxima, small objects, all through host memory."""

import resource
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Group:
    """The ranks that play one role, as one of them sees it. All of them must call each method.

    The mesh's first axis is data parallelism, and rows belong to its ranks. Ranks along further axes (tensor or
    sequence parallelism) form a set that works on the same rows. So sums and gathers run along the first axis alone.

    Attributes:
        dp_rank, dp_size: place along the mesh's first axis, and its length.
    """

    mesh: DeviceMesh
    dp_rank: int
    dp_size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Group":
        return cls(mesh, mesh.get_local_rank(0), mesh.size(0))

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of its set, which sends and receives rows for all of it."""
        return not any(self.mesh.get_local_rank(axis) for axis in range(1, self.mesh.ndim))

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

    def _all_reduce(self, values: Tensor, op: Any, axes: range) -> Tensor:
        for axis in axes if values.numel() else ():
            if self.mesh.size(axis) > 1:
                dist.all_reduce(values, op=op, group=self.mesh.get_group(axis))
        return values


def make_groups(
    launch: Launch, placement: Placement, device: torch.device, store: dist.Store, timeout: float, shard_size: ShardSize
) -> tuple[dict[Role, Group], dict[Role, DeviceMesh], dict[Role, Any], Any]:
    """Makes the process groups of all roles: NCCL for tensors on GPUs, Gloo for tensors in host memory.

    All ranks of the job call it. Returns `Runtime.groups`, `Runtime.shards`, `Runtime.saving` and `Runtime.wire`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # Gloo opens a file handle for each rank of each group
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    backend, limit = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world, timeout=limit)
    new_group: Any = partial(dist.new_group, backend=backend, timeout=limit)
    wire = dist.new_group(backend=backend, timeout=2 * limit)  # longer than the channels' waits, which name the ranks
    groups, shards, saving = {}, {}, {}
    for role, ranks in placement.groups.items():
        group, held = new_group(list(ranks)), launch.rank in ranks
        if held:
            mesh = DeviceMesh.from_group(group, device.type, mesh=list(ranks), mesh_dim_names=(role,))
            groups[role], shards[role] = Group.of(mesh), mesh
        sets = replicas(role, placement, shard_size, local_world=launch.local_world)
        if len(sets) > 1:
            within, across = ([new_group(list(part)) for part in cut] for cut in (sets, zip(*sets, strict=True)))
            if held:
                replica, shard = divmod(ranks.index(launch.rank), len(sets[0]))
                both, names = [across[shard], within[replica]], ("replica", "shard")
                shards[role] = DeviceMesh.from_group(both, device.type, mesh=sets, mesh_dim_names=names)
        saving[role] = dist.new_group(list(ranks), backend="gloo", timeout=limit)
    return groups, shards, saving, wire
