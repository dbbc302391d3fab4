"""One model on several ranks: fully_shard, gathered weights, the shard of a rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from splitppo.job.collectives import ModelSet, all_gather
from splitppo.models.names import weights_of
from splitppo.models.sequence import SequenceSet
from splitppo.models.tensor import cut_layers, parts_of, transformer_layers

# From some number of tokens on (4,096), Inductor would fuse the two reductions of a norm's
# backward. Micro-batches have fewer and more tokens than that, so each layer would be compiled
# twice.
COMPILER: dict[str, Any] = {"triton.mix_order_reduction": False}


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    activation_checkpointing: bool,
    compiled: bool = False,
    ranks: ModelSet | None = None,
    adapt: Callable[[nn.Module], object] | None = None,
) -> None:
    """Prepares a model on the meta device for a group, in place: activation checkpointing,
    compilation, fully_shard. Weights are sharded over the mesh's last axis, and replicated over the
    first if the mesh has two. Weights and reductions are float32; forward and backward run in
    `dtype`, but for the modules that the model names in `float32`. Gradients are *summed* over the
    ranks: the loss is already normalised by the whole mini-batch.

    `ranks` are those that run the model's rows together. If they share layers, these are cut over
    the set, and each part is sharded over the set's `line`. What is not cut (embeddings, output
    layer) is sharded over `mesh`, all ranks: these have the same gradient on all ranks of such a
    set. If they share rows, each has the gradient of its own tokens: a part of the sum. `adapt` may
    then add modules to the layers; weights that are not trained may have another precision."""
    ranks = ranks or ModelSet()
    tensor = ranks.tensor
    untyped = cast(Any, model)
    untyped.mesh = mesh
    untyped.ranks = ranks
    untyped.sequence = SequenceSet(ranks.sequence) if ranks.sequence else None
    if tensor:
        cut_layers(model, tensor.size, tensor)
    if adapt:
        adapt(model)
    # a layer that is computed again notes nothing, such as its experts' load; else the compiler
    # would leave it out
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    exact = [model.get_submodule(name) for name in getattr(model, "float32", ())]
    layers = transformer_layers(model)
    for i, layer in enumerate(layers):
        wrapped: Any = checkpoint_wrapper(layer) if activation_checkpointing else layer
        # dynamic: all layers and lengths run one compiled graph
        layers[i] = (
            cast(Any, torch.compile(wrapped, dynamic=True, options=COMPILER))
            if compiled
            else wrapped
        )
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None
    )
    for module in exact:
        fully_shard(module, mesh=mesh, mp_policy=replace(precision, param_dtype=torch.float32))
    for layer in layers:
        fully_shard(layer, mesh=tensor.line if tensor else mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in [module for module in model.modules() if isinstance(module, FSDPModule)]:
        module.set_gradient_divide_factor(
            1.0 if tensor is None or module in {*layers} else float(tensor.size)
        )
        module.set_force_sum_reduction_for_comms(True)  # Gloo has no averaging reduction


def gather_full(
    model: nn.Module, named: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterable[tuple[str, Tensor]]:
    """Name and full tensor, in `dtype`, of a model's parameters, sharded or not. One message
    carries them all, or one a mesh; all ranks call it. Tensors may share memory with
    the parameters or with each other."""
    parts = parts_of(model)
    tensors = {}
    for mesh in dict.fromkeys(getattr(p, "device_mesh", None) for p in named.values()):
        tensors |= _gather_shards(
            {n: p for n, p in named.items() if getattr(p, "device_mesh", None) == mesh}, mesh, dtype
        )
    cut = {name: full for name, full in tensors.items() if name in parts.axes}
    if parts.ranks and cut:
        split = all_gather(
            torch.cat([full.flatten() for full in cut.values()]), parts.ranks.group
        ).split([full.numel() for full in cut.values()], dim=1)
        for (name, full), pieces in zip(cut.items(), split, strict=True):
            tensors[name] = torch.cat([x.view(full.shape) for x in pieces], dim=parts.axes[name])
    return tensors.items()


def _gather_shards(
    named: dict[str, Tensor], mesh: DeviceMesh | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The full tensors, in one message, of parameters that are sharded over the last axis of one
    mesh."""
    parameters = list(named.values())
    ranks = mesh.size(mesh.ndim - 1) if mesh else 1
    if mesh is None or ranks == 1:
        return {name: local(parameter).to(dtype) for name, parameter in named.items()}
    # of each shard; the last ones may have fewer rows
    sizes = [-(-p.shape[0] // ranks) * p.shape[1:].numel() for p in parameters]
    shards = local(parameters[0]).new_zeros(sum(sizes), dtype=dtype)
    for part, parameter in zip(shards.split(sizes), parameters, strict=True):
        part[: local(parameter).numel()].copy_(local(parameter).reshape(-1))
    parts = all_gather(shards, mesh.get_group(mesh.ndim - 1)).split(sizes, dim=1)
    return {
        name: part.reshape(-1, *parameter.shape[1:])[: parameter.shape[0]]
        for (name, parameter), part in zip(named.items(), parts, strict=True)
    }


def local(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def bounds(model: nn.Module, name: str, parameter: Tensor) -> tuple[slice, ...]:
    """Which part of the full weight this rank has, axis by axis; () for all of it."""
    whole = described(model, name, parameter)
    if not isinstance(whole, DTensor):
        return ()
    shape, at = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    return tuple(slice(first, first + length) for first, length in zip(at, shape, strict=True))


def described(model: nn.Module, name: str, parameter: Tensor) -> Tensor:
    """A parameter, or a tensor sharded as it is, as a part of the full weight. It shares memory."""
    parts = parts_of(model)
    if not parts.ranks or name not in parts.axes or not isinstance(parameter, DTensor):
        return parameter
    # in the order in which they cut: first the set, then fully_shard (after an axis of replicas,
    # which don't)
    where = [Shard(parts.axes[name]), *parameter.placements]
    shape = [*parameter.shape]
    shape[parts.axes[name]] *= parts.ranks.size
    return as_shard(local(parameter), parts.ranks.mesh, where, shape)


def as_shard(
    shard: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]
) -> DTensor:
    """A tensor of this shape of which the rank has `shard`, perhaps in host memory: DTensor would
    bring that back to the mesh's device. A mesh that is made anew says which rank holds which
    shard; nothing communicates over it."""
    if shard.device.type != mesh.device_type:
        mesh = DeviceMesh(
            shard.device.type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False
        )
    whole = torch.empty(torch.Size(shape), device="meta")
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def gradient_norm(model: nn.Module) -> Tensor:
    """The L2 norm of the whole gradient; all ranks call it. Before that, sums what each rank of a
    set has a part of."""
    parts = parts_of(model)
    ranks = parts.ranks
    mesh = getattr(model, "mesh", None)
    named = {
        name: parameter
        for name, parameter in weights_of(model).items()
        if parameter.grad is not None
    }
    grads = [local(cast(Tensor, parameter.grad)) for parameter in named.values()]
    if ranks and (
        partial := [grad for name, grad in zip(named, grads, strict=True) if name in parts.partial]
    ):
        flat = torch.cat([grad.flatten() for grad in partial])
        dist.all_reduce(flat, group=ranks.group)
        for grad, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
            grad.copy_(total.view_as(grad))
    squares = torch.stack(torch._foreach_norm(grads)).square()
    for i, (name, parameter) in enumerate(named.items()):
        if ranks and name not in parts.axes and cast(DTensor, parameter).device_mesh == ranks.line:
            squares[i] /= ranks.size  # what each rank of a set holds, such as norms, counts once
    total = squares.sum()
    if mesh is not None:
        dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    return total.sqrt()
