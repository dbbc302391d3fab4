"""Rows move inside a group once their lengths are known: all of them, whole, with what belongs to
them, and evenly."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from episodes import episode
from ranks import run_threads
from transformers import LlamaConfig

from splitppo.job.collectives import Group
from splitppo.models import runner as running
from splitppo.models.batching import partition
from splitppo.models.runner import Runner
from splitppo.placement import Streams, make_step_plan
from splitppo.rollout import Episode, Rollout

ROWS, LEFT_OUT = 120, {3, 50}
# so wide that a row costs its tokens
MODEL: Any = SimpleNamespace(config=LlamaConfig(hidden_size=2**40, num_attention_heads=1))


def sample(row: int) -> Episode:
    """Every fourth row has two turns, with an environment's answer between them."""
    length = round(random.Random(row).lognormvariate(3.5, 0.8)) + 1
    response = [1000 * row + i for i in range(length)]
    plain = episode(row, [row] * (1 + row % 7), response, [], "eos" if row % 2 else "limit")
    if row % 4 or length < 4:
        return plain
    mask = [not length // 3 <= i < length // 2 for i in range(length)]
    return episode(row, plain.prompt, response, end="environment", mask=mask)


def sampled(row: Episode) -> torch.Tensor:
    """The row's response tokens."""
    return torch.tensor(row.response)[row.places]


def runner_of(group: Group) -> Runner:
    return Runner(group, torch.device("cpu"), budget=1)


def balance_rank(group, count=ROWS, cuts=3):
    world, rank = group.dp_size, group.dp_rank
    owned = make_step_plan(
        Streams(count), seed=0, step=1, mini_batches=cuts, sizes={"actor": world, "critic": world}
    )
    mine = owned.slots("actor", rank)
    rollout = Rollout([sample(row) for part in mine for row in part])
    trained = [[row for row in part if row not in LEFT_OUT] for part in mine]
    fields = {"old": torch.cat([torch.zeros(0), *(sampled(s) / 7 for s in rollout.episodes)])}
    fields["twice"] = 2 * fields["old"]
    places = [rollout.places(part) for part in trained]
    got, places_now, figures = runner_of(group).balance(MODEL, rollout, places, fields)
    tokens = [sum(got.totals[place] for place in part) for part in places_now]
    before = [sum(rollout.totals[place] for place in part) for part in places]
    mini_batches = [[got.rows[place] for place in part] for part in places_now]
    per_row = {name: [t.tolist() for t in got.split(x)] for name, x in figures.items()}
    return mini_batches, got.episodes, per_row, tokens, before


def test_rows_are_spread_evenly_and_keep_what_is_theirs():
    parts = run_threads(3, balance_rank)
    owned = make_step_plan(
        Streams(ROWS), seed=0, step=1, mini_batches=3, sizes={"actor": 1, "critic": 1}
    )
    uneven = []
    for index, rows in enumerate(owned.slots("actor", 0)):
        together = sorted(row for part in parts for row in part[0][index])
        assert together == sorted(set(rows) - LEFT_OUT), "a mini-batch lost rows or got others"
        now, before = ([part[k][index] for part in parts] for k in (3, 4))
        assert max(now) < 1.02 * sum(now) / 3
        uneven.append(max(before) / (sum(before) / 3))
    assert max(uneven) > 1.05, "there was nothing to even out"
    for mini_batches, held, per_row, _, _ in parts:
        assert [s.row for s in held] == sorted(row for part in mini_batches for row in part)
        assert held == [sample(s.row) for s in held], "observations and ends stay with their rows"
        for row, old, twice in zip(held, per_row["old"], per_row["twice"], strict=True):
            assert old == (sampled(row) / 7).tolist()
            assert twice == (2 * sampled(row) / 7).tolist()


def test_ranks_without_rows_take_part():
    """Two rows for three ranks: one has none before, and one has none after."""
    parts = run_threads(3, balance_rank, 2, 1)
    assert sorted(len(held) for _, held, *_ in parts) == [0, 1, 1]
    assert sorted((row for _, held, *_ in parts for row in held), key=lambda row: row.row) == [
        sample(0),
        sample(1),
    ]
    for _, held, per_row, _, _ in parts:
        assert per_row["old"] == [(sampled(row) / 7).tolist() for row in held]


def test_the_cost_of_a_row_is_that_of_its_tokens(monkeypatch):
    asked: set[int] = set()

    def note(_: Any, tokens: list[int]) -> list[float]:
        asked.update(tokens)
        return [float(count) for count in tokens]

    def run(group: Group) -> None:
        rollout = Rollout([sample(2 * group.dp_rank)])
        fields = {"old": torch.zeros(rollout.tokens)}
        runner_of(group).balance(MODEL, rollout, [rollout.places(rollout.rows)], fields)

    monkeypatch.setattr(running, "work", note)
    run_threads(2, run)
    assert asked == {len(s.prompt) + len(s.response) for s in (sample(0), sample(2))}


@pytest.mark.parametrize("room", [0, 30, 60])
def test_bins_are_those_of_a_plain_scan(room):
    """Each item, the dearest first, goes to the cheapest bin with room for it; of equal bins and
    items, the first."""
    for seed in range(50):
        drawn = random.Random(seed)
        sizes = [drawn.randint(1, 20) for _ in range(drawn.randint(0, 30))]
        costs = [size * (1 + size / 100) for size in sizes]
        bins: list[list[int]] | None = [[] for _ in range(5)]
        for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            fit = [
                bin
                for bin in bins
                if not room or not bin or sum(sizes[j] for j in [*bin, i]) <= room
            ]
            if not fit:
                bins = None
                break
            min(fit, key=lambda bin: sum(costs[j] for j in bin)).append(i)
        assert partition(costs, 5, sizes=sizes if room else (), room=room) == bins
