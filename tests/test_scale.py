"""What a rank has to do in jobs of 8 to 1,024 ranks: ownership and wire plan by arithmetic, the
loops with fake groups.

`python tests/test_scale.py` prints the figures of the simulated ranks.
"""

import functools
import os
import pickle
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from episodes import episode
from ranks import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from splitppo import train
from splitppo.config import PlacementConfig
from splitppo.errors import UserError
from splitppo.job import collectives, nodes, runtime
from splitppo.job.wire import Hop, Wire
from splitppo.models.tiny import build_tiny
from splitppo.placement import (
    Placement,
    Role,
    StepPlan,
    Streams,
    chunk_sizes,
    make_step_plan,
    place,
)
from splitppo.rollout.wire import pack_rows

ROWS, MINI_BATCHES, CHUNKS, LOCAL = 8, 4, 2, 8  # rows of an actor rank; ranks of a node
WORLDS = [8, 16, 128, 1024]
SPLITS = {
    "even": PlacementConfig(),
    "3 to 1": PlacementConfig(),
    "by node": PlacementConfig(mode="by_node"),
}


def job(world: int, split: str = "even") -> tuple[Placement, StepPlan]:
    """A job whose actor ranks have as many rows however many they are."""
    nodes_ = world // LOCAL
    config = PlacementConfig(critic=2 * nodes_) if split == "3 to 1" else SPLITS[split]
    placement = place(config, world=world, local_world=LOCAL)
    size: Any = {
        "sizes": {
            "actor": len(placement.groups["actor"]),
            "critic": len(placement.groups["critic"]),
        }
    }
    batch = ROWS * len(placement.groups["actor"])
    return placement, make_step_plan(
        Streams(batch, 2), seed=1, step=3, mini_batches=MINI_BATCHES, **size
    )


@pytest.mark.parametrize(
    ("world", "split"),
    [
        (world, split)
        for world in WORLDS
        for split in SPLITS
        if (world, split) != (LOCAL, "by node")
    ],
)
def test_rows_and_messages_of_many_ranks(world, split):
    placement, cut = job(world, split)
    actors, critics = len(placement.groups["actor"]), len(placement.groups["critic"])
    batch = ROWS * actors
    sizes: dict[Role, int] = {"actor": actors, "critic": critics}
    for role, size in sizes.items():
        held = [cut.slots(role, rank) for rank in range(size)]
        assert sorted(row for rows in held for part in rows for row in part) == list(range(batch))
        for number in range(MINI_BATCHES):  # each is cut as evenly as it can be
            found = {len(rows[number]) for rows in held}
            assert max(found) - min(found) <= 1
    some = range(0, actors, max(1, actors // 16))
    peers = [[j for j in range(critics) if cut.between("actor", i, "critic", j)] for i in some]
    # neighbours in the order of ranks, whatever the number of ranks
    assert max(len(others) for others in peers) <= 2 * MINI_BATCHES
    for i, others in zip(some, peers, strict=True):
        for j in others:
            count = len(cut.between("actor", i, "critic", j))
            assert sum(cast(Any, chunk_sizes(count, CHUNKS))) == count
            if split != "by node":  # then no row leaves its node
                assert (
                    placement.groups["actor"][i] // LOCAL == placement.groups["critic"][j] // LOCAL
                )


@pytest.mark.parametrize("actor", [2, 3, 4, 5, 6])
def test_per_node_placements_send_rows_within_nodes_alone(actor):
    """[4,4]x2, [6,2]x2, [3,5]x2 and others."""
    placement = place(PlacementConfig(actor=2 * actor), world=16, local_world=8)
    sizes: Any = {"sizes": {"actor": 2 * actor, "critic": 16 - 2 * actor}}
    cut = make_step_plan(Streams(240), seed=0, step=1, mini_batches=2, **sizes)
    for i, first in enumerate(placement.groups["actor"]):
        for j, second in enumerate(placement.groups["critic"]):
            assert not cut.between("actor", i, "critic", j) or first // 8 == second // 8


@pytest.mark.parametrize(
    ("config", "world", "actor"),
    [
        (PlacementConfig(mode="by_node"), 24, range(16)),  # three nodes: two and one
        (PlacementConfig(mode="by_node", actor=8), 40, range(8)),  # five: one and four
        (PlacementConfig(mode="by_node", critic=8), 40, range(32)),
    ],
)
def test_by_node_takes_unequal_and_odd_numbers_of_nodes(config, world, actor):
    assert place(config, world=world, local_world=8).groups["actor"] == tuple(actor)
    with pytest.raises(UserError, match="whole nodes, so both are multiples of 8"):
        place(PlacementConfig(mode="by_node", actor=12), world=world, local_world=8)


# The loops of single ranks, the others made up


class Count:
    """What a rank sends and receives, in messages and bytes, by channel or collective."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, name: str, size: int) -> None:
        self.calls[name] += 1
        self.bytes[name] += size


def counted(count: Count, function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        count.add(function.__name__, min((tensor.nbytes for tensor in given), default=0))
        return function(*args, **kwargs)

    return call


def simulate(_: int, rank: int, world: int, folder: str) -> tuple[dict[str, int], dict[str, int]]:
    """One rank's run of a step in a job of `world`; collectives give back what this rank put in."""
    run_dir, nodes_ = Path(folder) / f"{world}_{rank}", world // LOCAL
    build_tiny(run_dir / "tiny", seed=0)  # rank 0's part
    env = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % LOCAL, "LOCAL_WORLD_SIZE": LOCAL}
    os.environ.update(
        {name: str(value) for name, value in (env | {"GROUP_WORLD_SIZE": nodes_}).items()}
    )
    placement, count = place(PlacementConfig(), world=world, local_world=LOCAL), Count()
    init, new_group = dist.init_process_group, dist.new_group

    def cut(step: int) -> StepPlan:
        sizes: Any = {
            "sizes": {
                "actor": len(placement.groups["actor"]),
                "critic": len(placement.groups["critic"]),
            }
        }
        batch = ROWS * len(placement.groups["actor"])
        return make_step_plan(Streams(batch), seed=0, step=step, mini_batches=MINI_BATCHES, **sizes)

    def send(self: Wire, hop: Hop, payload: torch.Tensor, header: Any = ()) -> None:
        count.add(hop.channel, payload.nbytes + 8 * len(header))

    def recv(
        self: Wire, hop: Hop, dtype: torch.dtype, check: Any
    ) -> tuple[list[int], torch.Tensor]:
        if hop.channel != "rollouts":
            payload = torch.zeros(check([]), dtype=dtype)
            count.add(hop.channel, payload.nbytes + 8)
            return [0], payload
        at = (
            placement.groups["actor"].index(hop.sender),
            placement.groups["critic"].index(hop.receiver),
        )
        due = cut(hop.step).between("actor", at[0], "critic", at[1])
        counts: Any = chunk_sizes(len(due), CHUNKS)
        first = sum(counts[: hop.chunk])
        rows = due[first : first + counts[hop.chunk]]
        payload = pack_rows(episode(row, [5] * 3, [5] * 4) for row in rows)
        count.add(hop.channel, payload.nbytes + 8)
        return [len(payload)], payload

    dist.init_process_group = lambda *_, **__: init(
        "fake", store=FakeStore(), rank=rank, world_size=world
    )
    dist.new_group = lambda ranks=None, **_: new_group(ranks, backend="fake")
    for name in (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_gather",
        "broadcast",
    ):
        setattr(dist, name, counted(count, getattr(dist, name)))
    reduce, gather = dist.all_reduce, dist.all_gather_object

    def all_reduce(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        reduce(*args, **kwargs)
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
        count.add("all_gather_object", len(pickle.dumps(value)) * len(found))
        gather(found, value, group=group)

    dist.all_reduce, dist.all_gather_object = all_reduce, all_gather_object
    Wire.send, Wire.recv, Wire.is_clear = send, recv, lambda self, hop: True
    store = dist.HashStore()
    there = nodes.Peer("host", "cpu", os.getpid(), "network", "machine", "")

    def all_to_all(_: Any, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        count.add("all_to_all", sum(part.nbytes for part in parts))
        return parts

    collectives.Group.all_to_all = all_to_all  # type: ignore[assignment, method-assign]
    runtime.connect, runtime.join = lambda *_: store, lambda *_: (0, [there] * world)
    runtime.Runtime.all_gather = lambda self, key, value: [value] * world
    runtime.Runtime.broadcast = lambda self, key, value, *, patience=0.0: (
        "built" if key == "tiny" else value()
    )
    runtime.Runtime.wait_for_all = lambda self: None
    runtime.Status.stopped_by = lambda self, step: None  # rank 0, which answers, may not be there
    argv = [
        f"--run-dir={run_dir}",
        "--steps=1",
        f"--rollout.batch-size={ROWS * len(placement.groups['actor'])}",
    ]
    argv += [
        f"--ppo.mini-batches={MINI_BATCHES}",
        f"--rollout.chunks={CHUNKS}",
        "--log.validate-every=0",
    ]
    argv += (
        "--rollout.max-new-tokens=4 --ppo.epochs=1 --reward.workers=1 --ppo.kl-coef=0.01 "
        "--checkpoint.no-last"
    ).split()
    assert train.main(argv) == 0
    return dict(count.calls), dict(count.bytes)


def simulated(world: int, folder: Path) -> dict[int, tuple[dict[str, int], dict[str, int]]]:
    """The first rank, an actor's, and the last one, a critic's."""
    ranks = (0, world - 1)
    return {rank: run_ranks(1, simulate, rank, world, str(folder))[0] for rank in ranks}


def test_a_ranks_messages_do_not_grow_with_the_ranks(tmp_path, capfd):
    few, many = simulated(16, tmp_path), simulated(128, tmp_path)
    # the simulations were in processes of their own
    assert Wire.send.__module__ == "splitppo.job.wire"
    for found in (few, many):
        for calls, _ in found.values():
            assert calls["rollouts"] >= 1
            assert calls["logprobs"] >= 1
            assert calls["advantages"] >= 1
    most = [
        {name: max(calls.get(name, 0) for calls, _ in found.values()) for name in names(found)}
        for found in (few, many)
    ]
    assert most[1].keys() == most[0].keys()
    for name, calls in most[1].items():
        slack = 2 * MINI_BATCHES if name in ("rollouts", "logprobs", "advantages") else 0
        assert calls <= most[0][name] + slack, f"{name}: {calls} in place of {most[0][name]}"
    # what is small and comes from every rank of the group: as many bytes more as there are ranks
    # more
    objects = [
        max(sizes["all_gather_object"] for _, sizes in found.values()) for found in (few, many)
    ]
    assert objects[1] <= 1.1 * 8 * objects[0]
    assert objects[1] < 100_000
    for name in ("rollouts", "logprobs", "advantages"):
        bytes_ = [max(sizes.get(name, 0) for _, sizes in found.values()) for found in (few, many)]
        assert bytes_[1] <= 1.2 * bytes_[0]


def names(found: dict[int, tuple[dict[str, int], dict[str, int]]]) -> set[str]:
    return {name for calls, _ in found.values() for name in calls}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for size in (16, 128):
            for one, (calls_, sizes_) in simulated(size, Path(scratch)).items():
                told = ", ".join(
                    f"{name} {calls_[name]} ({sizes_[name]:,} B)" for name in sorted(calls_)
                )
                print(f"world {size:>4} rank {one:>4}: {told}", file=sys.stderr)
