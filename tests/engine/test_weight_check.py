"""The proof of a sync: checksums, what a load is seen to do, and with vLLM each family of models,
also on two ranks."""

# pyright: reportMissingImports=false
# (vLLM is not installed everywhere)

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import needs_gpus
from ranks import run_ranks
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from splitppo.engine import build as engines
from splitppo.engine import weight_names
from splitppo.engine.vllm import vllm_version, weight_check
from splitppo.engine.vllm.weight_check import Received, checksum, compare, gaps
from splitppo.models.build import build

Told = dict[str, tuple[int, int]]


# Checksums


def plain_checksum(tensor: Tensor) -> int:
    """By the definition, in Python's integers."""
    numbers = (
        tensor.flatten()
        .view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        .tolist()
    )

    def signed(number: int) -> int:
        return (number + 2**63) % 2**64 - 2**63

    def weight(index: int) -> int:
        return (2 * index + 1) ** 3

    total = 0
    for start in range(0, len(numbers), weight_check.BLOCK):
        stretch = numbers[start : start + weight_check.BLOCK]
        whole = sum(number * weight(i) for i, number in enumerate(stretch))
        total += whole * weight(start // weight_check.BLOCK) ** 2
    return signed(total)


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    weight_check._weights.cache_clear()
    monkeypatch.setattr(weight_check, "BLOCK", 700)
    yield
    weight_check._weights.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_is_the_weighted_sum_of_the_bits(
    dtype: torch.dtype, short_stretches: None
) -> None:
    wide = (
        torch.randn(50, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 100
    )
    tensor = wide.to(dtype)
    for part in (
        tensor,
        tensor.T,
        tensor[:, 3:9],
        tensor[:1],
        tensor[0, 0],
        tensor[:0],
        -torch.zeros(9, dtype=dtype),
    ):
        assert int(checksum(part)) == plain_checksum(part.contiguous())
    assert int(checksum(torch.zeros(800, dtype=dtype))) == 0


def test_a_checksum_shows_what_has_moved() -> None:
    # two stretches
    tensor = (
        torch.randn(2**20 + 64, generator=torch.Generator().manual_seed(3)).bfloat16().view(-1, 32)
    )
    total, rows = checksum(tensor), torch.arange(len(tensor))
    for first, second in ((0, 1), (5, 20_000), (7, len(tensor) - 1)):
        swapped = rows.clone()
        swapped[[first, second]] = rows[[second, first]]
        assert checksum(tensor[swapped]) != total
    assert checksum(tensor.roll(1, 1)) != total
    assert checksum(torch.cat([tensor[99:], tensor[:99]])) != total
    assert checksum(tensor[:64].view(2, 32, 32).transpose(1, 2)) != checksum(tensor[:64])
    signs = tensor.clone()
    signs[3, 4] *= -1
    others = tensor.clone()
    others[3, 5] *= -1
    assert len({int(checksum(each)) for each in (tensor, signs, others)}) == 3


@pytest.mark.gpu
@pytest.mark.gpus(count=1)  # it takes the time
@needs_gpus(1)
def test_a_checksum_is_the_same_on_a_gpu_and_quick() -> None:
    tensor = torch.randn(2**21 + 77).bfloat16()
    assert int(checksum(tensor.cuda())) == int(checksum(tensor))
    large = torch.ones(2**30, dtype=torch.bfloat16, device="cuda")  # a seventh of a 7B model
    checksum(large)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    checksum(large)
    end.record()
    torch.cuda.synchronize()
    print(f"{start.elapsed_time(end):.1f} ms for 2**30 bfloat16 numbers")
    assert start.elapsed_time(end) < 20
    assert torch.cuda.max_memory_allocated() - before < 2**27


# Which places a load has filled


def test_gaps_are_what_no_box_covers() -> None:
    draw = random.Random(3)
    for _ in range(400):
        whole = torch.zeros(draw.choice([(24,), (6, 8), (4, 6, 5)]), dtype=torch.int64)
        boxes = []
        for _ in range(draw.randrange(4)):
            part = whole
            for axis in range(whole.ndim):
                first = draw.randrange(whole.shape[axis])
                part = part.narrow(axis, first, draw.randint(1, whole.shape[axis] - first))
            part = part.transpose(0, -1)
            part.fill_(1)
            boxes.append((tuple(part.shape), part.stride(), part.storage_offset()))
        found = torch.ones(whole.numel(), dtype=torch.int64)
        stretches = gaps(whole.numel(), tuple(boxes))
        for first, end in stretches:
            found[first:end] = 0
        assert torch.equal(found, whole.flatten())
        assert all(end < first for (_, end), (first, _) in pairwise(stretches))


class Model(nn.Module):
    """An engine's model of one weight, and how it loads. It begins with other numbers."""

    def __init__(self, shape: tuple[int, ...], load: Callable[..., Any], bias: int = 0):
        super().__init__()
        self.weight, self.load = nn.Parameter(torch.full(shape, 7.0, dtype=torch.bfloat16)), load
        if bias:
            self.bias = nn.Parameter(torch.full((bias,), 7.0, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.load(self.weight.data, dict(weights))


def send(received: Received, tensors: dict[str, Tensor]) -> Told:
    """Loads them as a worker does, from one bucket; returns what the trainer says of them."""
    sizes = [-(-tensor.numel() // 256) * 256 for tensor in tensors.values()]
    bucket, sent = torch.zeros(sum(sizes), dtype=torch.bfloat16), {}
    for part, (name, tensor) in zip(bucket.split(sizes), tensors.items(), strict=True):
        sent[name] = part[: tensor.numel()].view(tensor.shape)
        sent[name].copy_(tensor)
    received.load(sent)
    return {name: (tensor.numel(), int(checksum(tensor))) for name, tensor in tensors.items()}


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def fused(held: Tensor, sent: dict[str, Tensor]) -> None:
    for name, tensor in sent.items():
        held.narrow(0, 8 * "qkv".index(name), 8).copy_(tensor)


def by_heads(held: Tensor, sent: dict[str, Tensor]) -> None:
    """As Bloom: the parts of each head in turn become one part of all heads after the other."""
    held.copy_(sent["qkv"].view(4, 3, 2, 6).transpose(0, 1).reshape(24, 6))


def put_together(held: Tensor, sent: dict[str, Tensor]) -> None:
    held.copy_(torch.cat([*sent.values()], dim=1))


def padded(held: Tensor, sent: dict[str, Tensor]) -> None:
    held[:20].copy_(sent["embed"])
    held[20:].fill_(0)


LOADS: dict[str, tuple[tuple[int, ...], Any, dict[str, Tensor]]] = {
    "as it is": ((8, 6), lambda held, sent: held.copy_(sent["w"]), {"w": some(8, 6)}),
    "transposed": ((8, 6), lambda held, sent: held.copy_(sent["w"].t()), {"w": some(6, 8)}),
    "one number": ((1,), lambda held, sent: held.copy_(sent["w"].view(1)), {"w": some()}),
    "fused": ((24, 6), fused, {name: some(8, 6, seed=ord(name)) for name in "qkv"}),
    "padded": ((24, 6), padded, {"embed": some(20, 6)}),
}
# what is copied from tensors that the model makes of them
REORDERED = {
    "by heads": ((24, 6), by_heads, {"qkv": some(24, 6)}),
    "put together": ((8, 24), put_together, {"a": some(8, 16), "b": some(8, 8, seed=1)}),
    "through float32": (
        (8, 6),
        lambda held, sent: held.copy_(sent["w"].float().flip(0)),
        {"w": some(8, 6)},
    ),
}


def damages(tensor: Tensor) -> Iterator[str]:
    """Does one thing after the other to a tensor, and restores it in between."""
    right, rows = tensor.clone(), tensor.view(len(tensor), -1)
    bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(-1)
    bits[len(bits) // 2] ^= 1 << (8 * tensor.element_size() - 4)
    yield "a bit flipped"
    tensor.zero_()
    yield "zeroed"
    tensor.copy_(right)
    if len(rows) > 1:
        rows[[0, len(rows) // 2]] = rows[[len(rows) // 2, 0]]
        yield "two rows swapped"
        rows.copy_(right.view_as(rows).roll(len(rows) // 2, 0))
        yield "halves swapped"
    tensor.copy_(right)


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_way_to_load_is_proved_and_each_damage_found(
    name: str, dtype: Any, monkeypatch: Any
) -> None:
    """Also of a model that keeps a wider dtype than it is sent."""
    shape, load, tensors = LOADS[name]
    model = Model(shape, load).to(dtype)
    received = Received(model)
    told = send(received, tensors)
    assert compare([told], [received.report()]) == ([], [])
    for damage in damages(model.weight.data):
        assert compare([told], [received.report()]) == ([], ["weight"]), damage
    # later loads are not watched, and what is left out of them is found
    monkeypatch.setattr(weight_check, "_Trace", None)
    again = {name: tensor + 1 for name, tensor in tensors.items()}
    told = send(received, again)
    assert compare([told], [received.report()]) == ([], [])
    for name in tensors:
        stale = told | {name: (told[name][0], told[name][1] + 1)}
        assert compare([stale], [received.report()]) == ([], [name])


def test_what_a_model_has_no_place_for_is_named() -> None:
    tensors = {"w": some(8, 6), "head": some(8, 6, seed=1)}
    received = Received(Model((8, 6), lambda held, sent: held.copy_(sent["w"])))
    assert compare([send(received, tensors)], [received.report()]) == (["head"], [])
    half = Received(Model((4, 6), lambda held, sent: held.copy_(sent["w"][:4])))
    assert compare([send(half, {"w": tensors["w"]})], [half.report()]) == (["w"], [])


@pytest.mark.parametrize("name", REORDERED)
def test_what_a_model_reorders_counts_as_lost(name: str) -> None:
    shape, load, tensors = REORDERED[name]
    received = Received(Model(shape, load))
    assert compare([send(received, tensors)], [received.report()]) == ([*tensors], ["weight"])


def test_buffers_are_loaded_and_computed_ones_left_alone() -> None:
    model: Any = Model(
        (8, 6), lambda held, sent: [held.copy_(sent["w"]), model.scale.copy_(sent["s"])]
    )
    model.register_buffer("scale", torch.zeros((), dtype=torch.bfloat16))
    model.register_buffer("rotary", torch.ones(9))
    model.other = nn.Parameter(model.weight.data)  # the same memory
    received = Received(model)
    told = send(received, {"w": some(8, 6), "s": some()})
    assert compare([told], [received.report()]) == ([], [])
    model.scale += 1
    assert compare([told], [received.report()]) == ([], ["scale"])


def test_what_nothing_was_sent_for_is_named() -> None:
    received = Received(Model((8, 6), lambda held, sent: held.copy_(sent["w"]), bias=8))
    told = send(received, {"w": some(8, 6)})
    assert compare([told], [received.report()]) == ([], ["bias"])
    received.model.bias.data.zero_()  # as padding is
    assert compare([told], [received.report()]) == ([], [])
    assert compare([told | {"v": (4, 1)}], [received.report()]) == (["v"], ["v"])


def test_a_router_that_the_engine_holds_less_exactly_is_compared_as_it_holds_it() -> None:
    received = Received(Model((8, 6), lambda held, sent: held.copy_(sent["w"])))
    exact = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    told = {"w": (exact.numel(), int(checksum(exact)))}
    received.load({"w": exact})
    assert compare([told], [received.report()]) == ([], [])
    received.model.weight.data[3, 1] += 1
    assert compare([told], [received.report()]) == ([], ["weight"])


@pytest.mark.parametrize("axis", [0, 1])
def test_workers_have_all_of_a_tensor_together(axis: int) -> None:
    tensors = {"w": some(8, 6)}
    shape = (4, 6) if axis == 0 else (8, 3)

    def worker(part: int) -> Received:
        return Received(Model(shape, lambda held, sent: held.copy_(sent["w"].chunk(2, axis)[part])))

    first, second, same = worker(0), worker(1), worker(0)
    told = [send(received, tensors) for received in (first, second, same)][:2]
    assert compare(told, [first.report(), second.report()]) == ([], [])
    assert compare(told, [first.report(), same.report()]) == (["w"], [])
    second.model.weight.data[1, 1] += 1
    assert compare(told, [first.report(), second.report()]) == ([], ["weight"])
    # what the second one got is not what was sent to it
    wrong = [told[0], {"w": (48, told[1]["w"][1] + 1)}]
    second.load({"w": tensors["w"]})
    assert compare(wrong, [first.report(), second.report()]) == ([], ["w"])


# vLLM's models

BASE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
}
BASE |= {
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
PLAIN = """llama qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt_neox olmo olmo2 olmo3 granite
cohere cohere2 glm glm4 starcoder2 stablelm smollm3 helium ernie4_5 exaone4 hunyuan_v1_dense
seed_oss apertus arcee nemotron persimmon jais2"""
FAMILIES: dict[str, dict[str, Any]] = {family: {} for family in PLAIN.split()}
FAMILIES |= {
    "mistral": {"num_key_value_heads": 1},  # two ranks hold the same keys and values
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_ff_dim": 96,
        "block_auto_adjust_ff_dim": False,
    }
    | {"conv_dim": 64, "conv_dim_out": 64, "block_dim": 64},
}
# on two ranks, vLLM's experts are a multiple of 32 wide
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GROUPS = EXPERTS | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1}
GROUPS |= {"first_k_dense_replace": 1}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
FAMILIES |= {
    "qwen3_moe": EXPERTS,
    "olmoe": MIXED,
    "mixtral": MIXED,
    "gpt_oss": MIXED,
    "granitemoe": MIXED,
    "glm4_moe": GROUPS,
    "deepseek_v3": GROUPS
    | {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16}
    | {"head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "topk_method": "noaux_tc"},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_next": SHARED | {"layer_types": ["linear_attention", "full_attention"]},
}
# of each way to load: plain, with biases, fused, in heads, learnt positions, a convolution, norms
# beside each other, parts that are always tied
SOME = "llama qwen2 phi3 gpt_neox gpt2 lfm2 gemma2 glm4"
ALL = pytest.param(" ".join(FAMILIES), marks=pytest.mark.families)
# vLLM's models tie these in any case
ALWAYS_TIED = {"cohere", "cohere2", "lfm2", "lfm2_moe", "gemma2", "bloom"}
# and these never
NEVER_TIED = {"olmoe", "glm4_moe", "deepseek_v3", "qwen3_next"}


def family_folder(family: str, tied: bool) -> tuple[str, dict[str, torch.Size]]:
    """A folder with the configuration of a small model, and what the trainer sends of it."""
    sizes = {name: value for name, value in (BASE | FAMILIES[family]).items() if value is not None}
    config = AutoConfig.for_model(family, **sizes, tie_word_embeddings=tied)
    model: Any = build(config, "policy")
    sent = {
        tensor: part.shape
        for name, (first, _) in weight_names(model).items()
        if name == first
        for tensor, part in model.folder_names.split(name, model.state_dict()[name]).items()
    }
    kinds: Any = AutoModelForCausalLM
    config.architectures = [kinds._model_mapping[type(config)].__name__]
    config.save_pretrained(folder := tempfile.mkdtemp())
    return folder, sent


def begin_vllm(rank: int, world: int, meeting: str) -> None:
    """vLLM's process groups, for a model on `world` ranks."""
    from vllm import config, distributed

    if torch.distributed.is_initialized():
        distributed.cleanup_dist_env_and_memory()
    with config.set_current_vllm_config(config.VllmConfig()):
        distributed.init_distributed_environment(world, rank, f"file://{meeting}", rank, "gloo")
        distributed.initialize_model_parallel(world)


def vllm_model(folder: str, ranks: int) -> nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    how: Any = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 64,
        "tensor_parallel_size": ranks,
    }
    how |= {"distributed_executor_backend": "mp"} if ranks > 1 else {}
    settings = EngineArgs(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, **how
    ).create_engine_config()
    with set_current_vllm_config(settings), set_default_torch_dtype(torch.bfloat16):
        return initialize_model(settings)


def sync(received: Received, sent: dict[str, torch.Size], seed: int, left_out: str = "") -> Told:
    """Sends weights in two buckets, all but one of them."""
    tensors = {name: some(*shape, seed=seed + i) for i, (name, shape) in enumerate(sent.items())}
    names = [*tensors]
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        send(received, {name: tensors[name] for name in part if name != left_out})
    return {name: (tensor.numel(), int(checksum(tensor))) for name, tensor in tensors.items()}


def together(report: Any, ranks: int) -> list[Any]:
    reports = [report] * ranks
    if ranks > 1:
        torch.distributed.all_gather_object(reports, report)
    return reports


def prove(folder: str, sent: dict[str, torch.Size], ranks: int, rank: int, number: int) -> str:
    """What is wrong with a family, or nothing. The weights of this one of its ranks are damaged."""
    model, missing = vllm_model(folder, ranks), [*sent][number % len(sent)]
    for parameter in model.parameters():
        parameter.data.uniform_(-1, 1)
    received = Received(model)
    told = sync(received, sent, 0, left_out=missing)
    lost, _ = compare([told] * ranks, together(received.report(), ranks))
    if lost != [missing]:
        return f"without {missing}: {lost}"
    received = Received(model)
    for seed in (0, 100):
        told = sync(received, sent, seed)
        reports = together(received.report(), ranks)
        if (found := compare([told] * ranks, reports)) != ([], []):
            return f"not all compared: {found}"
    for name, parameter in model.named_parameters():
        for damage in damages(parameter.data):
            found = compare(
                [told] * ranks, [*reports[:rank], received.report(), *reports[rank + 1 :]]
            )
            if found != ([], [name]):
                return f"{name}, {damage}: {found}"
    return ""


def prove_families(
    rank: int, jobs: list[tuple[str, bool]], meeting: str
) -> dict[tuple[str, bool, int, int], str]:
    """What is wrong with each, by family, tied, ranks and rank: a half of them on each rank, then
    each family on both, every second one with tied embeddings."""
    settings = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_MLA_DISABLE": "1",
    }
    # names that differ: no shared memory, which would stay behind
    os.environ.update(
        settings | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_DIST_IDENT": str(rank)}
    )
    # vLLM changes classes of the library's when it builds on them
    made = [family_folder(*job) for job in jobs]
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
    found = {}
    for ranks in (1, 2):
        begin_vllm(rank % ranks, ranks, f"{meeting}_{ranks}_{rank // ranks}")
        for number, job in enumerate(jobs):
            family = number // 2  # jobs come in pairs: a family untied and tied
            if number % 2 == (family % 2 if ranks == 2 else rank):
                try:
                    found[*job, ranks, rank] = prove(*made[number], ranks, rank % ranks, number)
                except (ValueError, AssertionError, KeyError) as error:
                    found[*job, ranks, rank] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.vllm
@pytest.mark.skipif("cpu" not in (vllm_version() or ""), reason="vLLM for the CPU is not installed")
@pytest.mark.parametrize("names", [SOME, ALL], ids=["some", "all"])
def test_vllm_has_all_of_each_family_and_each_damage_is_found(names: str, tmp_path: Path) -> None:
    jobs = [(family, tied) for family in names.split() for tied in (False, True)]
    first, second = run_ranks(2, prove_families, jobs, str(tmp_path / "vllm"))
    found = first | second
    wrong = {job: what for job, what in found.items() if what}
    assert len(found) == 2 * len(jobs)
    assert wrong.keys() == {
        job
        for job in found
        if job[0] in (NEVER_TIED if job[1] else ALWAYS_TIED) or job[0] in engines.REORDERED
    }, wrong
    held_otherwise = {"gpt_oss": "mlp.experts", "bloom": "query_key_value"}
    held_otherwise |= {"falcon": "query_key_value"}
    for job, what in wrong.items():
        assert held_otherwise.get(job[0], "lm_head") in what or job[:2] == ("bloom", False)
