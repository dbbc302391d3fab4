"""Weights: read out of safetensors files shard by shard, held against the model that they are for, written again."""

import json
import re
import zlib
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from splitppo.errors import UserError
from splitppo.models.build import HEAD, Kind, ValueModel, build, check_causal, check_reward, clean, on_meta, read_config
from splitppo.models.sharding import bounds, local

FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names them
SCALE = "_scale_inv"  # behind the name of an FP8 weight: the factors of its blocks


def check_folder(folder: str, kind: Kind, *, random_init: bool) -> None:
    """That a model can be built from the folder and, unless its weights are drawn, read from it.

    Raises:
        UserError: it can't.
    """
    config = read_config(folder)
    (check_reward if kind == "reward" else check_causal)(config, kind, folder)
    if not random_init:
        model = build(config, kind)
        weights = _Weights(folder, model)
        weights.check(model)
        weights.check_ties(_ties(model))


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
        UserError: a weight is missing in the folder, or has another shape or a type that is not read.
    """
    materialize(model, device)
    heads = HEAD if isinstance(model, ValueModel) else ()
    weights = _Weights(folder, model) if random_seed is None else None
    if weights:
        weights.check(model)
    for name, parameter in _parameters(model).items():
        if weights and name in weights.names:
            value = weights.read(name, bounds(parameter))
        elif name in heads:
            value = _draw(name, parameter, seed, parameter.shape[-1] ** -0.5 if head == "normal" else 0.0)
        else:
            value = _draw(name, parameter, random_seed or 0, getattr(model.config, "initializer_range", 0.02))
        with torch.no_grad():
            local(parameter).copy_(value)
    if weights:
        read_buffers(model, folder)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Gives a meta model memory for its weights, tied ones once; what is in it means nothing."""
    ties = _ties(model)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    _tie(model, ties)


def read_buffers(model: nn.Module, folder: str) -> None:
    """Takes what is not trained from the folder; what isn't there keeps the value that it was made with."""
    buffers = persistent_buffers(model)
    if buffers and any(Path(folder).glob("*.safetensors")):
        weights = _Weights(folder, model)
        for name in buffers.keys() & weights.names:
            buffers[name].copy_(weights.read(name, slice(None)))


def save(model: Any, folder: Path) -> None:
    """Writes a policy or value model as a Hugging Face folder; a value model as the library's token classification of
    one label where it has one of that type, else as the body and `score`."""
    if not isinstance(model, ValueModel):
        model.save_pretrained(folder)
        return
    weights, prefix, auto = (
        model.state_dict(),
        f"{model.base_model_prefix}.",
        cast(Any, AutoModelForTokenClassification),
    )
    written: Any = getattr(model, model.base_model_prefix)
    if type(model.config) in auto._model_mapping:
        config = deepcopy(model.config)
        config.num_labels = 1
        with on_meta():
            written = auto.from_config(config)
        head = next(name for name in written.state_dict() if not name.startswith(prefix)).rpartition(".")[0]
        weights = {name.replace("score.", f"{head}.") if name in HEAD else name: x for name, x in weights.items()}
    written.save_pretrained(folder, state_dict=weights)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What belongs to the weights and is not trained, by Hugging Face name."""
    return {
        clean(f"{path}.{name}"): buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By Hugging Face name, tied ones once."""
    return {clean(name): parameter for name, parameter in model.named_parameters()}


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
    """Reads tensors out of a folder's safetensors files, each opened once.

    Attributes:
        names: a model's name of a weight -> its name in the folder, which transformers may rename on loading.
        stray: names in the folder of weights that modules of the model don't have.
    """

    def __init__(self, folder: str, model: nn.Module):
        self.folder, self.files = Path(folder), _weight_files(Path(folder))
        self.open: dict[Path, Any] = {}
        self.names: dict[str, str] = {}
        self.stray: list[str] = []
        conversions, ignored = cast(Any, model).folder_names
        merges = [part for part in conversions if isinstance(part, WeightConverter)]
        renames = [part for part in conversions if part not in merges]
        prefix, harmless = (
            cast(Any, model).base_model_prefix,
            re.compile("|".join([f"{SCALE}$", "inv_freq$", *ignored])),
        )
        parameters = [clean(name) for name, _ in model.named_parameters(remove_duplicate=False)]
        known = dict.fromkeys([*parameters, *persistent_buffers(model)], True)
        modules = {part.split(".")[0] for name in known for part in (name, name.removeprefix(f"{prefix}."))}
        for given in self.files:
            name, merged = rename_source_key(given, renames, merges, prefix, known)
            if merged:
                told = "transformers merges or splits its weights on loading, which is not in this version"
                raise UserError(f"model folder {folder}: {told} ({given}); use another model")
            if isinstance(model, ValueModel) and name not in known:
                name = name.replace("classifier.", "score.")  # the head's name in some families
            if name in known:
                self.names[name] = given
            elif name.split(".")[0] in modules and not harmless.search(name):
                self.stray.append(given)
        for alias, main in _ties(model).items():
            if (alias := clean(alias)) in self.names:
                self.names.setdefault(clean(main), self.names[alias])

    def check(self, model: nn.Module) -> None:
        """That each weight of the model is here, of its shape and of a type that is read, and nothing else is.

        Raises:
            UserError: names the first that is not.
        """
        parameters, where = _parameters(model), f"model folder {self.folder}"
        optional = {*persistent_buffers(model), *(HEAD if isinstance(model, ValueModel) else ())}
        for name, tensor in [*parameters.items(), *persistent_buffers(model).items()]:
            if name not in self.names and name not in optional:
                remedy = "it is another model's: take config.json and weights from one"
                raise UserError(f"{where}: no weight {name} in its safetensors; {remedy}")
            if name not in self.names:
                continue
            given = self.names[name]
            shape, kind = self._slice(given).get_shape(), self._slice(given).get_dtype()
            if shape != list(tensor.shape):
                due = f"{list(tensor.shape)} by config.json; take both from one model"
                raise UserError(f"{where}: weight {given} is {shape}, but {due}")
            if name in parameters and kind not in FLOATS and not (kind == "F8_E4M3" and given + SCALE in self.files):
                remedy = f"use a folder of {', '.join(FLOATS)} weights"
                raise UserError(f"{where}: weight {given} is stored as {kind}, so it is quantized; {remedy}")
        if self.stray:
            found = f"weight {self.stray[0]} ({len(self.stray)} such)"
            raise UserError(f"{where}: config.json has no place for {found}; take both from one model")

    def check_ties(self, ties: dict[str, str]) -> None:
        """That weights which config.json ties are one in the folder, too.

        Raises:
            UserError: they differ; transformers then doesn't tie them.
        """
        for alias, main in ((clean(alias), clean(main)) for alias, main in ties.items()):
            both = [self.names.get(name, "") for name in (alias, main)]
            if both[0] != both[1] and all(both):
                one, other = (self._slice(name)[:] for name in both)
                if not torch.equal(one, other):
                    remedy = "set tie_word_embeddings to false there, or drop the one that is not used"
                    raise UserError(
                        f"model folder {self.folder}: config.json ties {both[0]} and {both[1]}, which differ; {remedy}"
                    )

    def read(self, name: str, rows: slice) -> Tensor:
        """The rows of a weight that a rank holds, FP8 as float32."""
        given = self.names[name]
        if given + SCALE not in self.files:
            found = self._slice(given)
            return found[rows] if found.get_shape() else found[...]
        whole = {"weight": self._slice(given)[:], "weight_scale_inv": self._slice(given + SCALE)[:]}
        return cast(Any, Fp8Dequantize(None)).convert(whole)["weight"][rows]

    def _slice(self, given: str) -> Any:
        path = self.files[given]
        if path not in self.open:
            self.open[path] = _open(path)
        return self.open[path].get_slice(given)
