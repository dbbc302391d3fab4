"""Tensor parallelism: the ranks of a set run each layer together, each with a part of its weights.

transformers' plan of a model (`base_model_tp_plan`) says which linear layers are cut by their
outputs (`colwise`: some of the heads, some of the MLP's width) and which by their inputs
(`rowwise`). Two sums over the set join the parts: of the rowwise layers' outputs, and in the
backward pass of the gradients at the inputs of attention and MLP (Shoeybi et al. 2019, Megatron-LM,
section 3). All else, embeddings and output layer included, runs whole on every rank of the set.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from transformers import PretrainedConfig

from splitppo.errors import UserError
from splitppo.job.collectives import TensorSet
from splitppo.models.build import Kind, build
from splitppo.models.experts import experts_of

AXES = {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}}
# a norm of single heads: each rank sees its own heads only
PARTIAL = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class Parts:
    """What a set has cut of a model, by Hugging Face names."""

    ranks: TensorSet | None = None  # the set; None if layers are whole
    # weight -> the axis along which it is cut
    axes: Mapping[str, int] = field(default_factory=dict)
    # weights that are whole on all ranks, of whose gradient each has a part
    partial: tuple[str, ...] = ()


def parts_of(model: nn.Module) -> Parts:
    return getattr(model, "parts", None) or Parts()


def transformer_layers(model: nn.Module) -> nn.ModuleList:
    """The model's repeated blocks: its longest ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of layers to shard by; use another model"
        )
    return max(lists, key=len)


def check_plan(config: PretrainedConfig, kind: Kind, size: int, setting: str) -> None:
    """Raises a UserError that begins with `setting` if the model's layers can't be cut into `size`
    parts."""
    try:
        cut_layers(build(config, kind), size)
    except ValueError as error:
        raise UserError(
            f"{setting} with tensor_parallel={size}: {error}; "
            "use a smaller size, such as 1, or another model"
        ) from error


def cut_layers(model: nn.Module, size: int, ranks: TensorSet | None = None) -> None:
    """Leaves each layer of a model on the meta device one of `size` parts of its weights, in place.
    Which part a rank holds is decided by what its weights are filled with (weights.py). Without
    `ranks` it can't run. Raises ValueError if the model has no plan, one that is not in this
    version, or parts of different sizes."""
    styles = _styles(model, size)
    axes = {}
    group = ranks.group.group_name if ranks else ""
    for name, style in styles.items():
        module = model.get_submodule(name)
        for part, axis in AXES.get(style, {}).items():
            if (weight := getattr(module, part)) is not None:
                if (length := weight.shape[axis]) % size:
                    raise ValueError(
                        f"axis {axis} of {name}.{part} has length {length}, no multiple of {size}"
                    )
                shard = weight.detach().chunk(size, axis)[0].clone()
                setattr(module, part, nn.Parameter(shard, weight.requires_grad))
                axes[f"{name}.{part}"] = axis
        if style == "rowwise":
            module.__class__ = _RowLinear
            cast(Any, module).group = group
    for name in dict.fromkeys(
        name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"
    ):
        parent = model.get_submodule(name)
        for weight, _ in parent.named_parameters(prefix=name):
            # parts of the module are cut, and it may need a part of this
            if weight.rpartition(".")[0] not in styles:
                raise ValueError(f"transformers' tensor-parallel plan does not cover {weight}")
        parent.register_forward_pre_hook(partial(_enter, group=group), with_kwargs=True)
    cast(Any, model).parts = Parts(
        ranks,
        axes,
        tuple(
            name
            for name, _ in model.named_parameters()
            if styles.get(name.rpartition(".")[0]) == PARTIAL
        ),
    )


def cut_adapter(model: nn.Module, layer: str, pair: Sequence[str]) -> None:
    """Cuts the adapters beside a layer as the layer is cut (lora.py); `pair`: the names of their
    weights A and B."""
    parts = parts_of(model)
    axis = parts.axes.get(f"{layer}.weight")
    if axis is None or parts.ranks is None:
        return
    modules = [model.get_submodule(name.rpartition(".")[0]) for name in pair]
    number = 1 - axis  # B has the layer's outputs, A its inputs
    cut: Any = modules[number]
    cut.weight = nn.Parameter(cut.weight.detach().chunk(parts.ranks.size, axis)[0].clone())
    partial = parts.partial
    if number == 0:
        cut.__class__ = _RowLinear
        cut.group = parts.ranks.group.group_name
    else:
        partial = (*partial, pair[0])
    axes = {**parts.axes, pair[number]: axis}
    cast(Any, model).parts = replace(parts, axes=axes, partial=partial)


def _styles(model: nn.Module, size: int) -> dict[str, str]:
    """Module of a layer -> its style in the plan. Raises ValueError if the plan can't be carried
    out."""
    config: Any = cast(Any, model).config
    plan = getattr(config, "base_model_tp_plan", None) or {}
    kind = f"type {config.model_type!r}"
    if experts_of(model):
        raise ValueError(
            f"{kind} has experts, which tensor parallelism does not split in this version"
        )
    prefix = f"{cast(Any, model).base_model_prefix}."
    styles = {}
    inside = {*transformer_layers(model).modules()}
    for name, module in model.named_modules():
        key = re.sub(r"\.\d+(?=\.)", ".*", name.removeprefix(prefix))
        if "*" in key and (style := plan.get(key)):
            if style not in (*AXES, PARTIAL) or (style in AXES and type(module) is not nn.Linear):
                raise ValueError(
                    f"the tensor-parallel plan of {kind} has {style} for {key}, "
                    "which is not supported"
                )
            # `parallelize` shards the layers of one list over the set's line
            if module not in inside:
                raise ValueError(
                    f"the tensor-parallel plan of {kind} splits {key}, which is outside its layers"
                )
            styles[name] = style
    if not styles:
        raise ValueError(f"transformers has no tensor-parallel plan for {kind}")
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name, None) or 0) % size:
            raise ValueError(f"{kind} has {name}={heads}, no multiple of {size}")
    return styles


class _RowLinear(nn.Linear):
    """Inputs and weight are parts; the output is whole."""

    group: str

    def forward(self, input: Tensor) -> Tensor:
        out: Any = _sum(nn.functional.linear(input, self.weight), self.group)
        return out if self.bias is None else out + self.bias


def _enter(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, group: str
) -> tuple[Any, Any]:
    """Hook of an attention or MLP: its input is whole, and what reads it has parts."""
    if args:
        return (_copy(args[0], group), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": _copy(kwargs["hidden_states"], group)}


# Operators, and no autograd.Function: torch.compile of 2.11 loses the gradient of one that
# communicates.
@torch.library.custom_op("splitppo::sum_over_set", mutates_args=())
def _sum(tensor: Tensor, group: str) -> Tensor:
    """The sum over the set. Each rank has the whole gradient of it."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_resolve_process_group(cast(Any, group)))
    return total


@torch.library.custom_op("splitppo::copy_to_set", mutates_args=())
def _copy(tensor: Tensor, group: str) -> Tensor:
    """The same on all ranks of the set. Each rank has a part of the gradient."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


for _operator in (_sum, _copy):
    _operator.register_fake(
        lambda tensor, group: torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )
_sum.register_autograd(lambda ctx, grad: (grad, None))
_copy.register_autograd(lambda ctx, grad: (_sum(grad, ctx.group), None), setup_context=_keep_group)
