"""Families of Hugging Face models, tiny and random: built on meta, sharded, filled, and equal to the library's own."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)

from splitppo.config import PlacementConfig
from splitppo.errors import UserError
from splitppo.models import build, check_folder, clean, fill, policy_outputs, read_config, value_outputs
from splitppo.parallel import parallelize
from splitppo.placement import place
from splitppo.rollout import Sample, micro_batch
from splitppo.runtime import Launch, Runtime

CPU = torch.device("cpu")
SIZE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZE, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**SIZE, tie_word_embeddings=False, attention_bias=True),
    "mistral": MistralConfig(**SIZE, sliding_window=4),
    "qwen2": Qwen2Config(**SIZE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZE),
    "gemma2": Gemma2Config(**SIZE, final_logit_softcapping=5.0, attn_logit_softcapping=10.0, sliding_window=4),
    "phi3": Phi3Config(**{**SIZE, "num_key_value_heads": 4}),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
}


@pytest.fixture(scope="module")
def mesh():
    runtime = Runtime(Launch(), place(PlacementConfig(), world=1, local_world=1), CPU, 60.0)
    yield runtime.mesh["actor"]
    runtime.close()


def rows():
    generator = torch.Generator().manual_seed(0)
    cut = [(3, 5), (1, 9), (6, 1)]
    draw = [
        (torch.randint(1, 50, (p,), generator=generator), torch.randint(1, 50, (r,), generator=generator))
        for p, r in cut
    ]
    return [Sample(i, p.tolist(), r.tolist(), [], True) for i, (p, r) in enumerate(draw)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_librarys_own(family, mesh, tmp_path):
    torch.manual_seed(1)
    # larger than the usual 0.02: soft caps and windows are to matter
    config = FAMILIES[family]
    config.initializer_range = 0.3
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plain.save_pretrained(tmp_path)
    check_folder(str(tmp_path), "policy", random_init=False)
    model = build(read_config(str(tmp_path)), "policy")
    parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=True)
    fill(model, str(tmp_path), device=CPU)
    samples = rows()
    batch = micro_batch(samples, CPU)
    logprobs, entropy = policy_outputs(model, batch, temperature=0.7, vocabulary=50, entropy=True)
    for i, sample in enumerate(samples):
        logits = plain(input_ids=torch.tensor([sample.prompt + sample.response])).logits[0]
        log_p = (logits[len(sample.prompt) - 1 : -1] / 0.7).log_softmax(-1)
        n = len(sample.response)
        due = log_p.gather(-1, torch.tensor(sample.response)[:, None])[:, 0]
        torch.testing.assert_close(logprobs[i, :n], due, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entropy[i, :n], -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=1e-4)
        assert not logprobs[i, n:].any()
    logprobs.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    names = {clean(name) for name, _ in model.named_parameters()}
    assert names <= plain.state_dict().keys()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi3"])
def test_a_value_model_is_its_body_and_a_fresh_head(family, mesh, tmp_path):
    config = FAMILIES[family]
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path)
    check_folder(str(tmp_path), "value", random_init=False)
    batch = micro_batch(rows(), CPU)
    for head in ("zero", "normal"):
        model = build(read_config(str(tmp_path)), "value")
        parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=False)
        fill(model, str(tmp_path), device=CPU, head=head, seed=3)
        values = value_outputs(model, batch)
        assert values.shape == batch.mask.shape
        assert bool(values.any()) == (head == "normal")
        assert torch.equal(values != 0, batch.mask) or head == "zero"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Qwen3MoeConfig(**SIZE, num_experts=4, moe_intermediate_size=16), "mixtures of experts"),
        (BertConfig(), "not a causal language model"),
        (T5Config(), "not a causal language model"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_does_not_work_is_refused(config, says, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=says):
        check_folder(str(tmp_path), "policy", random_init=True)


def test_weights_of_another_shape_are_refused(mesh, tmp_path):
    plain = AutoModelForCausalLM.from_config(FAMILIES["llama"])
    plain.save_pretrained(tmp_path)
    config = read_config(str(tmp_path))
    config.intermediate_size = 40
    model = build(config, "policy")
    with pytest.raises(UserError, match="gate_proj"):
        fill(model, str(tmp_path), device=CPU)
