"""Small mixtures of experts."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from splitppo.models.tiny import build_tokenizer, model_config


def write_mixture(folder: Path, kind: str, seed: int, **changes: Any) -> None:
    """A small random one with the embedded model's tokenizer."""
    tiny = model_config()
    make: Any = CONFIG_MAPPING[kind]
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": tiny.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tiny.eos_token_id,
        "pad_token_id": tiny.pad_token_id,
    }
    config = make(**sizes | changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
