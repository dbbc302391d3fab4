"""Policy, value and reward models by the configurations of Hugging Face folders, built without memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping

from splitppo.errors import UserError
from splitppo.models.attention import PACKED

Kind = Literal["policy", "value", "reward"]
# without a file like these, transformers makes up an empty tokenizer
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
HEAD = ("score.weight", "score.bias")  # of a value model


def read_config(folder: str) -> PretrainedConfig:
    """The model's configuration, with every dropout turned off: PPO's ratio compares two passes of one function.
    Of a model in FP8, which is read into floats, it is that of the plain model.

    Raises:
        UserError: the folder has no readable config.json, or holds a quantized model that can't be read.
    """
    if (Path(folder) / "adapter_config.json").is_file():
        raise UserError(
            f"model folder {folder}: a LoRA adapter; this version trains and reads whole models: merge it into its "
            "base (peft's merge_and_unload) and save that"
        )
    if not (Path(folder) / "config.json").is_file():
        remedy = "give a local folder; hub names are not fetched (hf download NAME --local-dir FOLDER)"
        raise UserError(f"model folder {folder}: no config.json there; {remedy}")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError, StrictDataclassError) as error:
        # the first paragraph: what follows is on installing another transformers
        why = str(error).partition("\n\n")[0]
        raise UserError(f"model folder {folder}: config.json is of no model that transformers knows: {why}") from error
    if quantized := getattr(config, "quantization_config", None):
        method = dict(quantized).get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        if method != "fp8":
            remedy = "load it with transformers, dequantize() it and save_pretrained that"
            raise UserError(f"model folder {folder}: its weights are quantized ({method}), only fp8 is read; {remedy}")
        delattr(config, "quantization_config")
    for name in vars(config):
        if name.endswith(("dropout", "_pdrop")) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
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


def most_positions(config: PretrainedConfig) -> tuple[int | None, str]:
    """Tokens of a row at most, and the setting of config.json that says so.

    Where rotary factors depend on the longest row of a batch, it ends before they change: a row's log-probs would
    depend on its neighbours.
    """
    most, setting = getattr(config, "max_position_embeddings", None), "max_position_embeddings"
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(part for part in ropes.values() if isinstance(part, dict))]:
        own = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        original = own or most
        if rope.get("rope_type") in ("longrope", "dynamic") and original and original <= (most or original):
            most, setting = original, f"original_max_position_embeddings of its {rope['rope_type']} positions"
    return most, setting


def check_reward(config: PretrainedConfig, kind: Kind, folder: str) -> None:
    """A UserError if the model gives no score."""
    auto: Any = AutoModelForSequenceClassification
    if type(config) not in auto._model_mapping:
        raise UserError(f"reward.model={folder}: no sequence classification of type {config.model_type!r}; use another")
    if config.num_labels != 1:
        raise UserError(
            f"reward.model={folder}: it gives {config.num_labels} numbers a text, and a reward is one; use a "
            "checkpoint with num_labels 1 in its config.json"
        )


def check_causal(config: PretrainedConfig, kind: Kind, folder: str) -> None:
    """A UserError if models of this type are not trained here."""
    kinds: Any = (AutoModelForCausalLM, AutoModelForMaskedLM)
    causal, masked = (kind._model_mapping for kind in kinds)
    # encoders such as BERT are in the causal mapping, too, for those who turn them into decoders
    encoder = type(config) in masked and getattr(config, "is_decoder", None) is False
    need = None
    if type(config) not in causal or encoder or config.is_encoder_decoder:
        need = "a causal language model"
    elif config.get_text_config(decoder=True) is not config:
        need = "a text model alone: what reads pictures or sound is not in this version"
    elif any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        need = "dense: mixtures of experts are not in this version"
    if need:
        raise UserError(f"model folder {folder}: type {config.model_type!r} is not {need}; choose another {kind}.path")


class ValueModel(nn.Module):
    """A causal model's body with a scalar head `score` on its last states.

    Attributes:
        base_model_prefix: the body's name, which is the one that it has in the causal model and in its folder.
    """

    def __init__(self, causal: Any):
        super().__init__()
        self.config, self.base_model_prefix = causal.config, causal.base_model_prefix
        if causal.base_model is causal:
            raise UserError(f"{type(causal).__name__} has no body that another head could be put on; use another model")
        setattr(self, self.base_model_prefix, causal.base_model)
        self.score = nn.Linear(causal.get_output_embeddings().weight.shape[-1], 1, dtype=causal.dtype)

    def forward(self, at: Tensor, **inputs: Any) -> Tensor:
        """`[N, 1]` values of the states `at` `[N]` in the flattened ids."""
        states = getattr(self, self.base_model_prefix)(**inputs, use_cache=False)[0]
        return self.score(states.flatten(0, 1)[at])


def build(
    config: PretrainedConfig, kind: Kind, dtype: torch.dtype = torch.float32, *, packed: bool = False
) -> nn.Module:
    """The model with its parameters on the meta device and its buffers real; for `fully_shard`, then `fill`.

    With `packed` it takes packed rows (see attention.py), and no others.

    A value model is the causal model's body with a head of ours (ValueModel). A reward model is the library's
    sequence-classification model.
    """
    config = deepcopy(config)  # which attention a model has is written there, too
    if kind == "reward":
        config.num_labels = 1
    auto: Any = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    with on_meta():
        model = auto.from_config(config, dtype=dtype, **({"attn_implementation": PACKED} if packed else {}))
        # how a folder's names become the model's: asked for before they are wrapped
        names = get_model_conversion_mapping(model), getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
        model = ValueModel(model) if kind == "value" else model
    cast(Any, model).folder_names = names
    return model.eval()


def clean(name: str) -> str:
    """A parameter's Hugging Face name, without what activation checkpointing and compilation put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def count_parameters(config: PretrainedConfig, kind: Kind) -> int:
    """Parameters of the model, tied ones once."""
    return sum(parameter.numel() for parameter in build(config, kind).parameters())


@contextmanager
def on_meta() -> Iterator[None]:
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
