"""Weights: read from a folder's safetensors files shard by shard, checked against the model,
written again."""

import json
import re
import shutil
import zlib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from splitppo.errors import one_line
from splitppo.models.build import Kind, build, check_type, folder_error, on_meta, read_config
from splitppo.models.experts import experts_of, top_k
from splitppo.models.heads import ValueModel
from splitppo.models.names import HEAD, buffers_of, own_weights, ties_of, weights_of
from splitppo.models.sharding import bounds, described, local
from splitppo.models.stored import HEADED, open_folder
from splitppo.models.tokenizer import TOKENIZER_FILES

# of a written config.json never as before: the precision; code and quantization, which are not
# read; `id2label` counts; the folder of somebody's machine
CHANGED = (
    *("dtype", "torch_dtype", "auto_map", "quantization_config", "num_labels"),
    "_name_or_path",
)


def check_folder(
    config: PretrainedConfig, folder: str, kind: Kind, *, random_init: bool
) -> list[str]:
    """Raises a UserError if no such model can be built or, without `random_init`, filled from its
    folder. Returns what the user should know of its weights."""
    check_type(config, kind, folder)
    try:
        model = build(config, kind)
    except Exception as error:  # whatever a wrong field leads to in the model's code
        cause = one_line(f"{type(error).__name__}: {error}")[:200]
        raise folder_error(
            folder,
            f"no model can be built from its config.json ({cause})",
            "correct that file, or use another model",
        ) from error
    for number in {module.num_experts for module in experts_of(model)}:
        if not 0 < top_k(model) <= number or number == 1:
            raise folder_error(
                folder,
                f"config.json sends a token to {top_k(model)} of {number} experts",
                "correct that file, or use a dense model",
            )
    if random_init:
        return []
    stored = open_folder(folder, model)
    stored.check()
    stored.check_ties()
    stored.check_moments()
    return stored.notes()


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
    stored = None if random_init else open_folder(folder, model)
    if stored:
        stored.check()
    for name, tensor in (own_weights(weights_of(model)) | buffers_of(model)).items():
        if stored and name in stored.made_of:
            local(tensor).copy_(stored.read(name, bounds(model, name, tensor)))
        elif isinstance(tensor, nn.Parameter):  # and no buffer, which has been computed
            std = getattr(model.config, "initializer_range", 0.02)
            if isinstance(model, HEADED) and name in HEAD:
                std = tensor.shape[-1] ** -0.5 if head == "normal" else 0.0
            local(tensor).copy_(draw(model, name, tensor, seed, std))


def materialize(model: nn.Module, device: torch.device) -> None:
    """Gives a meta model uninitialised memory for its weights. Tied weights stay tied."""
    ties = ties_of(model)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for alias, main in ties.items():
        module, _, name = alias.rpartition(".")
        model.get_submodule(module)._parameters[name] = model.get_parameter(main)


def save(
    model: Any, folder: Path, source: Path, tokenizer: Path, *, own_code: bool = False
) -> None:
    """Writes a policy or value model as a Hugging Face folder, which transformers 4 reads, too. A
    value model becomes transformers' token classification with one label, if its type has that,
    else the body and `score`. What training did not change is as in the folder `source`, from which
    the model started; the tokenizer is that of the folder `tokenizer`."""
    is_value = isinstance(model, ValueModel)
    written: Any = getattr(model, model.base_model_prefix) if is_value else model.causal
    ties = ties_of(model)
    weights = {name: weight for name, weight in model.state_dict().items() if name not in ties}
    if is_value and type(model.config) in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        config = deepcopy(model.config)
        config.num_labels = 1
        with on_meta():
            written = transformers.AutoModelForTokenClassification.from_config(
                config, dtype=written.dtype, trust_remote_code=False
            )
        # the classifier's head has another name
        body = f"{written.base_model_prefix}."
        head = next(name for name in written.state_dict() if not name.startswith(body))
        renamed = rf"{head.rpartition('.')[0]}."
        weights = {re.sub(r"^score\.", renamed, name): w for name, w in weights.items()}
    tensors = {
        stored: part
        for name, weight in weights.items()
        for stored, part in model.folder_names.split(name, weight).items()
    }
    # transformers would leave it to the job's first rank
    written.should_save_on_this_rank = lambda _: True
    written.save_pretrained(folder, state_dict=tensors, save_original_format=False)
    _complete(folder, source, tokenizer, own_code=own_code, policy=not is_value)


def _complete(folder: Path, source: Path, tokenizer: Path, *, own_code: bool, policy: bool) -> None:
    """Completes the folder of a model that was written after training.

    config.json gets the values of the folder `source`, in its words, where both models agree. So
    transformers 4 reads it if it reads that folder. The tokenizer's files are those of the folder
    `tokenizer`, with a class and a setting that transformers 4 knows. A policy's
    generation_config.json is that of `source`. With `own_code` Python code comes along.
    """
    file = folder / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    source_config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    before = json.loads(read_config(str(source), own_code=own_code).to_json_string())
    same = {
        name: value
        for name, value in source_config.items()
        if name not in CHANGED and before.get(name) == written.get(name)
    }
    written.pop("_name_or_path", None)
    written["torch_dtype"] = written["dtype"]  # as transformers 4 calls it
    file.write_text(json.dumps(written | same, indent=2), encoding="utf-8")
    code = ["*.py"] * own_code
    copies = (
        *(source.glob(pattern) for pattern in [*code, *["generation_config.json"] * policy]),
        *(tokenizer.glob(pattern) for pattern in [*code, *TOKENIZER_FILES]),
    )
    for copied in filter(Path.is_file, (file for files in copies for file in files)):
        shutil.copyfile(copied, folder / copied.name)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        text = settings.read_text(encoding="utf-8")
        if "name_or_path" in (fields := json.loads(text)):
            del fields["name_or_path"]
            text = json.dumps(fields, indent=2, ensure_ascii=False)
        text = text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
        settings.write_text(
            re.sub(r'"extra_special_tokens"(?=\s*:\s*\[)', '"additional_special_tokens"', text),
            encoding="utf-8",
        )


def to_precision(model: Any, dtype: torch.dtype) -> Any:
    """Casts the weights and buffers that folders hold, in place, but for those that the family
    keeps in float32."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = tensor.to(torch.float32 if model.folder_names.exact(name) else dtype)
    return model


def assemble(config: PretrainedConfig, kind: Kind, named: Mapping[str, Tensor]) -> nn.Module:
    """A model of full weights and buffers, whose memory it shares."""
    model = build(config, kind)
    tied = {alias: named[main] for alias, main in ties_of(model).items()}
    model.load_state_dict({**named, **tied}, assign=True)
    return model


def draw(model: nn.Module, name: str, parameter: Tensor, seed: int, std: float) -> Tensor:
    """This rank's part of a random tensor. The whole is drawn from the name and the seed, whatever
    the sharding."""
    shard = local(parameter)
    if name.endswith("bias") or parameter.ndim < 2:
        return torch.full_like(shard, 0.0 if name.endswith("bias") else 1.0)
    generator = torch.Generator(shard.device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    full = torch.randn(
        described(model, name, parameter).shape, generator=generator, device=shard.device
    )
    return full[bounds(model, name, parameter)] * std
