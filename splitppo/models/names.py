"""Names of a model's weights.

Outside of its modules a weight has the name that transformers' model of the type gives it: in
checkpoints, in what goes to engines, in messages. On a rank the modules add parts to it. A folder
or an adapter may name its tensors otherwise (stored.py, lora.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

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
