"""Shards that have moved to host memory stay there when they are described for a checkpoint."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from splitppo.models.sharding import as_shard, local


def described(rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    gpus: Any = SimpleNamespace(
        device_type="cuda", mesh=torch.tensor([[0, 1]]), mesh_dim_names=("tensor", "shard")
    )
    shard = torch.arange(6.0).view(2, 3)
    tensor = as_shard(shard, gpus, [Shard(0), Shard(0)], [4, 3])
    mesh = tensor.device_mesh
    assert (mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names) == (
        "cpu",
        [[0, 1]],
        ("tensor", "shard"),
    )
    assert as_shard(shard, mesh, [Shard(0), Shard(0)], [4, 3]).device_mesh is mesh
    assert (tensor.shape, tensor.stride()) == ((4, 3), (3, 1))
    assert local(tensor).data_ptr() == shard.data_ptr()


def test_a_shard_in_host_memory_is_not_brought_back_to_the_meshs_device() -> None:
    run_ranks(1, described)
