"""The figures that say whether the value model is any good, against loops over rows and tokens."""

import pytest
import torch
from episodes import episode
from ranks import run_threads

from splitppo.job.collectives import Group
from splitppo.models.calibration import quality
from splitppo.rollout import Rollout

GAMMA = 0.9
LENGTHS, SCORES = (4, 7, 1, 6, 5), (1.0, 0.0, 0.5, 1.0, -1.0)
CUT = 1  # this row did not end, so its score says nothing of its tokens
HELD = ((0, 1), (2, 3, 4))


def values() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return [torch.randn(length, generator=drawn) for length in LENGTHS]


def quality_rank(group: Group) -> dict:
    rows = HELD[group.dp_rank]
    samples = [
        episode(
            row,
            [1],
            list(range(LENGTHS[row])),
            [0.0] * LENGTHS[row],
            end="limit" if row == CUT else "eos",
        )
        for row in rows
    ]
    held, scores = (
        torch.cat([values()[row] for row in rows]),
        torch.tensor([SCORES[row] for row in rows]),
    )
    return quality(Rollout(samples), held, scores, GAMMA, group)


def test_figures_are_those_of_a_loop_over_tokens():
    places: dict[str, list] = {"first": [], "third_1": [], "third_2": [], "third_3": []}
    every = []
    for row, (length, score) in enumerate(zip(LENGTHS, SCORES, strict=True)):
        for t in range(length):
            pair = (values()[row][t].item(), score * GAMMA ** (length - 1 - t))
            if row == CUT:
                continue
            every.append(pair)
            places[f"third_{1 + 3 * t // length}"].append(pair)
            if t == 0:
                places["first"].append(pair)
    due = {}
    for place, pairs in places.items():
        guesses, happened = torch.tensor(pairs, dtype=torch.float64).T
        due[f"critic/explained/{place}"] = float(1 - (happened - guesses).var() / happened.var())
    due["critic/first_value_error"] = sum(v - s for v, s in places["first"]) / len(places["first"])
    low, high = min(v for v, _ in every), max(v for v, _ in every)
    bins: dict[int, list] = {}
    for pair in every:
        bins.setdefault(min(9, int((pair[0] - low) / (high - low) * 10)), []).append(pair)
    means = [[len(pairs), *(sum(column) / len(pairs) for column in zip(*pairs, strict=True))]
             for _, pairs in sorted(bins.items())]  # fmt: skip
    for found in run_threads(2, quality_rank):
        table = found.pop("critic/calibration")
        assert found == pytest.approx(due, rel=1e-5)
        assert [x for line in table for x in line.values()] == pytest.approx(
            [x for line in means for x in line], rel=1e-5
        )
