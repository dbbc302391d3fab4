"""The figures that say whether the value model is any good, against loops over rows and tokens."""

from typing import Any

import pytest
import torch
from episodes import episode
from ranks import run_threads

from splitppo.critic.calibration import quality
from splitppo.job.collectives import Group
from splitppo.rollout import Rollout

GAMMA = 0.9
LENGTHS = (4, 7, 1, 6, 5, 6, 6)
CUT = 1  # this row did not end
TURNS = ((1, 3, 4), (7,), (), (2, 4, 6), (), (2, 4, 6), ())  # where they end; some have one
HELD = ((0, 1), (2, 3, 4, 5, 6))


def drawn(seed: int) -> list[torch.Tensor]:
    """Values, or rewards, of each row's tokens."""
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=drawn) for length in LENGTHS]


def quality_rank(group: Group, cut: bool, unfinished: Any) -> dict:
    rows = HELD[group.dp_rank]
    episodes = []
    for row in rows:
        sampled = [True] * LENGTHS[row]
        for end in reversed(TURNS[row][:-1]):
            sampled.insert(end, False)  # an environment answers between two turns
        end = unfinished if row == CUT else "eos"
        episodes.append(episode(row, [1], range(len(sampled)), end=end, mask=sampled))
    values, rewards = (torch.cat([drawn(seed)[row] for row in rows]) for seed in (1, 2))
    return quality(Rollout(episodes), values, rewards, GAMMA, group, cut=cut)


@pytest.mark.parametrize(("cut", "end"), [(False, "limit"), (False, "failed"), (True, "limit")])
def test_figures_are_those_of_a_loop_over_tokens(cut: bool, end: Any):
    tokens = []  # position, turn, value less its mean, reward-to-go less its mean
    first = []
    for row, length in enumerate(LENGTHS):
        rewards = drawn(2)[row].tolist()
        for t in range(length):
            to_go = sum(reward * GAMMA**k for k, reward in enumerate(rewards[t:]))
            turn = sum(t >= end for end in TURNS[row])
            if row != CUT or cut:
                tokens.append((t, turn, to_go, to_go - drawn(1)[row][t].item()))
    places: dict[str, list] = {}
    for t, turn, *pair in tokens:
        alike = torch.tensor([x[2:] for x in tokens if x[:2] == (t, turn)], dtype=torch.float64)
        around = torch.tensor(pair, dtype=torch.float64) - alike.mean(0)
        octave = {0: "first", 1: "token_2", 2: "token_2"}.get(t, "token_4")
        for place in ("all", octave, f"turn_{1 + turn}"):
            places.setdefault(place, []).append(around)
        first += [-pair[1]] if t == 0 else []
    due = {}
    for place, pairs in places.items():
        happened, error = torch.stack(pairs).T
        due[f"critic/explained/{place}"] = float(1 - error.var() / happened.var())
    due["critic/vf_explained_var"] = due.pop("critic/explained/all")
    due["critic/first_value_error"] = sum(first) / len(first)
    for found in run_threads(2, quality_rank, cut, end):
        assert found == pytest.approx(due, rel=1e-5)


def test_values_that_know_the_place_and_no_more_explain_nothing():
    """Each token is paid 1, and the rows differ in the last one alone."""
    episodes = [episode(row, [1], range(2)) for row in range(2)]
    rewards = torch.tensor([1.0, 1, 1, 3])
    values = torch.tensor([3.0, 2, 3, 2])  # the means of what is still to come
    found = run_threads(
        1, lambda group: quality(Rollout(episodes), values, rewards, 1.0, group, cut=True)
    )
    assert found[0]["critic/vf_explained_var"] == 0
    assert found[0]["critic/explained/token_2"] == 0
