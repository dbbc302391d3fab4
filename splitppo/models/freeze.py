"""Weights that are not trained: they have no gradient, no optimizer state, and nothing of them is reduced."""

import re
from collections.abc import Sequence

from torch import nn
from transformers import PretrainedConfig

from splitppo.errors import UserError
from splitppo.models.build import HEAD, Kind, ValueModel, build

# modules in which a layer mixes positions, as transformers calls them; those of linear attention, too
_MIXERS = "attention attn conv linear_attn mamba mixer self_attention self_attn short_conv temporal_block time_mixer"
ATTENTION = rf"\.(?:{'|'.join(_MIXERS.split())})\."


def freeze(model: nn.Module, parts: Sequence[str], setting: str) -> None:
    """Takes the gradient from some weights of a model that is not sharded yet.

    Args:
        parts: `attention`, `embeddings`, `body`, or regular expressions that a weight's name contains.
        setting: named in errors.

    Raises:
        UserError: a part matches no weight, or nothing is left to train.
    """
    weights = dict(model.named_parameters())
    for part in parts:
        found = [name for name in weights if _matches(model, part, name)]
        if not found:
            some = ", ".join(list(weights)[1:4])
            raise UserError(f"{setting}={part} matches no weight; their names are like {some}")
        for name in found:
            weights[name].requires_grad_(False)
    if parts and not any(weight.requires_grad for weight in weights.values()):
        raise UserError(f"{setting}={' '.join(parts)} leaves no weight to train; name fewer")


def count_trained(config: PretrainedConfig, kind: Kind, parts: Sequence[str], setting: str) -> int:
    """A model's parameters that are trained, tied ones once. Raises UserError as `freeze` does."""
    model = build(config, kind)
    freeze(model, parts, setting)
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def _matches(model: nn.Module, part: str, name: str) -> bool:
    match part:
        case "attention":
            return re.search(ATTENTION, name) is not None
        case "embeddings":
            found = [path for path, module in model.named_modules() if isinstance(module, nn.Embedding)]
            return name.startswith(tuple(f"{path}." for path in found))
        case "body":
            return name not in HEAD if isinstance(model, ValueModel) else name.startswith(f"{model.base_model_prefix}.")
    try:
        return re.search(part, name) is not None
    except re.error as error:
        raise UserError(f"{part!r} is no regular expression ({error}); correct it") from error
