"""Tensor parallelism: the ranks of a set run each layer together, each with a part of its weights.

transformers' plan of a model (`base_model_tp_plan`) says which linear layers are cut by their outputs (`colwise`: some
of the heads, some of the MLP's width) and which by their inputs (`rowwise`). Two sums over the set join the parts: of
the rowwise layers' outputs, and in the backward pass of the gradients at the inputs of attention and MLP (Shoeybi et
al. 2019, Megatron-LM, section 3). All else, embeddings and output layer included, runs whole on every rank of the set.

The parts are plain tensors, so fully_shard, optimizer and compiler treat them as the weights of a narrower model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from splitppo.errors import UserError
from splitppo.models.build import Kind, build

AXES = {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}}
PARTIAL = "replicated_with_grad_allreduce"  # a norm of single heads: each rank sees its own heads only


@dataclass(frozen=True)
class Parts:
    """What a set has cut of a model, by Hugging Face names.

    Attributes:
        axes: weight -> the axis along which it is cut. size: ranks of the set.
        partial: weights that are whole on all ranks, of whose gradient each has a part.
    """

    size: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)
    partial: tuple[str, ...] = ()

    def whole(self, name: str, tensor: Tensor) -> list[int]:
        """The shape of the weight of which a rank of the set holds `tensor`."""
        axis = self.axes.get(name)
        return [length * (self.size if i == axis else 1) for i, length in enumerate(tensor.shape)]


def parts_of(model: nn.Module) -> Parts:
    return getattr(model, "parts", None) or Parts()


def check_plan(config: PretrainedConfig, kind: Kind, size: int, setting: str) -> None:
    """Raises a UserError that begins with `setting` if the model's layers can't be cut into `size` parts."""
    try:
        cut_layers(build(config, kind), size, "")
    except ValueError as error:
        raise UserError(f"{setting} with tensor_parallel={size}: {error}; use another size or model") from error


def cut_layers(model: nn.Module, size: int, group: str) -> None:
    """Leaves each layer of a model on the meta device one of `size` parts of its weights, in place. Which part a rank
    holds is decided by what its weights are filled with (weights.py).

    Args:
        group: name of the set's process group.

    Raises:
        ValueError: the model has no plan, one that is not in this version, or parts of different sizes.
    """
    styles, axes = _styles(model, size), {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        for part, axis in AXES.get(style, {}).items():
            if (weight := getattr(module, part)) is not None:
                if weight.shape[axis] % size:
                    raise ValueError(f"axis {axis} of {name}.{part} has length {weight.shape[axis]}, no multiple of it")
                shape = [length // (size if i == axis else 1) for i, length in enumerate(weight.shape)]
                setattr(module, part, nn.Parameter(weight.new_empty(shape), requires_grad=weight.requires_grad))
                axes[f"{name}.{part}"] = axis
        if style == "rowwise":
            module.__class__, cast(Any, module).group = _RowLinear, group
    for name in dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"):
        _check_covered(model, name, styles)
        model.get_submodule(name).register_forward_pre_hook(_Enter(group), with_kwargs=True)
    partial = [name for name, _ in model.named_parameters() if styles.get(name.rpartition(".")[0]) == PARTIAL]
    cast(Any, model).parts = Parts(size, axes, tuple(partial))


def _styles(model: nn.Module, size: int) -> dict[str, str]:
    """Module of a layer -> its style in the plan. Raises ValueError if the plan can't be carried out."""
    config: Any = cast(Any, model).config
    plan, kind = getattr(config, "base_model_tp_plan", None) or {}, f"type {config.model_type!r}"
    prefix, found = f"{cast(Any, model).base_model_prefix}.", {}
    for name, module in model.named_modules():
        key = re.sub(r"\.\d+(?=\.)", ".*", name.removeprefix(prefix))
        if "*" in key and (style := plan.get(key)):
            if style not in (*AXES, PARTIAL) or (style in AXES and type(module) is not nn.Linear):
                raise ValueError(f"the plan of {kind} has {style} for {key}, which is not in this version")
            found[name] = style
    if not found:
        raise ValueError(f"transformers has no plan for {kind}")
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name, None) or 0) % size:
            raise ValueError(f"{kind} has {name}={heads}, no multiple of it")
    return found


def _check_covered(model: nn.Module, parent: str, styles: Mapping[str, str]) -> None:
    """The modules of which parts are cut must hold no weight of which the plan does not speak."""
    for name, _ in model.get_submodule(parent).named_parameters(prefix=parent):
        if name.rpartition(".")[0] not in styles:
            raise ValueError(f"transformers' plan does not speak of {name}")


class _RowLinear(nn.Linear):
    """Inputs and weight are parts; the output is whole."""

    group: str

    def forward(self, input: Tensor) -> Tensor:
        out: Any = _Sum.apply(nn.functional.linear(input, self.weight), self.group)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True)
class _Enter:
    """Hook of an attention or MLP: its input is whole, and what reads it has parts."""

    group: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (_Copy.apply(args[0], self.group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _Copy.apply(kwargs["hidden_states"], self.group)}


def _all_reduce(tensor: Tensor, group: str) -> Tensor:
    """The sum over the set, as operators that the compiler can trace."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor.contiguous(), "sum", group))


class _Sum(torch.autograd.Function):
    """The sum over the set. Each rank has the whole gradient of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _Copy(torch.autograd.Function):
    """The same on all ranks of the set. Each rank has a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_reduce(grads[0], ctx.group), None
