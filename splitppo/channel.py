"""The wire: three channels between the two groups, and the handshake that keeps NCCL from ever
waiting.

A posted NCCL send or recv spins on the GPU until its peer posts too: it would slow what runs there,
and could dead-lock against the collectives of FSDP. So both sides agree first, in host memory, over
the store:

    receiver                          sender
    clear to send  ------------->     (asks for it between two decode steps, later waits in a thread)
                   <-------------     go, with the header: how much is coming
    posts its recv                    posts its send

The copy then takes microseconds. Batches travel over a process group of their own: NCCL on GPUs,
Gloo on CPUs.
"""

import os
import sys
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from splitppo.errors import WireError
from splitppo.job.collectives import Group
from splitppo.placement import Ownership, Placement, Role, chunk_sizes
from splitppo.rollout import Episode, Rollout, exchange_rows, pack_rows, unpack_rows


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
        return f"step {self.step} {self.channel} chunk {self.chunk} rank {self.sender} -> rank {self.receiver}"


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
        # that crossed here since the last `spent`
        self.bytes = 0
        self.seconds = 0.0

    def is_clear(self, hop: Hop) -> bool:
        """Sender: whether the receiver has given its clear-to-send. Doesn't wait."""
        return self.store.check([f"{hop}/clear"])

    def send(self, hop: Hop, payload: Tensor, header: Sequence[int] = ()) -> None:
        """Sender: waits until the receiver is ready, then sends a 1-D CPU tensor with a header of
        integers."""
        self._wait(hop, "clear", hop.receiver)
        self.store.set(f"{hop}/go", array("q", [payload.numel(), *header]).tobytes())
        self._trace(f"sends {payload.numel()} x {payload.dtype}", hop)
        self._copy(hop, hop.receiver, self.transfer_out, payload, hop.receiver)
        self.bytes += payload.nbytes

    def recv(
        self, hop: Hop, dtype: torch.dtype, check: Callable[[list[int]], int]
    ) -> tuple[list[int], Tensor]:
        """Receiver: gives its clear-to-send, waits for the sender's go, then receives the header
        and a 1-D CPU tensor. `check`: header -> the number of elements that must come.

        One message at a time: a second sender that is clear to send would post, and its GPU would
        wait.
        """
        self._trace("clear to send", hop)
        self.store.set(f"{hop}/clear", b"1")
        self._wait(hop, "go", hop.sender)
        numel, *header = array("q", self.store.get(f"{hop}/go"))
        for word in ("clear", "go"):
            self.store.delete_key(f"{hop}/{word}")
        if numel != (due := check(header)):
            raise WireError(
                f"{hop}: {numel} elements announced where {due} are due; do all ranks run one version?"
            )
        payload = self._copy(hop, hop.sender, self.transfer_in, numel, dtype, hop.sender)
        self.bytes += payload.nbytes
        self._trace(f"has received {numel} x {dtype}", hop)
        return header, payload

    def spent(self) -> dict[str, float]:
        """Metrics of what crossed at this rank since the last call: MB, and seconds of copying."""
        figures = {"perf/wire_mb": self.bytes / 1e6, "perf/wire_s": self.seconds}
        self.bytes = 0
        self.seconds = 0.0
        return figures

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
            what = "a clear-to-send" if word == "clear" else "a message"
            raise self._timed_out(hop, f"{what} from", peer) from error

    def _copy(self, hop: Hop, peer: int, transfer: Callable[..., Any], *args: Any) -> Any:
        """Returns `transfer(*args)` once the GPU has finished the copy; a failure names both
        ranks."""

        def on_stream() -> Any:
            with torch.cuda.stream(self.stream):
                found = transfer(*args)
            if self.stream:
                self.stream.synchronize()
            return found

        start = time.monotonic()
        try:
            return self._copier.submit(on_stream).result(self.timeout)
        except TimeoutError as error:
            raise self._timed_out(
                hop, f"the copy {'to' if peer == hop.receiver else 'from'}", peer
            ) from error
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            both = f"between {self.describe(self.rank)} and {self.describe(peer)}"
            raise WireError(f"{hop}: the copy {both} failed: {error}") from error
        finally:
            self.seconds += time.monotonic() - start

    def _timed_out(self, hop: Hop, what: str, peer: int) -> WireError:
        waited = (
            f"{self.describe(self.rank)} waited {self.timeout:g} s for {what} {self.describe(peer)}"
        )
        return WireError(f"{hop}: {waited}; raise --timeout if that rank is only slow")

    def _trace(self, what: str, hop: Hop) -> None:
        if os.environ.get("SPLITPPO_TRACE") == "1":
            # one write a line, since all ranks write to one screen
            sys.stderr.write(f"[trace {time.time():.6f}] rank {self.rank} {what}: {hop}\n")


class _Link:
    """One channel as one rank sees it: its peers, and the slots it has in common with each of them
    in a step.

    Args:
        sender: the role that sends.
        group: this rank's. The first rank of a set of ranks with the same rows sends and receives
            for all of it.
    """

    def __init__(
        self, name: str, sender: Role, wire: Wire, placement: Placement, ownership: Callable[[int], Ownership],
        group: Group,
    ):  # fmt: skip
        self.name = name
        self.wire = wire
        self.ownership = ownership
        self.group = group
        self.role: Role = placement.roles(wire.rank)[0]
        self.other: Role = "critic" if self.role == "actor" else "actor"
        self.sends = self.role == sender
        self.ranks = placement.groups[self.other]

    def _peers(self, step: int) -> list[tuple[int, list[int]]]:
        """(global rank of the peer, slots in common with it) for each peer with slots, in the order
        of their ranks."""
        own = self.ownership(step)
        size = self.ownership(step).sizes[self.other]
        speakers = self.ranks[:: len(self.ranks) // size]
        found = [
            own.between(self.role, self.group.dp_rank, self.other, peer) for peer in range(size)
        ]
        return [(rank, slots) for rank, slots in zip(speakers, found, strict=True) if slots]

    def _hop(self, step: int, peer: int, chunk: int = 0) -> Hop:
        both = (self.wire.rank, peer) if self.sends else (peer, self.wire.rank)
        return Hop(self.name, step, chunk, *both)

    def _recv(
        self, hop: Hop, dtype: torch.dtype, check: Callable[[list[int]], int]
    ) -> tuple[list[int], Tensor]:
        """`Wire.recv` for all ranks of a set."""
        header, payload = self.wire.recv(hop, dtype, check) if self.group.speaks else (None, None)
        numbers = self.group.broadcast(
            None if header is None else torch.tensor(header), torch.int64
        )
        return numbers.tolist(), self.group.broadcast(payload, dtype)


class RolloutLink(_Link):
    """`rollouts`, actor -> critic: finished rows, streamed in at most `chunks` messages a pair of
    ranks.

    With a `window` (tokens of a slot) a pair has as many messages; each holds the rows that end in
    its part of the window, and only its header says how many.
    """

    def __init__(self, *args, chunks: int, window: int):
        super().__init__(*args)
        self.chunks = chunks
        self.window = window
        self._step = 0
        self._peer_of: dict[int, int] = {}  # slot -> peer
        self._place: dict[int, int] = {}  # slot -> tokens that it has decoded in this step
        self._filling: dict[int, list[Episode]] = {}  # peer -> rows of its next chunk
        self._due: dict[
            int, deque[tuple[Hop, int | None]]
        ] = {}  # peer -> its chunks; their rows, None: as many as end
        self._ready: list[tuple[Hop, list[Episode]]] = []
        self._poster = ThreadPoolExecutor(1, "rollouts")

    def offer(self, step: int, finished: Iterable[Episode]) -> None:
        """Actor: takes rows as they finish; posts each full chunk whose critic is clear to receive;
        never waits."""
        self._begin(step)
        for episode in finished if self.group.speaks else ():
            slot = episode.row % self.ownership(step).count
            if self.window:  # slots decode side by side
                self._place[slot] += episode.fresh
                self._close_before((self._place[slot] * self.chunks - 1) // self.window)
            peer = self._peer_of[slot]
            self._filling[peer].append(episode)
            if len(self._filling[peer]) == self._due[peer][0][1]:
                self._close(peer)
        waiting = self._ready
        self._ready = []
        for message in waiting:
            if self.wire.is_clear(message[0]):
                self._post([message])
            else:
                self._ready.append(message)

    def flush(self, step: int) -> Future[None]:
        """Actor: a thread posts what is left and waits for each critic rank in turn. Every row must
        have been offered. The wire is the thread's until the result is there."""
        self._begin(step)
        missing = sum(count or 0 for due in self._due.values() for _, count in due)
        if missing:
            raise WireError(
                f"step {step} {self.name}: rank {self.wire.rank} was not offered {missing} of its rows"
            )
        self._close_before(self.chunks)
        # chunk by chunk, so that every wait is for a critic rank that is, or will come, at that
        # chunk
        left = sorted(self._ready, key=lambda entry: (entry[0].chunk, entry[0].receiver))
        self._ready = []
        return self._poster.submit(self._post, left)

    def recv(self, step: int, chunk: int) -> list[Episode]:
        """Critic: the rows of one chunk from all actor ranks, without log-probs, which stay on the
        actor."""
        episodes = []
        for rank, slots in self._peers(step):
            if self.window or chunk_sizes(len(slots), self.chunks)[chunk]:
                hop = self._hop(step, rank, chunk)
                _, message = self._recv(hop, torch.int32, lambda head: head[0])
                episodes += unpack_rows(message)
        return episodes

    def _begin(self, step: int) -> None:
        """Plans the messages of a step, at its first call; on the rank that sends for its set."""
        if step == self._step or not self.group.speaks:
            return
        self._step = step
        self._due = {}
        self._peer_of = {}
        self._filling = defaultdict(list)
        self._place = defaultdict(int)
        for peer, slots in self._peers(step):
            sizes = [None] * self.chunks if self.window else chunk_sizes(len(slots), self.chunks)
            self._due[peer] = deque(
                (self._hop(step, peer, i), size) for i, size in enumerate(sizes) if size != 0
            )
            self._peer_of |= dict.fromkeys(slots, peer)

    def _close_before(self, part: int) -> None:
        """Makes the chunks of all parts of the window before this one ready."""
        for peer, due in self._due.items():
            while due and due[0][0].chunk < part:
                self._close(peer)

    def _close(self, peer: int) -> None:
        """Makes the peer's next chunk ready."""
        self._ready.append((self._due[peer].popleft()[0], self._filling.pop(peer, [])))

    def _post(self, chunks: Sequence[tuple[Hop, list[Episode]]]) -> None:
        for hop, episodes in chunks:
            message = pack_rows(episodes)
            self.wire.send(hop, message, [len(message)])


class TensorLink(_Link):
    """`logprobs` (actor -> critic) or `advantages` (critic -> actor): packed per-token tensors, one
    message a pair."""

    def send(self, step: int, rollout: Rollout, *packed: Tensor) -> None:
        """Sends the rows in common of float32 tensors `[N]`."""
        stacked = torch.stack(packed)
        for peer, rows in self._shared(step, rollout) if self.group.speaks else ():
            self.wire.send(self._hop(step, peer), rollout.select(stacked, rows).float().flatten())

    def recv(self, step: int, rollout: Rollout, *, fields: int) -> list[Tensor]:
        """`fields` packed tensors `[N]` for all rows of `rollout`."""
        by_row: list[dict[int, Tensor]] = [{} for _ in range(fields)]
        for peer, rows in self._shared(step, rollout):
            lengths = [rollout.lengths[rollout.index[row]] for row in rows]
            _, payload = self._recv(
                self._hop(step, peer), torch.float32, lambda _, n=lengths: fields * sum(n)
            )
            for field, values in zip(by_row, payload.view(fields, -1), strict=True):
                field.update(zip(rows, values.split(lengths), strict=True))
        return [rollout.pack(field) for field in by_row]

    def _shared(self, step: int, rollout: Rollout) -> list[tuple[int, list[int]]]:
        """(global rank of the peer, rows in common with it) for each peer with rows."""
        owned = self.ownership(step)
        found = [(peer, owned.rows_of(slots, rollout.rows)) for peer, slots in self._peers(step)]
        return [(peer, rows) for peer, rows in found if rows]


class Links:
    """The three channels, in the order in which a step uses them."""

    def __init__(
        self, wire: Wire, placement: Placement, ownership: Callable[[int], Ownership], group: Group, *, chunks: int,
        window: int = 0,
    ):  # fmt: skip
        self.wire = wire
        self.chunks = chunks
        where: Any = (wire, placement, ownership, group)
        self.rollouts = RolloutLink("rollouts", "actor", *where, chunks=chunks, window=window)
        self.logprobs = TensorLink("logprobs", "actor", *where)
        self.advantages = TensorLink("advantages", "critic", *where)


class Exchange:
    """What ranks that play both roles have in the place of `Links`: `rollouts`, `logprobs`,
    `advantages`. Each role deals rows to its own tensor-parallel sets, so a rank may need rows in
    one role that it does not hold in the other. Where the sets of both roles are the same, nothing
    is sent or copied.

    All ranks of a set hold the same rows. A rank gets the rows of another set from the rank that
    has its own place there: the two are on one line along the first axis of the sender's group.

    Args:
        groups: role -> its group, of the same ranks in one order. All of them make each exchange.
    """

    def __init__(self, groups: Mapping[Role, Group], ownership: Callable[[int], Ownership]):
        self.groups = groups
        self.ownership = ownership
        self.same = len({group.dp_size for group in groups.values()}) == 1
        self.logprobs = partial(self._tensors, "actor", "critic")
        self.advantages = partial(self._tensors, "critic", "actor")

    def rollouts(self, step: int, rollout: Rollout) -> Rollout:
        """This rank's rows as a critic, given its rows as an actor. Log-probs stay with the
        actor."""
        if self.same:
            return rollout
        sent = self._sent("actor", "critic", step, rollout)
        parts = [[rollout.episodes[rollout.index[row]] for row in rows] for rows in sent]
        return Rollout(exchange_rows(self.groups["actor"], parts))

    def _tensors(
        self,
        sender: Role,
        receiver: Role,
        step: int,
        held: Rollout,
        due: Rollout,
        packed: Sequence[Tensor],
    ) -> list[Tensor]:
        """Packed tensors `[N]` of the rows `due`, this rank's as a receiver, given those of the
        rows `held`, this rank's as a sender."""
        if self.same:
            return list(packed)
        # a token's values side by side, so that one row's part follows another's
        values = torch.stack(list(packed)).float()
        parts = self.groups[sender].all_to_all(
            [
                held.select(values, rows).T.flatten()
                for rows in self._sent(sender, receiver, step, held)
            ]
        )
        owned = self.ownership(step)
        slots = (
            owned.between(sender, peer, receiver, self.groups[receiver].dp_rank)
            for peer in range(len(parts))
        )
        rows = [row for part in slots for row in owned.rows_of(part, due.rows)]
        tokens = torch.cat(parts).view(-1, len(packed))
        pieces = tokens.split([due.lengths[due.index[row]] for row in rows])
        by_row = dict(zip(rows, pieces, strict=True))
        return list(torch.cat([values.T[:0], *(by_row[row] for row in due.rows)]).T.contiguous())

    def _sent(self, sender: Role, receiver: Role, step: int, held: Rollout) -> list[list[int]]:
        """The rows that each rank on this rank's line gets from it."""
        owned = self.ownership(step)
        group = self.groups[sender]
        ranks = (peer * group.set_size + group.set_rank for peer in range(group.dp_size))
        slots = (
            owned.between(sender, group.dp_rank, receiver, rank // self.groups[receiver].set_size)
            for rank in ranks
        )
        return [owned.rows_of(part, held.rows) for part in slots]
