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

    def abort_request(self, names: list[str]) -> None:
        self.aborted.append((names, "front"))

    def get_output(self) -> "Engine":
        self.outputs = self.answers.pop(0)
        return self

    def step(self) -> list:
        return self.answers.pop(0)


def core(
    name: str, tokens: list[int], logprobs: list[float] | None = None, ended: str | None = None
) -> Any:
    table = (
        None
        if logprobs is None
        else SimpleNamespace(logprobs=np.array([[x, -9.0] for x in logprobs]))
    )
    return SimpleNamespace(
        request_id=name, new_token_ids=tokens, new_logprobs=table, finish_reason=ended
    )


def front(
    name: str,
    tokens: list[int],
    logprobs: list[float],
    ended: str,
    by: Any = None,
    *,
    finished: bool = True,
) -> Any:
    table = SimpleNamespace(logprobs=logprobs)
    told = SimpleNamespace(token_ids=tokens, logprobs=table, finish_reason=ended, stop_reason=by)
    return SimpleNamespace(request_id=name, finished=finished, outputs=[told])


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


def test_rows_that_strings_may_end_go_through_the_front_end():
    engine = Engine(
        [front("0/1", [5], [-1.0], "", finished=False)],
        [front("0/1", [5, 6], [-1.0, -2.0], "stop", "END"), front("0/2", [7], [-3.0], "length")],
        [front("0/3", [2], [-4.0], "stop", 2)],
    )
    rows = Rows(engine, [2])
    asks = [Ask(row, [4], 0, 9) for row in (1, 2, 3, 8)]
    rows.add(0, asks, RolloutConfig(max_new_tokens=9, temperature=1.0, stop=("END",)), 0)
    assert engine.aborted == []
    assert rows.step() == []
    told = [(rank, s.row, s.tokens, s.logprobs, s.end) for rank, s in rows.step()]
    assert told == [(0, 1, [5, 6], [-1.0, -2.0], "stop"), (0, 2, [7], [-3.0], "limit")]
    # by a token, whose number is the reason
    assert [piece.end for _, piece in rows.step()] == ["eos"]
    rows.abort(0)
    assert engine.aborted == [(["0/8"], "front")]
    params = engine.asked["0/1"][1]
    assert (params["stop"], params["detokenize"], params["include_stop_str_in_output"]) == (
        ["END"],
        True,
        True,
    )


def test_how_a_row_is_drawn():
    due = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 4, "max_tokens": 9, "stop": [],
        "detokenize": False, "include_stop_str_in_output": True, "skip_special_tokens": False,
        "ignore_eos": True, "stop_token_ids": [2], "logprobs": 0, "flat_logprobs": True,
        "output_kind": "final",
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
