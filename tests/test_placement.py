"""Roles and rows: pure functions, so every rule is checked over many sizes."""

import itertools
from typing import Any

import pytest

from splitppo.config import Config, FsdpConfig, PlacementConfig, ReferenceConfig, ValueConfig
from splitppo.errors import UserError
from splitppo.placement import (
    Role,
    StepPlan,
    Streams,
    check_sets,
    chunk_sizes,
    data_parallel,
    make_step_plan,
    piece,
    place,
    replicas,
    set_shapes,
)

ROLES: tuple[Role, Role] = ("actor", "critic")
SIZES = [(1, 1), (2, 1), (1, 3), (5, 3), (3, 4)]


def ownership(actor, critic, *, batch=23, samples=1, mini=1, seed=0, step=1):
    size: dict[Role, int] = {"actor": actor, "critic": critic}
    return make_step_plan(
        Streams(batch, samples), seed=seed, step=step, mini_batches=mini, sizes=size
    )


@pytest.mark.parametrize(
    ("config", "world", "local", "actor", "critic"),
    [
        (PlacementConfig(), 8, 8, [0, 1, 2, 3, 4, 5], [6, 7]),
        (PlacementConfig(), 5, 5, [0, 1, 2], [3, 4]),
        (PlacementConfig(), 4, 4, [0, 1, 2], [3]),
        (PlacementConfig(), 3, 3, [0, 1], [2]),
        (PlacementConfig(), 2, 2, [0], [1]),
        (PlacementConfig(), 10, 5, [0, 1, 2, 5, 6, 7], [3, 4, 8, 9]),
        (PlacementConfig(actor=5, critic=3), 8, 8, [0, 1, 2, 3, 4], [5, 6, 7]),
        (PlacementConfig(actor=5), 8, 8, [0, 1, 2, 3, 4], [5, 6, 7]),
        (PlacementConfig(critic=1), 4, 4, [0, 1, 2], [3]),
        (PlacementConfig(critic=2), 8, 4, [0, 1, 2, 4, 5, 6], [3, 7]),
        (PlacementConfig(), 6, 3, [0, 1, 3, 4], [2, 5]),
        (PlacementConfig(mode="by_node"), 6, 2, [0, 1, 2, 3], [4, 5]),
        (PlacementConfig(mode="by_node", critic=4), 6, 2, [0, 1], [2, 3, 4, 5]),
        (PlacementConfig(mode="colocated"), 3, 3, [0, 1, 2], [0, 1, 2]),
        (PlacementConfig(), 1, 1, [0], [0]),
    ],
)
def test_groups(config, world, local, actor, critic):
    placement = place(config, world=world, local_world=local)
    assert (list(placement.groups["actor"]), list(placement.groups["critic"])) == (actor, critic)
    assert placement.mode == (
        config.mode if config.mode != "auto" else "colocated" if world == 1 else "per_node"
    )
    assert placement.colocated == (actor == critic)
    for rank in range(world):
        assert placement.roles(rank) == ("actor",) * (rank in actor) + ("critic",) * (
            rank in critic
        )


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (PlacementConfig(), "colocated"),
        (PlacementConfig(actor=3), "per_node"),
        (PlacementConfig(critic=1), "per_node"),
        (PlacementConfig(mode="per_node"), "per_node"),
        (PlacementConfig(mode="by_node"), "by_node"),
    ],
)
def test_without_a_model_for_the_critic_nothing_is_split_unasked(config, mode):
    placement = place(config, world=4, local_world=2 + 2 * (mode != "by_node"), critic_models=False)
    assert placement.mode == mode


@pytest.mark.parametrize(
    ("config", "world", "colocated"),
    [
        (PlacementConfig(), 1, True),
        (PlacementConfig(), 2, True),
        (PlacementConfig(), 3, False),
        (PlacementConfig(mode="per_node"), 2, False),
        (PlacementConfig(critic=1), 2, False),
        (PlacementConfig(actor=1), 2, False),
        (PlacementConfig(reference="critic"), 2, False),
    ],
)
def test_two_gpus_are_colocated_unless_a_setting_asks_for_groups(config, world, colocated):
    assert place(config, world=world, local_world=world, gpu=True).colocated == colocated


@pytest.mark.parametrize(
    ("config", "world", "local", "says"),
    [
        (PlacementConfig(actor=5, critic=4), 8, 8, "do not add up to 8 ranks"),
        (PlacementConfig(actor=8), 8, 8, "actor=8 and critic=0 of 8 ranks"),
        (PlacementConfig(actor=9), 8, 8, "critic"),
        (PlacementConfig(critic=8), 8, 8, "actor=0 and critic=8 of 8 ranks"),
        (
            PlacementConfig(actor=5, critic=3),
            8,
            4,
            "per_node each node has ranks of both, so both are multiples of 2",
        ),
        (PlacementConfig(mode="by_node"), 8, 8, "actor=0 and critic=8"),
        (
            PlacementConfig(mode="by_node", actor=5),
            8,
            4,
            "each has whole nodes, so both are multiples of 4",
        ),
        (
            PlacementConfig(mode="colocated", actor=2),
            4,
            4,
            "actor=2: all 4 ranks play both roles; use per_node",
        ),
        (PlacementConfig(mode="colocated", critic=3), 4, 4, "critic=3: all 4 ranks"),
        (
            PlacementConfig(actor=2),
            1,
            1,
            r"start more ranks \(a dry run: --world-size\) or leave it unset",
        ),
        (PlacementConfig(mode="per_node"), 1, 1, "of 1 ranks"),
        (PlacementConfig(), 7, 4, "divided into nodes of 4 ranks"),
    ],
)
def test_wrong_sizes_say_what_to_do(config, world, local, says):
    with pytest.raises(UserError, match=says):
        place(config, world=world, local_world=local)


@pytest.mark.parametrize(
    ("config", "size", "due"),
    [
        (PlacementConfig(critic=4), None, [[0, 1, 4, 5]]),
        (PlacementConfig(critic=4), 2, [[0, 1], [4, 5]]),
        (PlacementConfig(critic=4), 9, [[0, 1, 4, 5]]),
        (PlacementConfig(mode="by_node"), 2, [[0, 1], [2, 3]]),
        (PlacementConfig(mode="colocated"), 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (PlacementConfig(mode="colocated"), 1, [[rank] for rank in range(8)]),
    ],
)
def test_replicas_keep_to_nodes(config, size, due):
    assert replicas("actor", place(config, world=8, local_world=4), size, local_world=4) == due


def test_a_replica_a_node_fits_any_split():
    placement = place(PlacementConfig(actor=10), world=16, local_world=8)
    assert replicas("actor", placement, "node", local_world=8) == [
        [0, 1, 2, 3, 4],
        [8, 9, 10, 11, 12],
    ]
    assert replicas("critic", placement, "node", local_world=8) == [[5, 6, 7], [13, 14, 15]]
    assert replicas(
        "actor", place(PlacementConfig(), world=2, local_world=2), "node", local_world=2
    ) == [[0]]


@pytest.mark.parametrize(
    ("config", "world", "size", "says"),
    [
        (
            PlacementConfig(mode="colocated"),
            8,
            3,
            "fsdp.shard_size=3 does not divide the 8 actor ranks on 2 nodes",
        ),
        (
            PlacementConfig(actor=6, critic=2),
            8,
            2,
            r"6 actor ranks on 2 nodes .*; use one of \[1, 3, 6\]",
        ),
        (
            PlacementConfig(actor=3),
            4,
            2,
            r"the 3 actor ranks into whole replicas; use one of \[1, 3\]",
        ),
    ],
)
def test_sizes_that_would_cut_a_replica_over_parts_of_nodes_are_refused(config, world, size, says):
    with pytest.raises(UserError, match=says):
        replicas("actor", place(config, world=world, local_world=4), size, local_world=4)


@pytest.mark.parametrize(("actor", "critic"), SIZES)
def test_every_row_has_one_owner_in_each_group(actor, critic):
    own_ = ownership(actor, critic, batch=24, mini=4)
    for role, size in zip(ROLES, (actor, critic), strict=True):
        rows = [row for rank in range(size) for row in own_.all_slots(role, rank)]
        assert sorted(rows) == list(range(24))
    shared = [
        row
        for a in range(actor)
        for c in range(critic)
        for row in own_.between("actor", a, "critic", c)
    ]
    assert sorted(shared) == list(range(24))


def test_mini_batches_do_not_depend_on_group_sizes_but_on_seed_and_step():
    cuts = {ownership(a, c, batch=24, mini=4).mini_batches for a, c in SIZES}
    assert len(cuts) == 1
    assert ownership(1, 1, step=2).mini_batches != ownership(1, 1, step=1).mini_batches
    assert ownership(1, 1, seed=2).mini_batches != ownership(1, 1, seed=1).mini_batches


@pytest.mark.parametrize(("actor", "critic"), SIZES)
def test_ranks_are_even_within_each_mini_batch(actor, critic):
    own_ = ownership(actor, critic, batch=22, mini=2)
    for role, size in zip(ROLES, (actor, critic), strict=True):
        for mini in range(2):
            counts = [len(own_.slots(role, rank)[mini]) for rank in range(size)]
            assert max(counts) - min(counts) <= 1


def test_samples_of_a_prompt_stay_together():
    own_ = ownership(2, 2, batch=24, samples=4)
    owner = {
        row: rank for rank in range(own_.sizes["critic"]) for row in own_.all_slots("critic", rank)
    }
    owners = [{owner[p * 4 + s] for s in range(4)} for p in range(6)]
    assert all(len(ranks) == 1 for ranks in owners)


@pytest.mark.parametrize("chunks", [1, 3, 40])
def test_messages_hold_every_shared_row_once(chunks):
    own_ = ownership(3, 2, batch=23)
    for a, c in itertools.product(range(3), range(2)):
        count = len(own_.between("actor", a, "critic", c))
        rows: Any = chunk_sizes(count, chunks)
        assert len(rows) == chunks
        assert sum(rows) == count


def test_the_last_rows_to_finish_are_few_in_a_message():
    assert chunk_sizes(90, 4) == [45, 23, 11, 11]
    assert chunk_sizes(2, 4) == [1, 1, 0, 0]


def test_the_value_models_own_mini_batches_join_or_cut_those_of_the_policy():
    """By hand; and the same rows are together whatever the number of ranks."""
    four = StepPlan(1, Streams(8), ((0, 1), (2, 3), (4, 5), (6, 7)), {"actor": 1, "critic": 1})
    assert four.slots("critic", 0, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert four.slots("critic", 0, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    shuffled = ((7, 1, 3, 0, 8), (5, 2, 6, 4))
    one, two = (StepPlan(1, Streams(9), shuffled, {"actor": 1, "critic": size}) for size in (1, 2))
    assert one.slots("critic", 0, 4) == [[7, 3, 8], [1, 0], [5, 6], [2, 4]]
    assert two.slots("critic", 0, 4) == [[7], [1], [5], [2]]
    assert two.slots("critic", 1, 4) == [[3, 8], [0], [6], [4]]
    assert one.slots("critic", 0, 6) == [[7, 0], [1, 8], [3], [5, 4], [2], [6]]
    assert two.slots("critic", 1, 1) == [[3, 0, 8, 6, 4]]


def test_the_pairs_between_which_rows_go():
    ownership = make_step_plan(
        Streams(24, 2), seed=1, step=1, mini_batches=3, sizes={"actor": 3, "critic": 4}
    )
    pairs = [
        (i, j) for i in range(3) for j in range(4) if ownership.between("actor", i, "critic", j)
    ]
    assert len(pairs) < 12


def config_of(
    policy: int,
    value: int | None = None,
    reference: int | None = None,
    held_by: Role = "actor",
    **fsdp,
):
    return Config(
        fsdp=FsdpConfig(tensor_parallel=policy, **fsdp),
        value=ValueConfig(tensor_parallel=value),
        reference=ReferenceConfig(tensor_parallel=reference),
        placement=PlacementConfig(reference=held_by),
    )


@pytest.mark.parametrize(
    ("config", "due"),
    [
        (config_of(1), {"actor": [1, 1], "critic": [1, 1, 1]}),
        (config_of(2), {"actor": [2, 2], "critic": [2, 2, 2]}),
        (config_of(2, 1, 4), {"actor": [2, 4], "critic": [1, 1, 1]}),
        (config_of(2, 1, held_by="critic"), {"actor": [2], "critic": [1, 1, 1, 1]}),
        (config_of(1, 2, 6, held_by="critic"), {"actor": [1], "critic": [2, 2, 6, 2]}),
    ],
)
def test_sets_of_a_group_and_of_its_frozen_models(config, due):
    assert {
        role: [shape.size for shape in shapes] for role, shapes in set_shapes(config).items()
    } == due


def test_rows_belong_to_sets():
    placement = place(PlacementConfig(actor=6, critic=2), world=8, local_world=8)
    assert data_parallel(config_of(3, 1), placement) == {"actor": 2, "critic": 2}


@pytest.mark.parametrize(
    ("config", "nodes", "says"),
    [
        (
            config_of(4, 1),
            2,
            r"4 does not divide the 6 actor ranks, 3 on a node .*; set fsdp.tensor_parallel .* of "
            r"\[1, 3\]",
        ),
        (
            config_of(6),
            1,
            r"6 does not divide the 2 critic ranks.*; set value.tensor_parallel to one of \[1, 2\]",
        ),
        (
            config_of(2, shard_size=3),
            1,
            r"policy's tensor_parallel=2 .* 6 actor ranks, 3 on a node .* of \[1, 3\]",
        ),
        (
            config_of(1, 1, 4),
            1,
            r"4 does not divide the 6 actor ranks.*; set reference.tensor_parallel .* \[1, 2, 3, "
            r"6\]",
        ),
    ],
)
def test_a_set_stays_in_a_node_and_in_a_replica(config, nodes, says):
    placement = place(PlacementConfig(actor=6, critic=2), world=8, local_world=8 // nodes)
    with pytest.raises(UserError, match=says):
        check_sets(config, placement, local_world=8 // nodes)
    check_sets(config_of(1), placement, local_world=8 // nodes)


@pytest.mark.parametrize("mini", [1, 3])
@pytest.mark.parametrize(("actor", "critic"), [(2, 1), (3, 2), (5, 3)])
def test_actor_ranks_hold_slots_of_about_the_same_context(actor, critic, mini):
    contexts = [1 + (7 * slot**3) % 101 for slot in range(30)]
    sizes: dict[Role, int] = {"actor": actor, "critic": critic}
    cut: Any = {"seed": 2, "step": 2, "mini_batches": mini, "sizes": sizes}
    plain, found = (
        make_step_plan(Streams(30, 2), **cut),
        make_step_plan(Streams(30, 2), **cut, contexts=contexts),
    )
    assert found.mini_batches == plain.mini_batches
    assert [sorted(slots) for slots in found.orders] == [
        sorted(slots) for slots in plain.mini_batches
    ]
    sums = [0] * actor
    # a scan finds what the heap finds
    for slots, order in zip(found.mini_batches, found.orders, strict=True):
        pieces: list[list[int]] = [[] for _ in range(actor)]
        room = [len(piece(slots, actor, rank)) for rank in range(actor)]
        for slot in sorted(slots, key=lambda slot: -contexts[slot]):
            rank = min((i for i in range(actor) if len(pieces[i]) < room[i]), key=lambda i: sums[i])
            pieces[rank].append(slot)
            sums[rank] += contexts[slot]
        assert order == tuple(itertools.chain(*pieces))
    held = [
        [sum(contexts[slot] for slot in c.all_slots("actor", i)) for i in range(actor)]
        for c in (plain, found)
    ]
    spread = [max(sums) - min(sums) for sums in held]
    assert spread[1] < min(24, spread[0] / 4)
    for i in range(actor):
        assert [*map(len, found.slots("actor", i))] == [*map(len, plain.slots("actor", i))]
    parts = [[o.slots("critic", i, 5 * mini) for i in range(critic)] for o in (plain, found)]
    both = [
        [sorted(itertools.chain(*slots)) for slots in zip(*ranks, strict=True)] for ranks in parts
    ]
    # which slots of a value mini-batch are together depends on no context
    assert both[0] == both[1]
