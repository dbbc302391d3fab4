"""Rows that go on: the program against the reference, which keeps its open rows in a list; through
kill and resume."""

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from episodes import episode
from ranks import ALONE, run_ranks, run_threads
from runs import assert_same, figures, main_rank
from test_channel import pair
from test_flagship import (
    BATCH,
    POLICY_LR,
    STEPS,
    compare,
    flags,
    inputs,
    reference,
    run,
    train_rank,
)
from tiers import wide

from splitppo.config import Config, PlacementConfig, PPOConfig, RolloutConfig, rules
from splitppo.config.cli import parse
from splitppo.engine import Ask, Piece
from splitppo.errors import UserError
from splitppo.generator.sampler import OpenRow, Sampler
from splitppo.job.collectives import Group
from splitppo.job.launch import Launch
from splitppo.placement import place
from splitppo.rollout import Episode, Prompt, Rollout, tensor_of
from splitppo.rollout.wire import unpack_rows
from splitppo.run.build import build_sampler
from splitppo.run.checks import warnings
from splitppo.run.life import plan_step
from splitppo.run.main import dry_run

__all__ = ["inputs"]  # the fixture

WINDOW = 4
LENGTHS = [1, 9, 4, 2, 12, 7, 3, 5, 8, 1, 6, 4, 11]  # of a stream's rows: up to three windows long


def lengths_file(folder: Path, lengths: list[int]) -> Path:
    (folder / "lengths.txt").write_text("\n".join(map(str, lengths)))
    return folder / "lengths.txt"


def check(
    inputs: Path,
    tmp_path: Path,
    world: int,
    lengths: list[int],
    window: int,
    hyper: Any = None,
    replays: bool = False,
    **changes: Any,
) -> dict:
    """Runs the program and the reference; returns what was recorded of the program. `hyper`:
    changes of the loss. `replays`: as the reference has it."""
    options = {"rollout__lengths": lengths_file(tmp_path, lengths), "rollout__max_new_tokens": 12}
    hyper = hyper or {"old_logprobs": "engine"}
    changes |= {f"ppo__{name}": value for name, value in hyper.items()}
    seen = run(inputs, tmp_path, world, odd="exact", rollout__window=window, **options, **changes)
    samples = changes.get("rollout__samples", 1)
    warmup = changes.get("policy__optim__warmup_steps", 0)
    like: Any = {"samples": samples, "warmup_steps": warmup, "replays": replays, **hyper}
    due = reference(inputs, seen, window=window, **like)
    compare(seen, due)
    # the mixtures' weights are ten times as large: logits of 10 and more, in float32 steps of 1e-6
    close = 2e-5 if replays else 1e-5
    for rows, step in zip(seen["rows"], due["steps"], strict=True):
        mine = [row for _, row in sorted(rows.items(), key=lambda item: (item[0] % BATCH, item[0]))]
        assert [row[:2] for row in mine] == [(row.prompt, row.response) for row in step.rows]
        for (_, _, logprobs, *_), row in zip(mine, step.rows, strict=True):
            assert logprobs == pytest.approx(row.engine, rel=0, abs=close)
    return seen


@pytest.mark.parametrize(
    ("world", "placement"),
    [
        (3, {"placement__actor": 2}),
        wide(4, {"placement__actor": 1}),
        wide(2, {"placement__mode": "colocated"}),
        wide(
            2,
            {
                "placement__mode": "colocated",
                "fsdp__tensor_parallel": 2,
                "value__tensor_parallel": 1,
                "value__offload": "all",
            },
        ),
        wide(
            3, {"placement__actor": 2, "fsdp__sequence_parallel": 2, "value__sequence_parallel": 1}
        ),
    ],
    ids=["2+1", "1+3", "colocated", "the actor's set with offload", "cut rows"],
)
def test_every_placement_is_the_reference(inputs, tmp_path, world, placement):
    seen = check(inputs, tmp_path, world, LENGTHS, WINDOW, rollout__samples=2, **placement)
    lines = seen["lines"][:STEPS]
    assert [line["window/sampled"] for line in lines] == [BATCH * WINDOW] * STEPS
    assert [line["window/rows"] for line in lines] == [len(rows) for rows in seen["rows"]]
    assert [line["window/age/max"] for line in lines] == [0, 1, 2]
    streams = [
        sorted(row for rows in seen["rows"] for row in rows if row % BATCH == slot)
        for slot in range(BATCH)
    ]
    # each stream without a gap; a row is in one step alone
    assert all(
        stream == [slot + BATCH * k for k in range(len(stream))]
        for slot, stream in enumerate(streams)
    )
    assert {len(stream) for stream in streams} >= {1, 2, 3}


def test_the_trainers_log_probs_with_token_weights(inputs, tmp_path):
    """Decoupled PPO: clipped around the policy before the update, weighted by it over the policies
    that sampled."""
    hyper = {"old_logprobs": "trainer", "importance": "token", "importance_cap": 1.02}
    seen = check(inputs, tmp_path, 1, LENGTHS, WINDOW, hyper=hyper)
    assert [0 < line["actor/importance_capped"] < 1 for line in seen["lines"][:STEPS]] == [
        False,
        True,
        True,
    ]


def test_a_step_in_which_no_row_ends_trains_nothing(inputs, tmp_path):
    """Nor does it spend the policy's schedule before the first update."""
    seen = check(
        inputs, tmp_path, 2, [12, 11], 5, placement__actor=1, policy__optim__warmup_steps=2
    )
    assert [len(rows) for rows in seen["rows"]] == [0, 0, BATCH]
    assert [line["actor/lr"] for line in seen["lines"][:STEPS]] == pytest.approx(
        [0, 0, POLICY_LR / 2]
    )
    assert seen["actor"][:2] == seen["critic"][:2] == [[], []]


def whole_rows_rank(rank: int, *args: Any) -> None:
    """No row follows another one in its slot within a step."""
    generate = Sampler.generate

    def alone(self: Sampler, engine: Any, step: int, slots: Sequence[int], *args: Any) -> Any:
        window, self.window = self.window, 0
        yield from generate(self, engine, step, slots, *args)
        self.window = window
        self.held |= {
            slot: self.new_episode(self.streams.row(step + 1, slot)) for slot in slots if window
        }

    Sampler.generate = alone  # type: ignore[method-assign]
    train_rank(rank, *args)


@pytest.mark.wide
def test_a_window_that_no_row_exceeds_changes_no_bit_if_slots_are_not_refilled(inputs, tmp_path):
    found = []
    for window in (0, 12):
        record = tmp_path / f"record_{window}"
        record.mkdir()
        changes = {"rollout.lengths": lengths_file(tmp_path, LENGTHS), "rollout.max-new-tokens": 12}
        changes |= {
            "rollout.window": window,
            "ppo.old-logprobs": "engine",
            "reward.function": "exact_match",
        }
        argv = flags(inputs, tmp_path / f"run_{window}", changes)
        run_ranks(1, whole_rows_rank, argv, record, "none", "exact")
        lines = [figures(tmp_path / f"run_{window}", role) for role in ("actor", "critic")]
        weights = [torch.load(record / f"{name}.pt") for name in ("policy", "value")]
        found.append((lines, weights))
    (lines, weights), (others, other_weights) = found
    for role, other in zip(lines, others, strict=True):
        assert {
            step: {name: line[name] for name in role[step]} for step, line in other.items()
        } == role
    assert all(
        torch.equal(one[name], two[name])
        for one, two in zip(weights, other_weights, strict=True)
        for name in one
    )


@pytest.mark.wide
def test_a_killed_run_goes_on_with_its_open_rows_and_trains_on_each_prompt_once(inputs, tmp_path):
    """Resumed with one more actor rank after two steps."""
    argv = [
        "--rollout.window=5",
        f"--rollout.lengths={lengths_file(tmp_path, LENGTHS)}",
        "--rollout.batch-size=6",
    ]
    argv += (
        "--rollout.max-new-tokens=12 --data.max-rows=8 --log.samples=1000 --checkpoint.every=2"
    ).split()
    argv += ["--ppo.kl-coef=0.01", "--log.validate-every=0", "--checkpoint.keep=9"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_ranks(2, main_rank, [*argv, "--placement.actor=1", "--steps=7", f"--run-dir={whole}"])
    run_ranks(2, main_rank, [*argv, "--placement.actor=1", "--steps=2", f"--run-dir={cut}"])
    state = json.loads((cut / "checkpoints" / "step_000002" / "actor" / "state.json").read_text())
    assert len(state["open"]) == 6
    packed = [b64decode(row) for _, row, _ in state["open"]]
    held = unpack_rows(tensor_of(packed, torch.int32))
    assert {step for row in held for step, _ in row.stretches} == {1, 2}
    run_ranks(3, main_rank, [*argv, "--placement.actor=2", "--steps=7", f"--run-dir={cut}"])
    for role in ("actor", "critic"):
        assert_same(figures(cut, role), figures(whole, role))
    files = sorted((cut / "samples").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert set(Counter(row["row"] for row in rows).values()) == {1}
    prompts = Counter(row["prompt"] for row in rows if row["row"] < 8)
    assert (len(prompts), set(prompts.values())) == (8, {1})  # the first epoch
    saved = [
        *argv,
        f"--run-dir={tmp_path / 'new'}",
        f"--resume={cut / 'checkpoints' / 'step_000007'}",
        "--steps=8",
    ]
    assert "resolved" in dry_run(parse(saved), Launch())
    with pytest.raises(UserError, match=r"6 slots; set rollout\.window above 0"):
        dry_run(parse([*saved, "--rollout.window=0", "--force"]), Launch())
    for other in ("--seed=1", "--data.task=addition", "--rollout.samples=2"):
        with pytest.raises(
            UserError,
            match=r"row \d+ of the checkpoint is unfinished, .*prompt.* changed; restore seed",
        ):
            dry_run(parse([*saved, other]), Launch())


def prompt(row: int) -> Prompt:
    return Prompt("", [row, row], "", "", {})


class Drawing:
    """An engine that draws all tokens that it is asked for: token k of a row is k."""

    def __init__(self):
        self.asks: list[Ask] = []
        self.asked: list[Ask] = []

    def abort(self) -> None: ...

    def submit(self, asks: Sequence[Ask], sampling: RolloutConfig, seed: int) -> None:
        self.asks += asks
        self.asked += asks

    def poll(self) -> list[Piece]:
        ask = self.asks.pop(0)
        tokens = range(ask.begun, ask.begun + ask.tokens)
        experts = bytes([ask.row % 256, 1, 2, 3]) * ask.tokens
        return [Piece(ask.row, [*tokens], [-0.5] * ask.tokens, "limit", experts)]


def sampler_of(
    lengths: list[int], *, slots: int = 3, window: int = 5, limit: int = 20, asked: Any = prompt
) -> Sampler:
    return Sampler(slots, asked, limit=limit, window=window, lengths=lengths)


def drawn(sampler: Sampler, step: int, slots: Sequence[int]) -> tuple[list[Episode], list[Ask]]:
    """The rows that end in a step, and what was asked for them."""
    engine: Any = Drawing()
    lists = list(sampler.generate(engine, step, slots, RolloutConfig(), 0))
    return [row for rows in lists for row in rows], engine.asked


OF_ROWS = [2, 5, 9, 10]  # their lengths; from row 4 on again


def shared(group: Group) -> list[Any]:
    """Three slots; rank 0 has the first two, and then the last two."""
    sampler = sampler_of(OF_ROWS)
    ended, _ = drawn(sampler, 1, [[0, 1], [2]][group.dp_rank])
    before = len(sampler.open)
    following = [[1, 2], [0]]
    sampler.gather_open(group)
    kept = sampler.state(group)
    sampler.move_open(group, following)
    begun = [sampler.row(2, slot) for slot in following[group.dp_rank]]
    assert sampler.held.keys() == {*following[group.dp_rank]}, "contents stay with the slot's owner"
    assert sampler.state(group) == kept
    return [ended, before, kept, begun, sampler.open]


def test_every_rank_knows_the_rows_that_go_on():
    first, second = run_threads(2, shared)
    assert first[4:] == second[4:]
    assert first[4] == {0: OpenRow(3, 3, 3, 5), 1: OpenRow(4, 0, 0, 2), 2: OpenRow(2, 5, 5, 7)}
    assert (first[1], [(row.row, row.stretches) for row in first[0]]) == (
        0,
        [(0, ((1, 2),)), (1, ((1, 5),))],
    )
    assert (second[0], second[2]) == ([], [])
    rows = [
        [3, [0, 1, 2], [-0.5] * 3, [(1, 3)]],
        [4, [], [], []],
        [2, [*range(5)], [-0.5] * 5, [(1, 5)]],
    ]
    assert len({made_by["prompt"] for *_, made_by in first[2]}) == 3
    begun = second[3] + first[3]
    assert [[row.row, [*row.response], [*row.logprobs], [*row.stretches]] for row in begun] == rows
    for row in begun:  # also where a row goes on on another rank
        experts = [segment.experts for segment in row.segments]
        assert b"".join(experts) == bytes([row.row, 1, 2, 3]) * row.tokens
    goes_on = sampler_of(OF_ROWS)
    goes_on.load_state(json.loads(json.dumps(first[2])))
    assert [goes_on.row(2, slot) for slot in range(3)] == begun
    assert goes_on.contexts() == [5, 2, 7]
    ended, asked = drawn(goes_on, 2, [2, 1, 0])
    # those with the fewest tokens come first; a slot that has ended a row asks for the next one at
    # once
    assert [(ask.row, [*ask.ids], ask.begun, ask.tokens, ask.may_stop) for ask in asked] == [
        (4, [4, 4], 0, 2, False),
        (3, [3, 3, 0, 1, 2], 3, 5, False),
        (2, [2, 2, 0, 1, 2, 3, 4], 5, 4, False),
        (7, [7, 7], 0, 3, False),
        (5, [5, 5], 0, 1, False),
    ]
    assert [(row.row, row.end, row.stretches) for row in ended] == [
        (4, "limit", ((2, 2),)),
        (2, "limit", ((1, 5), (2, 4))),
    ]
    assert [*ended[1].response] == [*range(9)]
    assert Rollout(ended).ages().tolist() == [1] * 5 + [0] * 4 + [0, 0]
    goes_on.gather_open(ALONE)
    again = sampler_of(OF_ROWS)
    again.load_state(json.loads(json.dumps(goes_on.state(ALONE))))
    assert [again.row(3, slot) for slot in range(3)] == [goes_on.row(3, slot) for slot in range(3)]
    assert again.row(3, 0).stretches == ((1, 3), (2, 5)), "of two steps"
    for slots, window in ((4, 5), (3, 0)):
        with pytest.raises(
            UserError, match=r"3 slots; set rollout\.window above 0 and rollout\.batch_size=3"
        ):
            sampler_of([], slots=slots, window=window).load_state(first[2])


def test_a_row_goes_on_with_the_prompt_that_it_was_sampled_for():
    others: set[int] = set()  # rows that have another prompt now

    def asked_for(row: int) -> Prompt:
        return prompt(row + 1 if row in others else row)

    given = sampler_of([], asked=asked_for, limit=6)
    drawn(given, 1, range(3))
    given.gather_open(ALONE)
    state = json.loads(json.dumps(given.state(ALONE)))
    sampler_of([], asked=asked_for, limit=6).load_state(state)
    with pytest.raises(
        UserError, match=r"new_tokens=5, and row 0 of .* has 5 tokens so far; set it to at least 6"
    ):
        sampler_of([], asked=asked_for, limit=5).load_state(state)
    for lengths, other in (([9, 8, 7], 4), ([], 2)):
        others.add(other)
        with pytest.raises(
            UserError,
            match=r"row \d of the checkpoint is unfinished, and its prompt .*; restore seed, data",
        ):
            sampler_of(lengths, asked=asked_for).load_state(state)


def test_a_row_goes_on_with_all_that_made_it():
    made: dict[str, Any] = {"data_source": "a", "ground_truth": "7", "extra_info": {"a": [1]}}
    origin: dict[str, Any] = {"seed": 1, "environment": ["env.py:Env", "hash"]}

    def made_by(others: dict[str, Any], other_origin: dict[str, Any]) -> Sampler:
        def asked(row: int) -> Prompt:
            return replace(prompt(row), **made | others)

        return Sampler(3, asked, limit=20, window=5, origin=origin | other_origin)

    first = made_by({}, {})
    drawn(first, 1, range(3))
    first.gather_open(ALONE)
    state = json.loads(json.dumps(first.state(ALONE)))
    made_by({}, {}).load_state(state)
    for others, other_origin, name in (
        ({"ground_truth": 7}, {}, "ground_truth"),
        ({"data_source": "b"}, {}, "ground_truth"),
        ({"extra_info": {"a": [2]}}, {}, "extra_info"),
        ({}, {"seed": 2}, "seed"),
        ({}, {"environment": ["env.py:Env", "other"]}, "environment"),
    ):
        with pytest.raises(UserError, match=f"is unfinished, and its {name} changed; restore"):
            made_by(others, other_origin).load_state(state)


SPLIT = place(PlacementConfig(actor=2), world=3, local_world=3)


@pytest.mark.parametrize(
    ("window", "placement", "rank", "sends"),
    [
        (8, SPLIT, 0, True),
        (8, SPLIT, 1, False),  # an actor rank knows the open rows itself
        (8, SPLIT, 2, True),  # a critic rank: what rank 0 sends
        (8, place(PlacementConfig(mode="colocated"), world=2, local_world=2), 0, False),
        (0, SPLIT, 0, False),
        (8, place(PlacementConfig(), world=2, local_world=2), 0, False),
    ],
)
def test_slots_follow_the_contexts_that_actor_ranks_know(window, placement, rank, sends):
    config = parse(
        [f"--rollout.window={window}", "--rollout.batch-size=4", "--ppo.mini-batches=1"]
        + ["--placement.mode=colocated"] * placement.colocated
    )
    lengths = "[2, 11, 2, 6]"
    said = {"contexts/2": ""} | ({"contexts/5": lengths} if rank == 2 else {})
    broadcast = lambda key, value: said.setdefault(key, value())  # noqa: E731
    runtime: Any = SimpleNamespace(
        broadcast=broadcast,
        store=SimpleNamespace(delete_key=said.pop),
        groups=dict.fromkeys(placement.roles(rank)),
        launch=SimpleNamespace(rank=rank),
    )
    training = SimpleNamespace(prompts=[prompt(row) for row in range(9)])
    known = {
        "config": config,
        "placement": placement,
        "tokenizer": SimpleNamespace(decode=str),
        "vocabulary_size": 9,
    }
    resolved = cast(Any, SimpleNamespace(**known))
    sampler = build_sampler(resolved, cast(Any, training))
    if rank < 2:
        sampler.open = {1: OpenRow(1, 9, 4, 11), 3: OpenRow(7, 4, 4, 6)}
    plan = plan_step(resolved, runtime, sampler, 5)
    assert said == ({"contexts/5": lengths} if sends else {"contexts/2": ""})
    if window and len(placement.groups["actor"]) > 1:
        assert {len(plan.all_slots("actor", one)) for one in (0, 1)} == {2}
        assert not any({1, 3} <= {*plan.all_slots("actor", one)} for one in (0, 1))
    else:
        assert plan.orders == ()


def test_without_windows_a_slot_has_one_row_a_step():
    sampler = sampler_of([], window=0, limit=4)
    ended, asked = drawn(sampler, 3, [0, 2])
    assert [(row.row, row.end, row.tokens) for row in ended] == [(6, "limit", 4), (8, "limit", 4)]
    assert [ask.may_stop for ask in asked] == [True, True]
    sampler.gather_open(ALONE)
    assert (sampler.state(ALONE), sampler.row(4, 1).row) == ([], 10)


def test_a_chunk_holds_the_rows_that_end_in_its_part_of_the_window():
    """Parts of four tokens; the row that goes on from another step counts with the tokens of this
    one."""
    sender, receiver, _, plan = pair(4, chunks=3, window=12)

    def ended(row: int, *stretches: tuple[int, int]) -> Episode:
        steps = [step for step, n in stretches for _ in range(n)]
        return episode(row, [1], [5] * len(steps), steps=steps)

    sender.rollouts.offer(plan(2), [ended(0, (2, 1)), ended(5, (1, 7), (2, 4))])
    sender.rollouts.offer(plan(2), [ended(4, (2, 4)), ended(9, (2, 8))])  # the slots' second rows
    posted = sender.rollouts.flush(plan(2))
    got = [[sample.row for sample in receiver.rollouts.recv(plan(2), chunk)] for chunk in range(3)]
    posted.result(timeout=10)
    assert got == [[0, 5], [4], [9]]
    nothing = sender.rollouts.flush(plan(3))
    assert [receiver.rollouts.recv(plan(3), chunk) for chunk in range(3)] == [[], [], []]
    nothing.result(timeout=10)


REFUSED = {
    "a stop string may span two windows": ["--rollout.stop", "END"],
    "use ppo.importance=token": ["--ppo.importance=sequence", "--ppo.old-logprobs=trainer"],
    "set ppo.importance=token": ["--ppo.old-logprobs=trainer"],
    "skips; change": ["--ppo.importance=token"],
    "use top_p 1": ["--rollout.top-p=0.9"],
    "must be at least 0": ["--rollout.window=-1"],
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_windows_refuse(said):
    with pytest.raises(UserError, match=said):
        rules.check(parse(["--rollout.window=8", *REFUSED[said]]))


def test_whose_log_probs_are_the_old_ones():
    assert [Config(rollout=RolloutConfig(window=w)).old_logprobs for w in (0, 8)] == [
        "trainer",
        "engine",
    ]
    decoupled = parse(
        ["--rollout.window=8", "--ppo.old-logprobs=trainer", "--ppo.importance=token"]
    )
    assert decoupled.old_logprobs == "trainer"
    rules.check(decoupled)
    assert Config(ppo=PPOConfig(old_logprobs="engine")).old_logprobs == "engine"


def test_a_mask_in_place_of_a_clip_is_warned_of():
    options = [
        f"--{name}" for name in ("rollout.window=8", "ppo.clip-mode=mask", "ppo.dual-clip=None")
    ]
    placement = place(PlacementConfig(), world=1, local_world=1)
    for argv, count in ((options, 1), (options[1:], 0)):
        known = {
            "config": parse(argv),
            "placement": placement,
            "device": torch.device("cpu"),
            "models": {"policy": SimpleNamespace(counts=SimpleNamespace(active=1, parameters=1))},
            "user_settings": (),
            "unreplayed": "",
        }
        known["eos"] = {}
        found = warnings(cast(Any, SimpleNamespace(**known)))
        assert (
            len([line for line in found if "rollout.window=8 with ppo.clip_mode=mask" in line])
            == count
        )
