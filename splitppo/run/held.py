"""What a rank holds of each model: its part of the weights, and of the optimizer's state."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch

from splitppo.models.footprint import Footprint, footprint
from splitppo.placement import SetShape, replicas
from splitppo.run.resolve import Model, Resolved


@cache
def _footprint(model: Model, dtype: torch.dtype, compiled: bool) -> Footprint:
    return footprint(model.config, model.kind, dtype, compiled=compiled, adapter=model.adapter)


def footprint_of(resolved: Resolved, name: str) -> tuple[Footprint, int, SetShape]:
    """A model's footprint, among how many ranks its weights are sharded, and its set."""
    ranks, *_ = replicas(
        resolved.role_of(name),
        resolved.placement,
        resolved.config.fsdp.shard_size,
        local_world=resolved.local_world,
    )
    compiled = resolved.compiled and name != "reward"
    found = _footprint(resolved.models[name], resolved.dtype, compiled)
    if name == "value" and resolved.config.value.share_base:
        # the output layer is gathered with the rest of the base
        found = replace(found, root=footprint_of(resolved, "policy")[0].root)
    return found, len(ranks), resolved.config.set_shape(name)


def held_of(resolved: Resolved, name: str) -> Iterator[tuple[str, float, bool]]:
    """What a rank holds of a model in its turns, its bytes, and whether it stays there between its
    turns."""
    model = resolved.models[name]
    _, ranks, _ = footprint_of(resolved, name)
    offload = resolved.offload(name)
    if name in ("reference", "reward"):
        yield name, model.parameters * resolved.dtype.itemsize / ranks, offload != "all"
        return
    weights = model.parameters * 4 / ranks
    if model.adapter:
        own_base = name == "policy" or not resolved.config.value.share_base
        base = model.parameters * resolved.dtype.itemsize * own_base
        weights = (base + model.trained * 4) / ranks
    yield f"{name}'s weights", weights, offload != "all"
    if offload in ("auto", "none"):
        yield f"{name}'s optimizer", model.trained * 8 / ranks, True
