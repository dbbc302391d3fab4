"""Model folders' configurations, and the models that they describe, built without memory."""

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)
from transformers.initialization import no_init_weights

from splitppo.errors import UserError, one_line
from splitppo.models.attention import PACKED
from splitppo.models.heads import PolicyModel, SharedModel, ValueModel
from splitppo.models.names import FolderNames

# `both`: policy and value model over one body
Kind = Literal["policy", "value", "reward", "both"]
SCALE = "_scale_inv"  # ends the name of an FP8 weight's block scales
ROUTER = r"\.(?:gate|router)\."  # of a mixture of experts
# modules in which a layer mixes positions, as transformers calls them; those of linear attention,
# too
ATTENTION = (
    r"\.(?:attention|attn|conv|linear_attn|mamba|mixer|self_attention|self_attn|short_conv"
    r"|temporal_block|time_mixer)\."
)


def folder_error(folder: str | Path, problem: str, remedy: str) -> UserError:
    if "trust_remote_code" in problem:
        problem = "it brings Python code of its own"
        remedy = "read that code, then allow it with --policy.trust-remote-code"
    return UserError(f"model folder {folder}: {problem}; {remedy}")


def read_config(folder: str, *, own_code: bool = False) -> PretrainedConfig:
    """The model's configuration. An FP8 model has that of the plain one, since its weights are read
    as floats. With `own_code` the folder's Python code runs, here and where the model is built;
    `auto_map` names it. Raises UserError if the folder has no readable config.json, or holds a
    model that can't be read."""
    if not (Path(folder) / "config.json").is_file():
        raise folder_error(
            folder,
            "no config.json there",
            "give the folder of a model, or its hub name OWNER/NAME; a LoRA adapter goes to "
            "--policy.lora.path, its base to policy.path",
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=own_code)
    except Exception as error:  # transformers raises whatever a wrong field leads to
        # the other paragraphs say how to install another transformers
        cause = str(error).partition("\n\n")[0]
        raise folder_error(
            folder,
            f"transformers can't read config.json: {cause}",
            "correct config.json, or use another model",
        ) from error
    if quantized := getattr(config, "quantization_config", None):
        method = (
            quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        )
        if method != "fp8":
            raise folder_error(
                folder,
                f"its weights are quantized ({method}), and splitppo reads only fp8",
                "load it with transformers, dequantize() it and save_pretrained that",
            )
        delattr(config, "quantization_config")
    if not own_code and hasattr(config, "auto_map"):
        delattr(config, "auto_map")
    for name in vars(config):
        # such as a fast attention for which this machine has no library: `build` chooses
        if name.endswith("_implementation_internal"):
            setattr(config, name, None)
    check_ids(folder, "config.json", vars(config), getattr(config, "vocab_size", 2**31))
    return config


def check_ids(folder: str | Path, file: str, fields: Mapping[str, Any], vocabulary: int) -> None:
    """Raises a UserError if a field for special tokens holds no ids, or one of padding that the
    model has not."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = fields.get(name)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        # an end beyond the vocabulary is never sampled; padding is embedded
        if any(
            type(token) is not int or (name == "pad_token_id" and token >= vocabulary)
            for token in ids
        ):
            raise folder_error(
                folder,
                f"{file} has {name} = {json.dumps(value, default=str)}",
                f"write null, or a token's id, a whole number below {vocabulary}",
            )


def code_of(config: PretrainedConfig) -> dict[str, str]:
    """The classes that the model's own code defines, by the name of transformers' class; {} if it
    may not run."""
    return getattr(config, "auto_map", {})


def most_positions(config: PretrainedConfig) -> tuple[int | None, str]:
    """The longest row in tokens, and the setting of config.json that says so. Some rotary factors
    change where a batch has a long row, so log-probs would depend on other rows. The limit is then
    the length from which they change."""
    most = getattr(config, "max_position_embeddings", None)
    setting = "max_position_embeddings"
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(part for part in ropes.values() if isinstance(part, dict))]:
        original = (
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or most
        )
        if (
            rope.get("rope_type") in ("longrope", "dynamic")
            and original
            and original <= (most or original)
        ):
            most = original
            setting = f"original_max_position_embeddings of its {rope['rope_type']} positions"
    return most, setting


def check_type(config: PretrainedConfig, kind: Kind, folder: str) -> None:
    """Raises a UserError if models of this type can't be trained, or as reward models don't give
    one score."""
    # encoders such as BERT are in the causal mapping too, since they can be turned into decoders
    encoder = (
        type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
        and getattr(config, "is_decoder", None) is False
    )
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    causal = known or "AutoModelForCausalLM" in code_of(config)
    scores = (
        type(config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        or "AutoModelForSequenceClassification" in code_of(config)
    )
    need = ""
    if kind == "reward":
        if not scores:
            need = "a sequence-classification model"
    elif not causal or encoder or config.is_encoder_decoder:
        need = "a causal language model"
    elif kind == "policy" and re.search("Classification|Reward", str(config.architectures)):
        need = "a causal language model: it scores texts, by its architectures in config.json"
    elif config.get_text_config(decoder=True) is not config:
        need = "a text-only model: images and sound are not supported"
    if need:
        setting = "reward.model" if kind == "reward" else f"{kind}.path"
        raise folder_error(
            folder, f"type {config.model_type!r} is not {need}", f"choose another {setting}"
        )


def shorten(config: PretrainedConfig, layers: int | None, folder: str) -> PretrainedConfig:
    """The configuration of a model's first layers; the folder may hold the others' weights. None:
    all layers. Raises UserError if the model has fewer."""
    every = config.num_hidden_layers
    if layers is None or layers == every:
        return config
    if layers > every:
        raise UserError(f"value.layers={layers}: {folder} has {every} layers; use at most {every}")
    config = deepcopy(config)
    for name, value in vars(config).items():  # such as layer_types
        if isinstance(value, list | tuple) and len(value) == every:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    cast(Any, config).layers_in_folder = every
    return config


def bound(
    config: PretrainedConfig, value_range: tuple[float, float] | None, folder: str
) -> PretrainedConfig:
    """A model's configuration with the range of its values, if it is a value model that has one.
    Raises UserError if the folder's head was trained for another one."""
    trained = getattr(config, "value_range", None)
    if trained and trained != [*(value_range or ())]:
        raise UserError(
            f"{folder}: this is a value model with a value range; use it only as value.path, "
            f"with --value.range as in its config.json: value_range={one_line(repr(trained))[:100]}"
        )
    if value_range:
        cast(Any, config).value_range = [*value_range]
    return config


def choose_label(config: PretrainedConfig, label: str | None, folder: str) -> PretrainedConfig:
    """A reward model's configuration with the label whose probability is the score; None: it has
    one label, whose number is the score. Raises UserError if it gives no scores, or has no such
    label."""
    check_type(config, "reward", folder)
    wide: Any = config
    if not (label in wide.label2id if wide.num_labels > 1 else label is None):
        raise UserError(
            f"reward.label={label or 'unset'}: reward.model={folder} has the labels "
            f"{', '.join(wide.label2id)}, by its config.json; name the one whose "
            "probability is the score, or choose another reward.model"
        )
    wide.score_label = wide.label2id.get(label)
    return config


def make(config: PretrainedConfig, kind: Kind, dtype: torch.dtype, **options: Any) -> Any:
    """The model as transformers makes it; one of Qwen's process reward models with its head of two
    layers, which transformers' class lacks."""
    names = str(config.architectures)
    auto: Any = AutoModelForCausalLM
    if kind == "reward":
        of_tokens = "ForTokenClassification" in names
        auto = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    model = auto.from_config(
        config, dtype=dtype, trust_remote_code=bool(code_of(config)), **options
    )
    if kind == "reward" and "Qwen2ForProcessRewardModel" in names:
        width = config.hidden_size
        layers = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, len(config.id2label or ()))
        model.score = nn.Sequential(*layers).to(dtype)
    return model


def build(
    config: PretrainedConfig,
    kind: Kind,
    dtype: torch.dtype = torch.float32,
    *,
    packed: bool = False,
) -> nn.Module:
    """The model, its parameters on the meta device. Next come `parallelize` and `fill`. A reward
    model is transformers' sequence-classification model; for packed rows its body and its head
    `score`, if it has these. With `packed` the model takes packed rows (attention.py), and no
    others."""
    config = deepcopy(config)  # transformers writes the model's attention into it
    with no_init_weights(), on_meta():
        model = make(config, kind, dtype, **({"attn_implementation": PACKED} if packed else {}))
        model.tie_weights()  # no_init_weights leaves this out, too
        every = getattr(config, "layers_in_folder", 0)
        ignored = [
            "inv_freq$",
            *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []),
            *(rf"\.{layer}\." for layer in range(config.num_hidden_layers, every)),
        ]
        names = FolderNames(model, ignored)
        if kind != "reward":
            if model.base_model is model:
                raise UserError(
                    f"{type(model).__name__} has no body separate from its head; use another model"
                )
            made = {"policy": PolicyModel, "value": ValueModel, "both": SharedModel}
            model = made[kind](model.eval())
        elif packed:
            model = ValueModel(model.eval(), model.score)
    untyped = cast(Any, model)
    untyped.folder_names = names
    exact = {name.rpartition(".")[0] for name, _ in model.named_parameters() if names.exact(name)}
    for name in exact:
        model.get_submodule(name).float()
    untyped.float32 = (*getattr(model, "float32", ()), *sorted(exact))
    return model.eval()  # without dropout: PPO's ratio compares two passes of one function


def freeze(model: nn.Module, parts: Sequence[str], setting: str) -> None:
    """Takes the gradient from some weights of a model that is not sharded yet: `attention`,
    `router`, `embeddings`, `body`, or regular expressions that a weight's name contains. Such
    weights have no optimizer state, and nothing of them is reduced. Raises a UserError of `setting`
    if a part matches no weight, or nothing is left to train."""
    weights = dict(model.named_parameters())
    tables = [re.escape(p) for p, part in model.named_modules() if isinstance(part, nn.Embedding)]
    known = {
        "attention": ATTENTION,
        "router": ROUTER,
        "embeddings": rf"^({'|'.join(tables)})\.",
        "body": rf"^{model.base_model_prefix}\.",
    }
    for part in parts:
        for name in matching(known.get(part, part), [*weights], f"{setting}={part}", "weight"):
            weights[name].requires_grad_(False)
    if parts and not any(weight.requires_grad for weight in weights.values()):
        raise UserError(f"{setting}={' '.join(parts)} leaves no weight to train; name fewer")


def matching(pattern: str, names: Sequence[str], setting: str, what: str) -> list[str]:
    """The names that contain a regular expression. Raises a UserError of `setting` if none does;
    `what`: is named."""
    try:
        matched = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise UserError(f"{setting} is not a regular expression ({error}); correct it") from error
    if not matched:
        examples = ", ".join(names[:3]) or "nothing: the model has none"
        raise UserError(f"{setting} matches no {what}; their names are like {examples}")
    return matched


def on_meta() -> RemovableHandle:
    """While the context is open, new parameters go to the meta device; buffers (rotary tables) are
    computed."""
    return register_module_parameter_registration_hook(
        lambda _, __, parameter: (
            parameter
            if parameter.is_meta
            else cast(
                Any,
                nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad),
            )
        )
    )
