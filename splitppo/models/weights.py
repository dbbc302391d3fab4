"""Weights: read from a folder's safetensors files shard by shard, checked against the model,
written again."""

import json
import re
import shutil
import zlib
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from splitppo.errors import UserError
from splitppo.models.build import SCALE, Kind, build, check_type, folder_error, on_meta
from splitppo.models.heads import SharedModel, ValueModel
from splitppo.models.names import (
    ADAPTER,
    HEAD,
    buffers_of,
    of_classifier,
    outside,
    sources,
    ties_of,
    weights_of,
)
from splitppo.models.older import complete
from splitppo.models.sharding import bounds, described, local

HEADED = (ValueModel, SharedModel)  # with a scalar head
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names them
# a model's kind -> architectures in config.json that are another kind's, what they are, what to do
OTHERS = {
    "policy": (
        "Classification|Reward",
        "a model that scores texts",
        "name a causal language model",
    ),
    "reward": (
        "CausalLM|LMHead",
        "a causal language model",
        "name a sequence-classification model with one label, which scores texts",
    ),
}


def check_folder(config: PretrainedConfig, folder: str, kind: Kind, *, random_init: bool) -> None:
    """Raises a UserError if no such model can be built or, without `random_init`, filled from its
    folder."""
    made = ", ".join(config.architectures or ())
    if kind in OTHERS and re.search(OTHERS[kind][0], made) and not random_init:
        _, what, remedy = OTHERS[kind]
        raise folder_error(folder, f"it is {what} by its config.json ({made})", remedy)
    check_type(config, kind, folder)
    try:
        model = build(config, kind)
    except Exception as error:  # whatever a wrong field leads to in the model's code
        raise folder_error(
            folder,
            f"no model can be built from its config.json ({type(error).__name__}: {error})",
            "correct that file, or use another model",
        ) from error
    if not random_init:
        weights = _Weights(folder, model)
        weights.check()
        weights.check_ties()


def fill(
    model: nn.Module,
    folder: str,
    device: torch.device,
    random_init: bool = False,
    head: Literal["zero", "normal"] = "zero",
    seed: int = 0,
) -> None:
    """Gives a (sharded) meta model its memory, and weights from a folder's safetensors (each rank
    reads its shards), or drawn from `seed` with `random_init`. `head`: how a scalar head starts
    that the folder lacks (`normal` is drawn). Raises UserError if a weight is not there, or of
    another shape, or of a type that can't be read."""
    materialize(model, device)
    weights = None if random_init else _Weights(folder, model)
    if weights:
        weights.check()
    for name, parameter in weights_of(model).items():
        if weights and name in weights.sources:
            value = weights.read(name, bounds(model, name, parameter))
        else:
            of_head = parameter.shape[-1] ** -0.5 if head == "normal" else 0.0
            own_head = isinstance(model, HEADED) and name in HEAD
            std = of_head if own_head else getattr(model.config, "initializer_range", 0.02)
            if adapter := re.search(ADAPTER, name):
                # of A as in peft, by the whole weight's inputs; B is 0
                inputs = described(model, name, parameter).shape[-1]
                std = (3 * inputs) ** -0.5 if adapter[1] == "A" else 0.0
            value = _draw(model, name, parameter, seed, std)
        with torch.no_grad():
            local(parameter).copy_(value)
    if weights:
        weights.read_buffers()


def materialize(model: nn.Module, device: torch.device) -> None:
    """Gives a meta model uninitialised memory for its weights. Tied weights stay tied."""
    ties = ties_of(model)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for alias, main in ties.items():
        module, _, name = alias.rpartition(".")
        model.get_submodule(module)._parameters[name] = model.get_parameter(main)


def read_buffers(model: nn.Module, folder: str) -> None:
    """Reads the persistent buffers from the folder; a buffer that is not there keeps its value."""
    if buffers_of(model) and any(Path(folder).glob("*.safetensors")):
        _Weights(folder, model).read_buffers()


def save(
    model: Any, folder: Path, source: Path, tokenizer: Path, *, own_code: bool = False
) -> None:
    """Writes a policy or value model as a Hugging Face folder, which transformers 4 reads, too. A
    value model becomes transformers' token classification with one label, if its type has that,
    else the body and `score`. What training did not change is as in the folder `source`, from which
    the model started; the tokenizer is that of the folder `tokenizer`."""
    is_value = isinstance(model, ValueModel)
    written: Any = getattr(model, model.base_model_prefix) if is_value else model.causal
    weights = model.state_dict()
    if is_value and type(model.config) in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        config = deepcopy(model.config)
        config.num_labels = 1
        with on_meta():
            written = transformers.AutoModelForTokenClassification.from_config(
                config, dtype=written.dtype, trust_remote_code=False
            )
        weights = of_classifier(written, weights)
    # transformers would leave it to the job's first rank
    written.should_save_on_this_rank = lambda _: True
    written.save_pretrained(folder, state_dict=weights)
    complete(folder, source, tokenizer, own_code=own_code, policy=not is_value)


def save_trained(
    config: PretrainedConfig,
    kind: Kind,
    named: Iterable[tuple[str, Tensor]],
    folder: Path,
    *given: Path,
    own_code: bool,
    write: bool,
) -> None:
    """Writes full weights and buffers (`Learner.weights`) as a Hugging Face folder, which replaces
    an older one. `given`: the folders `source` and `tokenizer` of `save`. All ranks of the group
    call it, and one of them has `write`."""
    held = {name: tensor.cpu().clone() for name, tensor in named if write}
    if not write:
        return
    model = build(config, kind)
    model.load_state_dict(held, assign=True)
    partial = folder.with_name(f"{folder.name}.partial")
    save(model, partial, *given, own_code=own_code)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _draw(model: nn.Module, name: str, parameter: Tensor, seed: int, std: float) -> Tensor:
    """This rank's part of a random tensor. The whole is drawn from the name and the seed, whatever
    the sharding."""
    own = local(parameter)
    if name.endswith("bias") or parameter.ndim < 2:
        return torch.full_like(own, 0.0 if name.endswith("bias") else 1.0)
    generator = torch.Generator(own.device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    full = torch.randn(
        described(model, name, parameter).shape, generator=generator, device=own.device
    )
    return full[bounds(model, name, parameter)] * std


def _weight_files(folder: Path) -> dict[str, Path]:
    """Name of a weight -> the safetensors file that holds it."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            files = {
                name: folder / file
                for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{index} is broken ({type(error).__name__}: {error}); fetch it again"
            ) from error
        if missing := sorted({path.name for path in files.values() if not path.is_file()}):
            raise folder_error(
                folder, f"{missing[0]} is in the index but not there", "fetch it again"
            )
        return files
    if not single.is_file():
        raise folder_error(
            folder,
            "no model.safetensors",
            "load it with transformers and save_pretrained it, which writes one",
        )
    return dict.fromkeys(_open(single).keys(), single)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{path} is no safetensors file ({error}); fetch it again") from error


class _Weights:
    """Reads tensors from a folder's safetensors files, each opened once."""

    def __init__(self, folder: str, model: nn.Module):
        self.folder = folder
        self.model = model
        self.files = _weight_files(Path(folder))
        self.open = cache(_open)
        self.parameters = weights_of(model)
        self.buffers = buffers_of(model)
        self.sources, self.unexpected = sources(model, folder, self.files)

    def check(self) -> None:
        """Raises a UserError that names the first weight that is missing, of another shape or type,
        or unexpected."""
        optional = {*self.buffers, *(HEAD if isinstance(self.model, HEADED) else ())}
        for name, tensor in (self.parameters | self.buffers).items():
            if name in self.sources:
                self._check_stored(name, [*described(self.model, name, tensor).shape])
            elif name not in optional and not re.search(ADAPTER, name):
                raise folder_error(
                    self.folder,
                    f"no weight {name} in its safetensors",
                    "it is another model's: take config.json and weights from one",
                )
        if self.unexpected:
            raise folder_error(
                self.folder,
                f"config.json has no place for weight {self.unexpected[0]} "
                f"({len(self.unexpected)} such)",
                "take both from one model",
            )

    def _check_stored(self, name: str, due: list[int]) -> None:
        (stored,) = self.sources[name]
        shape = self._slice(stored).get_shape()
        kind = self._slice(stored).get_dtype()
        if shape != due:
            raise folder_error(
                self.folder,
                f"weight {stored} is {shape}, but {due} by config.json",
                "take both from one model",
            )
        if (
            name in self.parameters
            and kind not in FLOATS
            and not (kind == "F8_E4M3" and stored + SCALE in self.files)
        ):
            raise folder_error(
                self.folder,
                f"weight {stored} is stored as {kind}, so it is quantized",
                f"use a folder of {', '.join(FLOATS)} weights",
            )

    def check_ties(self) -> None:
        """Raises a UserError if weights that config.json ties differ in the folder; transformers
        doesn't tie these."""
        for tied in ties_of(self.model).items():
            stored = [source for path in tied for source in self.sources.get(outside(path), ())]
            if len(set(stored)) == 2 and not torch.equal(
                *(self._slice(name)[:] for name in stored)
            ):
                raise folder_error(
                    self.folder,
                    f"config.json ties {' and '.join(stored)}, which differ",
                    "set tie_word_embeddings to false there, or drop the weight that is not used",
                )

    def read(self, name: str, where: tuple[slice, ...] = ()) -> Tensor:
        """A part of a weight, or all of it, FP8 as float32."""
        (stored,) = self.sources[name]
        if stored + SCALE not in self.files:
            return self._slice(stored)[where or ...]
        scales = self._slice(stored + SCALE)[:]
        whole = {"weight": self._slice(stored)[:], "weight_scale_inv": scales}
        plain = cast(Any, Fp8Dequantize(None)).convert(whole)["weight"]
        # a list in transformers 5.17
        return (plain[0] if isinstance(plain, list) else plain)[where]

    def read_buffers(self) -> None:
        for name, buffer in self.buffers.items():
            if name in self.sources:
                buffer.copy_(self.read(name))

    def _slice(self, stored: str) -> Any:
        return self.open(self.files[stored]).get_slice(stored)
