"""Who plays which role, and who owns which slot: pure functions that every rank computes for
itself."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Literal, get_args

from splitppo.config import Config, PlacementConfig, SetShape, ShardSize
from splitppo.errors import UserError

Role = Literal["actor", "critic"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Placement:
    """Which global ranks play which role; `colocated`: every rank plays all of them.

    Attributes:
        mode: `per_node`, `by_node` or `colocated`.
        groups: role -> its global ranks in ascending order. A rank's index there is its rank in the
            group.
    """

    mode: str
    groups: Mapping[Role, tuple[int, ...]]

    @property
    def colocated(self) -> bool:
        return self.mode == "colocated"

    @property
    def world(self) -> int:
        return len({rank for ranks in self.groups.values() for rank in ranks})

    def roles(self, rank: int) -> tuple[Role, ...]:
        """The roles that a global rank plays."""
        return tuple(role for role, ranks in self.groups.items() if rank in ranks)


def place(
    config: PlacementConfig,
    *,
    world: int,
    local_world: int,
    gpu: bool = False,
    critic_models: bool = True,
) -> Placement:
    """Cuts `world` ranks, `local_world` on each node, into the two groups; `gpu`: whether each rank
    has one; `critic_models`: whether the run has a model for critic ranks. Raises UserError if the
    sizes don't add up, or don't cut into nodes as the mode asks."""
    mode = config.mode
    if mode == "auto":
        asks_for_two = config.actor or config.critic or config.reference == "critic"
        prefers_one = (gpu and world == 2) or not critic_models
        mode = "colocated" if world == 1 or (prefers_one and not asks_for_two) else "per_node"
    if mode == "colocated":
        for name, size in (("actor", config.actor), ("critic", config.critic)):
            if size not in (None, world):
                raise UserError(
                    f"placement.{name}={size}: all {world} ranks play both roles; use per_node, "
                    "start more ranks (a dry run: --world-size) or leave it unset"
                )
        return Placement(mode, dict.fromkeys(ROLES, tuple(range(world))))
    if world % local_world:
        raise UserError(
            f"{world} ranks can't be divided into nodes of {local_world} ranks; "
            "start as many ranks on each node"
        )
    nodes = world // local_world
    actor = _actor_size(config, world, nodes if mode == "per_node" else local_world, mode)
    if mode == "by_node":
        return Placement(mode, {"actor": tuple(range(actor)), "critic": tuple(range(actor, world))})
    cut = actor // nodes
    actors = tuple(rank for rank in range(world) if rank % local_world < cut)
    return Placement(mode, {"actor": actors, "critic": tuple(sorted({*range(world)} - {*actors}))})


def _actor_size(config: PlacementConfig, world: int, unit: int, mode: str) -> int:
    """The actor group's size, the rest being the critic's; both are multiples of `unit`: the number
    of nodes (per_node) or a node's ranks (by_node). By default the critic has a quarter, rounded
    up: with models of one size both columns then take about as long (docs/placement.md)."""
    actor = config.actor
    critic = config.critic
    if critic is None:
        critic = -(-world // unit // 4) * unit if actor is None else world - actor
    if actor is None:
        actor = world - critic
    if actor + critic != world:
        raise UserError(
            f"placement.actor={actor} and critic={critic} do not add up to {world} ranks;"
            " give one of them"
        )
    if min(actor, critic) < 1 or actor % unit or critic % unit:
        rule = "each node has ranks of both" if mode == "per_node" else "each has whole nodes"
        raise UserError(
            f"placement.actor={actor} and critic={critic} of {world} ranks: with placement.mode="
            f"{mode} {rule}, so both are multiples of {unit}, above 0; change them, use colocated,"
            " or start more ranks (a dry run: --world-size)"
        )
    return actor


def replicas(
    role: Role, placement: Placement, shard_size: ShardSize, *, local_world: int
) -> list[list[int]]:
    """The ranks of a group in sets, each of which holds the weights once, in ascending order.
    Raises UserError if the size doesn't divide the group, or a set would take a part of one node
    and a part of another."""
    ranks = placement.groups[role]
    on_node = Counter(rank // local_world for rank in ranks)
    wanted = on_node[ranks[0] // local_world] if shard_size == "node" else shard_size
    size = min(wanted or len(ranks), len(ranks))
    # sets cut no node in two but into sets
    fits = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
    fits = [n for n in fits if all(n % held == 0 or held % n == 0 for held in on_node.values())]
    if size not in fits:
        nodes = f" on {len(on_node)} nodes" if len(on_node) > 1 else ""
        raise UserError(
            f"fsdp.shard_size={size} does not divide the {len(ranks)} {role} ranks{nodes} into "
            "whole"
            f" replicas; use one of {fits}"
        )
    return [list(ranks[first : first + size]) for first in range(0, len(ranks), size)]


def set_shapes(config: Config) -> dict[Role, list[SetShape]]:
    """The sets of each group: of the model that it trains, which own rows together, then of its
    frozen models."""
    held = holders(config).items()
    return {
        role: [config.set_shape(model) for model, holder in held if holder == role]
        for role in ROLES
    }


def holders(config: Config) -> dict[str, Role]:
    """Model -> the group that holds it, if the run has it; the models that are trained come
    first."""
    return {
        "policy": "actor",
        "value": "critic",
        "reward": "critic",
        "reference": config.placement.reference,
        "teacher": "critic",
    }


def data_parallel(config: Config, placement: Placement) -> dict[Role, int]:
    """Data-parallel ranks of each group: its sets."""
    return {
        role: len(placement.groups[role]) // shapes[0].size
        for role, shapes in set_shapes(config).items()
    }


def check_sets(config: Config, placement: Placement, *, local_world: int) -> None:
    """Raises a UserError if sets don't fill a group, or don't fit into a node, or those that share
    layers into a replica."""
    for model, role in holders(config).items():
        held = replicas(role, placement, config.fsdp.shard_size, local_world=local_world)[0]
        table = "fsdp" if model == "policy" else model
        shape = config.set_shape(model)
        check = partial(
            check_cut, f"the {model}'s", role=role, placement=placement, local_world=local_world
        )
        check(f"{table}.tensor_parallel", shape.tensor, replica=len(held))
        check(f"{table}.sequence_parallel", shape.sequence, times=shape.tensor)


def check_cut(
    owner: str,
    setting: str,
    size: int,
    role: Role,
    placement: Placement,
    *,
    local_world: int,
    replica: int = 0,
    times: int = 1,
) -> None:
    """Raises a UserError if sets of `size * times` ranks don't fill a role's group, or don't fit
    into a node or a replica."""
    ranks = placement.groups[role]
    counts = [*Counter(rank // local_world for rank in ranks).values(), replica or len(ranks)]

    def cut(size: int) -> bool:
        return all(count % (size * times) == 0 for count in counts)

    if not cut(size):
        fits = list(filter(cut, range(1, len(ranks) + 1)))
        beside = f" beside tensor_parallel={times}" if times > 1 else ""
        raise UserError(
            f"{owner} {setting.partition('.')[2]}={size}{beside} does not divide the {len(ranks)} "
            f"{role} ranks, {min(counts)} on a node or in a replica, into parallel groups;"
            f" set {setting} to one of {fits}"
        )


@dataclass(frozen=True)
class Streams:
    """The S slots of a run, and the rows that each generates, one after another: slot s has the
    rows s, s + S, s + 2 S, ... of the data order. Nothing else computes a slot, a prompt or another
    row from a row's number.

    Attributes:
        slots: S, a multiple of `samples`.
        samples: the rows of a prompt. They stand side by side in the data order.
    """

    slots: int
    samples: int = 1

    def slot(self, row: int) -> int:
        """The slot that generates a row."""
        return row % self.slots

    def row(self, step: int, slot: int) -> int:
        """The row that a slot begins and ends in a step, counted from 1, without windows."""
        return (step - 1) * self.slots + slot

    def next(self, row: int) -> int:
        """The row that follows in the row's slot."""
        return row + self.slots

    def prompt(self, row: int) -> int:
        """The number of a row's prompt in the order of the prompts."""
        return row // self.samples

    def sample(self, row: int) -> int:
        """Which of its prompt's responses the row is."""
        return row % self.samples

    def slot_prompt(self, row: int) -> int:
        """The number of a row's prompt among those that all slots have at one time."""
        return self.slot(row) // self.samples


@dataclass(frozen=True)
class StepPlan:
    """One step's slots -> mini-batch, and of each group the data-parallel rank that holds their
    rows. All groups cut each mini-batch into contiguous pieces of the same order: a rank exchanges
    rows with few ranks of another group.

    Attributes:
        step: counted from 1.
        streams: the rows of each slot.
        mini_batches: the slots of each mini-batch.
        sizes: role -> data-parallel ranks of its group.
        orders: the same slots, in the order in which they are cut over ranks; empty: that of
            `mini_batches`.
    """

    step: int
    streams: Streams
    mini_batches: tuple[tuple[int, ...], ...]
    sizes: Mapping[Role, int]
    orders: tuple[tuple[int, ...], ...] = ()

    def places(self, slots: Iterable[int], rows: Iterable[int]) -> list[int]:
        """Where, among these rows, those of some slots stand: slot by slot, ascending in each."""
        by_slot: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            by_slot.setdefault(self.streams.slot(row), []).append(place)
        return [place for slot in slots for place in by_slot.get(slot, ())]

    def slots(self, role: Role, rank: int, count: int | None = None) -> list[list[int]]:
        """The slots that a group's rank owns, by mini-batch; a list may be empty. `count`:
        mini-batches of a model with another number of them than the policy. Neighbours are joined,
        or each is cut further, so that every rank has its part of each. Which slots are together
        does not depend on the ranks."""
        pieces = [
            list(piece(part, self.sizes[role], rank)) for part in self.orders or self.mini_batches
        ]
        count = count or len(pieces)
        if joined := len(pieces) // count:
            return [
                [slot for slots in pieces[i * joined : (i + 1) * joined] for slot in slots]
                for i in range(count)
            ]
        cuts = count // len(pieces)
        place = [{slot: i for i, slot in enumerate(slots)} for slots in self.mini_batches]
        return [
            [slot for slot in slots if places[slot] % cuts == part]
            for slots, places in zip(pieces, place, strict=True)
            for part in range(cuts)
        ]

    def all_slots(self, role: Role, rank: int) -> list[int]:
        """The slots that a group's rank owns, ascending."""
        return sorted(slot for slots in self.slots(role, rank) for slot in slots)

    def of_ranks(self, role: Role) -> list[list[int]]:
        """The slots, ascending, that each rank of a group owns."""
        return [self.all_slots(role, rank) for rank in range(self.sizes[role])]

    def between(self, role: Role, rank: int, other: Role, peer: int) -> list[int]:
        """The slots, ascending, that a rank of one group and a rank of another both own."""
        return sorted({*self.all_slots(role, rank)} & {*self.all_slots(other, peer)})


def chunk_sizes(rows: int, chunks: int, window: int = 0) -> list[int | None]:
    """How many of a pair's rows each of its messages holds; 0 where no message is sent. None, with
    a window: as many as end in the message's part of it.

    Which rows a message holds is decided by who finishes first; how many is known to both sides
    beforehand. Each takes half of the rows that remain. So the last message is small: its rows
    finish last, and the critic cannot score them during the rollout.
    """
    if window:
        return [None] * chunks
    left = [rows // 2**k for k in range(chunks)] + [0]
    return [before - after for before, after in pairwise(left)]


def piece(slots: Sequence[int], count: int, i: int) -> Sequence[int]:
    """The i-th of so many contiguous pieces, whose lengths differ by one at most."""
    return slots[len(slots) * i // count : len(slots) * (i + 1) // count]


def make_step_plan(
    streams: Streams,
    *,
    seed: int,
    step: int,
    mini_batches: int,
    sizes: Mapping[Role, int],
    contexts: Sequence[int] = (),
) -> StepPlan:
    """A step's plan. `contexts`: tokens that each slot begins with, if rows go on; then actor ranks
    get about as many of them, and as many slots as otherwise."""
    samples = streams.samples
    prompts = list(range(streams.slots // samples))
    random.Random(f"rows/{seed}/{step}").shuffle(prompts)
    order = [prompt * samples + sample for prompt in prompts for sample in range(samples)]
    size = streams.slots // mini_batches
    cut = tuple(tuple(order[i * size : (i + 1) * size]) for i in range(mini_batches))
    orders = _deal(cut, contexts, sizes["actor"]) if contexts else ()
    return StepPlan(step, streams, cut, sizes, orders)


def _deal(
    mini_batches: Sequence[Sequence[int]], contexts: Sequence[int], ranks: int
) -> tuple[tuple[int, ...], ...]:
    """Orders of the slots of each mini-batch in which pieces for so many ranks have contexts of
    about the same sum: the longest context that is left goes to the rank with the smallest sum."""
    orders = []
    sums = [0] * ranks
    for slots in mini_batches:
        pieces: list[list[int]] = [[] for _ in range(ranks)]
        room = [len(piece(slots, ranks, rank)) for rank in range(ranks)]
        smallest = [(sums[rank], rank) for rank in range(ranks) if room[rank]]  # of ranks with room
        heapify(smallest)
        # of equal ones, the first comes first
        for slot in sorted(slots, key=contexts.__getitem__, reverse=True):
            _, rank = heappop(smallest)
            pieces[rank].append(slot)
            sums[rank] += contexts[slot]
            if len(pieces[rank]) < room[rank]:
                heappush(smallest, (sums[rank], rank))
        orders.append(tuple(slot for part in pieces for slot in part))
    return tuple(orders)
