"""The memory that is told beforehand is what the allocator counts; what does not fit is told with
the ways that fit."""

import contextlib
import io
import json
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peaks import count_peaks, estimated
from ranks import run_ranks
from runs import SMALL, figures, main_rank
from tiers import wide
from transformers import FalconConfig, Qwen2Config

from splitppo import train
from splitppo.config import LoraConfig
from splitppo.config.cli import parse
from splitppo.config.rules import check
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.models.cost import Cost
from splitppo.models.lora import Adapter
from splitppo.models.tiny import VOCABULARY, build_tokenizer
from splitppo.models.trainable import NotTrained, Trainable, cost_of, count
from splitppo.placement import place
from splitppo.run import checks, memory
from splitppo.run import main as run_main
from splitppo.run.build import Builder
from splitppo.run.models import Model
from splitppo.run.resolve import Resolved, resolve

PROMPT, RESPONSE = 58, 6
BASE = [
    "--engine.kind=hf",
    "--policy.random-init",
    f"--rollout.max-prompt-tokens={PROMPT}",
    "--checkpoint.no-last",
]
BASE += [
    f"--rollout.max-new-tokens={RESPONSE}",
    "--rollout.batch-size=32",
    "--ppo.mini-batches=2",
    "--steps=2",
]
BASE += ["--data.answer-key=answer", "--reward.function=exact_match", "--ppo.kl-coef=0.1"]
SETTINGS = {
    "checkpointing": ["--compute.activation-checkpointing"],
    "small micro-batches, packed": ["--compute.micro-batch-tokens=256", "--compute.packing=on"],
    "offload": ["--policy.offload=all", "--value.offload=all", "--reference.offload"],
    "adapters over one base": "--policy.lora.rank=8 --value.lora.rank=8 --value.share-base".split(),
    "sharded": "--value.offload=optimizer --compute.micro-batch-tokens=256".split(),
    "split": ["--placement.mode=per_node", "--placement.reference=critic"],
}


def write_inputs(folder: Path) -> list[str]:
    """A model's shape, prompts of the full length, and lengths of the responses; the flags that
    name them."""
    config = Qwen2Config(
        vocab_size=1000, hidden_size=128, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=False, eos_token_id=1,
    )  # fmt: skip
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    row = json.dumps({"prompt": "7" * PROMPT, "answer": "1", "data_source": "mine"})
    (folder / "rows.jsonl").write_text((row + "\n") * 40)
    (folder / "lengths").write_text(f"{RESPONSE}\n")
    assert len(VOCABULARY) < config.vocab_size
    named = {"policy.path": "model", "data.files": "rows.jsonl", "rollout.lengths": "lengths"}
    return [f"--{name}={folder / file}" for name, file in named.items()]


def measured_rank(rank: int, world: int, argv: list[str]) -> dict[str, Any]:
    """Phase -> (bytes counted, bytes estimated) of this rank."""
    if world == 1:
        del os.environ["RANK"]
    resolved: list[Resolved] = []
    init = Builder.__init__

    def noting(self: Any, given: Any, *args: Any) -> None:
        resolved.append(given)
        init(self, given, *args)

    setattr(Builder, "__init__", noting)  # noqa: B010
    peaks: dict[str, list[int]] = {}
    count_peaks(peaks)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = train.main(argv)
    assert status == 0, said.getvalue()
    due = estimated(resolved[-1])
    return {phase: (max(sizes), due[phase]) for phase, sizes in peaks.items()}


@pytest.mark.parametrize(
    ("world", "name"),
    [
        (1, "adapters over one base"),
        wide(2, "sharded"),
        wide(1, "checkpointing"),
        wide(1, "small micro-batches, packed"),
        wide(1, "offload"),
        wide(2, "split"),
    ],
)
def test_the_estimate_is_what_the_allocator_counts(tmp_path: Path, world: int, name: str) -> None:
    """The highest phase within a tenth on each rank, and so each update."""
    argv = [*BASE, "--placement.mode=colocated", *write_inputs(tmp_path), *SETTINGS[name]]
    argv.append(f"--run-dir={tmp_path / 'run'}")
    for phases in run_ranks(world, measured_rank, world, argv):
        most, due = (max(sizes) for sizes in zip(*phases.values(), strict=True))
        assert due == pytest.approx(most, rel=0.1), phases
        for phase in (phase for phase in phases if phase.endswith("update")):
            assert phases[phase][1] == pytest.approx(phases[phase][0], rel=0.1), phase


SHAPE_7B = Qwen2Config(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip


@cache
def models_of(shape: str) -> dict[str, Model]:
    """What the settings name; of a shape, as JSON, once: to work out what they cost takes long."""
    kinds: Any = {"policy": "policy", "value": "value", "reference": "policy"}
    config = Qwen2Config(**json.loads(shape))
    return {
        name: Model(
            kind,
            "m",
            "m",
            config,
            random_init=True,
            packed=True,
            trainable=(NotTrained if name == "reference" else Trainable)(kind),
        )
        for name, kind in kinds.items()
    }


def resolved_of(*flags: str, gpus: int = 8, shape: Any = SHAPE_7B, **models: Any) -> Resolved:
    """Of a 7B shape, as on a node of GPUs."""
    config = parse(["--policy.path=m", "--ppo.kl-coef=0.1", "--rollout.batch-size=512", *flags])
    placement = place(config.placement, world=gpus, local_world=gpus, gpu=True)
    models = models_of(shape.to_json_string()) | models
    device, dtype = torch.device("cuda"), torch.bfloat16
    return Resolved(
        config, {}, placement, gpus, device, dtype, True, "vllm", models, None, 151666, {0: ""}
    )


def test_the_model_of_activations_gives_what_was_measured():
    """docs/measured_speed.md: on two GPUs, responses of 512 tokens each, prompts of 128: GiB
    at most on actor and critic."""
    shape = Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    fixed = (
        "--rollout.batch-size=256 --rollout.max-prompt-tokens=128 --rollout.max-new-tokens=512"
    ).split()
    fixed += ["--compute.micro-batch-tokens=32768", "--ppo.mini-batches=4"]
    for flags, actor, critic in (
        (["--placement.mode=colocated"], 63, 63),
        (["--placement.actor=1"], 70, 63),
        (["--placement.actor=1", "--placement.reference=critic"], 67, 67),
    ):
        job = resolved_of(*fixed, *flags, gpus=2, shape=shape)
        due = estimated(job)
        assert due["actor update"] / 2**30 == pytest.approx(actor, rel=0.03)
        assert due["critic update"] / 2**30 == pytest.approx(critic, rel=0.05)
        assert memory.trainer_peak(job) / 2**30 == pytest.approx(actor, rel=0.03)


def test_updates_with_adapters_need_what_was_measured():
    """docs/measured_memory.md: 7B with LoRA on two GPUs, checkpointed layers."""
    found = resolved_of(
        "--placement.mode=per_node", "--rollout.batch-size=96", "--ppo.mini-batches=2",
        "--rollout.max-prompt-tokens=384", "--rollout.max-new-tokens=128",
        "--compute.micro-batch-tokens=16384", "--compute.activation-checkpointing",
        "--policy.lora.rank=32", "--value.lora.rank=32", gpus=2,
    )  # fmt: skip
    models = {
        kind: replace(found.models[kind], trainable=Adapter(kind, LoraConfig(32)))
        for kind in ("policy", "value")
    }
    due = estimated(replace(found, models=models, engine="hf"))
    assert due["actor update"] / 2**30 == pytest.approx(39.87, rel=0.01)


def test_a_trainer_compiles_beside_an_engine_that_is_awake_if_both_fit():
    """What they need then on 80 GB: weights of 7B, their gradients and vLLM's 13 GiB do not fit
    one GPU, and do fit two each."""
    for gpus, fits in ((2, False), (4, True)):
        flags = ["--placement.mode=colocated", "--policy.offload=all", "--value.offload=all"]
        flags += [f"--placement.actor={gpus // 2}", "--placement.mode=per_node"]
        job = resolved_of(*flags, "--engine.kind=vllm", "--reference.offload", gpus=gpus)
        assert memory.fits_awake(job) == fits


def test_a_run_that_does_not_fit_is_told_with_the_ways():
    """The three best, each with what the run then needs; refused only if the shortest rows would
    not fit either."""
    tight = resolved_of("--placement.actor=6", "--compute.micro-batch-tokens=16384")
    assert memory.check_memory(tight, 200 * 2**30) is None
    due = estimated(tight)
    assert memory.trainer_peak(tight) == due["actor update"] < due["critic update"], (
        "an engine is beside an actor"
    )
    told = memory.check_memory(tight, memory.GPU)
    assert told
    assert told.startswith("with rows of full length, critic update needs about ")
    assert (
        "of 73 GiB (a GPU of 79.2 GiB less 8% for fragments): activations of 16,384 tokens " in told
    )
    best = re.findall(r"(--[\w.-]+(?: \w+)?) (\d+) GiB", told.partition("ways to need less: ")[2])
    needs = {flags: memory.highest(changed, memory.GPU)[0] for flags, changed in memory.ways(tight)}
    for flags in (
        "--placement.reference critic",
        "--reference.offload",
        "--engine.tensor-parallel 2",
    ):
        assert needs[flags] >= due["critic update"], "it does not help the critic"
    least = sorted(needs, key=lambda flags: needs[flags])[:3]
    assert best == [(flags, f"{needs[flags] / 2**30:.0f}") for flags in least]
    assert needs["--compute.micro-batch-tokens 8192"] < due["critic update"] - 10 * 2**30
    assert due["critic update"] - needs["--value.offload optimizer"] == pytest.approx(
        8 * 7.07e9 / 2, abs=2 * 2**30
    )
    one = resolved_of("--placement.mode=colocated", gpus=1)
    assert "fsdp" not in memory.remedies(one, memory.GPU)
    with pytest.raises(
        UserError, match=r"^critic update needs about \d+ GiB of 37 GiB .* ways to need less: "
    ):
        memory.check_memory(tight, 40 * 2**30)
    held = resolved_of(
        "--placement.mode=colocated", "--policy.offload=all", "--value.offload=optimizer", gpus=4
    )
    phases = memory.phases(held)
    assert not any(
        "policy" in part
        for phase, parts in phases.items()
        if phase.startswith("critic")
        for part in parts
    )
    assert all("optimizer" not in part for parts in phases.values() for part in parts)


def test_rows_longer_than_a_micro_batch_may_be_cut():
    """A rank then has a part of them, and of what is computed of them. Short rows gain nothing."""
    flags = ["--placement.mode=colocated", "--rollout.max-prompt-tokens=1024"]
    whole = resolved_of(*flags, "--rollout.max-new-tokens=31744")
    cut = memory.with_setting(whole, "fsdp", "sequence_parallel", 2)
    for phase in ("actor update", "critic update"):
        sizes = [memory.phases(one)[phase] for one in (whole, cut)]
        of_32k, of_16k = (
            parts[f"activations of {tokens:,} tokens"]
            for parts, tokens in zip(sizes, (32768, 16384), strict=True)
        )
        assert of_16k == pytest.approx(of_32k / 2, rel=0.15)
    assert "--fsdp.sequence-parallel 2" in dict(memory.ways(whole))
    short = resolved_of(*flags, "--rollout.max-new-tokens=1024")
    assert "--fsdp.sequence-parallel 2" not in dict(memory.ways(short))
    assert "--fsdp.sequence-parallel 4" not in dict(memory.ways(cut)), "16,384 tokens are left"


@pytest.mark.parametrize(
    ("gib", "flags", "due"),
    [
        (130, [], {}),
        (111, [], {"policy": "optimizer"}),
        (103, [], {"policy": "optimizer", "value": "optimizer"}),
        (111, ["--policy.offload=none"], {"value": "optimizer"}),
        (80, [], {"policy": "optimizer", "value": "all"}),
        (80, ["--value.offload=none"], {"policy": "optimizer"}),
        (80, ["--policy.offload=none", "--value.offload=optimizer"], {"value": "optimizer"}),
    ],
)
def test_a_colocated_run_offloads_what_memory_asks_for(gib, flags, due):
    """The least that fits, cheapest first; never against a setting that was given."""
    every = {"policy": "none", "value": "none"} | due
    found, line = memory.offloaded(resolved_of("--placement.mode=colocated", *flags), gib * 2**30)
    models = json.loads(found.to_json())["models"]
    assert {name: model["offload"] for name, model in models.items()} == every | {
        "reference": "none"
    }
    given = {flag.partition("=")[0] for flag in flags}
    on = [
        f"--{name}.offload {kind}" for name, kind in due.items() if f"--{name}.offload" not in given
    ]
    assert line.partition(" is set automatically")[0] == " ".join(on)
    for elsewhere, size in (("--placement.actor=6", gib), ("--placement.mode=colocated", None)):
        found, line = memory.offloaded(resolved_of(elsewhere), size and size * 2**30)
        assert (found.offload("policy"), found.offload("value"), line) == ("none", "none", "")


def test_one_base_needs_less_and_stays_on_the_device():
    """A run that would not fit is offered one base, and with it no weights are offloaded."""
    both = "--policy.lora.rank=8 --value.lora.rank=8 --placement.mode=colocated".split()
    shape = Qwen2Config(hidden_size=2048, num_hidden_layers=8, intermediate_size=8192)
    kinds: Any = ("policy", "value")
    models = {
        kind: Model(kind, "m", "m", shape, True, True, trainable=Adapter(kind, LoraConfig(8)))
        for kind in kinds
    }
    needs = {}
    for more in ([], ["--value.share-base"]):
        job = resolved_of(*both, *more, "--policy.offload=optimizer", gpus=1, **models)
        needs[bool(more)] = memory.highest(job, memory.GPU)[0]
        ways = dict(memory.ways(job))
        for flags in ("--value.share-base", "--policy.offload all"):
            assert (flags in ways) != bool(more)
    base = models["value"].counts.parameters * 2
    assert needs[False] - needs[True] == pytest.approx(base, rel=0.01)


def test_a_run_without_a_value_model_needs_no_memory_for_it():
    flags = ("--ppo.baseline=batch", "--placement.actor=6", "--placement.reference=critic")
    job = resolved_of(*flags)
    models = {name: model for name, model in job.models.items() if name != "value"}
    job = replace(job, models=models)
    assert {phase for phase in memory.phases(job) if phase.startswith("critic")} == {"critic score"}
    assert "value" not in "\n".join(memory.table(job))
    # the critic group would hold no model
    assert "--placement.reference actor" not in {flag for flag, _ in memory.ways(job)}
    held, _ = memory.offloaded(job, 40 * 2**30)
    check(held.config)  # a setting that a run records must not be refused as it goes on


def test_what_fragments_take_is_left_out():
    """A job fits what they leave of the GPU, not all of it; what holds the job needs no margin for
    them."""
    job = resolved_of("--placement.mode=colocated", "--policy.offload=none")
    need, *_ = memory.highest(job, 0)
    for share, fits in ((0.91, True), (0.93, False)):
        size = need / share
        assert (memory.check_memory(job, size) is None) == fits
        assert (memory.fitted(job, size, ("--",))[1] == {}) == fits
        assert (memory.offloaded(job, size)[1] == "") == fits
    assert pytest.approx(79.2) == memory.GPU / 2**30, "as PyTorch finds it on a card of 80 GB"
    assert memory.table(job)[0].endswith(", of 73 GiB (a GPU of 79.2 GiB less 8% for fragments):")


@pytest.mark.parametrize(
    ("flags", "device", "engine", "own", "growing"),
    [
        (["--placement.actor=6"], "cuda", "hf", {}, range(8)),
        (["--placement.actor=6"], "cuda", "vllm", {}, range(6, 8)),
        (["--placement.mode=colocated"], "cuda", "vllm", {}, ()),
        (["--placement.mode=colocated"], "cuda", "hf", {}, range(8)),
        (["--placement.mode=colocated"], "cpu", "hf", {}, ()),
        (
            ["--placement.actor=6"],
            "cuda",
            "hf",
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"},
            (),
        ),
        (["--placement.actor=6"], "cuda", "hf", {"PYTORCH_CUDA_ALLOC_CONF": ""}, ()),
    ],
)
def test_segments_grow_where_no_memory_is_shared(flags, device, engine, own, growing, monkeypatch):
    """On ranks that send vLLM no weights by CUDA IPC; never against the user's settings."""
    told: list[str] = []
    allocator: Any = torch._C
    plain = allocator._accelerator_setAllocatorSettings
    monkeypatch.setattr(allocator, plain.__name__, lambda text: plain(text) or told.append(text))
    job = replace(resolved_of(*flags), device=torch.device(device), engine=engine)
    for rank in range(8):
        environ = {"HOME": "/"} | own
        monkeypatch.setattr(os, "environ", environ)
        run_main.use_expandable_segments(job, rank)
        assert told == ["expandable_segments:True"] * (rank in growing)
        assert environ == {"HOME": "/"} | own | ({"PYTORCH_ALLOC_CONF": told[0]} if told else {})
        told.clear()
        plain("expandable_segments:False")


def test_segments_are_set_before_the_rank_touches_its_gpu(tmp_path, monkeypatch, capsys):
    order: list[str] = []

    def runtime(*_: Any, **__: Any) -> None:
        order.append("the device")
        raise UserError("this far")

    monkeypatch.setattr(
        run_main,
        "use_expandable_segments",
        lambda _, rank: order.append(f"segments of rank {rank}"),
    )
    monkeypatch.setattr(run_main, "Runtime", runtime)
    assert train.main([*SMALL, f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "error: this far" in capsys.readouterr().err
    assert order == ["segments of rank 0", "the device"]


def stated_rank(rank: int, argv: list[str], sizes: tuple[float, ...]) -> None:
    setattr(memory, "gpu_memory", lambda _: sizes[rank])  # noqa: B010
    main_rank(rank, argv)


@pytest.mark.wide
def test_ranks_offload_what_the_smallest_gpu_asks_for(tmp_path, capfd):
    """With other memory the run resumes, and nothing that it computes is different."""
    argv = [
        *SMALL,
        "--placement.mode=colocated",
        "--steps=2",
        "--checkpoint.every=1",
        "--log.validate-every=1",
        "--rollout.max-prompt-tokens=512",
    ]
    placement = place(parse(argv).placement, world=2, local_world=2)
    plain = resolve(parse(argv), placement, 2, torch.device("cpu"), probe=False)
    both = memory.with_setting(
        memory.with_setting(plain, "policy", "offload", "optimizer"), "value", "offload", "all"
    )
    ample, enough = (memory.highest(run, 0)[0] / memory.USABLE for run in (plain, both))
    folders = [f"--run-dir={tmp_path / name}" for name in ("plain", "offloaded")]
    run_ranks(2, main_rank, [*argv, folders[0]])
    run_ranks(2, stated_rank, [*argv, folders[1], "--steps=1"], (ample, enough))
    said = capfd.readouterr().out
    assert said.count("--policy.offload optimizer --value.offload all is set automatically: ") == 1
    models = json.loads((tmp_path / "offloaded/resolved.json").read_text())["models"]
    assert {name: model["offload"] for name, model in models.items()} == {
        "policy": "optimizer", "value": "all", "reference": "none",
    }  # fmt: skip
    run_ranks(2, stated_rank, [*argv, folders[1]], (ample, ample))
    assert "is set automatically" not in capfd.readouterr().out
    for role in ("actor", "critic"):
        assert figures(tmp_path / "offloaded", role) == figures(tmp_path / "plain", role)


def cost(shape: Any, trainable: Trainable) -> Cost:
    return cost_of(shape, trainable, count(shape, trainable), torch.bfloat16, compiled=True)


def test_a_model_with_its_own_attention_is_estimated_too():
    shape = FalconConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    found = cost(shape, Trainable("policy"))
    assert (found.layers, found.hidden, found.widest) == (2, 128, 512)
    assert 10 * found.hidden <= found.saved <= 40 * found.hidden


def test_compiled_layers_keep_as_much_with_adapters():
    """As the compiler keeps it: the sum of both products in the place of the one."""
    shape = Qwen2Config(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    adapter = Adapter("policy", LoraConfig(4))
    whole, adapted = (cost(shape, trainable) for trainable in (Trainable("policy"), adapter))
    assert whole.saved == pytest.approx(adapted.saved, rel=0.03)


def test_where_memory_runs_out_the_last_lines_say_what_held_it(tmp_path, monkeypatch, capfd):
    """As `report_failure` prints them: the phase, what held how much, the ways."""
    found = resolved_of("--placement.actor=6")
    status: Any = SimpleNamespace(
        phase="critic step 3 update", describe=lambda rank: "critic rank 6"
    )
    run: Any = SimpleNamespace(
        build=SimpleNamespace(resolved=found), runtime=SimpleNamespace(status=status),
        last_checkpoint=lambda: None,
    )  # fmt: skip
    reported: list[BaseException] = []
    monkeypatch.setattr(run_main, "report_failure", lambda error, *_: reported.append(error) or 1)
    assert (
        run_main._failed(
            run_main.Rank(Launch(), None, run), torch.OutOfMemoryError("CUDA out of memory")
        )
        == 1
    )
    phase, held, ways = reported[0].__notes__
    assert phase == "memory ran out in 'critic step 3 update'"
    estimate, _, parts = held.partition(" (a GPU of 79.2 GiB less 8% for fragments): ")
    assert re.search(r"^estimated \d+ GiB of 73 GiB$", estimate)
    assert re.search(r"^activations of 16,384 tokens [\d.]+, value's optimizer", parts)
    assert ways.startswith("ways to need less: --")
    run_main._failed(run_main.Rank(Launch(), None, run), ValueError("no"))
    assert not hasattr(reported[1], "__notes__")
    for phase in ("compiling", "loading the policy"):
        status.phase = phase
        run_main._failed(run_main.Rank(Launch(), None, run), torch.OutOfMemoryError("no"))
        assert reported[-1].__notes__[0] == f"memory ran out in {phase!r}"


def test_a_run_refuses_and_warns_by_the_memory_of_its_gpu(monkeypatch):
    found = resolved_of("--placement.actor=6", "--engine.kind=vllm")
    monkeypatch.setattr(checks.build, "check_engine", lambda *_: None)
    monkeypatch.setattr(checks.build, "warnings", lambda *_: [])
    for size, refused, warned in (
        (200, False, False),
        (80, False, True),
        (40, True, True),
        (None, False, False),
    ):
        monkeypatch.setattr(memory, "gpu_memory", lambda _, size=size: size and size * 2**30)
        with (
            pytest.raises(UserError, match="ways to need less")
            if refused
            else contextlib.nullcontext()
        ):
            checks.preflight(found)
        if not refused:
            assert any("ways to need less" in line for line in checks.warnings(found)) == warned
