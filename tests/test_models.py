"""Families of Hugging Face models, tiny and random: built on meta, sharded, filled, and equal to the library's own."""

import copy
from typing import Any, cast

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
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

from splitppo.attention import PACKABLE, PACKED, is_packed, why_not_packed
from splitppo.config import PlacementConfig
from splitppo.errors import UserError
from splitppo.models import build, check_folder, clean, fill, head_names, read_config
from splitppo.nodes import Launch
from splitppo.outputs import PolicyOutputs, value_outputs
from splitppo.parallel import parallelize
from splitppo.placement import place
from splitppo.rollout import ROUND, Sample, micro_batch
from splitppo.runtime import Runtime

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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_librarys_own(family, packed, mesh, tmp_path):
    if packed and why_not_packed(FAMILIES[family]):
        pytest.skip("not packed")
    torch.manual_seed(1)
    # larger than the usual 0.02: soft caps and windows are to matter
    config = FAMILIES[family]
    config.initializer_range = 0.3
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plain.save_pretrained(tmp_path)
    check_folder(str(tmp_path), "policy", random_init=False)
    model = build(read_config(str(tmp_path)), "policy", packed=packed)
    parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=True)
    fill(model, str(tmp_path), device=CPU)
    samples = rows()
    batch = micro_batch(samples, CPU, packed=packed)
    logprobs, entropy = PolicyOutputs(0.7, 50)(model, batch, entropy=True)
    for i, sample in enumerate(samples):
        logits = plain(input_ids=torch.tensor([sample.prompt + sample.response])).logits[0]
        log_p = (logits[len(sample.prompt) - 1 : -1] / 0.7).log_softmax(-1)
        n = len(sample.response)
        due = log_p.gather(-1, torch.tensor(sample.response)[:, None])[:, 0]
        torch.testing.assert_close(logprobs[i, :n], due, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entropy[i, :n], -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=1e-4)
        assert not logprobs[i, n:].any()
    # only the last row's, so that a token that saw a neighbour would show
    logprobs[-1].sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    names = {clean(name) for name, _ in model.named_parameters()}
    assert names <= plain.state_dict().keys()


def test_a_model_leaves_no_trace_in_the_configuration_it_is_built_from():
    config = LlamaConfig(**SIZE)
    before = config.to_dict()
    assert is_packed(build(config, "value", packed=True))
    assert config.to_dict() == before
    assert not is_packed(build(config, "policy"))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi3"])
def test_a_value_model_is_its_body_and_a_fresh_head(family, mesh, tmp_path):
    config = FAMILIES[family]
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path)
    check_folder(str(tmp_path), "value", random_init=False)
    batch, packed = micro_batch(rows(), CPU), micro_batch(rows(), CPU, packed=True)
    for head in ("zero", "normal"):
        model = build(read_config(str(tmp_path)), "value")
        parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=False)
        fill(model, str(tmp_path), device=CPU, head=head, seed=3)
        values = value_outputs(model, batch)
        assert values.shape == batch.mask.shape
        assert bool(values.any()) == (head == "normal")
        assert torch.equal(values != 0, batch.mask) or head == "zero"
        if why_not_packed(config) is None:
            cast(Any, model).config._attn_implementation = PACKED
            torch.testing.assert_close(value_outputs(model, packed), values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_value_model_starts_with_a_reward_models_head_whatever_its_family_calls_it(family, mesh, tmp_path):
    config = copy.deepcopy(FAMILIES[family])
    config.num_labels = 1
    reward = AutoModelForSequenceClassification.from_config(config)
    reward.save_pretrained(tmp_path)
    model = build(read_config(str(tmp_path)), "value")
    parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=False)
    fill(model, str(tmp_path), device=CPU)
    parameters = {clean(name): cast(Any, p).full_tensor() for name, p in model.named_parameters()}
    weight, *bias = (parameters[name] for name in sorted(head_names(model), reverse=True))
    assert torch.equal(weight, reward.score.weight)
    assert not any(part.any() for part in bias)


@pytest.mark.parametrize("kind", sorted(PACKABLE))
def test_a_type_that_is_packed_keeps_rows_apart(kind):
    size = SIZE | {"num_key_value_heads": 4} if kind == "phi3" else SIZE
    make: Any = CONFIG_MAPPING[kind]
    config = make(**size, bos_token_id=0, eos_token_id=0)
    config.initializer_range = 0.3  # the rows' neighbours are to matter
    for name in vars(config):
        if name.endswith(("dropout", "_pdrop")) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=PACKED).eval()
    model.load_state_dict(plain.state_dict())
    assert why_not_packed(config) is None
    padded, packed = micro_batch(rows(), CPU), micro_batch(rows(), CPU, packed=True)
    due, got = (PolicyOutputs(1.0, 50)(m, b, entropy=False)[0] for m, b in ((plain, padded), (model, packed)))
    torch.testing.assert_close(got, due, rtol=1e-4, atol=1e-4)


def test_a_packed_row_has_the_gradients_that_it_has_alone(mesh, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES["mistral"]).save_pretrained(tmp_path)

    def gradients(samples, weights, packed):
        model = build(read_config(str(tmp_path)), "policy", packed=packed)
        parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=False)
        fill(model, str(tmp_path), device=CPU)
        batch = micro_batch(samples, CPU, packed=packed)
        logprobs, _ = PolicyOutputs(1.0, 50)(model, batch, entropy=False)
        (logprobs.sum(-1) * torch.tensor(weights)).sum().backward()
        return {name: cast(Any, p.grad).full_tensor() for name, p in model.named_parameters()}

    alone = gradients(rows()[1:2], [1.0], packed=False)
    among = gradients(rows(), [0.0, 1.0, 0.0], packed=True)
    for name, gradient in alone.items():
        # some of a tensor's figures are sums of others that cancel, and as uncertain as these
        torch.testing.assert_close(among[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


def test_a_packed_batch_holds_the_rows_and_nothing_but_a_round_number_of_tokens():
    samples = rows()
    batch = micro_batch(samples, CPU, packed=True)
    ids, begins = batch.inputs["input_ids"][0], batch.inputs["cu_seq_lens_q"].tolist()
    assert len(ids) == ROUND == begins[-1]
    for sample, start in zip(samples, begins, strict=False):
        row = sample.prompt + sample.response
        assert ids[start : start + len(row)].tolist() == row
        assert batch.inputs["position_ids"][0, start : start + len(row)].tolist() == list(range(len(row)))
    assert ids[batch.before + 1].tolist() == batch.responses.tolist()


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
