"""What a vLLM engine is asked for and what is made of its answers, without vLLM: a stand-in hands
out the tokens."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from splitppo.config import RolloutConfig
from splitppo.engine import Ask, OpenPiece, row_seed
from splitppo.engine.vllm.rows import Rows, params_of, piece_of

SAMPLING = RolloutConfig(max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=5)
GREEDY = RolloutConfig(max_new_tokens=9, temperature=0.0, top_p=0.9, top_k=5)


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """A module in which parameters are what they were made of."""
    module: Any = SimpleNamespace(
        RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"), SamplingParams=dict
    )
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(sampling_params=module))


class Engine:
    """Takes requests under names of its own; gives what `answers` holds, a step at a time."""

    def __init__(self, *answers: list):
        self.asked, self.answers, self.aborted = {}, list(answers), []
        self.output_processor = self.engine_core = self
        self.outputs: list = []

    def add_request(self, name: str, prompt: dict, params: dict) -> str:
        self.asked[name] = (prompt, params)
        return f"own {name}"

    def abort_requests(self, names: list[str], internal: bool = False) -> None:
        self.aborted.append((names, internal))

    def get_output(self) -> "Engine":
        self.outputs = self.answers.pop(0)
        return self


def core(
    name: str, tokens: list[int], logprobs: list[float] | None = None, ended: str | None = None
) -> Any:
    table = (
        None
        if logprobs is None
        else SimpleNamespace(
            logprobs=np.array([[x, -9.0] for x in logprobs]),
            logprob_token_ids=np.array([[0] for _ in logprobs], dtype=np.int32),
        )
    )
    return SimpleNamespace(
        request_id=name, new_token_ids=tokens, new_logprobs=table, finish_reason=ended
    )


def test_rows_of_several_ranks_gather_their_tokens_until_they_end():
    engine = Engine(
        [core("own 0/3", [7], [-0.5]), core("own 1/3", [8, 9], [-1.0, -2.0])],
        [
            core("own 1/3", [4], [-3.0]),
            core("own 0/3", [5], [-4.0]),
            core("own 0/9", [1], [-1.0], "stop"),
        ],
        [core("own 0/3", [6], [-6.0], "stop"), core("own 1/3", [2], [-7.0], "length")],
    )
    rows = Rows(engine, [2])
    rows.add(0, [Ask(3, [11, 12], 1, 8)], SAMPLING, 5)
    rows.add(1, [Ask(3, [13], 0, 4)], SAMPLING, 5)
    assert engine.asked["0/3"][0] == {"prompt_token_ids": [11, 12]}
    assert [engine.asked["0/3"][1][name] for name in ("seed", "max_tokens")] == [
        row_seed(5, 3, 1),
        8,
    ]
    # the front end forgets what the core gives to nobody but this
    assert engine.aborted == [(["own 0/3"], True), (["own 1/3"], True)]
    assert rows.step() == rows.step() == []
    (rank, mine), (other, cut) = rows.step()
    assert (rank, mine.row, mine.tokens) == (0, 3, [7, 5, 6])
    assert (mine.logprobs, mine.end) == ([-0.5, -4.0, -6.0], "eos")
    assert (other, cut.tokens, cut.logprobs, cut.end) == (
        1,
        [8, 9, 4, 2],
        [-1.0, -2.0, -3.0, -7.0],
        "limit",
    )
    assert not rows.open


def test_only_the_rows_of_the_rank_are_broken_off():
    engine = Engine([core("own 0/1", [5], [-1.0], "stop"), core("own 1/1", [6], [-2.0], "stop")])
    rows = Rows(engine, [2])
    for rank in range(2):
        rows.add(rank, [Ask(1, [3], 0, 9)], SAMPLING, 0)
    rows.abort(0)
    assert engine.aborted[2:] == [(["own 0/1"], False)]
    assert [row.rank for row in rows.open.values()] == [1]
    # what comes late is dropped
    assert [(rank, piece.tokens) for rank, piece in rows.step()] == [(1, [6])]


def test_strings_end_rows(monkeypatch):
    """The last token of 5, 6; not if the engine has ended the row there by an end id."""
    monkeypatch.setattr(
        "splitppo.engine.vllm.rows.find_stops",
        lambda tokenizer, strings: lambda rows: [row.tokens[-2:] == [5, 6] for row in rows],
    )
    engine = Engine(
        [core(f"own 0/{row}", [5], [-1.0]) for row in (1, 2, 3, 4)],
        [
            core("own 0/1", [6], [-2.0]),
            core("own 0/2", [6], [-2.0], "length"),
            core("own 0/3", [6], [-2.0], "stop"),
            core("own 0/4", [6], [-2.0]),
        ],
        [core("own 0/1", [7], [-3.0]), core("own 0/4", [7], [-3.0], "length")],
    )
    rows = Rows(engine, [2])
    asks = [Ask(row, [4], 0, 9, may_stop=row != 4) for row in (1, 2, 3, 4)]
    rows.add(0, asks, RolloutConfig(max_new_tokens=9, temperature=1.0, stop=("END",)), 0)
    begun = len(engine.aborted)
    assert rows.step() == []
    ended = {piece.row: (piece.tokens, piece.logprobs, piece.end) for _, piece in rows.step()}
    assert ended.pop(3) == ([5, 6], [-1.0, -2.0], "eos")
    assert ended == dict.fromkeys((1, 2), ([5, 6], [-1.0, -2.0], "stop"))
    assert engine.aborted[begun:] == [(["own 0/1", "own 0/2"], False)]
    # what comes late is dropped
    assert [(piece.row, piece.tokens) for _, piece in rows.step()] == [(4, [5, 6, 7])]


def test_how_a_row_is_drawn():
    due = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 4, "max_tokens": 9,
        "detokenize": False, "ignore_eos": True, "stop_token_ids": [2], "logprobs": 0,
        "flat_logprobs": True, "output_kind": "final",
    }  # fmt: skip
    assert params_of(SAMPLING, seed=4, eos=[2], tokens=9) == due
    greedy = {"temperature": 0.0}
    assert params_of(GREEDY, seed=4, eos=[2], tokens=9) == due | greedy
    assert params_of(SAMPLING, seed=4, eos=[2], tokens=30, fixed=True) == due | {
        "max_tokens": 30,
        "stop_token_ids": [],
    }


@pytest.mark.parametrize(("logprobs", "reason"), [([-1.0], "stop"), ([-1.0, -2.0], "abort")])
def test_rows_that_ended_wrongly_are_refused_by_number(logprobs, reason):
    with pytest.raises(RuntimeError, match="row 4"):
        piece_of(OpenPiece(Ask(4, [1], 0, 2), [5, 6], logprobs), reason)
