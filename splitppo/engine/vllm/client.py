"""The trainer's side of a vLLM engine. host.py is the other side: a process of its own on the
actor's GPU.

The ranks of an engine talk to it (messages.py) through a Unix socket in a private folder (no port).
Weights go through two buckets, memory that the trainer fills and vLLM's workers map: CUDA IPC on a
GPU, a file on the CPU. This process never imports vLLM, which changes the settings of its process.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PretrainedConfig

from splitppo.config import RolloutConfig
from splitppo.engine import TICK, Ask, Piece, RolloutEngine, check_weights, weight_names
from splitppo.engine.vllm.messages import Entry
from splitppo.engine.vllm.process import EngineError, Process, fixed_segments
from splitppo.engine.vllm.weight_check import checksum
from splitppo.errors import UserError
from splitppo.models.build import build
from splitppo.models.cost import USABLE

ALIGN = 512  # bytes; tensors in a bucket start at multiples of it
BUCKET = {"cuda": 2**28, "cpu": 2**22}  # bytes, at least


class VLLMEngine(RolloutEngine):
    """One rank's connection to an engine, whose process its first rank has started.

    Args:
        config: the policy's. address: the socket's path.
        index: of this rank among those of the engine. process: given to the first of them.
        sleep: `off`, `1`, `2` (vLLM's levels), or `auto`: level 2 while trainer and engine do not
            fit the GPU together.
        peak: bytes that the trainer will allocate on this GPU at most, estimated.
        timeout: seconds to wait for an answer.
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
        peak: float = 0.0,
        timeout: float = 1800.0,
    ):
        self.address = address
        self.index = index
        self.process = process
        self.device = device
        self.dtype = dtype
        self.sleep = sleep
        self.peak = peak
        self.timeout = timeout
        model: Any = build(config, "policy")
        self.names = weight_names(model)
        self.folder_names = model.folder_names
        # a thread: while the engine sends rows, it reads nothing
        self._sender = ThreadPoolExecutor(1, "requests")

        self._asleep: list[str] = []  # the parts of vLLM's memory that are released
        # the socket; None before `connect`, after `close` and after a failure
        self._conn: Any = None

    def connect(self) -> str:
        start = time.monotonic()
        while self._conn is None:
            try:
                self._conn = Client(self.address, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError):
                if self.process and self.process.popen.poll() is not None:
                    raise self._ended() from None
                if time.monotonic() - start > self.timeout:
                    raise self._timed_out("its start") from None
                time.sleep(0.02)
        largest = max(
            shape.numel() // len(self.folder_names.stored(name, shape))
            for name, (_, shape) in self.names.items()
        )
        size = max(BUCKET[self.device.type], largest * self.dtype.itemsize)
        path = Path(self.address).with_name(f"bucket_{self.index}")
        made = [_bucket(f"{path}_{number}", size, self.device) for number in range(2)]
        self._buckets = [bucket for bucket, _ in made]
        line = self._ask("hello", self.index, [handle for _, handle in made])
        if self.process:
            self.process.remove_folder()  # all ranks are connected, and the buckets stay mapped
        return line

    def release_memory(self, *, trained: bool) -> None:
        """Puts the engine to sleep. With `auto` it stays awake if engine and trainer's peak fit the
        GPU together."""
        if self.sleep == "off":
            return
        stay = self.sleep == "auto" and trained and self._fits()
        level = self._ask("sleep", 0 if stay else 1 if self.sleep == "1" else 2)
        self._asleep = ["weights", "kv_cache"] if level else []
        self.loaded = level < 2

    def close(self) -> None:
        self.loaded = False
        connected = self._conn is not None
        with suppress(EngineError):  # not connected, or the process has ended
            self._send("close")
            self._conn.close()
        self._conn = None
        self._sender.shutdown(wait=False)
        if self.process:
            self.process.end(kill=not connected)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sends the weights. Raises UserError if vLLM's model has no place for one, EngineError if
        one differs then."""
        self._wake("weights")
        sums: dict[str, tuple[int, Tensor]] = {}
        loading = False  # whether the engine loads one bucket, while the other is filled
        try:
            for bucket, entries in self._fill(weights, sums):
                if self.device.type == "cuda":
                    # another process reads the bucket next
                    torch.cuda.current_stream(self.device).synchronize()
                if loading:
                    self._answer("load")
                self._send("load", bucket, entries)
                loading = True
        finally:
            if loading and self._conn:
                self._answer("load")
        sent = {name: (numbers, int(total)) for name, (numbers, total) in sums.items()}
        lost, different = self._ask("verify", sent)
        if lost:
            raise UserError(
                f"vLLM's model lacks or changes {len(lost)} of the policy's {len(sent)} tensors: "
                f"{', '.join(lost[:3])}; use --engine.kind hf"
            )
        if different:
            raise EngineError(
                f"after the sync, {len(different)} tensors of the vLLM engine differ from the "
                f"policy's, among them {', '.join(different[:3])}; --engine.kind hf avoids vLLM"
            )
        self._wake("weights", "kv_cache")

    def _submit(self, asks: Sequence[Ask], sampling: RolloutConfig, seed: int) -> None:
        self._wake("weights", "kv_cache")
        self._heard = time.monotonic()  # when rows were last asked for, or came
        # if it fails, so does the next wait
        self._sender.submit(self._conn.send, ("submit", asks, sampling, seed))

    def _poll(self) -> list[Piece]:
        if not self._conn.poll(TICK):
            if time.monotonic() - self._heard > self.timeout:
                raise self._timed_out("the next row")
            return []
        pieces: list[Piece] = self._receive("the next row")
        self._heard = time.monotonic()
        return pieces

    def _abort(self) -> None:
        if self._conn:
            self._sender.submit(self._conn.send, ("halt",))
            while self._receive("the end of an aborted rollout") is not None:
                pass  # pieces of it

    def _fill(
        self, weights: Iterable[tuple[str, Tensor]], sums: dict[str, tuple[int, Tensor]]
    ) -> Iterator[tuple[int, list[Entry]]]:
        """Packs the stream into the two buckets in turn, as the tensors that a folder has, and puts
        the size and the checksum of each into `sums`. Yields the bucket's number, and what is in
        it."""
        bucket = at = 0
        entries: list[Entry] = []
        parts = (
            part
            for name, weight in check_weights(weights, self.names)
            for part in self.folder_names.split(name, self._cast(name, weight)).items()
        )
        for name, part in parts:
            tensor = part.contiguous()
            other = bool(entries) and entries[-1].dtype != tensor.dtype
            if other or at + tensor.nbytes > len(self._buckets[bucket]):
                yield bucket, entries
                bucket = 1 - bucket
                at = 0
                entries = []
            self._buckets[bucket][at : at + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            sums[name] = tensor.numel(), checksum(tensor)
            entries.append(Entry(name, tensor.dtype, tensor.shape, at))
            at += -(-tensor.nbytes // ALIGN) * ALIGN
        yield bucket, entries

    def _cast(self, name: str, weight: Tensor) -> Tensor:
        dtype = torch.float32 if self.folder_names.exact(name) else self.dtype
        return weight.to(self.device, dtype)

    def _wake(self, *tags: str) -> None:
        """Wakes these parts of a sleeping engine, after the trainer has freed its allocator's
        cache."""
        asleep = [tag for tag in tags if tag in self._asleep]
        if asleep:
            torch.cuda.empty_cache()
            self._ask("wake", asleep)
            self._asleep = [tag for tag in self._asleep if tag not in asleep]

    def _fits(self) -> bool:
        """Whether the trainer's peak fits the GPU beside CUDA and all that other processes hold
        now. The peak is the estimated one if no step has reached it yet: rows may grow, and where
        they go on over several steps the first are short."""
        peak = max(torch.cuda.max_memory_allocated(self.device), self.peak)
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        return others + peak <= USABLE * total

    def _send(self, *message: Any) -> None:
        if self._conn is None:
            raise EngineError("the vLLM engine is closed")
        try:
            self._conn.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None

    def _receive(self, what: str) -> Any:
        """The engine's next message. `what` is expected, for the error."""
        if not self._conn.poll(self.timeout):
            raise self._timed_out(what)
        try:
            return self._conn.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended() from None

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._send(name, *arguments)
        return self._answer(name)

    def _answer(self, name: str) -> Any:
        return self._receive(f"an answer to {name!r}")

    def _ended(self) -> EngineError:
        self._conn = None
        if self.process:
            return self.process.exit_report()
        return EngineError(
            "the vLLM engine of this rank has ended; see the output of the rank that started it"
        )

    def _timed_out(self, what: str) -> EngineError:
        self._conn = None
        report = f"\n{self.process.exit_report(wait=0)}" if self.process else ""
        return EngineError(
            f"waited {self.timeout:g} s for {what} of the vLLM engine; "
            f"raise --timeout if it is only slow{report}"
        )


def _bucket(path: str, size: int, device: torch.device) -> tuple[Tensor, Any]:
    """`size` bytes that another process can map: GPU memory, or the file `path`. And what it maps
    them by."""
    if device.type != "cuda":
        handle = {"filename": path, "shared": True, "size": size, "dtype": torch.uint8}
        return torch.from_file(**handle), handle
    allocator: Any = torch._C
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    allocator._accelerator_setAllocatorSettings(fixed_segments(settings))
    try:
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        return bucket, [*reduce_tensor(bucket)[1]]
    finally:
        allocator._accelerator_setAllocatorSettings(settings)
