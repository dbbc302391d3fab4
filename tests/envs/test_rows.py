"""Rows of several turns: who appends what, what ends them, and what windows and replays make of
them. Engine and environment are scripts: neither tokens nor answers depend on time."""

import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from envs import LocalPool
from ranks import ALONE

from splitppo.config import Config, EnvConfig, RewardConfig, RolloutConfig
from splitppo.engine import Ask, Piece, row_seed
from splitppo.envs import Message, Turn
from splitppo.envs.player import Player, turns_of
from splitppo.generator.sampler import Sampler
from splitppo.models.tiny import VOCABULARY, build_tokenizer
from splitppo.rollout import Episode, Prompt

EOS = VOCABULARY["<eos>"]
TOKENIZER: Any = build_tokenizer()
PROMPT = TOKENIZER("go=")["input_ids"]


class Script:
    """An engine: token k of a row follows from the row and k alone. Each third token of row r + k
    ends a turn."""

    def __init__(self) -> None:
        self.asks: list[Ask] = []
        self.asked: list[Ask] = []

    def abort(self) -> None: ...

    def submit(self, asks: Sequence[Ask], *_: Any) -> None:
        assert all(ask.tokens > 0 for ask in asks)
        self.asks += asks
        self.asked += asks

    def poll(self) -> list[Piece]:
        ask = self.asks.pop(0)
        tokens = []
        for k in range(ask.begun, ask.begun + ask.tokens):
            tokens.append(EOS if (ask.row + k) % 3 == 2 else 14 + (ask.row * 5 + k) % 26)
            if tokens[-1] == EOS:
                break
        end = "eos" if tokens[-1] == EOS else "limit"
        return [Piece(ask.row, tokens, [-0.5 - t for t in tokens], end)]


class Env:
    """Repeats what it hears, rewards it by its length, and is over after `extra_info["turns"]`."""

    delay = 0.0

    def __init__(self, row: dict, seed: int):
        self.info = row["extra_info"]
        self.seed = seed
        self.heard = 0

    def reset(self) -> list[Message] | None:
        if self.info.get("breaks"):
            raise ValueError("no such game")
        return [Message("user", f"ask{self.info['asks']}:")] if "asks" in self.info else None

    def step(self, message: Message) -> Turn:
        time.sleep(self.delay)
        self.heard += 1
        if self.heard == self.info.get("fails"):
            raise ValueError("out of order")
        done = self.heard == self.info.get("turns")
        text = f"{message.content}{self.seed % 10}." * self.info.get("times", 1)
        cut = self.heard == self.info.get("cut")
        numbers: dict[str, float] = dict.fromkeys(
            ("heard", "turns", "failures", "perf/env_wait_s"), 2.0
        )
        return Turn([Message("user", text)], 0.1 * len(message.content) + 0.1, done, cut, numbers)

    def close(self) -> None: ...


def config(
    *, context: int | None = None, turns: int = 16, observed: int = 99, said: int | None = None
) -> Config:
    return Config(
        rollout=RolloutConfig(max_context=context),
        env=EnvConfig(
            path="env.py:Env",
            max_turns=turns,
            max_observation_tokens=observed,
            max_turn_tokens=said,
        ),
        reward=RewardConfig(failed_score=-7.0),
    )


def sampler_of(
    info: dict,
    *,
    slots: int = 3,
    window: int = 0,
    limit: int = 40,
    given: Config | None = None,
    samples: int = 1,
) -> Any:
    given = given or config()
    prompt = Prompt("go=", PROMPT, "", "", info)
    return Sampler(
        slots,
        lambda row: prompt,
        samples=samples,
        limit=limit,
        context=given.rollout.max_context,
        window=window,
        player=Player(cast(Any, LocalPool(Env, 3)), cast(Any, turns_of(given, TOKENIZER)), given),
    )


def played(sampler: Sampler, step: int = 1, slots: Sequence[int] | None = None) -> list[Episode]:
    engine: Any = Script()
    mine = range(sampler.streams.slots) if slots is None else slots
    lists = list(sampler.generate(engine, step, mine, RolloutConfig(), 0))
    return sorted((row for rows in lists for row in rows), key=lambda row: row.row)


def told(row: Episode) -> list[tuple[str, str]]:
    """The row's turns as text: what was sampled, what was observed."""
    return [(TOKENIZER.decode(said), TOKENIZER.decode(heard)) for said, heard in row.turns]


@pytest.mark.parametrize("seeds", ["row", "prompt"])
def test_the_seed_is_the_rows_or_its_prompts(seeds: Any):
    given = replace(config(), env=replace(config().env, seed=seeds))
    sampler = sampler_of({"turns": 2}, slots=6, samples=3, given=given)
    for step in (1, 2):
        rows = played(sampler, step)
        numbers = [row.row // 3 if seeds == "prompt" else row.row for row in rows]
        digits = [told(row)[0][1][-2] for row in rows]  # of the seed, as the answer has it
        assert digits == [str(row_seed(0, number, -1) % 10) for number in numbers]


def test_a_row_holds_what_was_sampled_and_what_was_answered():
    sampler = sampler_of({"turns": 2})
    rows = played(sampler)
    assert [row.end for row in rows] == ["environment"] * 3
    for row in rows:
        (first, heard), (last, nothing) = told(row)
        assert first.endswith("<eos>")
        assert heard == first.removesuffix("<eos>") + heard[-2:]
        assert (last.endswith("<eos>"), nothing) == (True, "")
        assert len(row.logprobs) == row.tokens == len(row.ids) - 3 - len(heard)
        lengths = [0.1 * len(said.removesuffix("<eos>")) + 0.1 for said, _ in told(row)]
        assert row.rewards == pytest.approx(lengths)
    assert rows[0].turns[0][1] != rows[1].turns[0][1]
    sums, _ = sampler.player.take()
    assert sums["turns"] == 6
    # an environment's numbers and the player's may have one name
    assert {sums[f"env/{name}/mean"] for name in ("heard", "turns", "perf/env_wait_s")} == {12}
    assert sums["perf/env_wait_s"] < 12
    begun = played(sampler_of({"turns": 1, "asks": 7}))
    assert {TOKENIZER.decode(row.prompt) for row in begun} == {"ask7:"}


@pytest.mark.parametrize(
    ("info", "options", "end", "turns"),
    [
        ({"turns": 2}, {"limit": 6}, "environment", 2),
        ({"turns": 2, "cut": 2}, {}, "limit", 2),
        ({}, {"given": config(turns=3)}, "limit", 3),
        ({"turns": 3}, {"given": config(turns=3)}, "environment", 3),
        ({}, {"limit": 6}, "limit", 2),
        ({}, {"limit": 8}, "limit", 3),
        ({}, {"given": config(context=14)}, "limit", 2),
        ({"fails": 2}, {}, "failed", 2),
        ({"breaks": 1}, {}, "failed", 1),
        ({"asks": "x" * 20}, {"given": config(context=14)}, "failed", 1),
    ],
)
def test_what_ends_a_row(info, options, end, turns):
    sampler = sampler_of(info, **options)
    row = played(sampler)[0]
    assert (row.end, len(row.turns)) == (end, turns)
    assert row.tokens <= sampler.limit
    assert row.total <= sampler.context
    assert row.turns[-1][1] == array("i"), "nobody reads the last answer"
    failures = [failure.text for _, failure in sampler.player.failures]
    assert bool(failures) == (end == "failed")
    if failures:
        assert row.rewards == [0.0] * (turns - 1) + [-7.0]
    assert not sampler.player._rows


def test_a_long_answer_is_cut():
    row = played(sampler_of({"turns": 2, "times": 9}, given=config(observed=12)))[0]
    assert len(row.turns[0][1]) <= 12
    assert "cut" in told(row)[0][1]


def play(
    moves: bool,
    window: int,
    *,
    restarts: bool = False,
    delay: float = 0.0,
    given: Config | None = None,
) -> list[Episode]:
    """Twelve steps, or two without windows; after each, the objects are lost if it `moves`."""
    Env.delay = delay
    sampler = sampler_of({"turns": 4, "asks": 1}, window=window, given=given)
    rows = []
    for step in range(1, 13 if window else 3):
        if moves:
            sampler.player = sampler_of({}, given=given).player
        rows += played(sampler, step)
        sampler.gather_open(ALONE)
        if restarts:
            state = json.loads(json.dumps(sampler.state(ALONE)))
            sampler = sampler_of({"turns": 4, "asks": 1}, window=window, given=given)
            sampler.load_state(state)
    assert not sampler.player.failures
    Env.delay = 0.0
    return sorted(rows, key=lambda row: row.row)


def test_a_turn_ends_at_its_limit_and_its_environment_hears_it():
    row = played(sampler_of({"turns": 3}, given=config(said=2)))[0]
    assert [(len(said), said[-1] == EOS) for said, _ in row.turns] == [(2, 0), (1, 1), (2, 0)]
    assert told(row)[0][1].startswith(told(row)[0][0]), "it repeats what was said"
    assert row.end == "environment"
    over = sampler_of({"turns": 3}, window=2)
    assert not played(over)
    over.gather_open(ALONE)
    over.player = sampler_of({}, given=config(said=1)).player  # of a run that goes on from it
    played(over, 2)
    assert len(over.held[0].turns[0][0]) == 3


@pytest.mark.parametrize("said", [None, 2])
def test_windows_and_replays_change_nothing(said):
    run = partial(play, given=config(said=said))
    whole = {row.row: row for row in run(False, 0)}
    for window in (1, 2, 3, 5, 7):
        kept = run(False, window)
        assert kept == run(True, window)
        assert kept == run(False, window, restarts=True)
        assert kept == run(False, window, delay=0.002)
        same = [row for row in kept if row.row in whole]
        assert len(same) >= 3 or window == 1
        for row in same:
            other = whole[row.row]
            assert (row.prompt, row.turns, row.end) == (other.prompt, other.turns, other.end)
            assert row.logprobs == other.logprobs
            assert [reward for reward in row.rewards if reward] == other.rewards


def test_a_slot_decodes_its_window_whatever_the_answers_take():
    sampler = sampler_of({"turns": 2}, window=4)
    for step in range(1, 4):
        ended = played(sampler, step)
        sampler.gather_open(ALONE)
        sampled = [
            len(segment.ids)
            for row in [*ended, *sampler.held.values()]
            for segment in row.segments
            if segment.logprobs is not None and segment.version == step
        ]
        assert sum(sampled) == 3 * 4


def test_a_row_that_waits_at_its_limit_goes_on_from_a_checkpoint():
    sampler = sampler_of({}, slots=1, window=6, limit=6)
    assert played(sampler) == []
    sampler.gather_open(ALONE)
    state = json.loads(json.dumps(sampler.state(ALONE)))
    sampler = sampler_of({}, slots=1, window=6, limit=6)
    sampler.load_state(state)
    row, *_ = played(sampler, 2)
    assert (row.row, row.end, row.tokens, row.last_step_tokens) == (0, "limit", 6, 0)


@pytest.mark.parametrize("why", ["answered turn 1 differently", "began otherwise"])
@pytest.mark.parametrize("moves", [True, False], ids=["at another rank", "after its worker's end"])
def test_an_environment_that_plays_otherwise_fails_its_row(monkeypatch, why, moves):
    sampler = sampler_of({"turns": 4, "asks": 1}, window=4)
    played(sampler)
    sampler.gather_open(ALONE)
    assert any(len(row.turns) > 1 for row in sampler.held.values())
    if moves:
        sampler.player = sampler_of({}).player
    else:
        sampler.player.pool.envs.clear()
    other = [Message("user", "other.")]
    if "began" in why:
        monkeypatch.setattr(Env, "reset", lambda self: other)
    else:
        monkeypatch.setattr(Env, "step", lambda self, message: Turn(other))
    rows = [row for step in range(2, 5) for row in played(sampler, step) if row.end == "failed"]
    assert rows
    failure = sampler.player.failures[0][1]
    assert (failure.function, failure.kind) == ("local", "replay")
    assert why in failure.text
