"""Policy, value and reward models of Hugging Face folders: built without memory, sharded, filled shard by shard."""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from splitppo.attention import PACKED
from splitppo.errors import UserError
from splitppo.parallel import bounds, local

Kind = Literal["policy", "value", "reward"]
# without a file like these, transformers makes up an empty tokenizer
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def read_config(folder: str) -> PretrainedConfig:
    """The model's configuration, with every dropout turned off: PPO's ratio compares two passes of one function.

    Raises:
        UserError: the folder has no readable config.json.
    """
    if not (Path(folder) / "config.json").is_file():
        remedy = "give a local folder; hub names are not fetched (hf download NAME --local-dir FOLDER)"
        raise UserError(f"model folder {folder}: no config.json there; {remedy}")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError, StrictDataclassError) as error:
        # the first paragraph: what follows is on installing another transformers
        why = str(error).partition("\n\n")[0]
        raise UserError(f"model folder {folder}: config.json is of no model that transformers knows: {why}") from error
    for name in vars(config):
        if name.endswith(("dropout", "_pdrop")) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    # the token-classification heads of transformers drop 10 % of the features where this isn't set
    config.classifier_dropout = 0.0
    return config


def read_tokenizer(folder: str) -> Any:
    """The folder's tokenizer.

    Raises:
        UserError: there is none, or it can't be read.
    """
    if not any(file for pattern in TOKENIZER_FILES for file in Path(folder).glob(pattern)):
        raise UserError(f"model folder {folder}: no tokenizer there; save one beside the model (tokenizer.json)")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise UserError(f"model folder {folder}: its tokenizer can't be read: {error}; save it again") from error


def known_ids(tokenizer: Any) -> int:
    """Ids that the tokenizer knows, holes among them. A model's vocabulary is often padded beyond, and what lies there
    is never sampled: it has no text, and another model may not have it."""
    return max(tokenizer.get_vocab().values()) + 1


def check_folder(folder: str, kind: Kind, *, random_init: bool) -> None:
    """That a model can be built from the folder and, unless its weights are drawn, read from it.

    Raises:
        UserError: it can't.
    """
    if (Path(folder) / "adapter_config.json").is_file():
        raise UserError(
            f"model folder {folder}: a LoRA adapter; this version trains and reads whole models: merge it into its "
            "base (peft's merge_and_unload) and save that"
        )
    (_check_reward if kind == "reward" else _check_type)(read_config(folder), kind, folder)
    if not random_init:
        _weight_files(Path(folder))


def _check_reward(config: PretrainedConfig, kind: Kind, folder: str) -> None:
    auto: Any = AutoModelForSequenceClassification
    if type(config) not in auto._model_mapping:
        raise UserError(f"reward.model={folder}: no sequence classification of type {config.model_type!r}; use another")
    if config.num_labels != 1:
        raise UserError(
            f"reward.model={folder}: it gives {config.num_labels} numbers a text, and a reward is one; use a "
            "checkpoint with num_labels 1 in its config.json"
        )


def _check_type(config: PretrainedConfig, kind: Kind, folder: str) -> None:
    kinds: Any = (AutoModelForCausalLM, AutoModelForTokenClassification, AutoModelForMaskedLM)
    causal, token, masked = (kind._model_mapping for kind in kinds)
    # encoders such as BERT are in the causal mapping, too, for those who turn them into decoders
    encoder = type(config) in masked and getattr(config, "is_decoder", None) is False
    need = None
    if type(config) not in causal or encoder:
        need = "a causal language model"
    elif kind == "value" and type(config) not in token:
        need = "a body with a token-classification model, as Llama's"
    elif any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        need = "dense: mixtures of experts are not in this version"
    if need:
        raise UserError(f"model folder {folder}: type {config.model_type!r} is not {need}; choose another {kind}.path")


def build(
    config: PretrainedConfig, kind: Kind, dtype: torch.dtype = torch.float32, *, packed: bool = False
) -> nn.Module:
    """The model with its parameters on the meta device and its buffers real; for `fully_shard`, then `fill`.

    With `packed` it takes packed rows (see attention.py), and no others.

    A value model is the library's token-classification model of one label, so that `from_pretrained` loads what
    is exported: the causal model's body and a scalar head. A reward model is a sequence-classification model.
    """
    config = deepcopy(config)  # which attention a model has is written there, too
    autos = {"policy": AutoModelForCausalLM, "value": AutoModelForTokenClassification}
    auto: Any = autos.get(kind, AutoModelForSequenceClassification)
    if kind != "policy":
        config.num_labels = 1
    with _parameters_on_meta():
        model = auto.from_config(config, dtype=dtype, **({"attn_implementation": PACKED} if packed else {}))
    return model.eval()


def fill(
    model: nn.Module,
    folder: str,
    *,
    device: torch.device,
    random_seed: int | None = None,
    head: Literal["zero", "normal"] = "zero",
    seed: int = 0,
) -> None:
    """Gives a (sharded) meta model its memory and weights; each rank reads only its own shards.

    Args:
        folder: Hugging Face folder with safetensors.
        random_seed: draw the weights from this seed in place of reading them.
        head: how a scalar head that isn't in the folder starts, drawn from `seed` if `normal`.

    Raises:
        UserError: a weight is missing in the folder or has another shape.
    """
    ties = _ties(model)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    _tie(model, ties)
    heads = set(head_names(model))
    weights = _Weights(Path(folder)) if random_seed is None else None
    for name, parameter in model.named_parameters():
        name = clean(name)
        aliases = [clean(alias) for alias, main in ties.items() if clean(main) == name]
        if name in heads:  # a reward model's, which a value model may start from, is called so in every family
            aliases.append(name.replace("classifier.", "score."))
        if name in heads and (weights is None or not weights.files.keys() & {name, *aliases}):
            value = _draw(name, parameter, seed, parameter.shape[-1] ** -0.5 if head == "normal" else 0.0)
        elif weights is None:
            value = _draw(name, parameter, random_seed or 0, getattr(model.config, "initializer_range", 0.02))
        else:
            value = weights.read(name, aliases, parameter)
        with torch.no_grad():
            local(parameter).copy_(value)


def clean(name: str) -> str:
    """A parameter's Hugging Face name, without what activation checkpointing and compilation put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def head_names(model: nn.Module) -> list[str]:
    """Names of the parameters of a value model's scalar head; [] for a policy."""
    body = cast(Any, model).base_model_prefix + "."
    is_value = getattr(model.config, "num_labels", None) == 1 and "TokenClassification" in type(model).__name__
    return [clean(name) for name, _ in model.named_parameters() if is_value and not name.startswith(body)]


def count_parameters(config: PretrainedConfig, kind: Kind) -> int:
    """Parameters of the model, tied ones once."""
    return sum(parameter.numel() for parameter in build(config, kind).parameters())


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters made inside go to the meta device as they are registered; buffers (rotary tables) are computed."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    module: Any = nn.Module
    module.register_parameter = on_meta
    try:
        yield
    finally:
        module.register_parameter = register


def _ties(model: nn.Module) -> dict[str, str]:
    """alias -> main name of the parameters that are one, such as the output layer and the embedding."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            ties[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return ties


def _tie(model: nn.Module, ties: dict[str, str]) -> None:
    for alias, main in ties.items():
        module, _, name = alias.rpartition(".")
        model.get_submodule(module)._parameters[name] = model.get_parameter(main)


def _draw(name: str, parameter: Tensor, seed: int, std: float) -> Tensor:
    """The same weights for any sharding: each tensor is drawn whole from its name and the seed."""
    own = local(parameter)
    if name.endswith("bias") or parameter.ndim < 2:
        return torch.full_like(own, 0.0 if name.endswith("bias") else 1.0)
    generator = torch.Generator(own.device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    full = torch.randn(parameter.shape, generator=generator, device=own.device) * std
    return full[bounds(parameter)]


def _weight_files(folder: Path) -> dict[str, Path]:
    """weight name -> the safetensors file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{index} is broken ({type(error).__name__}: {error}); fetch it again") from error
        if missing := sorted({path.name for path in files.values() if not path.is_file()}):
            raise UserError(f"model folder {folder}: {missing[0]} is in the index but not there; fetch it again")
        return files
    single = folder / "model.safetensors"
    if not single.is_file():
        remedy = "load it with transformers and save_pretrained it, which writes one"
        raise UserError(f"model folder {folder}: no model.safetensors; {remedy}")
    return dict.fromkeys(_open(single).keys(), single)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{path} is no safetensors file ({error}); fetch it again") from error


class _Weights:
    """Reads slices of tensors out of a folder's safetensors files, each opened once."""

    def __init__(self, folder: Path):
        self.folder, self.files = folder, _weight_files(folder)
        self.open: dict[Path, Any] = {}

    def read(self, name: str, aliases: list[str], parameter: Tensor) -> Tensor:
        """This rank's part of a weight, found by its name, a tied one's, or without the body's prefix."""
        names = [name, *aliases, name.split(".", 1)[-1]]
        found = next((candidate for candidate in names if candidate in self.files), None)
        if found is None:
            raise UserError(
                f"model folder {self.folder}: no weight {name} in its safetensors; it is another model's, or of a type "
                "whose weights transformers renames on loading, which is not in this version"
            )
        path = self.files[found]
        if path not in self.open:
            self.open[path] = _open(path)
        weight = self.open[path].get_slice(found)
        if list(weight.get_shape()) != list(parameter.shape):
            raise UserError(
                f"model folder {self.folder}: weight {found} is {weight.get_shape()}, but {list(parameter.shape)} by "
                "config.json; take both from one model"
            )
        return weight[bounds(parameter)]
