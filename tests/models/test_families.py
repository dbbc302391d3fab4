"""Model folders of many families, plain and odd: read, run and trained as transformers does it, or
refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from episodes import episode
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiers import wide
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForTokenClassification

from splitppo import train
from splitppo.config import PlacementConfig
from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models.batching import micro_batch
from splitppo.models.build import build, read_config
from splitppo.models.heads import PolicyOutputs, value_outputs
from splitppo.models.probe import find_mismatch
from splitppo.models.sharding import parallelize
from splitppo.models.tiny import build_tokenizer
from splitppo.models.weights import fill, save
from splitppo.placement import place
from splitppo.rollout import Episode
from splitppo.run.checks import preflight
from splitppo.run.main import dry_run
from splitppo.run.resolve import resolve

CPU = torch.device("cpu")
VOCABULARY = 96
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
HALF: dict[str, Any] = {"num_key_value_heads": 4}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "rope_theta": 1e4,
}
WITHIN: dict[str, Any] = {"rope_parameters": LONG, "max_position_embeddings": 128}
WITHIN |= {"original_max_position_embeddings": 64}
BEYOND = WITHIN | {"original_max_position_embeddings": 16}
CAPS: dict[str, Any] = {
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 10.0,
    "sliding_window": 4,
}
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
GROUPS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# name -> (type, settings beside SIZE, whether rows must be packed)
PLAIN: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}, True),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}, True),
    "mistral's window": ("mistral", {"sliding_window": 4}, True),
    "ministral": ("ministral", {"sliding_window": 4}, True),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}, True),
    "qwen2's window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        True,
    ),
    "qwen3": ("qwen3", {}, True),
    "qwen3.5, hybrid": (
        "qwen3_5_text",
        {"layer_types": ["linear_attention", "full_attention"]},
        False,
    ),
    "gemma": ("gemma", {}, True),
    "gemma2's caps": ("gemma2", CAPS, False),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        True,
    ),
    "phi": ("phi", HALF, True),
    "phi3": ("phi3", HALF, True),
    "phi3, longrope within": ("phi3", HALF | WITHIN, True),
    "gpt2": ("gpt2", {}, True),
    "gpt-neox, head renamed": ("gpt_neox", {}, True),
    "gpt-neo": (
        "gpt_neo",
        {"attention_types": [[["global", "local"], 1]], "window_size": 4},
        False,
    ),
    "gptj": ("gptj", {"rotary_dim": 8}, False),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, True),
    "opt, projected": (
        "opt",
        {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        True,
    ),
    "bloom": ("bloom", {}, False),
    "falcon": ("falcon", {}, False),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}, False),
    "stablelm": ("stablelm", {}, False),
    "starcoder2": ("starcoder2", {}, True),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}, True),
    "olmo": ("olmo", {}, True),
    "olmo2": ("olmo2", {}, True),
    "olmo3": (
        "olmo3",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        True,
    ),
    "granite": (
        "granite",
        {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
        True,
    ),
    "cohere, tied": ("cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}, True),
    "cohere, untied": ("cohere", {"logit_scale": 0.5, "tie_word_embeddings": False}, True),
    "cohere2": (
        "cohere2",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        True,
    ),
    "glm4": ("glm4", {"pad_token_id": 0}, True),
    "helium": ("helium", {}, True),
    "apertus, with buffers": ("apertus", {}, True),
    "arcee": ("arcee", {}, True),
    "exaone4": (
        "exaone4",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        True,
    ),
    "hunyuan": ("hunyuan_v1_dense", {}, True),
    "seed-oss": ("seed_oss", {}, True),
    "lfm2, hybrid": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
        False,
    ),
    "nanochat": ("nanochat", {}, True),
    "qwen3-moe": ("qwen3_moe", EXPERTS, True),
    "olmoe": ("olmoe", EXPERTS, True),
    "mixtral": ("mixtral", MIXED, True),
    "gpt-oss": ("gpt_oss", MIXED | {"sliding_window": 4}, False),
    "qwen3-next": ("qwen3_next", EXPERTS | SHARED | HYBRID, False),
    "qwen3.5-moe": ("qwen3_5_moe_text", EXPERTS | SHARED | HYBRID, False),
    "deepseek-v3": ("deepseek_v3", GROUPS | LATENT, True),
    "lfm2-moe": (
        "lfm2_moe",
        EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        False,
    ),
    "granite-moe": ("granitemoe", MIXED, True),
    "glm4-moe": ("glm4_moe", GROUPS, True),
}


def configured(kind: str, settings: dict[str, Any]) -> Any:
    make: Any = CONFIG_MAPPING[kind]
    return make(
        **{
            name: value
            for name, value in (SIZE | settings).items()
            if kind != "falcon" or name != "head_dim"
        }
    )


@torch.no_grad()
def written(folder: Path, config: Any) -> Any:
    """A folder with a random model whose neighbours, windows and caps matter, and a tokenizer."""
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, nn.Parameter):
            noise = torch.randn_like(tensor)
            tensor.copy_(
                noise * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else tensor + 0.1 * noise
            )
        elif name in model.state_dict():
            tensor.mul_(1.1)  # what is made anew in place of being read shows
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return model


def rows() -> list[Episode]:
    generator = torch.Generator().manual_seed(0)
    cut = [(3, 5), (1, 9), (6, 1)]
    ids = [torch.randint(2, VOCABULARY, (p + r,), generator=generator).tolist() for p, r in cut]
    return [
        episode(i, row[:p], row[p:], [], "eos")
        for i, (row, (p, _)) in enumerate(zip(ids, cut, strict=True))
    ]


@pytest.fixture(scope="module")
def mesh():
    runtime = Runtime(Launch(), place(PlacementConfig(), world=1, local_world=1), CPU, 60.0)
    yield runtime.groups["actor"].mesh
    runtime.close()


def check_rows(folder: Path, plain: Any, mesh: Any, *, packs: bool) -> None:
    """Holds log-probs and values of the folder's models, padded and packed, against the library's
    row by row."""
    head = nn.Linear(plain.get_output_embeddings().weight.shape[-1], 1)
    for kind in ("policy", "value"):
        for packed in (False, True)[: 1 + packs]:
            model: Any = build(read_config(str(folder)), kind, packed=packed)
            parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=False)
            fill(model, str(folder), device=CPU, head="normal", seed=3)
            batch = micro_batch(rows(), CPU, packed=packed)
            if kind == "policy":
                got = PolicyOutputs(0.7, VOCABULARY)(model, batch, entropy=False)[0]
            else:
                drawn = {
                    name: parameter.full_tensor()
                    for name, parameter in model.score.named_parameters()
                }
                head.load_state_dict(drawn)
                got = value_outputs(model, batch)
                assert head.weight.any()
            lengths = [len(sample.response) for sample in rows()]
            for sample, found in zip(rows(), got.split(lengths), strict=True):
                ids, n = sample.ids[None].long(), len(sample.response)
                if kind == "policy":
                    logp = (
                        plain(input_ids=ids, use_cache=False).logits[0, -n - 1 : -1] / 0.7
                    ).log_softmax(-1)
                    due = logp.gather(-1, torch.tensor(sample.response)[:, None])[:, 0]
                else:
                    due = head(plain.base_model(input_ids=ids, use_cache=False)[0])[
                        0, -n - 1 : -1, 0
                    ]
                torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)


def preflown(folder: Path, *more: str) -> None:
    config = parse(
        [
            f"--policy.path={folder}",
            "--rollout.max-prompt-tokens=8",
            "--rollout.max-new-tokens=24",
            *more,
        ]
    )
    preflight(resolve(config, place(config.placement, world=1, local_world=1), 1, CPU, probe=True))


# of each kind of layers, heads and positions
OFTEN = (
    "llama, tied", "mistral's window", "qwen3", "qwen3.5, hybrid", "gemma3", "glm4", "gpt2",
    "phi3, longrope within", "falcon", "cohere2", "apertus, with buffers", "olmo2",
)  # fmt: skip


@pytest.mark.parametrize("name", [name if name in OFTEN else wide(name) for name in PLAIN])
def test_a_family_is_the_librarys_own(name: str, mesh: Any, tmp_path: Path) -> None:
    kind, settings, packs = PLAIN[name]
    written(tmp_path, configured(kind, settings))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    preflown(tmp_path)
    config = read_config(str(tmp_path))
    packed = not any(find_mismatch(config, part, packed=True) for part in ("policy", "value"))
    assert packed or not packs  # a later transformers may pack more
    check_rows(tmp_path, plain, mesh, packs=packed)


@pytest.mark.parametrize(("name", "packs"), [("llama, tied", True), ("gemma2's caps", False)])
def test_a_gpu_packs_the_rows_of_a_model_that_can(name: str, packs: bool, tmp_path: Path) -> None:
    written(tmp_path, configured(*PLAIN[name][:2]))
    short = ["--rollout.max-prompt-tokens=8", "--rollout.max-new-tokens=24"]
    config = parse([f"--policy.path={tmp_path}", "--engine.kind=hf", *short])
    placement = place(config.placement, world=1, local_world=1, gpu=True)
    models = resolve(config, placement, 1, torch.device("cuda"), probe=True).models
    assert [models[part].packed for part in ("policy", "value")] == [packs, packs]


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Changes what the safetensors of a folder hold."""
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights) or weights, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def in_fp8(weights: dict[str, torch.Tensor]) -> None:
    """As the published FP8 models are: matrices of layers in blocks of 16, each with the inverse of
    its scale."""
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        blocks = weights[name].unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        weights[f"{name}_scale_inv"] = scale
        weights[name] = (
            (blocks / scale[:, None, :, None]).view_as(weights[name]).to(torch.float8_e4m3fn)
        )


def dequantized(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if name.endswith("_scale_inv")]:
        main, scale = name.removesuffix("_scale_inv"), weights.pop(name)
        blocks = weights[main].float().unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
        weights[main] = (blocks * scale[:, None, :, None]).view(weights[main].shape)


def test_fp8_is_read_as_the_floats_that_it_stands_for(mesh: Any, tmp_path: Path) -> None:
    for folder in (tmp_path / "fp8", tmp_path / "plain"):
        written(folder, configured("qwen3", {}))
        edited(folder, in_fp8)
    edited(tmp_path / "plain", dequantized)
    configure(
        tmp_path / "fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}
    )
    preflown(tmp_path / "fp8")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    check_rows(tmp_path / "fp8", plain, mesh, packs=True)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "olmo", "qwen3_moe"])
def test_a_value_model_is_written_and_read_again(kind: str, mesh: Any, tmp_path: Path) -> None:
    """As the library's token classification where there is one, else as body and head."""
    plain = written(tmp_path / "policy", configured(kind, {}))
    value: Any = build(read_config(str(tmp_path / "policy")), "value")
    parallelize(value, mesh, dtype=torch.float32, activation_checkpointing=False)
    fill(value, str(tmp_path / "policy"), device=CPU, head="normal", seed=3)
    whole = build(read_config(str(tmp_path / "policy")), "value")
    fill(whole, str(tmp_path / "policy"), device=CPU, head="normal", seed=3)
    save(whole, tmp_path / "value", tmp_path / "policy", tmp_path / "policy")
    preflown(tmp_path / "policy", f"--value.path={tmp_path / 'value'}")
    again = build(read_config(str(tmp_path / "value")), "value")
    fill(again, str(tmp_path / "value"), device=CPU)
    batch = micro_batch(rows(), CPU)
    torch.testing.assert_close(
        value_outputs(again, batch), value_outputs(value, batch), rtol=0, atol=0
    )
    if kind != "olmo":
        loaded: Any = AutoModelForTokenClassification.from_pretrained(
            tmp_path / "value", dtype=torch.float32
        ).eval()
        ids = batch.inputs["input_ids"][:1]
        due = cast(Any, whole).score(plain.base_model(input_ids=ids)[0])
        torch.testing.assert_close(loaded(input_ids=ids).logits, due)


def untie(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.5


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda weights: {other: tensor for other, tensor in weights.items() if other != name}


def stored_as(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda weights: {name: tensor.to(dtype) for name, tensor in weights.items()}


def without_expert(number: int, to: int) -> Callable[[dict[str, torch.Tensor]], Any]:
    """Expert `number` of layer 1 gets the number `to`, or is dropped if that is the same."""
    old, new = (f"layers.1.block_sparse_moe.experts.{i}." for i in (number, to))
    return lambda weights: {
        name.replace(old, new): tensor
        for name, tensor in weights.items()
        if old not in name or new != old
    }


def one_of(
    part: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[dict[str, torch.Tensor]], Any]:
    """Changes the tensors with a part of their name."""
    return lambda weights: {
        name: change(tensor).contiguous() if f"{part}." in name else tensor
        for name, tensor in weights.items()
    }


def shorter(part: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return one_of(part, lambda tensor: tensor[1:])


def one_more(weights: dict[str, torch.Tensor]) -> Any:
    name = "model.layers.0.block_sparse_moe.experts.{}.w2.weight"
    return weights | {name.format(4): weights[name.format(3)].clone()}


def stacked(weights: dict[str, torch.Tensor]) -> Any:
    return weights | {"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 32, 16)}


def renumbered(weights: dict[str, torch.Tensor]) -> Any:
    return {name.replace("experts.1.", "experts.01."): weights[name] for name in weights}


BIAS = "e_score_correction_bias"
MXFP4 = {"quant_method": "mxfp4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
# name -> (type, settings, what is done to the folder, what the line says)
REFUSED: dict[str, tuple[str, dict[str, Any], Callable[[Path], Any] | None, str]] = {
    "int8": (
        "llama", {}, lambda f: configure(f, quantization_config=INT8), "quantized .*dequantize",
    ),
    "int8 without a word": (
        "llama", {}, lambda f: edited(f, stored_as(torch.int8)), "stored as I8",
    ),
    "fp8 without scales": (
        "qwen3", {}, lambda f: edited(f, stored_as(torch.float8_e4m3fn)), "F8_E4M3",
    ),
    "longrope beyond": ("phi3", HALF | BEYOND, None, "32 together, more than the 16 .*longrope"),
    "a head against the config": (
        "llama", {"tie_word_embeddings": True}, lambda f: edited(f, untie), "which differ",
    ),
    "a weight is missing": (
        "llama", {}, lambda f: edited(f, drop("model.norm.weight")), "no weight model.norm.weight",
    ),
    "weights without a place": (
        "llama", {"attention_bias": True}, lambda f: configure(f, attention_bias=False),
        "has no weight",
    ),
    "another shape": (
        "llama", {}, lambda f: configure(f, intermediate_size=40), r"proj.weight is \[.*, but",
    ),
    "mxfp4": (
        "gpt_oss", MIXED, lambda f: configure(f, quantization_config=MXFP4), "quantized .mxfp4",
    ),
    "an expert is missing": (
        "mixtral", MIXED, lambda f: edited(f, without_expert(2, 2)),
        r"no weight model\.layers\.1\.block_sparse_moe\.experts\.2\.w1\.weight",
    ),
    "experts with a gap": (
        "mixtral", MIXED, lambda f: edited(f, without_expert(2, 4)), r"no weight .*experts\.2\.w1",
    ),
    "more experts": (
        "mixtral", MIXED, lambda f: edited(f, one_more), r"has no weight .*experts\.4\.w2\.weight",
    ),
    "fewer experts in config.json": (
        "mixtral", MIXED, lambda f: configure(f, num_local_experts=3), r"\[4, 32\], but \[3, 32\]",
    ),
    "an expert of another shape": (
        "qwen3_moe", EXPERTS, lambda f: edited(f, shorter("experts.3.down_proj")),
        r"experts\.3\.down_proj\.weight is \[31, 16\], but \[32, 16\]",
    ),
    "an expert's number with a zero": (
        "qwen3_moe", EXPERTS, lambda f: edited(f, renumbered), r"no weight .*experts\.1\.gate_proj",
    ),
    "one expert": (
        "qwen3_moe", EXPERTS, lambda f: configure(f, num_local_experts=1),
        "a token to 2 of 1 experts; .* dense model",
    ),
    "a token to none": (
        "mixtral", MIXED, lambda f: configure(f, num_experts_per_tok=0), "to 0 of 4 experts",
    ),
    "a token to too many": (
        "glm4_moe", GROUPS, lambda f: configure(f, num_experts_per_tok=5), "to 5 of 4 experts",
    ),
    "a router's bias is missing": (
        "glm4_moe", GROUPS, lambda f: edited(f, drop(f"model.layers.1.mlp.gate.{BIAS}")),
        f"no weight .*{BIAS}",
    ),
    "an expert in int8": (
        "qwen3_moe", EXPERTS, lambda f: edited(f, one_of("1.up_proj", torch.Tensor.char)),
        r"experts\.1\.up_proj\.weight is stored as I8",
    ),
    "experts twice": (
        "qwen3_moe", EXPERTS, lambda f: edited(f, stacked), r"both the weight .*experts\.down_proj",
    ),
    "experts with pictures": ("qwen3_5_moe", {}, None, "images and sound"),
    "an encoder": ("bert", {}, None, "not a causal language model"),
    "an encoder and a decoder": ("t5", {"d_kv": 8}, None, "not a causal language model"),
    "pictures": ("gemma3", {}, None, "images and sound"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_in_a_line_by_the_dry_run_too(
    name: str, tmp_path: Path
) -> None:
    kind, settings, change, says = REFUSED[name]
    if change or kind == "phi3":
        written(tmp_path, configured(kind, settings))
    else:
        make: Any = CONFIG_MAPPING[kind]
        make(
            **({} if kind in ("gemma3", "t5", "qwen3_5_moe") else SIZE | settings)
        ).save_pretrained(tmp_path)
        build_tokenizer().save_pretrained(tmp_path)
    if change:
        change(tmp_path)
    argv = [
        f"--policy.path={tmp_path}",
        "--rollout.max-prompt-tokens=8",
        "--rollout.max-new-tokens=24",
        "--dry-run",
    ]
    with pytest.raises(UserError, match=says) as refused:
        dry_run(parse(argv), Launch())
    assert "\n" not in str(refused.value)


def test_weights_that_are_tied_and_stored_twice_are_read(mesh: Any, tmp_path: Path) -> None:
    plain = written(tmp_path, configured("llama", {"tie_word_embeddings": True}))
    edited(tmp_path, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()})
    preflown(tmp_path)
    check_rows(tmp_path, plain, mesh, packs=True)


def figures_of_runs(rank: int, folders: list[Path], out: Path) -> None:
    """Two steps with each folder's model, split and colocated."""
    for folder in folders:
        for mode in ("per_node", "colocated"):
            train.main([
                f"--policy.path={folder}", f"--run-dir={out / folder.name / mode}",
                f"--placement.mode={mode}", "--policy.no-random-init", "--steps=2",
                "--rollout.batch-size=6", "--rollout.max-prompt-tokens=8",
                "--rollout.max-new-tokens=5", "--ppo.kl-coef=0.1", "--log.validate-every=0",
                "--value.head=normal", "--compute.micro-batch-tokens=32", "--checkpoint.no-last",
            ])  # fmt: skip


# of each way to run: packed with buffers, hybrid
SOME = ("apertus, with buffers", "qwen3.5, hybrid")


@pytest.mark.parametrize(
    "names",
    [wide(SOME), pytest.param(tuple(PLAIN), marks=pytest.mark.families)],
    ids=["some", "all"],
)
def test_a_family_trains_alike_split_and_colocated(names: tuple[str, ...], tmp_path: Path) -> None:
    folders = []
    for number, (kind, settings, _) in enumerate(PLAIN[name] for name in names):
        folders.append(tmp_path / f"model_{number}")
        written(folders[-1], configured(kind, settings))
    run_ranks(2, figures_of_runs, folders, tmp_path / "runs")
    for name, folder in zip(names, folders, strict=True):
        for role, loss in (("actor", "actor/pg_loss"), ("critic", "critic/vf_loss")):
            runs = [tmp_path / "runs" / folder.name / mode for mode in ("per_node", "colocated")]
            split, colocated = (
                [
                    json.loads(line)
                    for line in (run / "metrics" / f"{role}.jsonl").read_text().splitlines()
                ]
                for run in runs
            )
            for one, other in zip(split, colocated, strict=True):
                for figure in (loss, f"{role}/grad_norm"):
                    assert one[figure] == pytest.approx(other[figure], rel=1e-4, abs=1e-5), (
                        name,
                        figure,
                    )
            assert len(split) == 2
