"""Engines with windows: which tokens a row gets does not depend on how the windows cut it, and a
slot never rests."""

from collections import Counter
from typing import Any

import pytest
from ranks import ALONE
from test_engine import CLOSE, FIRST, Case, case, hf_case, tokenizer

from splitppo.config import RolloutConfig
from splitppo.generator.sampler import Sampler
from splitppo.rollout import Episode, Prompt

__all__ = ["case", "hf_case", "tokenizer"]  # fixtures

SLOTS, LIMIT = 6, 14


def prompt(row: int) -> Prompt:
    return Prompt("", [FIRST + row % 50, *[FIRST + row % 7] * (row % 3)], "", "", {})


def decode(
    engine: Any,
    window: int,
    steps: int,
    lengths: list[int],
    *,
    parts: int = 1,
    temperature: float = 1.0,
) -> dict[int, Episode]:
    """The rows that end in so many steps, with the same weights in all; each step is checked to be
    full. The slots come in so many calls, one after the other."""
    sampler = Sampler(SLOTS, prompt, limit=LIMIT, window=window, lengths=lengths)
    ended: dict[int, Episode] = {}
    sampling = RolloutConfig(temperature=temperature)
    for step in range(1, steps + 1):
        before = {*ended}
        for part in range(parts):
            for rows in sampler.generate(engine, step, range(part, SLOTS, parts), sampling, 3):
                assert not ended.keys() & {row.row for row in rows}, "a row has ended twice"
                ended |= {row.row: row for row in rows}
        sampler.gather_open(ALONE)
        tokens = Counter[int]()
        for row in [*(ended[row] for row in ended.keys() - before), *sampler.held.values()]:
            slot = sampler.streams.slot(row.row)
            tokens[slot] += sum(len(part.ids) for part in row.segments if part.version == step)
        assert not window or tokens == dict.fromkeys(range(SLOTS), window)
    return ended


def told(rows: dict[int, Episode]) -> dict[int, tuple[list[int], str | None]]:
    return {row: (list(sample.response), sample.end) for row, sample in rows.items()}


def check(engine: Any, temperature: float) -> None:
    whole = decode(engine, 0, 8, [], temperature=temperature)
    assert {"eos", "limit"} <= {sample.end for sample in whole.values()}
    for window, steps, parts in ((3, 13, 1), (40, 2, 1), (3, 13, 2)):
        found = decode(engine, window, steps, [], parts=parts, temperature=temperature)
        both = told(whole).keys() & told(found).keys()
        assert len(both) >= 2 * SLOTS
        assert {row: told(found)[row] for row in both} == {row: told(whole)[row] for row in both}
        for row in both:
            assert list(found[row].logprobs) == pytest.approx(
                list(whole[row].logprobs), abs=max(CLOSE, 1e-3)
            )


def test_a_greedy_row_depends_neither_on_the_window_nor_on_the_rank(case: Case) -> None:
    check(case.engine, 0.0)


def test_nor_does_a_sampled_row_of_the_embedded_engine(hf_case: Case) -> None:
    """Its noise belongs to the token's place in the row; more slots than the engine has rows at
    once."""
    check(hf_case.make(max_rows=4), 1.0)


def test_a_sampled_row_of_given_length_is_the_same_again(case: Case) -> None:
    lengths = [5, 1, 9, 2, 14, 3, 7]
    first, second = (decode(case.engine, 4, 6, lengths) for _ in range(2))
    assert told(first) == told(second)
    assert all(len(sample.response) == lengths[row % 7] for row, sample in first.items())
    assert all(sample.end == "limit" for sample in first.values())
    assert len(first) > 3 * SLOTS


def test_the_embedded_engine_fills_its_places_while_a_long_row_goes_on(
    hf_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot has a row of the whole window, three have rows of five tokens."""
    engine, steps = hf_case.engine, []
    decode_once = engine._decode
    monkeypatch.setattr(engine, "_decode", lambda: [steps.append(1), decode_once()][1])
    sampler = Sampler(4, prompt, limit=40, window=30, lengths=[30, 5, 5, 5])
    lists = sampler.generate(hf_case.engine, 1, range(4), RolloutConfig(), 3)
    assert len([sample for samples in lists for sample in samples]) == 1 + 3 * 6
    assert len(steps) == 29
