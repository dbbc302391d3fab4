"""The channels between the two groups, over the wire (`job/wire.py`), and what stands in their
place on ranks that play both roles. A step's plan says which rows two ranks have in common; each
message of a step names it."""

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from splitppo.job.collectives import Group
from splitppo.job.wire import Hop, Wire, WireError
from splitppo.placement import Placement, Role, StepPlan, chunk_sizes
from splitppo.rollout import Episode, Rollout
from splitppo.rollout.wire import (
    exchange_rows,
    exchange_tensors,
    from_bytes,
    pack,
    pack_rows,
    to_bytes,
    unpack_rows,
)


class _Link:
    """One channel as one rank sees it: its peers, and the slots it has in common with each of them
    in a step.

    Args:
        sender: the role that sends.
        group: this rank's. The first rank of a set of ranks with the same rows sends and receives
            for all of it.
    """

    def __init__(self, name: str, sender: Role, wire: Wire, placement: Placement, group: Group):
        self.name = name
        self.wire = wire
        self.group = group
        self.role: Role = placement.roles(wire.rank)[0]
        self.other: Role = "critic" if self.role == "actor" else "actor"
        self.sends = self.role == sender
        self.ranks = placement.groups[self.other]

    def _peers(self, plan: StepPlan) -> list[tuple[int, list[int]]]:
        """(global rank of the peer, slots in common with it) for each peer with slots, in the order
        of their ranks."""
        size = plan.sizes[self.other]
        speakers = self.ranks[:: len(self.ranks) // size]
        common = [
            plan.between(self.role, self.group.dp_rank, self.other, peer) for peer in range(size)
        ]
        return [(rank, slots) for rank, slots in zip(speakers, common, strict=True) if slots]

    def _hop(self, step: int, peer: int, chunk: int = 0) -> Hop:
        both = (self.wire.rank, peer) if self.sends else (peer, self.wire.rank)
        return Hop(self.name, step, chunk, *both)

    def _recv(
        self, hop: Hop, dtype: torch.dtype, check: Callable[[list[int]], int]
    ) -> tuple[list[int], Tensor]:
        """`Wire.recv` for all ranks of a set."""
        header, payload = self.wire.recv(hop, dtype, check) if self.group.speaks else (None, None)
        return self.group.of_first(lambda: header), self.group.broadcast(payload, dtype)


class RolloutLink(_Link):
    """`rollouts`, actor -> critic: finished rows, streamed in at most `chunks` messages a pair of
    ranks.

    With a `window` (tokens of a slot) a pair has as many messages; each holds the rows that end in
    its part of the window, and only its header says how many.
    """

    def __init__(self, wire: Wire, placement: Placement, group: Group, *, chunks: int, window: int):
        super().__init__("rollouts", "actor", wire, placement, group)
        self.chunks = chunks
        self.sizes = partial(chunk_sizes, chunks=chunks, window=window)
        self.part = window or sys.maxsize  # tokens of a slot after which all chunks are full
        self._step = 0
        # peer -> its chunks; their rows, None: as many as end
        self._due: dict[int, deque[tuple[Hop, int | None]]] = {}
        self._ready: list[tuple[Hop, list[Episode]]] = []
        self._poster = ThreadPoolExecutor(1, "rollouts")

    def offer(self, plan: StepPlan, finished: Iterable[Episode]) -> None:
        """Actor: takes rows as they finish; posts each full chunk whose critic is clear to receive;
        never waits."""
        self._begin(plan)
        for episode in finished if self.group.speaks else ():
            slot = plan.streams.slot(episode.row)
            # slots decode side by side
            self._decoded[slot] += episode.last_step_tokens
            self._close_before((self._decoded[slot] * self.chunks - 1) // self.part)
            peer = self._peer_of[slot]
            self._filling[peer].append(episode)
            if len(self._filling[peer]) == self._due[peer][0][1]:
                self._close(peer)
        clear = {hop for hop, _ in self._ready if self.wire.is_clear(hop)}
        self._post([message for message in self._ready if message[0] in clear])
        self._ready = [message for message in self._ready if message[0] not in clear]

    def flush(self, plan: StepPlan) -> Future[None]:
        """Actor: a thread posts what is left and waits for each critic rank in turn. Every row must
        have been offered. The wire is the thread's until the result is there."""
        self._begin(plan)
        missing = sum(count or 0 for due in self._due.values() for _, count in due)
        if missing:
            raise WireError(
                f"step {plan.step} {self.name}: rank {self.wire.rank} was not offered {missing} "
                "of its rows"
            )
        self._close_before(self.chunks)
        # chunk by chunk: every wait is for a critic rank that is, or will come, at that chunk
        left = sorted(self._ready, key=lambda entry: (entry[0].chunk, entry[0].receiver))
        self._ready = []
        return self._poster.submit(self._post, left)

    def recv(self, plan: StepPlan, chunk: int) -> list[Episode]:
        """Critic: the rows of one chunk from all actor ranks, without log-probs, which stay on the
        actor."""
        episodes = []
        for rank, slots in self._peers(plan):
            if self.sizes(len(slots))[chunk] != 0:
                _, message = self._recv(
                    self._hop(plan.step, rank, chunk), torch.int32, lambda head: head[0]
                )
                episodes += unpack_rows(message)
        return episodes

    def _begin(self, plan: StepPlan) -> None:
        """Plans the messages of a step, at its first call; on the rank that sends for its set."""
        if plan.step == self._step or not self.group.speaks:
            return
        self._step = plan.step
        self._due = {}
        self._peer_of: dict[int, int] = {}  # slot -> peer
        self._filling = defaultdict[int, list[Episode]](list)  # peer -> rows of its next chunk
        self._decoded = defaultdict[int, int](int)  # slot -> its tokens in this step
        for peer, slots in self._peers(plan):
            sizes = self.sizes(len(slots))
            self._due[peer] = deque(
                (self._hop(plan.step, peer, i), size) for i, size in enumerate(sizes) if size != 0
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
    message a pair of ranks, and a flag with them."""

    def send(
        self, plan: StepPlan, rollout: Rollout, packed: Sequence[Tensor], *, flag: bool = False
    ) -> None:
        """Sends the rows in common of tensors `[N, ...]`."""
        message = to_bytes(packed)
        for peer, places in self._shared(plan, rollout) if self.group.speaks else ():
            part = rollout.select(message, places).flatten()
            self.wire.send(self._hop(plan.step, peer), part, [flag])

    def recv(
        self, plan: StepPlan, rollout: Rollout, empty: Sequence[Tensor]
    ) -> tuple[list[Tensor], bool]:
        """The packed tensors for all rows of `rollout`, and the flag: False on a rank without rows,
        which gets no message. `empty`: what the tensors are without rows, `[0, ...]` each."""
        nothing = to_bytes(empty)
        width = nothing.shape[1]
        pieces: list[Tensor] = []
        flag = False
        shared = self._shared(plan, rollout)
        for peer, places in shared:
            lengths = [rollout.episode_lengths[place] for place in places]
            header, payload = self._recv(
                self._hop(plan.step, peer), torch.uint8, lambda _, n=lengths: width * sum(n)
            )
            flag = flag or bool(header[0])
            pieces += payload.view(-1, width).split(lengths)
        places = [place for _, places in shared for place in places]
        return from_bytes(pack(pieces, places, nothing), empty), flag

    def _shared(self, plan: StepPlan, rollout: Rollout) -> list[tuple[int, list[int]]]:
        """(global rank of the peer, places of the rows in common with it) for each peer with
        rows."""
        peers = self._peers(plan)
        shared = [(peer, plan.places(slots, rollout.rows)) for peer, slots in peers]
        return [(peer, places) for peer, places in shared if places]


class Links:
    """The three channels, in the order in which a step uses them."""

    def __init__(
        self, wire: Wire, placement: Placement, group: Group, *, chunks: int, window: int = 0
    ):
        self.wire = wire
        self.chunks = chunks
        self.rollouts = RolloutLink(wire, placement, group, chunks=chunks, window=window)
        self.logprobs = TensorLink("logprobs", "actor", wire, placement, group)
        self.advantages = TensorLink("advantages", "critic", wire, placement, group)


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

    def __init__(self, groups: Mapping[Role, Group]):
        self.groups = groups
        self.same = len({group.dp_size for group in groups.values()}) == 1
        self.logprobs = partial(self._tensors, "actor", "critic")
        self.advantages = partial(self._tensors, "critic", "actor")

    def rollouts(self, plan: StepPlan, rollout: Rollout) -> Rollout:
        """This rank's rows as a critic, given its rows as an actor. Log-probs stay with the
        actor."""
        if self.same:
            return rollout
        parts = [
            [rollout.episodes[place] for place in places]
            for places in self._sent("actor", "critic", plan, rollout)
        ]
        return Rollout(exchange_rows(self.groups["actor"], parts))

    def _tensors(
        self,
        sender: Role,
        receiver: Role,
        plan: StepPlan,
        held: Rollout,
        due: Rollout,
        packed: Sequence[Tensor],
    ) -> list[Tensor]:
        """Packed tensors `[N, ...]` of the rows `due`, this rank's as a receiver, given those of
        the rows `held`, this rank's as a sender."""
        if self.same:
            return list(packed)
        group = self.groups[sender]
        rank = self.groups[receiver].dp_rank
        slots = (plan.between(sender, peer, receiver, rank) for peer in range(group.dp_size))
        places = [place for part in slots for place in plan.places(part, due.rows)]
        sent = self._sent(sender, receiver, plan, held)
        return exchange_tensors(group, packed, held, sent, due, places)

    def _sent(self, sender: Role, receiver: Role, plan: StepPlan, held: Rollout) -> list[list[int]]:
        """The places of the rows that each rank on this rank's line gets from it."""
        group = self.groups[sender]
        receivers = (
            (peer * group.set_size + group.set_rank) // self.groups[receiver].set_size
            for peer in range(group.dp_size)
        )
        slots = (plan.between(sender, group.dp_rank, receiver, rank) for rank in receivers)
        return [plan.places(part, held.rows) for part in slots]
