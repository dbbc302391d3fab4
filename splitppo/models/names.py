"""Names of a model's weights, both ways.

Outside of its modules a weight has the name that transformers' model of the type gives it: in
checkpoints, in what goes to engines, in messages. On a rank the modules add parts to it. A folder
may name its tensors otherwise, and several of them may make a weight.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter, rename_source_key

from splitppo.models.build import folder_error

HEAD = ("score.weight", "score.bias")  # of a value model
# in the name of an adapter's weight (lora.py): which of its two matrices, and whose it is
ADAPTER = r"\.lora_([AB])\.(policy|value)\."


def outside(path: str) -> str:
    """The name of a parameter or buffer, without what checkpointing, compilation and adapters add
    to its path."""
    return re.sub(r"_checkpoint_wrapped_module\.|_orig_mod\.|\.base_layer\b", "", path)


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, tied ones once."""
    return {outside(path): parameter for path, parameter in model.named_parameters()}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are saved with the weights, by name."""
    saved = {outside(path) for path in model.state_dict()}
    return {
        name: buffer for path, buffer in model.named_buffers() if (name := outside(path)) in saved
    }


def ties_of(model: nn.Module) -> dict[str, str]:
    """Tied parameters, such as the output layer and the embedding: path of an alias -> path of the
    first."""
    first: dict[int, str] = {}
    mains = {
        path: first.setdefault(id(parameter), path)
        for path, parameter in model.named_parameters(remove_duplicate=False)
    }
    return {alias: main for alias, main in mains.items() if alias != main}


def sources(
    model: Any, folder: str, stored: Iterable[str]
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """From a folder's names to the model's.

    Returns:
        weight or buffer -> the tensors, of the `stored` ones, that make it. Tied weights have the
        same. Today one tensor makes a weight: where transformers would merge or split some, this
        is a UserError. The tensors for which the model's modules have no weight.
    """
    conversions, ignored = model.folder_names
    merges = [part for part in conversions if isinstance(part, WeightConverter)]
    renames = [part for part in conversions if part not in merges]
    ties = {outside(alias): outside(main) for alias, main in ties_of(model).items()}
    known = dict.fromkeys([*weights_of(model), *ties, *buffers_of(model)], True)
    modules = {
        part.split(".")[0]
        for name in known
        for part in (name, name.removeprefix(f"{model.base_model_prefix}."))
    }
    found: dict[str, tuple[str, ...]] = {}
    unexpected: list[str] = []
    for source in stored:
        name, merged = rename_source_key(source, renames, merges, model.base_model_prefix, known)
        if merged:
            raise folder_error(
                folder,
                f"weight {source} must be merged or split on loading, which is not in this version",
                "use another model",
            )
        if name in known:
            found[name] = (source,)
        elif name.split(".")[0] in modules and not re.search("|".join(ignored), name):
            unexpected.append(source)
    return (
        {main: found[alias] for alias, main in ties.items() if alias in found} | found,
        unexpected,
    )


def of_classifier(classifier: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A value model's weights by the names of transformers' classifier of the type, whose head has
    another name."""
    head = next(
        name
        for name in classifier.state_dict()
        if not name.startswith(f"{classifier.base_model_prefix}.")
    )
    return {
        re.sub(r"^score(?=\.)", head.rpartition(".")[0], name): weight
        for name, weight in weights.items()
    }
