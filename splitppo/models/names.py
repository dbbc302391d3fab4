"""Names of a model's weights.

Outside of its modules a weight has the name that transformers' model of the type gives it: in
checkpoints, in the stream for engines, in messages. On a rank the modules add parts to it. A folder
may name its tensors otherwise (`FolderNames`), and so may an adapter (lora.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

# buffers of routers that no family names as such
EXACT = ("e_score_correction_bias", "expert_bias")
HEAD = ("score.weight", "score.bias")  # of a value model
# in the name of an adapter's weight (lora.py): which of its two matrices, and whose it is
ADAPTER = r"\.lora_([AB])\.(policy|value)\."
# what transformers does with the matrices of a layer's experts: it stacks those of one kind, and
# those of two kinds behind each other
STACKS = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


class FolderNames:
    """How the folders of a model's type hold its weights, and how engines take them. A weight is
    one tensor there, under its name or another. Or it is several: the model has the matrices of a
    layer's experts in one weight `[experts, rows, columns]`, the folder one by one.

    Args:
        model: transformers' model.
        ignored: regular expressions of tensors that no model reads.
    """

    def __init__(self, model: Any, ignored: Sequence[str]):
        self.ignored = ignored
        self.prefix: str = model.base_model_prefix
        conversions: list[Any] = get_model_conversion_mapping(model)
        merges = [part for part in conversions if isinstance(part, WeightConverter)]
        self.renames = [part for part in conversions if part not in merges]
        self.stacks = [
            merge
            for merge in merges
            if [(type(step), getattr(step, "dim", None)) for step in merge.operations] in STACKS
        ]
        self.others = [merge for merge in merges if merge not in self.stacks]
        exact = {*EXACT, *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
        self._exact = "|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in exact)
        written: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
        # the renames from the model to folders; a prefix that some folders have is left out
        self._reverse: list[Any] = [
            part.reverse_transform()
            for part in written[::-1]
            if isinstance(part, WeightRenaming) and not isinstance(part, PrefixChange)
        ]

    def exact(self, name: str) -> bool:
        """Whether a weight or buffer is float32 whatever the precision of the others."""
        return bool(re.search(self._exact, name))

    def part_of(self, tensor: str, parts: dict[str, Any]) -> str:
        """The name in transformers (`parts`) of a folder's tensor. Raises ValueError if
        transformers would merge or split the tensor in another way."""
        name, merged = rename_source_key(tensor, self.renames, self.others, self.prefix, parts)
        if merged:
            raise ValueError(
                f"weight {tensor} must be merged or split on loading, which is not supported"
            )
        return name

    def parts(self, name: str, shape: Sequence[int]) -> list[str]:
        """The tensors that make a weight of this shape, in the order of its rows. Folders may have
        them under other names (`stored`)."""
        kinds = self._kinds(name)
        numbers = range(shape[0] if kinds else 1)
        return [kind.replace("*", str(number)) for number in numbers for kind in kinds or [name]]

    def stored(self, name: str, shape: Sequence[int]) -> list[str]:
        """The tensors that make a weight of this shape, as folders name them."""
        return [rename_source_key(part, self._reverse, [])[0] for part in self.parts(name, shape)]

    def split(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """A weight as the tensors that a folder holds: views, by name."""
        tensors = self.stored(name, weight.shape)
        parts = weight.flatten(0, 1).chunk(len(tensors)) if self._kinds(name) else [weight]
        return dict(zip(tensors, parts, strict=True))

    def _kinds(self, name: str) -> list[str]:
        """The names of an expert's tensors, `*` for its number; [] of other weights."""
        return [
            name.removesuffix(stack.target_patterns[0]) + kind
            for stack in self.stacks
            if name.endswith(stack.target_patterns[0])
            for kind in stack.source_patterns
        ]


def hf_name(path: str) -> str:
    """The name of a parameter or buffer, without what checkpointing, compilation and adapters add
    to its path."""
    return re.sub(r"_checkpoint_wrapped_module\.|_orig_mod\.|\.base_layer\b", "", path)


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, tied ones once."""
    return {hf_name(path): parameter for path, parameter in model.named_parameters()}


def own_weights(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those of a model's parameters that training did not add to it."""
    return {name: weight for name, weight in named.items() if not re.search(ADAPTER, name)}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are saved with the weights, by name."""
    saved = model.state_dict(keep_vars=True)
    return {
        hf_name(path): tensor
        for path, tensor in saved.items()
        if not isinstance(tensor, nn.Parameter)
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
