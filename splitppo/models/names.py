"""Names of a model's weights, both ways.

Outside of its modules a weight has the name that transformers' model of the type gives it: in
checkpoints, in what goes to engines, in messages. On a rank the modules add parts to it. A folder
may name its tensors otherwise, and several of them may make a weight.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter, rename_source_key

from splitppo.models.build import SCALE, folder_error

HEAD = ("score.weight", "score.bias")  # of a value model
# in the name of an adapter's weight (lora.py): which of its two matrices, and whose it is
ADAPTER = r"\.lora_([AB])\.(policy|value)\."


def hf_name(path: str) -> str:
    """The name of a parameter or buffer, without what checkpointing, compilation and adapters add
    to its path."""
    return re.sub(r"_checkpoint_wrapped_module\.|_orig_mod\.|\.base_layer\b", "", path)


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, tied ones once."""
    return {hf_name(path): parameter for path, parameter in model.named_parameters()}


def own_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters without those that training adds to the model."""
    every = weights_of(model)
    return {name: weight for name, weight in every.items() if not re.search(ADAPTER, name)}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are saved with the weights, by name."""
    saved = {hf_name(path) for path in model.state_dict()}
    return {
        name: buffer for path, buffer in model.named_buffers() if (name := hf_name(path)) in saved
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


@dataclass(frozen=True)
class Sources:
    """Which of a folder's tensors make a model.

    Attributes:
        made_of: weight or buffer -> the tensors that make it. Tied weights have the same. Today one
            tensor makes a weight.
        unexpected: tensors of the model's modules for which these have no weight.
        unused: the other tensors that are not read.
    """

    made_of: Mapping[str, tuple[str, ...]]
    unexpected: Sequence[str]
    unused: Sequence[str]


def find_sources(model: Any, folder: str, shapes: Mapping[str, Sequence[int]]) -> Sources:
    """From a folder's names to the model's. `shapes`: of the folder's tensors, by name. Raises a
    UserError if two tensors are the same weight, or if transformers would merge or split one."""
    conversions, ignored = model.folder_names
    merges = [part for part in conversions if isinstance(part, WeightConverter)]
    renames = [part for part in conversions if part not in merges]
    ties = {hf_name(alias): hf_name(main) for alias, main in ties_of(model).items()}
    known = dict.fromkeys([*own_weights(model), *ties, *buffers_of(model)], True)
    modules = {
        part.split(".")[0]
        for name in known
        for part in (name, name.removeprefix(f"{model.base_model_prefix}."))
    }
    made_of: dict[str, tuple[str, ...]] = {}
    others: dict[bool, list[str]] = {True: [], False: []}  # by whether they are of a module
    for source in shapes:
        name, merged = rename_source_key(source, renames, merges, model.base_model_prefix, known)
        if merged:
            raise folder_error(
                folder,
                f"weight {source} must be merged or split on loading, which is not in this version",
                "use another model",
            )
        if name in made_of:
            raise folder_error(
                folder,
                f"{made_of[name][0]} and {source} are both the weight {name}",
                "remove the one that is not the model's",
            )
        if name in known:
            made_of[name] = (source,)
        # a scale is read with its weight
        elif not (source.endswith(SCALE) and source.removesuffix(SCALE) in shapes):
            of_module = name.split(".")[0] in modules and not re.search("|".join(ignored), name)
            others[of_module].append(source)
    unused = others[False]
    if HEAD[0] in known and HEAD[0] not in made_of:
        width = model.get_parameter(HEAD[0]).shape[-1]
        head = find_head({name: shapes[name] for name in unused}, width)
        made_of |= {name: (source,) for name, source in head.items() if name in known}
        unused = [source for source in unused if (source,) not in made_of.values()]
    tied = {main: made_of[alias] for alias, main in ties.items() if alias in made_of}
    return Sources(tied | made_of, others[True], unused)


def find_head(shapes: Mapping[str, Sequence[int]], width: int) -> dict[str, str]:
    """The scalar head among tensors outside of a body of this width, under any name
    (`value_head.weight`, `v_head.summary.weight`, an output layer of one row): name in `HEAD` ->
    tensor. {} if there is none, or it is not alone, as in a head of several layers."""
    rows = [name for name, shape in shapes.items() if [*shape] == [1, width]]
    if len(rows) != 1:
        return {}
    stem = rows[0].removesuffix("weight")
    due = {f"{stem}weight": [1, width], f"{stem}bias": [1]}
    head = {n: [*shape] for n, shape in shapes.items() if n.split(".")[0] == stem.split(".")[0]}
    alone = all(due.get(name) == shape for name, shape in head.items())
    return {
        name: tensor for name, tensor in zip(HEAD, due, strict=True) if tensor in head and alone
    }


def shorten_names(names: Iterable[str]) -> str:
    """Names of weights in a line; four or more that differ only in a number, such as the layer's,
    are one."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return ", ".join(
        f"{pattern} ({len(same)})" if len(same) > 3 else ", ".join(same)
        for pattern, same in alike.items()
    )
