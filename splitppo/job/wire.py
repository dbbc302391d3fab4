"""The wire: one message between two ranks, and the handshake that keeps NCCL from ever waiting.

A posted NCCL send or recv spins on the GPU until its peer posts too: it would slow what runs there,
and could dead-lock against the collectives of FSDP. So both sides agree first, in host memory, over
the store:

    receiver                          sender
    clear to send  ------------->     (asks for it between two decode steps, later waits in a
                                      thread)
                   <-------------     go, with the header: how much is coming
    posts its recv                    posts its send

The copy then takes microseconds. Batches travel over a process group of their own: NCCL on GPUs,
Gloo on CPUs.
"""

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class WireError(RuntimeError):
    """A wait for another rank ran out of time, or a message is not what was due."""


@dataclass(frozen=True)
class Hop:
    """One message between two global ranks in a step; `chunk` counts the pair's messages on the
    channel."""

    channel: str
    step: int
    chunk: int
    sender: int
    receiver: int

    def __str__(self) -> str:
        return (
            f"step {self.step} {self.channel} chunk {self.chunk} "
            f"rank {self.sender} -> rank {self.receiver}"
        )


class Wire:
    """Moves one tensor a message, for all channels. Tensors given and returned are on the CPU.

    Args:
        group: process group of all ranks, used for nothing else.
        store: for the handshake. The connection is the wire's own, since a wait blocks it.
        timeout: seconds that a wait may take.
        describe: global rank -> its name in an error, with its host and what it was last doing.
    """

    def __init__(
        self,
        rank: int,
        group: Any,
        store: Any,
        device: torch.device,
        timeout: float,
        describe: Callable[[int], str],
    ):
        self.rank = rank
        self.group = group
        self.store = store
        self.device = device
        self.timeout = timeout
        self.describe = describe
        # a stream of its own: a batch must not queue behind the decode steps or updates already
        # launched
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        begin = partial(torch.cuda.set_device, device) if self.stream else None
        # copies run in a thread: NCCL can't cancel one whose peer is absent, but the wait for the
        # thread can end
        self._copier = ThreadPoolExecutor(1, "copies", begin)

    def is_clear(self, hop: Hop) -> bool:
        """Sender: whether the receiver has given its clear-to-send. Doesn't wait."""
        return self.store.check([f"{hop}/clear"])

    def send(self, hop: Hop, payload: Tensor, header: Sequence[int] = ()) -> None:
        """Sender: waits until the receiver is ready, then sends a 1-D CPU tensor with a header of
        integers."""
        self._wait(hop, "clear", hop.receiver)
        self.store.set(f"{hop}/go", array("q", [payload.numel(), *header]).tobytes())
        self._copy(hop, hop.receiver, self.transfer_out, payload, hop.receiver)

    def recv(
        self, hop: Hop, dtype: torch.dtype, check: Callable[[list[int]], int]
    ) -> tuple[list[int], Tensor]:
        """Receiver: gives its clear-to-send, waits for the sender's go, then receives the header
        and a 1-D CPU tensor. `check`: header -> the number of elements that must come.

        One message at a time: a second sender that is clear to send would post, and its GPU would
        wait.
        """
        self.store.set(f"{hop}/clear", b"1")
        self._wait(hop, "go", hop.sender)
        numel, *header = array("q", self.store.get(f"{hop}/go"))
        self.store.delete_key(f"{hop}/clear")
        self.store.delete_key(f"{hop}/go")
        if numel != (due := check(header)):
            raise WireError(
                f"{hop}: {numel} elements announced where {due} are due; "
                "do all ranks run one version?"
            )
        payload = self._copy(hop, hop.sender, self.transfer_in, numel, dtype, hop.sender)
        return header, payload

    def transfer_out(self, payload: Tensor, receiver: int) -> None:
        """Posts the send; the receiver posts at the same time."""
        if payload.numel():
            dist.send(payload.to(self.device), receiver, group=self.group)

    def transfer_in(self, numel: int, dtype: torch.dtype, sender: int) -> Tensor:
        """Posts the recv; returns a CPU tensor."""
        buffer = torch.empty(numel, dtype=dtype, device=self.device)
        if numel:
            dist.recv(buffer, sender, group=self.group)
        return buffer.cpu()

    def _wait(self, hop: Hop, word: str, peer: int) -> None:
        try:
            self.store.wait([f"{hop}/{word}"], timedelta(seconds=self.timeout))
        except dist.DistStoreError as error:
            what = {"clear": "a clear-to-send", "go": "a message"}[word]
            raise self._timed_out(hop, f"{what} from", peer) from error

    def _copy(self, hop: Hop, peer: int, transfer: Callable[..., Any], *args: Any) -> Any:
        """Returns `transfer(*args)` once the GPU has finished the copy; a failure names both
        ranks."""

        def on_stream() -> Any:
            with torch.cuda.stream(self.stream):
                transferred = transfer(*args)
            if self.stream:
                self.stream.synchronize()
            return transferred

        try:
            return self._copier.submit(on_stream).result(self.timeout)
        except TimeoutError as error:
            raise self._timed_out(hop, "the copy to or from", peer) from error
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            both = f"between {self.describe(self.rank)} and {self.describe(peer)}"
            raise WireError(f"{hop}: the copy {both} failed: {error}") from error

    def _timed_out(self, hop: Hop, what: str, peer: int) -> WireError:
        return WireError(
            f"{hop}: {self.describe(self.rank)} waited {self.timeout:g} s for {what} "
            f"{self.describe(peer)}; raise --timeout if that rank is only slow"
        )
