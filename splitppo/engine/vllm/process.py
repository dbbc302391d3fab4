"""The process of a vLLM engine, as the rank that starts it sees it: environment, start, end and
exit report."""

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from splitppo.engine.vllm.plan import Plan
from splitppo.job.child import clean_environment

# variables with the settings of PyTorch's allocator
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


class EngineError(RuntimeError):
    """The engine's process failed. The message holds the end of its log, with a traceback if there
    is one."""


def fixed_segments(settings: str) -> str:
    """PyTorch's allocator settings without expandable segments: CUDA IPC and vLLM's sleep do not
    support them."""
    return re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", settings)


def child_environment(devices: Sequence[str]) -> dict[str, str]:
    """The environment of an engine that sees these GPUs only, as CUDA_VISIBLE_DEVICES names them;
    none: on the CPU."""
    env = clean_environment()
    env.pop("OMP_NUM_THREADS", None)  # torchrun sets it for its ranks
    for name in ALLOCATOR & env.keys():
        env[name] = fixed_segments(env[name])
    if devices:
        # for each host and GPU: engines that start together would write to the same files
        cache = Path(env.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser()
        env["VLLM_CACHE_ROOT"] = str(
            cache / f"splitppo_{socket.gethostname()}_{devices[0].replace('/', '_')}"
        )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        # vLLM's own setting for its workers; torch would take all cores in each engine
        env["OMP_NUM_THREADS"] = "1"
        # Each row has a seed. vLLM's second runner draws all such rows in one kernel, the first
        # runs a kernel per row.
        env.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    return env


def visible_device(local: int) -> str:
    """The name in CUDA_VISIBLE_DEVICES of this process's GPU `local`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[local].strip() if visible else str(local)


class Process:
    """The engine's process, on `devices` (as in `child_environment`), which builds what the plan
    says."""

    def __init__(self, devices: Sequence[str], plan: Plan):
        self.log = Path(plan.log)
        # Holds the socket. Only this user can enter it, and the path is short enough for a socket
        # address.
        self.folder = Path(tempfile.mkdtemp(prefix="splitppo-", dir="/tmp"))
        self.address = str(self.folder / "engine")
        # This shell removes the folder, on request or when this process ends for whatever reason,
        # and its engine too.
        self._remover = subprocess.Popen(
            ["sh", "-c", 'read _ || sleep 0.5; rm -rf "$0"', str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches only the trainer, and the engine ends with the
            # trainer.
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "splitppo.engine.vllm.host", str(os.getpid())],
                env=child_environment(devices),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # if it has ended, `connect` says so
        with suppress(BrokenPipeError), cast(Any, self.popen.stdin) as pipe:
            pickle.dump(replace(plan, address=self.address), pipe)

    def exit_report(self, wait: float = 5.0) -> EngineError:
        """How the process ended, with the end of its log. The end comes a moment after the sockets
        close: `wait`."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(wait)
        status = self.popen.returncode
        how = "is not answering" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        lines = self.log.read_text(errors="replace").splitlines()
        # A worker's error stands before the messages that its parent makes of it.
        errors = [line for line in lines[:-30] if "Error" in line][-10:]
        heading = f"the vLLM engine (process {self.popen.pid}) {how}; the end of {self.log}:"
        return EngineError("\n".join([heading, *errors, *lines[-30:]]))

    def end(self, *, kill: bool = False) -> None:
        """Waits 10 s for the end of a process that was asked to close, then kills it; with `kill`,
        at once."""
        try:
            self.popen.wait(timeout=0 if kill else 10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.remove_folder()

    def remove_folder(self) -> None:
        if self._remover.returncode is None:
            self._remover.communicate("\n")
