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
LENGTHS = (4, 7, 1, 6, 5)
CUT = 1  # this row did not end
TURNS = ((1, 3, 4), (7,), (), (2, 4, 6), ())  # where they end; two rows have one turn
HELD = ((0, 1), (2, 3, 4))


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
    places: dict[str, list] = {}
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            rewards = drawn(2)[row].tolist()
            to_go = sum(reward * GAMMA**k for k, reward in enumerate(rewards[t:]))
            pair = (drawn(1)[row][t].item(), to_go)
            if row == CUT and not cut:
                continue
            octave = {0: "first", 1: "token_2", 2: "token_2"}.get(t, "token_4")
            turn = sum(t >= end for end in TURNS[row])
            for place in (octave, f"turn_{1 + turn}"):
                places.setdefault(place, []).append(pair)
    due = {}
    left = spread = 0.0  # over all tokens, around the means at their places
    for place, pairs in places.items():
        guesses, happened = torch.tensor(pairs, dtype=torch.float64).T
        error = happened - guesses
        due[f"critic/explained/{place}"] = float(1 - error.var() / happened.var())
        if not place.startswith("turn"):
            left += float((error - error.mean()).square().sum())
            spread += float((happened - happened.mean()).square().sum())
    due["critic/vf_explained_var"] = 1 - left / spread
    due["critic/first_value_error"] = sum(v - s for v, s in places["first"]) / len(places["first"])
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
