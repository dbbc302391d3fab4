"""What makes one model out of several ranks: the sharding, and the few agreements of a group."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from splitppo.algo import Moments, merge_moments

# Inductor would fuse a norm's two backward reductions from a number of tokens on that real micro-batches are on either
# side of (4,096, two for each of a layer's numbers), and compile a layer for both
COMPILER: dict[str, Any] = {"triton.mix_order_reduction": False}


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype, activation_checkpointing: bool, compiled: bool = False
) -> None:
    """Prepares a model on the meta device for training over a group, in place: checkpointing, compilation, fully_shard.

    Weights are sharded over the mesh, or over the second axis of one that has two, and the same along the first.
    Weights and reductions are float32, forward and backward run in `dtype`. Gradients are *summed* over the ranks:
    the loss is already normalised by the whole mini-batch.
    """
    layers = transformer_layers(model)
    if activation_checkpointing:
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
    if compiled:
        for i, layer in enumerate(layers):
            # all layers and lengths share one
            layers[i] = cast(nn.Module, torch.compile(layer, dynamic=True, options=COMPILER))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Gloo has no averaging reduction, and a sum is what is meant
            module.set_force_sum_reduction_for_comms(True)


def keep_gathered(model: nn.Module, *, last: bool) -> None:
    """Before a micro-batch of a mini-batch: layers stay whole from its forward pass on, to the backward pass of the
    `last` one, in which gradients are reduced, too."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
            if module is not model:  # the outermost stays whole anyway, and must
                module.set_reshard_after_forward(False, recurse=False)


def shard_again(model: nn.Module) -> None:
    """Ends what `keep_gathered` began: forward passes without a backward give their weights back."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            module.set_reshard_after_forward(True, recurse=False)


def transformer_layers(model: nn.Module) -> nn.ModuleList:
    """The model's repeated blocks: its longest ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers to shard by")
    return max(lists, key=len)


def gather_full(parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The full tensors, in `dtype`, of parameters that `parallelize` has sharded, in one message. All ranks call it.

    They may share memory with the parameters (in a group of one) or with each other.
    """
    mesh = cast(DTensor, parameters[0]).device_mesh
    axis = mesh.ndim - 1
    ranks = mesh.size(axis)
    if ranks == 1:
        return [local(parameter).to(dtype) for parameter in parameters]
    rows = [-(-parameter.shape[0] // ranks) for parameter in parameters]  # of each shard; the last ones may have fewer
    sizes = [row * parameter.shape[1:].numel() for row, parameter in zip(rows, parameters, strict=True)]
    shards = local(parameters[0]).new_zeros(sum(sizes), dtype=dtype)
    for part, parameter in zip(shards.split(sizes), parameters, strict=True):
        part[: local(parameter).numel()].copy_(local(parameter).reshape(-1))
    gathered = shards.new_empty(ranks * len(shards))
    dist.all_gather_into_tensor(gathered, shards, group=mesh.get_group(axis))
    return [
        part.reshape(-1, *parameter.shape[1:])[: parameter.shape[0]]
        for part, parameter in zip(gathered.view(ranks, -1).split(sizes, dim=1), parameters, strict=True)
    ]


def local(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def bounds(parameter: Tensor) -> slice:
    """The rows of the full tensor that this rank holds: fully_shard cuts axis 0 as torch.chunk does."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    mesh = parameter.device_mesh
    size, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    step = -(-parameter.shape[0] // size)
    return slice(min(rank * step, parameter.shape[0]), min((rank + 1) * step, parameter.shape[0]))


def all_max(values: Sequence[int], mesh: DeviceMesh) -> list[int]:
    """Element-wise maximum over the group, through host memory."""
    return _all_reduce(torch.tensor(values, dtype=torch.int64), mesh, dist.ReduceOp.MAX).tolist()


def meet(mesh: DeviceMesh) -> None:
    """Returns when all ranks of the group are here. Through host memory: nothing waits for the GPU's work."""
    all_sum(torch.zeros(1), mesh)


def all_sum(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """Element-wise sum of a CPU tensor over the group, in float64."""
    return _all_reduce(values.double(), mesh, dist.ReduceOp.SUM)


def all_moments(own: Sequence[Moments], mesh: DeviceMesh) -> list[Moments]:
    """Moments over the whole group, of as many figures on every rank."""
    parts = all_objects([tuple(map(float, (m.count, m.mean, m.variance))) for m in own], mesh)
    wide = torch.tensor(parts, dtype=torch.float64)  # [ranks, figures, 3]
    return [merge_moments([Moments(*part[i]) for part in wide]) for i in range(len(own))]


def all_objects(value: Any, mesh: DeviceMesh) -> list[Any]:
    """Every rank's small object, in order of ranks. For start-up and figures, never for batches."""
    gathered: list[Any] = [None] * mesh.size()
    dist.all_gather_object(gathered, value, group=mesh.get_group())
    return gathered


def _all_reduce(values: Tensor, mesh: DeviceMesh, op: Any) -> Tensor:
    if mesh.size() > 1 and values.numel():
        dist.all_reduce(values, op=cast(Any, op), group=mesh.get_group())
    return values
