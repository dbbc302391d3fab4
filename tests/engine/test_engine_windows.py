"""Engines with windows: which tokens a row gets does not depend on how the windows cut it, and a slot never rests."""

import sys
from collections import Counter
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import ALONE
from test_engine import CLOSE, FIRST, Case, case, hf_case, tokenizer
from test_vllm_rows import SAMPLING, Engine, core

from splitppo.config import RolloutConfig
from splitppo.engine import WHOLE, Window, hf, row_seed
from splitppo.engine.vllm.client import AHEAD, first_rows, more_rows
from splitppo.engine.vllm.rows import Rows
from splitppo.rollout import Prompt, Request, Sample, Streams

__all__ = ["case", "hf_case", "tokenizer"]  # fixtures

SLOTS, LIMIT = 6, 14


def prompt(row: int) -> Prompt:
    return Prompt("", [FIRST + row % 50, *[FIRST + row % 7] * (row % 3)], "", "", {})


def decode(
    engine: Any, window: int, steps: int, lengths: list[int], *, ranks: int = 1, temperature: float = 1.0
) -> dict[int, Sample]:
    """The rows that end in so many steps, with the same weights in all; each step is checked to be full. The slots are
    those of so many ranks, one after the other."""
    streams, ended = Streams(SLOTS, prompt, lengths, windows=window > 0), {}
    how = Window(window, streams.slots, streams.following) if window else WHOLE
    sampling = RolloutConfig(temperature=temperature, max_new_tokens=LIMIT)
    for step in range(1, steps + 1):
        requests, sampled = [streams.request(step, slot) for slot in range(SLOTS)], Counter[int]()
        parts = [requests[rank::ranks] for rank in range(ranks)]
        run = [engine.generate(part, sampling, seed=3, window=how) for part in parts]
        for stopped in chain(*run):
            begun = {r.row: len(r.response) for r in requests}
            for sample in stopped:
                sampled[sample.row % SLOTS] += len(sample.response) - begun.get(sample.row, 0)
            rows = streams.take(step, stopped)
            assert not ended.keys() & {row.row for row in rows}, "a row has ended twice"
            ended |= {row.row: row for row in rows}
        streams.share(ALONE, lambda: [range(SLOTS)])
        assert not window or [sampled[slot] for slot in range(SLOTS)] == [window] * SLOTS
    return ended


def told(rows: dict[int, Sample]) -> dict[int, tuple[list[int], str]]:
    return {row: (list(sample.response), sample.end) for row, sample in rows.items()}


def check(engine: Any, temperature: float) -> None:
    whole = decode(engine, 0, 8, [], temperature=temperature)
    assert {"eos", "limit"} <= {sample.end for sample in whole.values()}
    for window, steps, ranks in ((3, 13, 1), (40, 2, 1), (3, 13, 2)):
        found = decode(engine, window, steps, [], ranks=ranks, temperature=temperature)
        both = told(whole).keys() & told(found).keys()
        assert len(both) >= 2 * SLOTS
        assert {row: told(found)[row] for row in both} == {row: told(whole)[row] for row in both}
        for row in both:
            assert list(found[row].logprobs) == pytest.approx(list(whole[row].logprobs), abs=max(CLOSE, 1e-3))


def test_a_greedy_row_depends_neither_on_the_window_nor_on_the_rank(case: Case) -> None:
    check(case.engine, 0.0)


def test_nor_does_a_sampled_row_of_the_embedded_engine(hf_case: Case) -> None:
    """Its noise belongs to the token's place in the row; more slots than the engine has rows at once."""
    check(hf_case.make(max_rows=4), 1.0)


def test_a_sampled_row_of_given_length_is_the_same_again(case: Case) -> None:
    lengths = [5, 1, 9, 2, 14, 3, 7]
    first, second = (decode(case.engine, 4, 6, lengths) for _ in range(2))
    assert told(first) == told(second)
    assert all(len(sample.response) == lengths[row % 7] for row, sample in first.items())
    assert all(sample.end == "limit" for sample in first.values())
    assert len(first) > 3 * SLOTS


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"), SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(sampling_params=module))


def test_a_slot_of_vllm_gets_its_next_row_at_once(vllm: None) -> None:
    """A window of six tokens; the row that goes on has two tokens from before."""
    engine = Engine(
        [core("own 0/3", [7, 2], [-1.0, -2.0], "stop")],
        [core("own 0/5", [8], [-3.0], "stop")],
        [core("own 0/7", [9, 9, 9], [-4.0] * 3, "length")],
    )
    rows, before = Rows(engine, [2]), Request(3, [11], None, [5, 6], [-0.1, -0.2])
    rows.add(0, {1: [before, Request(5, [12])]}, SAMPLING, 4, 6, True)
    (prompt_, params) = engine.asked["0/3"]
    assert (prompt_["prompt_token_ids"], params["max_tokens"], params["seed"]) == ([11, 5, 6], 6, row_seed(4, 3, 2))
    ((_, sample),) = rows.step()
    assert (list(sample.response), sample.end) == ([5, 6, 7, 2], "eos")
    assert list(sample.logprobs) == pytest.approx([-0.1, -0.2, -1.0, -2.0])
    assert engine.asked["0/5"][1]["max_tokens"] == 4
    rows.step()
    assert (rows.open, rows.ranks()) == ({}, {0})  # it waits for its next row
    rows.add_more(0, [(1, Request(7, [13])), (1, Request(9, [14])), (0, Request(8, [1]))])
    assert engine.asked["0/7"][1]["max_tokens"] == 3
    ((_, sample),) = rows.step()
    assert (sample.end, list(sample.response), rows.open, rows.ranks()) == ("window", [9, 9, 9], {}, set())


def test_the_engine_has_rows_ahead() -> None:
    window, both = Window(9, 2, lambda row: Request(row + 2, [row])), [Request(1, [1]), Request(0, [1])]
    assert AHEAD == 2
    slots = first_rows(both, window)
    assert {slot: [request.row for request in rows] for slot, rows in slots.items()} == {1: [1, 3, 5], 0: [0, 2, 4]}

    def more(*stopped: tuple[int, Any]) -> list[tuple[int, int]]:
        samples = [Sample(row, [], [], [], end) for row, end in stopped]
        return [(slot, request.row) for slot, request in more_rows(samples, window)]

    assert more((1, "eos"), (0, "window")) == [(1, 7)]
    assert more((3, "eos"), (5, "limit"), (7, "eos")) == [(1, 9), (1, 11), (1, 13)]
    assert first_rows(both, WHOLE) == {request.row: [request] for request in both}
    assert more_rows([Sample(0, [], [], [], "eos")], WHOLE) == []


def test_the_embedded_engine_fills_its_slots_while_a_long_row_goes_on(hf_case: Case, monkeypatch: Any) -> None:
    """One slot has a row of the whole window, three have rows of five tokens."""
    steps, draw = [], hf._Batch.draw
    monkeypatch.setattr(hf._Batch, "draw", lambda self, *args: steps.append(1) or draw(self, *args))
    streams = Streams(4, prompt, [30, 5, 5, 5], windows=True)
    requests = [streams.request(1, slot) for slot in range(4)]
    window = Window(30, 4, streams.following)
    lists = hf_case.engine.generate(requests, RolloutConfig(max_new_tokens=40), seed=3, window=window)
    assert len([sample for samples in lists for sample in samples]) == 1 + 3 * 6
    assert len(steps) == 30
