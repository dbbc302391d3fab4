"""What of a model is trained, and what follows from it: how its weights are held, what checkpoints
hold, what engines get.

A model that is trained whole, a frozen one, and one with adapters (`lora.Adapter`) answer the same
questions, so that nobody asks which of them a model is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from splitppo.models.build import Kind, build, freeze, shorten
from splitppo.models.cost import Cost, Counts, measure, numbers
from splitppo.models.experts import active
from splitppo.models.names import buffers_of, own_weights, weights_of
from splitppo.models.sharding import gather_full

TRACED_LAYERS = 8


@dataclass(frozen=True)
class Trainable:
    """The questions, with the answers of a model that is trained whole, or but for some weights."""

    kind: Kind
    # the weights that are not trained (`build.freeze`)
    frozen: tuple[str, ...] = field(default=(), kw_only=True)
    # whether the weights are held in float32, and not in the precision of forward passes
    exact = True

    def prepare(self, model: nn.Module) -> None:
        """Chooses which weights need a gradient; the model is on the meta device. Raises UserError
        if a setting that names some matches none."""
        freeze(model, self.frozen, f"{self.kind}.freeze")

    def add(self, model: nn.Module) -> None:
        """Adds the modules that training needs, after the layers are cut for a tensor-parallel
        group and before the model is sharded."""

    def read(self, model: nn.Module, seed: int) -> None:
        """Fills what `add` added, after the model's own weights. What no folder has is drawn."""

    def check(self, config: PretrainedConfig, start: Path | None = None) -> list[str]:
        """Raises UserError if training can't start from the folder `start`, by default the one that
        the settings name. Returns what the user should know of it."""
        return []

    def cost(self, cost: Cost) -> Cost:
        """What such a model holds and computes; `cost` is that of its forward and backward pass."""
        return cost

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters, by Hugging Face name."""
        return weights_of(model)

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Those that are trained."""
        return {name: p for name, p in self.parameters(model).items() if p.requires_grad}

    def saved(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Those that a checkpoint holds."""
        return self.parameters(model)

    def sent(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Those that engines and exports get, through `gather`, which merges adapters into them."""
        return own_weights(self.parameters(model))

    def gather(
        self, model: nn.Module, named: dict[str, Tensor], dtype: torch.dtype
    ) -> Iterable[tuple[str, Tensor]]:
        """Some of the weights that are `sent`, full; all ranks call it (`gather_full`)."""
        return gather_full(model, named, dtype)

    def merged(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights that are `sent`, and buffers, of a model that is not sharded. Adapters are
        merged in place: a second model may not fit."""
        sent = self.sent(model)
        for name, weight in self.gather(model, {**sent}, torch.float32):
            sent[name].detach().copy_(weight)
        return {**sent, **buffers_of(model)}

    def gather_files(self, model: nn.Module) -> dict[str, Tensor]:
        """The full tensors of `write`, in host memory; all ranks call it."""
        return {}

    def write(self, folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
        """Writes what a checkpoint holds once more, for other programs. Returns the files' names,
        below the folder."""
        return []


@dataclass(frozen=True)
class NotTrained(Trainable):
    """A model that is not trained: reference, reward model."""

    exact = False

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {}

    def prepare(self, model: nn.Module) -> None:
        # with gradients, the reference's layers are to the compiler what the policy's are; it runs
        # without them
        model.requires_grad_(self.kind != "reward")

    def cost(self, cost: Cost) -> Cost:
        return replace(cost, trained=0, weights=float(cost.parameters * cost.width))


def count(config: PretrainedConfig, trainable: Trainable) -> Counts:
    """Raises UserError if what is frozen, or has adapters, matches nothing."""
    model = build(config, trainable.kind)
    parameters = numbers(model.parameters())
    trainable.prepare(model)
    trainable.add(model)
    trained = trainable.trained(model).values()
    return Counts(parameters, active(model), numbers(trained))


def cost_of(
    config: PretrainedConfig,
    trainable: Trainable,
    counts: Counts,
    dtype: torch.dtype,
    *,
    compiled: bool,
    shared: bool = False,
) -> Cost:
    """The cost of a model that runs in `dtype`.

    Args:
        shared: the model is the value model over the policy's base. The base's weights count as the
            policy's, but its output layer is gathered with the value model.
    """
    layers = config.num_hidden_layers
    short = shorten(config, min(layers, TRACED_LAYERS), "")
    model = build(short, "both" if shared else trainable.kind, dtype).to("meta")
    trainable.add(model)
    model.to(dtype)
    cost = trainable.cost(measure(model, layers, counts, dtype, compiled=compiled))
    if shared:
        return replace(cost, weights=4.0 * counts.trained, vocabulary=0)
    return cost
