"""Who plays which role, and who owns which row: pure functions that every rank computes for itself."""

import random
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from splitppo.config import PlacementConfig, ShardSize
from splitppo.errors import UserError

Role = Literal["actor", "critic"]


@dataclass(frozen=True)
class Placement:
    """The global ranks of the two groups; equal if the placement is colocated.

    Attributes:
        mode: `per_node`, `by_node` or `colocated`.
        actor, critic: global ranks in ascending order; a rank's index in the tuple is its rank in the group.
    """

    mode: str
    actor: tuple[int, ...]
    critic: tuple[int, ...]

    @property
    def colocated(self) -> bool:
        return self.mode == "colocated"

    def roles(self, rank: int) -> tuple[Role, ...]:
        """The roles that a global rank plays."""
        actors, critics = self._members
        return (("actor",) if rank in actors else ()) + (("critic",) if rank in critics else ())

    @cached_property
    def _members(self) -> tuple[frozenset[int], frozenset[int]]:
        return frozenset(self.actor), frozenset(self.critic)


def place(config: PlacementConfig, *, world: int, local_world: int) -> Placement:
    """Cuts `world` ranks, `local_world` on each node, into the two groups.

    Raises:
        UserError: the sizes don't add up, or don't cut into nodes as the mode asks.
    """
    mode = config.mode
    if mode == "auto":
        mode = "colocated" if world == 1 else "per_node"
    if mode == "colocated":
        for name, size in (("actor", config.actor), ("critic", config.critic)):
            if size not in (None, world):
                remedy = "start more ranks (a dry run: --world-size)" if world == 1 else "use per_node"
                raise UserError(
                    f"placement.{name}={size}: all {world} ranks play both roles; {remedy} or leave it unset"
                )
        return Placement(mode, tuple(range(world)), tuple(range(world)))
    if world == 1:
        remedy = "use colocated or start more ranks (a dry run: --world-size)"
        raise UserError(f"placement.mode={mode} needs 2 ranks at least, not 1; {remedy}")
    if world % local_world:
        raise UserError(f"{world} ranks are not whole nodes of {local_world}; start as many ranks on each node")
    nodes = world // local_world
    unit = nodes if mode == "per_node" else local_world
    actor = _actor_size(config, world, unit, mode)
    if mode == "by_node":
        return Placement(mode, tuple(range(actor)), tuple(range(actor, world)))
    cut = actor // nodes
    ranks = range(world)
    return Placement(
        mode,
        tuple(rank for rank in ranks if rank % local_world < cut),
        tuple(rank for rank in ranks if rank % local_world >= cut),
    )


def _actor_size(config: PlacementConfig, world: int, unit: int, mode: str) -> int:
    """The actor group's size, the rest being the critic's; both are multiples of `unit`: the number of nodes
    (per_node) or a node's ranks (by_node)."""
    actor, critic = config.actor, config.critic
    if critic is None:
        critic = world // unit // 2 * unit if actor is None else world - actor
    if actor is None:
        actor = world - critic
    if actor + critic != world:
        raise UserError(f"placement.actor={actor} and critic={critic} do not add up to {world} ranks; give one of them")
    for name, size in (("actor", actor), ("critic", critic)):
        if size < 1:
            given = f"placement.mode={mode}, actor={config.actor}, critic={config.critic}: no rank of {world} is left"
            raise UserError(f"{given} for the {name} group; set sizes of 1 to {world - 1}, or placement.mode=colocated")
        if size % unit:
            rule = (
                f"must be the same on each of {unit} nodes" if mode == "per_node" else f"is not whole nodes of {unit}"
            )
            raise UserError(f"placement.{name}={size} with mode {mode} {rule}; use a multiple of {unit}")
    return actor


def copies(role: Role, placement: Placement, shard_size: ShardSize, *, local_world: int) -> list[list[int]]:
    """The ranks of a group in sets that each hold one copy of its weights, in ascending order.

    Raises:
        UserError: the size doesn't divide the group, or a set would take a part of one node and a part of another.
    """
    ranks = placement.actor if role == "actor" else placement.critic
    on_node = Counter(rank // local_world for rank in ranks)
    wanted = on_node[ranks[0] // local_world] if shard_size == "node" else shard_size
    size = min(wanted or len(ranks), len(ranks))
    fits = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0 and _keeps_nodes(n, list(on_node.values()))]
    if size not in fits:
        nodes = f" on {len(on_node)} nodes" if len(on_node) > 1 else ""
        told = f"fsdp.shard_size={size} does not cut the {len(ranks)} {role} ranks{nodes} into whole copies"
        raise UserError(f"{told}; use one of {fits}")
    return [list(ranks[first : first + size]) for first in range(0, len(ranks), size)]


def _keeps_nodes(size: int, on_node: list[int]) -> bool:
    """Whether sets of `size` ranks cut no node in two but into sets."""
    return all(size % held == 0 or held % size == 0 for held in on_node)


@dataclass(frozen=True)
class Ownership:
    """Rows of one step -> mini-batch, actor rank, critic rank.

    Both groups cut each mini-batch into contiguous pieces of the same order: a rank then talks to few ranks of the
    other group (all pairs together: at most actor + critic - 1 a mini-batch), and n samples of a prompt sit together.

    Attributes:
        mini_batches: the rows of each mini-batch, in the order in which they are cut over ranks.
        actor_size, critic_size: ranks of the groups.
    """

    mini_batches: tuple[tuple[int, ...], ...]
    actor_size: int
    critic_size: int

    def rows(self, role: Role, rank: int) -> list[list[int]]:
        """The rows that a group rank owns, by mini-batch; a list may be empty."""
        size = self.actor_size if role == "actor" else self.critic_size
        return [list(rows[len(rows) * rank // size : len(rows) * (rank + 1) // size]) for rows in self.mini_batches]

    def critic_rows(self, rank: int, count: int) -> list[list[int]]:
        """The rows that a critic rank owns, by mini-batch, for a value model with `count` mini-batches of its own.

        `count` divides the mini-batches, whose neighbours are then joined, or is a multiple of them: each is then dealt
        out in turn, so that every rank has its part of each. Which rows are together does not depend on the ranks.
        """
        own = self.rows("critic", rank)
        joined = len(own) // count
        if joined:
            return [[row for rows in own[i * joined : (i + 1) * joined] for row in rows] for i in range(count)]
        parts = count // len(own)
        place = [{row: i for i, row in enumerate(rows)} for rows in self.mini_batches]
        return [
            [row for row in rows if places[row] % parts == part]
            for rows, places in zip(own, place, strict=True)
            for part in range(parts)
        ]

    def all_rows(self, role: Role, rank: int) -> list[int]:
        """The rows that a group rank owns, ascending."""
        return sorted(row for rows in self.rows(role, rank) for row in rows)

    @cached_property
    def critic_of(self) -> dict[int, int]:
        """row -> critic group rank."""
        return {row: rank for rank in range(self.critic_size) for row in self.all_rows("critic", rank)}

    def pairs(self) -> list[tuple[int, int]]:
        """The group ranks, actor and critic, between which rows go."""
        return sorted({(i, self.critic_of[row]) for i in range(self.actor_size) for row in self.all_rows("actor", i)})

    def shared(self, actor: int, critic: int) -> list[int]:
        """The rows, ascending, that go from an actor group rank to a critic group rank."""
        return [row for row in self.all_rows("actor", actor) if self.critic_of[row] == critic]

    def message_rows(self, actor: int, critic: int, chunks: int) -> list[int]:
        """How many rows each of the pair's `chunks` messages holds; 0 where no message is sent.

        Which rows a message holds is decided by who finishes first; how many is known to both sides beforehand. Each
        takes half of what is left: the last rows are the longest, and what the critic does with them no longer fits
        under the rollout.
        """
        n = len(self.shared(actor, critic))
        left = [n // 2**k for k in range(chunks)] + [0]
        return [before - after for before, after in pairwise(left)]


def own(
    *, seed: int, step: int, batch_size: int, samples: int, mini_batches: int, actor_size: int, critic_size: int
) -> Ownership:
    """The ownership of a step's rows: row `p * samples + s` is sample s of the step's prompt p."""
    prompts = list(range(batch_size // samples))
    random.Random(f"rows/{seed}/{step}").shuffle(prompts)
    order = [prompt * samples + sample for prompt in prompts for sample in range(samples)]
    size = batch_size // mini_batches
    cut = tuple(tuple(order[i * size : (i + 1) * size]) for i in range(mini_batches))
    return Ownership(cut, actor_size, critic_size)
