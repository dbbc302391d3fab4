"""Mixtures of experts in vLLM: log-probs after the second sync are transformers' own."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from devices import skip_without_vllm
from mixtures import write_mixture
from test_dialogues import write_game
from test_engine import (
    CLOSE,
    ENGINES,
    EOS,
    OTHER_EOS,
    PADDED,
    VOCAB,
    Drawn,
    Request,
    make_tokenizer,
    run,
    some_requests,
    start_vllm,
)
from test_families import EXPERTS, GROUPS, MIXED
from test_vllm import job
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from splitppo.engine.vllm.client import VLLMEngine
from splitppo.models.experts import Load

__all__ = ["job"]  # a fixture
SIZE: dict[str, Any] = {
    "vocab_size": PADDED,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": [EOS, OTHER_EOS],
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
WIDE = {"moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | WIDE,
    "olmoe": MIXED,
    "mixtral": MIXED,
    "granitemoe": MIXED,
    "glm4_moe": GROUPS | WIDE,
}


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    for name, tensor in state.items():
        if isinstance(model.get_parameter_or_buffer(name), nn.Parameter) and tensor.ndim > 1:
            tensor.normal_(0, 1.5 * tensor.shape[-1] ** -0.5, generator=generator)
        else:
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))


def test_a_bucket_holds_an_experts_matrices_of_one_dtype() -> None:
    """And routers in float32, where the family keeps them so."""
    config = AutoConfig.for_model("glm4_moe", **SIZE | FAMILIES["glm4_moe"])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    cpu = torch.device("cpu")
    engine = VLLMEngine(config, "", 0, None, device=cpu, dtype=torch.bfloat16)
    engine._buckets = [torch.empty(2**20, dtype=torch.uint8) for _ in range(2)]
    sums: dict[str, Any] = {}
    filled = [entries for _, entries in engine._fill(model.state_dict().items(), sums)]
    assert all(len({entry.dtype for entry in entries}) == 1 for entries in filled)
    sent = {entry.name: entry for entries in filled for entry in entries}
    assert sent.keys() == sums.keys()
    exact = {name for name, entry in sent.items() if entry.dtype == torch.float32}
    # transformers 5.17 does not name the routers
    endings = tuple(model._keep_in_fp32_modules_strict)
    assert exact == {name for name in sent if name.endswith(endings)}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in exact
    assert sent["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (64, 32)
    assert sums["model.layers.1.mlp.experts.3.down_proj.weight"][0] == 64 * 32


@pytest.mark.vllm
@ENGINES
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "qwen3_moe" else [pytest.mark.families])
        for kind in FAMILIES
    ],
)
def test_log_probs_are_the_librarys_after_the_second_sync(kind: str, tmp_path: Path) -> None:
    skip_without_vllm()
    model = make_model(kind)
    long = [EOS + 2] * 300  # longer than a block of the prefix cache
    requests = [*some_requests(12), *(Request(row, [*long, row], 40) for row in (50, 51, 52))]
    check_rows(tmp_path, model, requests)


@pytest.mark.vllm
@ENGINES
def test_rows_that_vllm_preempts_keep_their_experts(tmp_path: Path) -> None:
    """Two rows of 640 tokens in two windows, and room for 1,280 in blocks of 128, one of which vLLM
    keeps: a row waits, and is computed again."""
    skip_without_vllm()
    model = make_model("qwen3_moe")
    requests = [Request(row, [EOS + 2 + row], 320) for row in (1, 2)]
    a_token = 2 * 2 * 2 * 32 * 4  # bytes: keys and values, layers, heads, their width, float32
    check_rows(tmp_path, model, requests, kv_bytes=1280 * a_token)


@pytest.mark.vllm
@pytest.mark.wide
@ENGINES
def test_a_tensor_parallel_engine_tells_experts(tmp_path: Path) -> None:
    skip_without_vllm()
    requests = [Request(row, [EOS + 2] * row, 6) for row in (3, 200)]
    check_rows(tmp_path, make_model("qwen3_moe"), requests, ranks=2)


@pytest.mark.vllm
@pytest.mark.wide
def test_a_run_with_an_environment_replays_what_vllm_chose(job: Any, tmp_path: Path) -> None:
    """Each row is trained on once, by the weights that sampled it: the trainer's routers would have
    chosen the same."""
    write_mixture(tmp_path / "policy", "qwen3_moe", 1, head_dim=32)
    write_game(tmp_path)
    files = (f"--policy.path={tmp_path / 'policy'}", f"--env.path={tmp_path / 'env.py'}:Env")
    reward = f"--reward.function={tmp_path / 'reward.py'}:score"
    short = ("--steps=2", "--rollout.batch-size=8", "--rollout.max-new-tokens=12")
    once = ("--policy.replay-routing=on", "--ppo.epochs=1", "--log.validate-every=0")
    run = job(2, *files, reward, *short, *once)
    assert run.ends(within=120) == 0, run.said()
    for line in run.records():
        assert line["env/turns"] > 8
        assert line["actor/routes_differ"] == 0
        assert line["actor/mismatch_max"] < 1e-4


def make_model(kind: str) -> Any:
    config = AutoConfig.for_model(kind, **SIZE | FAMILIES[kind])
    kinds: Any = AutoModelForCausalLM
    config.architectures = [kinds._model_mapping[type(config)].__name__]
    return kinds.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()


def check_rows(folder: Path, model: Any, requests: list[Request], **options: Any) -> None:
    """Log-probs and experts of what vLLM draws are transformers' own, of the weights of then:
    after a second sync all rows go on."""
    config = cast(Any, model.config)
    engine = start_vllm(folder, config, make_tokenizer(), 2, routes=True, **options)
    pieces: dict[int, Any] = {}
    poll = engine.poll

    def noted() -> Any:
        drawn = poll()
        pieces.update({piece.row: piece for piece in drawn})
        return drawn

    engine.poll = noted
    try:
        for seed in (0, 1):
            randomize(model, seed)
            engine.load_weights(model.state_dict().items())
            rows = run(engine, requests, max_new_tokens=320)
            exact = deepcopy(model).double()  # in float32 transformers errs by up to 8e-5
            load = Load(exact)
            for row in rows.values():
                check_row(exact, load, row, pieces[row.row].experts)
            requests = [
                replace(request, prompt=rows[request.row].prompt + rows[request.row].response)
                for request in requests
            ]
    finally:
        engine.close()


def check_row(model: Any, load: Load, row: Drawn, experts: bytes) -> None:
    tokens = torch.tensor([row.prompt + row.response])
    at = slice(len(row.prompt) - 1, -1)
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, at, :VOCAB]
    chosen = torch.stack([module.chosen[at] for module in load.experts])
    packed = torch.frombuffer(bytearray(experts), dtype=torch.uint8)
    told = load.packing.unpack(packed.view(len(row.response), -1))
    assert torch.equal(told.sort().values, chosen.sort().values)
    due = logits.log_softmax(-1).gather(-1, torch.tensor(row.response)[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor(row.logprobs), due, rtol=0, atol=CLOSE, check_dtype=False
    )
