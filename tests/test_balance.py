"""Rows move inside a group once their lengths are known: all of them, whole, with what belongs to them, and evenly."""

import random

import torch
from ranks import run_threads

from splitppo.models.balance import balance
from splitppo.placement import own
from splitppo.rollout import Rollout, Sample

ROWS, LEFT_OUT = 120, {3, 50}


def sample(row: int) -> Sample:
    length = round(random.Random(row).lognormvariate(3.5, 0.8)) + 1
    return Sample(row, [row] * (1 + row % 7), [1000 * row + i for i in range(length)], [0.0] * length, row % 2 == 0)


def balance_rank(mesh, count=ROWS, cuts=3):
    world, rank = mesh.size(), mesh.rank
    owned = own(seed=0, step=1, batch_size=count, samples=1, mini_batches=cuts, actor_size=world, critic_size=world)
    mine = owned.rows("actor", rank)
    rollout = Rollout([sample(row) for part in mine for row in part])
    learnt = [[row for row in part if row not in LEFT_OUT] for part in mine]
    fields = {"old": torch.cat([torch.zeros(0), *(torch.tensor(s.response) / 7 for s in rollout.samples)])}
    fields["twice"] = 2 * fields["old"]
    got, mini_batches, figures = balance(rollout, learnt, fields, float, mesh, torch.device("cpu"))
    tokens = [sum(got.totals[got.index[row]] for row in part) for part in mini_batches]
    before = [sum(rollout.totals[rollout.index[row]] for row in part) for part in learnt]
    held = [(s.row, s.prompt, s.response) for s in got.samples if s.logprobs == []]
    per_row = {name: [t.tolist() for t in got.split(x)] for name, x in figures.items()}
    return mini_batches, held, per_row, tokens, before


def test_rows_are_dealt_out_evenly_and_keep_what_is_theirs():
    parts = run_threads(3, balance_rank)
    owned = own(seed=0, step=1, batch_size=ROWS, samples=1, mini_batches=3, actor_size=1, critic_size=1)
    uneven = []
    for index, rows in enumerate(owned.rows("actor", 0)):
        together = sorted(row for part in parts for row in part[0][index])
        assert together == sorted(set(rows) - LEFT_OUT), "a mini-batch lost rows or got others"
        now, before = ([part[k][index] for part in parts] for k in (3, 4))
        assert max(now) < 1.02 * sum(now) / 3
        uneven.append(max(before) / (sum(before) / 3))
    assert max(uneven) > 1.05, "there was nothing to even out"
    for mini_batches, held, per_row, _, _ in parts:
        assert [row for row, _, _ in held] == sorted(row for part in mini_batches for row in part)
        for (row, prompt, response), old, twice in zip(held, per_row["old"], per_row["twice"], strict=True):
            due = sample(row)
            assert (prompt, response) == (due.prompt, due.response)
            assert old == (torch.tensor(due.response) / 7).tolist()
            assert twice == (2 * torch.tensor(due.response) / 7).tolist()


def test_ranks_without_rows_take_part():
    """Two rows for three ranks: one has none before, and one has none after."""
    parts = run_threads(3, balance_rank, 2, 1)
    assert sorted(len(held) for _, held, *_ in parts) == [0, 1, 1]
    assert sorted(row for _, held, *_ in parts for row in held) == [
        (r, sample(r).prompt, sample(r).response) for r in (0, 1)
    ]
    for _, held, per_row, _, _ in parts:
        assert per_row["old"] == [(torch.tensor(response) / 7).tolist() for _, _, response in held]
