"""Names of weights, from folders to the model and back, against transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_families import SIZE
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from splitppo.models.build import build
from splitppo.models.names import weights_of

EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gpt_neox": {},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 3},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "granitemoe": {"num_local_experts": 3},
}


@pytest.mark.parametrize("kind", TYPES)
def test_names_are_transformers_own_both_ways(kind: str, tmp_path: Path) -> None:
    make: Any = CONFIG_MAPPING[kind]
    config = make(**SIZE | TYPES[kind])
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for number, parameter in enumerate(plain.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    plain.save_pretrained(tmp_path)
    model: Any = build(config, "policy")
    names = model.folder_names
    folder = load_file(tmp_path / "model.safetensors")
    tensors = {}
    for name in {*weights_of(model)} | dict(
        plain.named_buffers()
    ).keys() & plain.state_dict().keys():
        weight = plain.state_dict()[name]
        parts = names.split(name, weight)
        due = names.parts(name, weight.shape)
        assert [names.part_of(tensor, dict.fromkeys(due, True)) for tensor in parts] == due
        tensors |= parts
    assert tensors.keys() == folder.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in folder.items())
