"""vLLM on the actor's own GPU, in a process of its own: the trainer's side. The other is vllm_host.py.

Each actor rank has an engine, or each `engine.tensor_parallel` ranks have one together: the first of them starts it,
all of them connect to it through a socket in a private folder (no port), give it their prompts and get their rows.
Weights go through buckets of memory that the trainer fills and the engine's workers map: CUDA IPC on the same GPU, a
mapped file on the CPU. vLLM itself is never imported here: it sets up its process as it likes.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PretrainedConfig

from splitppo.engine import Sampling, check_requests
from splitppo.engine.vllm.process import EngineError, Process
from splitppo.engine.vllm.weight_check import checksum
from splitppo.errors import UserError
from splitppo.models.build import build
from splitppo.rollout import Request, Sample

ALIGN = 512  # bytes; where a tensor may begin in a bucket
HEADROOM = 0.92  # share of the GPU that trainer and engine may fill together for the engine to stay awake
FRAGMENTS = 1.1  # what the trainer's allocator takes for what is asked of it


def weight_names(config: PretrainedConfig) -> dict[str, tuple[str, torch.Size]]:
    """Hugging Face name of each weight and persistent buffer -> first of the names of the same (tied) tensor, shape."""
    first: dict[int, str] = {}
    named = build(config, "policy").state_dict(keep_vars=True).items()
    return {name: (first.setdefault(id(tensor), name), tensor.shape) for name, tensor in named}


class VLLMEngine:
    """One rank's end of an engine; see `RolloutEngine` for what its methods promise.

    The process was started by `launch_engine`; `connect` waits until it can work.

    Args:
        config: the policy's.
        address: the socket's path, the same for all ranks of the engine.
        index: of this rank among them; 0 has the `process`.
        sleep: `off`, `1`, `2` (vLLM's levels) or `auto`: as `2` while trainer and engine do not fit the GPU together.
        tell: takes a line for the user: who holds what of the GPU, whenever the engine goes over to sleeping or waking.
        timeout: seconds that an answer may take.
        tick: seconds between two empty lists of `generate`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        address: str,
        index: int,
        process: Process | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        sleep: str = "off",
        tell: Callable[[str], None] | None = None,
        timeout: float = 1800.0,
        tick: float = 0.005,
    ):
        self.address, self.index, self.process, self.device, self.dtype = address, index, process, device, dtype
        self.sleep, self.tell, self.timeout, self.tick = sleep, tell, timeout, tick
        self.names = weight_names(config)
        self.loaded = self._running = self._dead = self._compared = False
        self.step_ms = 0.0
        self._level = 0  # how deep it sleeps
        self._slept: bool | None = None
        self._conn: Connection | None = None

    def connect(self) -> dict[str, Any]:
        """Waits for the engine to be built, shares the buckets, and returns what it says of itself."""
        start = time.monotonic()
        while self._conn is None:
            try:
                self._conn = Client(self.address, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError):
                if self.process and self.process.popen.poll() is not None:
                    raise self.process.obituary() from None
                if time.monotonic() - start > self.timeout:
                    raise self._silent("its start") from None
                time.sleep(0.02)
        facts = self._ask("hello", self.index)
        least = 2**28 if self.device.type == "cuda" else 2**22
        largest = max(shape.numel() for _, shape in self.names.values()) * self.dtype.itemsize
        folder = Path(self.address).parent
        names = [str(folder / f"bucket_{self.index}_{slot}") for slot in range(2)]
        self._buckets = [_bucket(name, max(least, largest + ALIGN), self.device) for name in names]
        on_gpu = self.device.type == "cuda"
        sizes = [len(bucket) for bucket in self._buckets]
        paths = list(zip(sizes, names, strict=True))
        self._ask("attach", [[*reduce_tensor(bucket)[1]] for bucket in self._buckets] if on_gpu else paths)
        if self.process:
            self.process.tidy()  # all are connected, and what is mapped stays
        return facts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine`. Of tied weights, the stream may hold any of the names or all of them.

        Raises:
            UserError: vLLM has no place for some of what was sent.
            EngineError: what the engine holds afterwards is not what was sent.
        """
        if self._running:
            raise RuntimeError("load_weights while rows are being generated: finish or close the iterator first")
        self.loaded = False
        self._wake("weights")
        sums: dict[str, Tensor] = {}
        pending = 0  # buckets that the engine has not loaded yet; one is filled while it loads the other
        try:
            for slot, entries in self._fill(weights, sums):
                self._send(("load", (slot, entries)))
                pending += 1
                if pending == len(self._buckets):
                    self._answer("load")
                    pending -= 1
        finally:
            for _ in range(0 if self._dead else pending):
                self._answer("load")
        totals = torch.stack(list(sums.values())).tolist() if sums else []
        sent = {n: (self.names[n][1].numel(), total) for n, total in zip(sums, totals, strict=True)}
        lost, wrong = self._ask("verify", sent)
        if lost:
            raise UserError(
                f"vLLM's model has no place for {len(lost)} of the policy's {len(sent)} tensors, or changes them: "
                f"{', '.join(lost[:3])}; use --engine.kind hf"
            )
        if wrong:
            why = f"{len(wrong)} tensors differ, among them {', '.join(wrong[:3])}; --engine.kind hf does without vLLM"
            raise EngineError(f"after the sync, the vLLM engine does not hold the policy's weights: {why}")
        if self.tell and not self._compared:
            self.tell(f"engine: {len(sent)} of {len(sent)} tensors compared with the policy's, as in each sync")
        self._compared = True
        self._wake("weights", "kv_cache")
        self.loaded = True

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, step: int
    ) -> Generator[list[Sample], None, None]:
        """See `RolloutEngine`. The arguments are checked here and now; the work begins with the first `next`."""
        check_requests(requests, loaded=self.loaded)
        return self._stream(requests, sampling, seed, step)

    def rest(self, *, trained: bool) -> None:
        """Goes to sleep, as `sleep` says; `auto` does unless all fits: the engine as it is, and the trainer's peak."""
        if self.sleep == "off":
            return
        level = 1 if self.sleep == "1" else 2
        fits, told = self._fits()
        stay = self.sleep == "auto" and trained and fits
        self._level = self._ask("sleep", 0 if stay else level)
        self.loaded = self._level < 2
        if self.tell and (self._level > 0) != self._slept:
            self.tell(f"engine: {'sleeps' if self._level else 'stays awake'} between rollouts; {told}")
        self._slept = self._level > 0

    def close(self) -> None:
        self.loaded = False
        if self.process:
            self.process.told = True  # its end is no death from here on
        if self._conn is not None and not self._dead:
            with suppress(EngineError):  # it has ended already, which is what is asked for
                self._send(("close", None))
            self._conn.close()
            self._dead = True
        if self.process:
            self.process.end(at_once=self._conn is None)

    def _stream(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, step: int
    ) -> Generator[list[Sample], None, None]:
        if self._running:
            raise RuntimeError("generate while rows are being generated: finish or close the first iterator")
        self._wake("weights", "kv_cache")
        self._running, done = True, False
        self._send(("generate", (list(requests), sampling, seed, step)))
        try:
            heard = time.monotonic()
            while not done:
                if self._connection.poll(self.tick):
                    heard = time.monotonic()
                    kind, value = self._receive()
                    done = kind == "done"
                    if done:
                        self.step_ms = value
                    else:
                        yield value
                elif time.monotonic() - heard > self.timeout:
                    raise self._silent("the next row")
                else:
                    yield []
        finally:
            if not done and not self._dead:
                self._send(("halt", None))
                while not done:
                    if not self._connection.poll(self.timeout):
                        raise self._silent("the end of a rollout that was broken off")
                    done = self._receive()[0] == "done"
            self._running = False

    def _fill(self, weights: Iterable[tuple[str, Tensor]], sums: dict[str, Tensor]) -> Iterator[tuple[int, list[Any]]]:
        """Packs the stream into the buckets, in turns: slot and [name, dtype, shape, first byte] of its tensors.

        Puts each tensor's checksum into `sums`.
        """
        slot, at, entries = 0, 0, []
        for name, tensor in weights:
            if name not in self.names:
                raise ValueError(f"unknown weight {name}: the policy has no tensor of this name")
            main, shape = self.names[name]
            if shape != tensor.shape:
                raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
            if main in sums:
                continue  # tied, and sent by another name
            tensor = tensor.to(self.device, self.dtype).contiguous()
            size = tensor.numel() * tensor.element_size()
            if at + size > len(self._buckets[slot]):
                yield self._filled(slot, entries)
                slot, at, entries = 1 - slot, 0, []
            self._buckets[slot][at : at + size].copy_(tensor.view(-1).view(torch.uint8))
            sums[main] = checksum(tensor)
            entries.append((main, str(self.dtype).removeprefix("torch."), list(shape), at))
            at += -(-size // ALIGN) * ALIGN
        if missing := sorted({main for main, _ in self.names.values()} - set(sums)):
            raise ValueError(f"{len(missing)} weights are missing, among them {', '.join(missing[:5])}")
        yield self._filled(slot, entries)

    def _filled(self, slot: int, entries: list[Any]) -> tuple[int, list[Any]]:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # another process is going to read it
        return slot, entries

    def _wake(self, *tags: str) -> None:
        """Wakes what of it sleeps, after the trainer has given back what its cache holds."""
        if not self._level:
            return
        torch.cuda.empty_cache()
        self._ask("wake", list(tags))
        self._level = 0 if "kv_cache" in tags else self._level

    def _fits(self) -> tuple[bool, str]:
        """Whether the trainer's peak fits beside what all others hold of this GPU now, while the engine is awake."""
        peak = torch.cuda.max_memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        sizes = f"of {total / 2**30:.1f} GiB the engine holds {others / 2**30:.1f} awake, the trainer "
        sizes += f"{torch.cuda.memory_allocated(self.device) / 2**30:.1f}, {peak / 2**30:.1f} at its peak so far"
        return others + FRAGMENTS * peak <= HEADROOM * total, sizes

    @property
    def _connection(self) -> Connection:
        if self._conn is None or self._dead:
            raise EngineError("the vLLM engine is closed")
        return self._conn

    def _send(self, message: tuple[str, Any]) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._gone() from None

    def _receive(self) -> tuple[str, Any]:
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._gone() from None
        if kind == "error":
            self._dead = True
            if self.process:
                self.process.told = True
            raise EngineError(f"in the vLLM engine's process:\n{value}")
        return kind, value

    def _ask(self, kind: str, value: Any) -> Any:
        self._send((kind, value))
        return self._answer(kind)

    def _answer(self, to: str) -> Any:
        if not self._connection.poll(self.timeout):
            raise self._silent(f"an answer to {to!r}")
        return self._receive()[1]

    def _gone(self) -> EngineError:
        self._dead = True
        if self.process is None:
            return EngineError("the vLLM engine that this rank shares is gone; the rank that started it says why")
        try:
            self.process.told = True
            self.process.popen.wait(timeout=5)  # its status comes a moment after its sockets close
        except subprocess.TimeoutExpired:
            pass
        return self.process.obituary()

    def _silent(self, what: str) -> EngineError:
        self._dead = True
        why = EngineError(
            f"waited {self.timeout:g} s for {what} of the vLLM engine; raise --timeout if it is only slow"
        )
        if self.process:
            why.add_note(str(self.process.obituary()))
        return why


def _bucket(name: str, size: int, device: torch.device) -> Tensor:
    """Bytes that another process can map: GPU memory, or the file `name`."""
    size = -(-size // ALIGN) * ALIGN
    if device.type == "cuda":
        allocator: Any = torch._C
        before = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        # CUDA IPC does not map what an expandable segment is made of
        allocator._accelerator_setAllocatorSettings(re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", before))
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        finally:
            allocator._accelerator_setAllocatorSettings(before)
    return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
