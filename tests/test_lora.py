"""LoRA against the oracle of test_flagship.py, peft, and the whole model."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_ppo import Adapted
from runs import assert_same, figures
from safetensors.torch import load_file
from test_flagship import HYPER, SEED, compare, flags, inputs, reference, run
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from splitppo import train
from splitppo.config import LoraConfig
from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.models import lora, tiny
from splitppo.models.batching import micro_batch
from splitppo.models.build import build, read_config
from splitppo.models.heads import PolicyOutputs, adapters_off, value_outputs
from splitppo.models.names import weights_of
from splitppo.models.weights import fill
from splitppo.rollout import Episode, episode_of
from splitppo.run import checkpoint
from splitppo.tools.export import export, load_model

peft = pytest.importorskip("peft")
__all__ = ["inputs"]  # a fixture
CPU = torch.device("cpu")
RANK = 3
TARGETS = ("q_proj", r"mlp\..*_proj")
SHARED = {"value__share_base": "", "value__lora__rank": RANK, "policy__lora__rank": RANK}
COLOCATED = {"placement__mode": "colocated"}


def lora_model(folder: Path, kind: Any, settings: LoraConfig, dtype: Any = torch.float32) -> Any:
    """A whole model with adapters, in this process alone, as the trainer begins with it."""
    adapter = lora.Adapter(kind, settings, str(folder))
    model = build(read_config(str(folder)), kind, dtype)
    lora.add(model, adapter)
    fill(model, str(folder), CPU, head="normal", seed=SEED)
    lora.read(model, adapter)
    return model, adapter


def randomize(model: nn.Module, scale: float = 0.05) -> nn.Module:
    """As after some training: no B is 0."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in weights_of(model).items():
        if ".lora_B." in name:
            weight.data.copy_(scale * torch.randn(weight.shape, generator=generator))
    return model


def begun(folder: Path, kind: str, settings: LoraConfig) -> tuple[dict, float]:
    """The adapters with which the trainer begins, for the reference: layer -> (A, B); alpha."""
    model, adapter = lora_model(folder, kind, settings)
    weights = weights_of(model)
    layers = {layer: adapter.pair(layer) for layer in lora.targets(model, adapter)}
    found = {layer: tuple(weights[name].data for name in pair) for layer, pair in layers.items()}
    return found, adapter.alpha


@pytest.fixture(scope="module")
def trained_adapter(inputs, tmp_path_factory) -> Path:
    """An adapter as peft saves it, with another scale."""
    folder = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=RANK, lora_alpha=6, target_modules="all-linear")
    plain = AutoModelForCausalLM.from_pretrained(inputs / "policy")
    model = peft.get_peft_model(plain, config)
    for number, (name, weight) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(number)
            weight.data.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("world", "kinds", "changes"),
    [
        (2, "policy", {"placement__actor": 1, "policy__lora__targets": " ".join(TARGETS)}),
        (3, "value", {"placement__actor": 2, "compute__gather": "mini_batch"}),
        (2, "policy value", {"placement__actor": 1, "policy__lora__path": "", "slow": "critic"}),
        (2, "policy value", {**COLOCATED, "policy__offload": "all", "ppo__kl_kind": "k1"}),
        (1, "policy value", {**SHARED, **COLOCATED}),
        (
            4,
            "policy value",
            {
                **SHARED,
                **COLOCATED,
                "fsdp__tensor_parallel": 2,
                "fsdp__shard_size": 2,
                "compute__packing": "on",
                "compute__activation_checkpointing": "",
            },
        ),
        (3, "policy value", {"placement__actor": 2, "compute__packing": "on"}),
    ],
    ids=["policy", "value", "from an adapter", "both", "shared", "shared in sets", "2+1"],
)
def test_adapters_are_the_papers(inputs, tmp_path, trained_adapter, world, kinds, changes):
    """Losses, gradient norms, adapters, merged weights; and no bit of a base changes."""
    changes = dict(changes)
    if "policy__lora__path" in changes:
        changes |= {"policy__lora__path": trained_adapter, "policy__lora__alpha": 6}
    bases = {"policy": "policy", "value": "value"}
    if "value__share_base" in changes:
        bases["value"] = "policy"
        changes["value__path"] = inputs / "policy"
    changes |= {f"{kind}__lora__rank": RANK for kind in kinds.split()}
    seen = run(inputs, tmp_path, world, **changes)
    adapters = {}
    for kind in kinds.split():
        settings = LoraConfig(
            RANK,
            changes.get(f"{kind}__lora__alpha"),
            TARGETS if f"{kind}__lora__targets" in changes else (),
            changes.get(f"{kind}__lora__path"),
        )
        adapters[kind] = begun(inputs / bases[kind], kind, settings)
    due = reference(inputs, seen, adapters=adapters, value_base=bases["value"])
    compare(seen, due)
    for kind in kinds.split():
        check_parts(seen[f"{kind}_parts"], due["models"][kind], inputs / bases[kind], kind)


def check_parts(held: dict, model: Any, folder: Path, kind: str) -> None:
    """What a learner holds in the end: its base as in the folder, adapters as the reference's."""
    base = load_file(folder / "model.safetensors")
    count = 0
    for name, weight in held.items():
        if part := re.search(rf"(.*)\.lora_([AB])\.{kind}\.weight", name):
            due = getattr(model.get_submodule(part[1]), f"lora_{part[2]}")
            torch.testing.assert_close(weight, due.detach(), rtol=0, atol=1e-5)
            count += 1
        elif not name.startswith("score"):
            assert torch.equal(weight, base[name]), f"{name}: the base has changed"
    layers = [module for module in model.modules() if isinstance(module, Adapted)]
    assert count == 2 * len(layers)
    assert max(float(layer.lora_B.detach().abs().max()) for layer in layers) > 1e-3


def test_with_windows(inputs, tmp_path):
    from test_windows import LENGTHS, WINDOW, lengths_file

    options = {
        "rollout__lengths": lengths_file(tmp_path, LENGTHS),
        "rollout__max_new_tokens": 12,
        "rollout__window": WINDOW,
        "policy__lora__rank": RANK,
        "ppo__old_logprobs": "engine",
    }
    seen = run(inputs, tmp_path, 2, odd="exact", placement__actor=1, **options)
    adapters = {"policy": begun(inputs / "policy", "policy", LoraConfig(RANK))}
    hyper = {"old_logprobs": "engine"}
    compare(seen, reference(inputs, seen, window=WINDOW, adapters=adapters, **hyper))
