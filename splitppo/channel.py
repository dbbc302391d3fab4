"""The wire: three channels between the two groups, and the handshake that keeps NCCL from ever waiting.

A posted NCCL send or recv spins on the GPU until its peer posts too: it would slow what runs there, and could
dead-lock against the collectives of FSDP. So both sides agree first, in host memory, over the store:

    receiver                          sender
    clear to send  ------------->     (asks for it between two decode steps, later waits in a thread)
                   <-------------     go, with the header: how much is coming
    posts its recv                    posts its send

The copy then takes microseconds. Batches travel over a communicator of their own: NCCL on GPUs, Gloo on CPU.
"""

import os
import sys
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from splitppo.placement import Ownership, Placement, Role
from splitppo.rollout import Rollout, Sample


class WireError(RuntimeError):
    """A wait for another rank ran out of time, or what came is not what was due."""


@dataclass(frozen=True)
class Hop:
    """One message: from one global rank to another, in a step; `chunk` counts a pair's messages on the channel."""

    channel: str
    step: int
    chunk: int
    sender: int
    receiver: int

    @property
    def key(self) -> str:
        return f"{self.channel}/{self.step}/{self.chunk}/{self.sender}/{self.receiver}"

    def __str__(self) -> str:
        return f"step {self.step} {self.channel} chunk {self.chunk} rank {self.sender} -> rank {self.receiver}"


class Wire:
    """Moves one tensor a hop; what the channels share.

    Args:
        rank: this process's global rank.
        group: process group of all ranks, used for nothing else.
        store: for the handshake; its connection is the wire's own, since a wait holds it up.
        device: where payloads cross; the tensors given and returned are on the CPU.
        timeout: seconds that a wait may take.
        describe: global rank -> what to call it in an error, with its host and what it was last doing.
    """

    def __init__(
        self, rank: int, group: Any, store: Any, device: torch.device, timeout: float, describe: Callable[[int], str]
    ):
        self.rank, self.group, self.store, self.device = rank, group, store, device
        self.timeout, self.describe = timeout, describe
        # a stream of its own: a batch must not queue behind the decode steps or updates already launched
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        begin = partial(torch.cuda.set_device, device) if self.stream else None
        # copies run in a thread: NCCL can't cancel one whose peer does not come, but the wait for the thread ends
        self._copier = ThreadPoolExecutor(1, "copies", begin)
        self.trace = os.environ.get("SPLITPPO_TRACE") == "1"
        self.bytes, self.seconds = 0, 0.0  # that crossed here since `spent` was asked

    def is_clear(self, hop: Hop) -> bool:
        """Sender: whether the receiver has said so. Doesn't wait."""
        return self.store.check([f"{hop.key}/clear"])

    def send(self, hop: Hop, payload: Tensor, header: Sequence[int] = ()) -> None:
        """Sender: waits until the receiver is ready, then sends a 1-D CPU tensor with a header of integers."""
        self._wait(hop, "clear", hop.receiver)
        self.store.set(f"{hop.key}/go", array("q", [payload.numel(), *header]).tobytes())
        self._trace(f"sends {payload.numel()} x {payload.dtype}", hop)
        with self._timed(payload.numel() * payload.itemsize):
            self._copy(hop, hop.receiver, self.transfer_out, payload, hop.receiver)

    def recv(self, hop: Hop, dtype: torch.dtype, check: Callable[[list[int]], int]) -> tuple[list[int], Tensor]:
        """Receiver: says that it is ready, waits for the sender's go, then receives.

        One hop at a time: a second sender that were clear to send would post, and wait for this one on its GPU.

        Args:
            check: header -> number of elements that it stands for; held against the number announced.

        Returns:
            The header and a 1-D CPU tensor.
        """
        self._trace("clear to send", hop)
        self.store.set(f"{hop.key}/clear", b"1")
        self._wait(hop, "go", hop.sender)
        numel, *header = array("q", self.store.get(f"{hop.key}/go"))
        for name in ("clear", "go"):
            self.store.delete_key(f"{hop.key}/{name}")
        if numel != (due := check(header)):
            raise WireError(f"{hop}: {numel} elements announced where {due} are due; do all ranks run one version?")
        with self._timed(numel * dtype.itemsize):
            payload = self._copy(hop, hop.sender, self.transfer_in, numel, dtype, hop.sender)
        self._trace(f"has received {numel} x {dtype}", hop)
        return header, payload

    def spent(self) -> dict[str, float]:
        """What crossed at this rank since the last call: MB, and seconds in which it was under way."""
        figures = {"perf/wire_mb": self.bytes / 1e6, "perf/wire_s": self.seconds}
        self.bytes, self.seconds = 0, 0.0
        return figures

    @contextmanager
    def _timed(self, size: int) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.bytes, self.seconds = self.bytes + size, self.seconds + time.monotonic() - start

    def transfer_out(self, payload: Tensor, receiver: int) -> None:
        """Posts the send; both sides are here at once."""
        if payload.numel():
            dist.send(payload.to(self.device), receiver, group=self.group)

    def transfer_in(self, numel: int, dtype: torch.dtype, sender: int) -> Tensor:
        """Posts the recv and returns what came, on the CPU."""
        buffer = torch.empty(numel, dtype=dtype, device=self.device)
        if numel:
            dist.recv(buffer, sender, group=self.group)
        return buffer.cpu()

    def _wait(self, hop: Hop, word: str, peer: int) -> None:
        try:
            self.store.wait([f"{hop.key}/{word}"], timedelta(seconds=self.timeout))
        except dist.DistStoreError as error:
            what = "a clear-to-send" if word == "clear" else "a message"
            raise self._late(hop, f"{what} from", peer) from error

    def _copy(self, hop: Hop, peer: int, transfer: Callable[..., Any], *args: Any) -> Any:
        """Returns `transfer(*args)` once the copy is over on the GPU, too; a failure names both ranks."""
        try:
            return self._copier.submit(self._on_stream, transfer, *args).result(self.timeout)
        except TimeoutError as error:
            raise self._late(hop, f"the copy {'to' if peer == hop.receiver else 'from'}", peer) from error
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            both = f"between {self.describe(self.rank)} and {self.describe(peer)}"
            raise WireError(f"{hop}: the copy {both} broke off: {error}") from error

    def _on_stream(self, transfer: Callable[..., Any], *args: Any) -> Any:
        with torch.cuda.stream(self.stream):
            found = transfer(*args)
        if self.stream:
            self.stream.synchronize()
        return found

    def _late(self, hop: Hop, what: str, peer: int) -> WireError:
        told = f"{self.describe(self.rank)} waited {self.timeout:g} s for {what} {self.describe(peer)}"
        return WireError(f"{hop}: {told}; raise --timeout if that is only slow")

    def _trace(self, what: str, hop: Hop) -> None:
        if self.trace:
            # one write a line: several ranks share the screen
            sys.stderr.write(f"[trace {time.time():.6f}] rank {self.rank} {what}: {hop}\n")


class _Link:
    """One channel as one rank sees it: who its peers are and which rows it shares with them in a step."""

    def __init__(
        self, name: str, sender: Role, wire: Wire, placement: Placement, ownership: Callable[[int], Ownership]
    ):
        self.name, self.sender, self.wire, self.placement, self.ownership = name, sender, wire, placement, ownership
        self.rank = wire.rank

    def _peers(self, step: int) -> list[tuple[int, list[int]]]:
        """(global rank of the peer, rows shared with it) for each peer with rows, in the order of their ranks."""
        own, actor, critic = self.ownership(step), self.placement.actor, self.placement.critic
        if self.rank in actor:
            me = actor.index(self.rank)
            peers = [(rank, own.shared(me, i)) for i, rank in enumerate(critic)]
        else:
            me = critic.index(self.rank)
            peers = [(rank, own.shared(i, me)) for i, rank in enumerate(actor)]
        return [(rank, rows) for rank, rows in peers if rows]

    def _hop(self, step: int, peer: int, *, chunk: int = 0) -> Hop:
        sends = self.rank in (self.placement.actor if self.sender == "actor" else self.placement.critic)
        return Hop(self.name, step, chunk, *((self.rank, peer) if sends else (peer, self.rank)))


class RolloutLink(_Link):
    """`rollouts`, actor -> critic: finished rows, streamed in at most `chunks` messages a pair of ranks."""

    def __init__(self, *args, chunks: int):
        super().__init__(*args)
        self.chunks = chunks
        self._step = 0
        self._filling: dict[int, list[Sample]] = {}
        self._due: dict[int, deque[tuple[int, int]]] = {}
        self._ready: deque[tuple[Hop, list[Sample]]] = deque()
        self._poster = ThreadPoolExecutor(1, "rollouts")

    def offer(self, step: int, finished: Iterable[Sample]) -> None:
        """Actor: takes rows as they finish; posts each full chunk whose critic is clear to receive; never waits."""
        if step != self._step:
            self._begin(step)
        own = self.ownership(step)
        for sample in finished:
            peer = self.placement.critic[own.critic_of[sample.row]]
            rows, due = self._filling[peer], self._due[peer]
            rows.append(sample)
            if len(rows) == due[0][1]:
                chunk, _ = due.popleft()
                self._ready.append((self._hop(step, peer, chunk=chunk), self._filling.pop(peer)))
        for _ in range(len(self._ready)):
            hop, samples = self._ready.popleft()
            if self.wire.is_clear(hop):
                self._post(hop, samples)
            else:
                self._ready.append((hop, samples))

    def flush(self, step: int) -> Future[None]:
        """Actor: has a thread post what is left, which waits for each critic rank in turn. Every row must have been
        offered. The wire is the thread's until the result is there."""
        if step != self._step:
            self._begin(step)
        missing = sum(count for due in self._due.values() for _, count in due)
        if missing:
            raise WireError(f"step {step} {self.name}: rank {self.rank} was not offered {missing} of its rows")
        # chunk by chunk, so that every wait is for a critic rank that is, or will come, at that chunk
        left = sorted(self._ready, key=lambda entry: (entry[0].chunk, entry[0].receiver))
        self._ready.clear()
        return self._poster.submit(self._post_all, left)

    def recv(self, step: int, chunk: int) -> list[Sample]:
        """Critic: the rows of one chunk from all actor ranks, without log-probs, which stay on the actor."""
        own, me = self.ownership(step), self.placement.critic.index(self.rank)
        senders = [rank for i, rank in enumerate(self.placement.actor) if own.message_rows(i, me, self.chunks)[chunk]]
        return [sample for rank in senders for sample in self._receive(self._hop(step, rank, chunk=chunk))]

    def _begin(self, step: int) -> None:
        own, me = self.ownership(step), self.placement.actor.index(self.rank)
        self._step, self._filling, self._due = step, defaultdict(list), {}
        for i, rank in enumerate(self.placement.critic):
            counts = own.message_rows(me, i, self.chunks)
            self._due[rank] = deque((chunk, count) for chunk, count in enumerate(counts) if count)

    def _post_all(self, left: Sequence[tuple[Hop, list[Sample]]]) -> None:
        for hop, samples in left:
            self._post(hop, samples)

    def _post(self, hop: Hop, samples: list[Sample]) -> None:
        header = [len(samples)]
        for sample in samples:
            header += [sample.row, len(sample.prompt), len(sample.response), int(sample.finished)]
        tokens = [token for sample in samples for token in (*sample.prompt, *sample.response)]
        self.wire.send(hop, torch.tensor(tokens, dtype=torch.int32), header)

    def _receive(self, hop: Hop) -> list[Sample]:
        header, payload = self.wire.recv(hop, torch.int32, lambda head: sum(head[2::4]) + sum(head[3::4]))
        samples, tokens, at = [], payload.tolist(), 0
        for row, prompt, response, finished in zip(*(header[1 + i :: 4] for i in range(4)), strict=True):
            middle, end = at + prompt, at + prompt + response
            samples.append(Sample(row, tokens[at:middle], tokens[middle:end], [], bool(finished)))
            at = end
        return samples


class TensorLink(_Link):
    """`logprobs` (actor -> critic) or `advantages` (critic -> actor): packed per-token tensors, one message a pair."""

    def send(self, step: int, rollout: Rollout, *packed: Tensor) -> None:
        """Sends the shared rows of float32 tensors `[N]`."""
        stacked = torch.stack(packed)
        for peer, rows in self._peers(step):
            self.wire.send(self._hop(step, peer), rollout.select(stacked, rows).float().flatten())

    def recv(self, step: int, rollout: Rollout, *, fields: int) -> list[Tensor]:
        """`fields` packed tensors `[N]` for all rows of `rollout`."""
        by_row: list[dict[int, Tensor]] = [{} for _ in range(fields)]
        for peer, rows in self._peers(step):
            lengths = [rollout.lengths[rollout.index[row]] for row in rows]
            _, payload = self.wire.recv(self._hop(step, peer), torch.float32, lambda _, n=lengths: fields * sum(n))
            for field, values in zip(by_row, payload.view(fields, -1), strict=True):
                field.update(zip(rows, values.split(lengths), strict=True))
        return [rollout.pack(field) for field in by_row]


class Links:
    """The three channels, in the order in which a step uses them."""

    def __init__(self, wire: Wire, placement: Placement, ownership: Callable[[int], Ownership], *, chunks: int):
        self.wire, self.chunks = wire, chunks
        self.rollouts = RolloutLink("rollouts", "actor", wire, placement, ownership, chunks=chunks)
        self.logprobs = TensorLink("logprobs", "actor", wire, placement, ownership)
        self.advantages = TensorLink("advantages", "critic", wire, placement, ownership)
