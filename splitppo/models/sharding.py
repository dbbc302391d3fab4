"""One model on several ranks: fully_shard, gathered weights, the shard of a rank."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

# From some number of tokens on (4,096), Inductor would fuse the two reductions of a norm's backward. Micro-batches have
# fewer and more tokens than that, so each layer would be compiled twice.
COMPILER: dict[str, Any] = {"triton.mix_order_reduction": False}


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype, activation_checkpointing: bool, compiled: bool = False
) -> None:
    """Prepares a model on the meta device for a group, in place: activation checkpointing, compilation, fully_shard.

    Weights are sharded over the mesh's last axis, and replicated over the first if the mesh has two. Weights and
    reductions are float32; forward and backward run in `dtype`, but for the modules that the model names in `float32`.
    Gradients are *summed* over the ranks: the loss is already normalised by the whole mini-batch.
    """
    layers = transformer_layers(model)
    for i, layer in enumerate(layers):
        wrapped: Any = checkpoint_wrapper(layer) if activation_checkpointing else layer
        # dynamic: all layers and lengths run one compiled graph
        layers[i] = cast(Any, torch.compile(wrapped, dynamic=True, options=COMPILER)) if compiled else wrapped
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None)
    for name in getattr(model, "float32", ()):
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=replace(precision, param_dtype=torch.float32))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # Gloo has no averaging reduction


def keep_gathered(model: nn.Module, *, last: bool) -> None:
    """Call it before each micro-batch of a mini-batch. Layers stay gathered from the first forward pass to the backward
    pass of the `last` micro-batch, which also reduces the gradients."""
    for module in _sharded_modules(model):
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_reshard_after_backward(last, recurse=False)
        if module is not model:  # the root stays gathered anyway, and must
            module.set_reshard_after_forward(False, recurse=False)


def shard_again(model: nn.Module) -> None:
    """Ends `keep_gathered`: forward passes without a backward release the gathered weights."""
    for module in _sharded_modules(model):
        if module is not model:
            module.set_reshard_after_forward(True, recurse=False)


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def transformer_layers(model: nn.Module) -> nn.ModuleList:
    """The model's repeated blocks: its longest ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers to shard by; use another model")
    return max(lists, key=len)


def gather_full(named: dict[str, Tensor], dtype: torch.dtype) -> Iterable[tuple[str, Tensor]]:
    """Name and full tensor, in `dtype`, of parameters that `parallelize` has sharded. One message carries them all; all
    ranks call it. The tensors may share memory with the parameters (in a group of one) or with each other."""
    parameters = list(named.values())
    mesh = cast(DTensor, parameters[0]).device_mesh
    axis = mesh.ndim - 1
    ranks = mesh.size(axis)
    if ranks == 1:
        return zip(named, [local(parameter).to(dtype) for parameter in parameters], strict=True)
    rows = [-(-parameter.shape[0] // ranks) for parameter in parameters]  # of each shard; the last ones may have fewer
    sizes = [count * parameter.shape[1:].numel() for count, parameter in zip(rows, parameters, strict=True)]
    shards = local(parameters[0]).new_zeros(sum(sizes), dtype=dtype)
    for part, parameter in zip(shards.split(sizes), parameters, strict=True):
        part[: local(parameter).numel()].copy_(local(parameter).reshape(-1))
    gathered = shards.new_empty(ranks * len(shards))
    dist.all_gather_into_tensor(gathered, shards, group=mesh.get_group(axis))
    parts = gathered.view(ranks, -1).split(sizes, dim=1)
    full = [x.reshape(-1, *p.shape[1:])[: p.shape[0]] for x, p in zip(parts, parameters, strict=True)]
    return zip(named, full, strict=True)


def local(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def bounds(parameter: Tensor) -> slice:
    """This rank's rows of the full tensor: fully_shard cuts axis 0 as torch.chunk does."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    mesh = parameter.device_mesh
    size, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    step = -(-parameter.shape[0] // size)
    return slice(min(rank * step, parameter.shape[0]), min((rank + 1) * step, parameter.shape[0]))
