"""Mixtures of experts: a layer's router sends each token to a few of the layer's experts, whose
matrices are stacked in weights `[experts, ...]`. fully_shard cuts these between experts, as it cuts
any weight by its rows."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from splitppo.job.collectives import Group


def experts_of(model: nn.Module) -> list[Any]:
    """The modules that hold a layer's experts; [] of a dense model."""
    return [
        module
        for module in model.modules()
        if any(weight.ndim == 3 for weight in module.parameters(recurse=False))
        and getattr(module, "num_experts", 0)
    ]


def top_k(model: nn.Module) -> int:
    """Experts to which a token goes in a layer."""
    config = cast(Any, model).config
    return getattr(config, "num_experts_per_tok", None) or config.top_k_experts


def active(model: nn.Module) -> int:
    """Parameters that a token meets in a forward pass."""
    idle = 0.0
    for module in experts_of(model):
        held = sum(weight.numel() for weight in module.parameters(recurse=False))
        idle += held * (1 - top_k(model) / module.num_experts)
    return sum(weight.numel() for weight in model.parameters()) - round(idle)


class Load:
    """How many of a policy's or value model's tokens went to each expert."""

    def __init__(self, model: nn.Module):
        self.experts = experts_of(model)
        for module in self.experts:
            module.register_forward_pre_hook(_note)
        self.counts = torch.zeros(0)

    def clear(self) -> None:
        self.counts = torch.zeros(0)

    def add(self, at: Tensor) -> None:
        """Counts the tokens `at` `[N]`, places in the flattened ids, of the last forward pass."""
        if self.experts:
            ids = torch.stack([module.chosen[at].flatten() for module in self.experts])
            counts = ids.new_zeros(len(ids), self.experts[0].num_experts)
            counts.scatter_add_(1, ids, torch.ones_like(ids))
            self.counts = self.counts + counts if len(self.counts) else counts

    def figures(self, group: Group) -> dict[str, float]:
        """Of the group's tokens since `clear`; all of its ranks call it. By layers, the mean and
        the largest: share of the tokens' choices that the busiest expert got, and experts that got
        none."""
        if not self.experts:
            return {}
        counts = group.all_sum(torch.stack(group.gather_set(self.counts.cpu())).sum(0))
        busiest = counts.amax(1) / counts.sum(1).clamp(min=1)
        idle = (counts == 0).double().sum(1)
        return {
            "expert_share": float(busiest.mean()),
            "expert_share_max": float(busiest.max()),
            "experts_idle": float(idle.mean()),
            "experts_idle_max": float(idle.max()),
        }


def _note(module: Any, inputs: tuple[Tensor, ...]) -> None:
    """Hook: the experts' inputs are states, ids `[L, k]`, weights."""
    module.chosen = inputs[1]
