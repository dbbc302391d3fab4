"""Weights: read from a folder's safetensors files shard by shard, checked against the model,
written again."""

import re
import shutil
import zlib
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from splitppo.models.build import Kind, build, check_type, folder_error, on_meta
from splitppo.models.heads import ValueModel
from splitppo.models.names import HEAD, buffers_of, of_classifier, own_weights, ties_of
from splitppo.models.older import complete
from splitppo.models.sharding import bounds, described, local
from splitppo.models.stored import HEADED, StoredWeights

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


def check_folder(
    config: PretrainedConfig, folder: str, kind: Kind, *, random_init: bool
) -> list[str]:
    """Raises a UserError if no such model can be built or, without `random_init`, filled from its
    folder. Returns what the user should know of its weights."""
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
    if random_init:
        return []
    weights = StoredWeights(folder, model)
    weights.check()
    weights.check_ties()
    weights.check_moments()
    return weights.notes()


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
    weights = None if random_init else StoredWeights(folder, model)
    if weights:
        weights.check()
    for name, parameter in own_weights(model).items():
        if weights and name in weights.sources.made_of:
            value = weights.read(name, bounds(model, name, parameter))
        else:
            of_head = parameter.shape[-1] ** -0.5 if head == "normal" else 0.0
            own_head = isinstance(model, HEADED) and name in HEAD
            std = of_head if own_head else getattr(model.config, "initializer_range", 0.02)
            value = draw(model, name, parameter, seed, std)
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
        StoredWeights(folder, model).read_buffers()


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
    *folders: Path,
    own_code: bool,
    write: bool,
) -> None:
    """Writes full weights and buffers (`Learner.weights`) as a Hugging Face folder, which replaces
    an older one. `folders`: the folders `source` and `tokenizer` of `save`. All ranks of the group
    call it, and one of them has `write`."""
    held = {name: tensor.cpu().clone() for name, tensor in named if write}
    if not write:
        return
    model = build(config, kind)
    model.load_state_dict(held, assign=True)
    partial = folder.with_name(f"{folder.name}.partial")
    save(model, partial, *folders, own_code=own_code)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


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
