"""What becomes of a raw score, the adaptive KL controller."""

from functools import partial

import pytest
import torch
from episodes import episode
from texts import bytes_tokenizer

from splitppo import algo
from splitppo.config import RewardConfig
from splitppo.rewards.shaping import place_spans, shape_scores
from splitppo.rollout import Rollout

SCORES = torch.tensor([1.0, 3.0, -5.0, 1.0])
LENGTHS, TRUNCATED = [4, 8, 10, 7], [False, False, True, False]


def of(config: RewardConfig, moments: algo.Moments | None = None) -> list[float]:
    moments = moments or algo.moments(SCORES)
    return shape_scores(SCORES, LENGTHS, TRUNCATED, moments, config, max_new_tokens=10).tolist()


def test_by_default_a_score_is_left_alone() -> None:
    assert of(RewardConfig()) == SCORES.tolist()


def test_a_row_without_an_end_loses_the_penalty() -> None:
    assert of(RewardConfig(missing_eos_penalty=0.5)) == [1.0, 3.0, -5.5, 1.0]


def test_the_last_tokens_before_the_limit_cost_ever_more() -> None:
    # 4 tokens of 10: the 7th costs a quarter, the 10th the whole
    assert of(RewardConfig(overlong_tokens=4, overlong_penalty=2.0)) == [1.0, 2.0, -7.0, 0.5]


def test_normalised_scores_have_mean_0_and_deviation_1() -> None:
    shaped = torch.tensor(of(RewardConfig(normalize="batch")))
    assert float(shaped.mean()) == pytest.approx(0, abs=1e-6)
    assert float(shaped.std()) == pytest.approx(1, abs=1e-6)


def test_a_batch_of_equal_scores_becomes_zeros() -> None:
    same = torch.full((4,), 7.0)
    moments = algo.moments(same)
    config = RewardConfig(normalize="batch")
    assert (
        shape_scores(same, LENGTHS, TRUNCATED, moments, config, max_new_tokens=10).tolist()
        == [0.0] * 4
    )


def test_a_failed_row_beside_equal_scores_is_as_far_from_them_as_it_was() -> None:
    """It is no part of the moments, whose deviation is then 0, or the rounding of a mean."""
    scores = torch.tensor([0.1, 0.1, 0.1, 0.0])
    moments = algo.moments(scores[:3])
    for rounding in (0.0, 1e-17):
        near = algo.Moments(moments.count, moments.mean, moments.variance + rounding)
        shaped = shape_scores(
            scores, LENGTHS, TRUNCATED, near, RewardConfig(normalize="batch"), max_new_tokens=10
        )
        assert shaped.tolist() == pytest.approx([0.0, 0.0, 0.0, -0.1], abs=1e-6)


def test_clipping_comes_after_normalising_and_before_the_penalties() -> None:
    config = RewardConfig(normalize="batch", clip=(-1.0, 0.25), missing_eos_penalty=3.0)
    shaped = of(config)
    assert max(shaped) == 0.25
    assert min(shaped) == -4.0


def test_what_is_added_to_the_deviation_is_1e_8() -> None:
    moments = algo.Moments(*(torch.tensor(x, dtype=torch.float64) for x in (2, -1e-8, 1e-16)))
    config = RewardConfig(normalize="running")
    shaped = shape_scores(torch.tensor([0.0]), [1], [False], moments, config, max_new_tokens=10)
    assert shaped.tolist() == pytest.approx([0.5])  # 1e-8 over 1e-8 + 1e-8
    assert shaped.dtype == torch.float32


def test_no_response_costs_more_than_the_whole_penalty() -> None:
    config = RewardConfig(overlong_tokens=4, overlong_penalty=2.0)
    moments = algo.moments(torch.zeros(0))  # of no scores
    shaped = shape_scores(
        torch.zeros(3), [6, 10, 14], [False] * 3, moments, config, max_new_tokens=10
    )
    assert shaped.tolist() == [0.0, -2.0, -2.0]


def test_a_span_is_paid_at_the_token_with_its_last_character() -> None:
    """Of the last message, whose tokens are bytes; what is no text holds no character."""
    tokenizer = bytes_tokenizer()
    eos = tokenizer.eos_token_id
    first, last = tokenizer("aé").input_ids, [eos, *tokenizer("é🙂b").input_ids, eos]
    mask = [True] * len(first) + [False] * 2 + [True] * len(last)
    rows = [
        episode(0, [1], first),
        episode(1, [1], [*first, 5, 5, *last], mask=mask),
        episode(2, [1], last),
    ]
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    spans = [[(1, 0.5), (2, 1.0), (1, 0.25)], [(1, 2.0), (2, 3.0), (3, 4.0)], []]
    paid = place_spans(Rollout(rows), spans, decode).split([3, 3 + 9, 9])
    assert [row.tolist() for row in paid] == [
        [0.75, 0.0, 1.0],
        [*[0.0] * 3, *[0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 3.0, 4.0, 0.0]],
        [0.0] * 9,
    ]
