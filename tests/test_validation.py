"""Validation: its estimators, its metrics under any number of ranks, what it asks of engine and
scorer, its files."""

import itertools
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import pytest
from ranks import run_threads

from splitppo.config import Config, EnvConfig, LogConfig, RolloutConfig
from splitppo.context import Context
from splitppo.engine import Piece, row_seed
from splitppo.generator.validation import Validator
from splitppo.job.collectives import Group
from splitppo.rewards.samples import record
from splitppo.rewards.scorer import Failure, Scored
from splitppo.rewards.summary import Response, metrics, pass_at_k
from splitppo.rollout import Episode, Prompt, Segment, Span, episode_of
from splitppo.run.files import shown, write_rows

ROLLOUT = RolloutConfig(max_new_tokens=10, top_p=0.9, top_k=40, stop=("!",))
SAMPLED = LogConfig(validate_every=5, validate_samples=4, validate_temperature=0.7)


@dataclass
class FakeEngine:
    """Says a number from 0 to 2 that follows from the row's noise; 0 if greedy. Rows finish in
    twos, the last first."""

    calls: list[tuple[dict[int, list[int]], RolloutConfig, int]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    loaded: bool = True

    def submit(self, asks, sampling, seed):
        self.sampling, self.seed, self.polled = sampling, seed, 0
        self.waiting = list(asks)
        self.calls.append(({ask.row: [*ask.ids] for ask in asks}, self.sampling, self.seed))

    def poll(self):
        self.polled += 1
        if not self.polled % 2:
            return []
        self.events.append("rows")
        return [self.piece(self.waiting.pop()) for _ in range(min(2, len(self.waiting)))]

    def piece(self, ask):
        tokens = self.response(self.sampling, self.seed, ask.row)
        return Piece(ask.row, tokens, [], "limit" if len(tokens) == ask.tokens else "eos")

    def response(self, sampling, seed, row):
        said = row_seed(seed, row, 0) % 3 if sampling.temperature else 0
        return [ord(char) for char in f"it is {said}" + "." * (row % 4)]

    def abort(self): ...
    def load_weights(self, weights): ...
    def release_memory(self, *, trained): ...
    def close(self): ...


SLOW = Failure("judge", "timeout", "took long")


@dataclass
class FakeScorer:
    """1 if the response says the truth; fails on those that end in three dots."""

    events: list[str] = field(default_factory=list)

    def submit(self, rows, /):
        self.events.append("submit")
        outcomes = []
        for prompt, text, _ in rows:
            right = text.rstrip(".").split()[-1] == str(prompt.ground_truth)
            outcomes.append(
                Scored(float(right), {"length": len(text)}, (SLOW,) * text.endswith("..."))
            )
        return lambda: self.events.append("result") or outcomes

    def close(self):
        self.events.append("close")


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def held_out(count: int) -> list[Prompt]:
    return [
        Prompt(f"ask {i}", [i, i + 1], "odd" if i % 2 else "even", i % 3, {}) for i in range(count)
    ]


def make_validator(group: Group, folder: Path, count: int, log: LogConfig = SAMPLED) -> Validator:
    config = Config(seed=14, steps=12, rollout=ROLLOUT, log=log)
    events: list[str] = []
    engine, scorer = FakeEngine(events=events), FakeScorer(events)
    nothing: Any = None
    context = Context(config, nothing, held_out(count), decode, 10)
    return Validator(
        context,
        cast(Any, engine),
        group,
        cast(Any, scorer),
        partial(write_rows, folder / "validation"),
    )


def on_one_rank(function, *args) -> Any:
    return run_threads(1, function, *args)[0]


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([i < c for i in range(n)], k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def answered(*scores: float, **changes: Any) -> list[Response]:
    """Responses to a prompt, each with another answer."""
    plain = [Response(0, score, {}, 10, False, False) for score in scores]
    return [replace(plain[0], **changes), *plain[1:]]


def test_metrics_of_one_greedy_response_each():
    first = answered(1.0, figures={"parsed": 1.0}, cut=True)
    found = metrics(
        [*first, *answered(0.25, figures={"parsed": 0.0, "steps": 3.0}, tokens=30)], ["a", "a"]
    )
    assert found == {
        "val/score/mean": 0.625,
        "val/rows": 2,
        "val/response_length/mean": 20.0,
        "val/clip_ratio": 0.5,
        "val/reward/parsed/mean": 0.5,
        "val/reward/steps/mean": 3.0,  # over the responses that have it
    }


def test_numbers_of_a_reward_hide_none_of_the_trainers():
    plain = [*answered(1.0, 0.5), *answered(0.25, 1.0)]
    known = metrics(plain, ["a", "b"])
    names = [name.removeprefix("val/").removesuffix("/mean") for name in known]
    numbers = dict.fromkeys([*names, "reward"], 7.0)
    named = metrics([replace(one, figures=numbers) for one in plain], ["a", "b"])
    assert {name: named[name] for name in known} == known
    assert named.keys() - known.keys() == {f"val/reward/{name}/mean" for name in numbers}


def test_metrics_of_several_responses_by_source():
    rows = [
        *answered(1, 0, 0.5, failed=True),
        *answered(0, 0.5, 0, failed=True),
        *answered(1, 1, 0),
    ]
    found = metrics(rows, ["a", "b", "b"])
    assert found["val/rows"] == 9
    assert found["val/failures"] == 2
    assert found["val/score/mean"] == pytest.approx(4 / 9)
    assert found["val/score/a/mean"] == 0.5
    assert found["val/score/b/mean"] == pytest.approx(2.5 / 6)
    assert (found["val/best/mean"], found["val/best/b/mean"]) == (pytest.approx(2.5 / 3), 0.75)
    # a half is not right: 1, 0 and 2 of 3 passed
    assert found["val/pass@1"] == pytest.approx(1 / 3)
    assert found["val/pass@2"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert found["val/pass@2/b"] == 0.5
    assert "val/pass@4" not in found


def test_one_source_is_not_told_apart():
    assert not [
        name for name in metrics([*answered(1, 0), *answered(1, 1)], ["a", "a"]) if "/a" in name
    ]


def test_no_pass_where_a_score_of_1_need_not_mean_right():
    found = metrics([*answered(2, 0), *answered(0, 1), *answered(-1, 1)], ["a", "b", "c"])
    assert {name for name in found if "pass@" in name} == {"val/pass@1/b", "val/pass@2/b"}


def test_the_trainers_own_figure_wins_over_a_rewards_of_the_same_name():
    found = metrics(answered(1, 0, figures={"response_length": 99.0, "best": 99.0}), ["a"])
    assert (found["val/response_length/mean"], found["val/best/mean"]) == (10, 1)


def validate(group: Group, folder: Path, count: int) -> dict[str, float]:
    return make_validator(
        group, folder / f"rank_{group.dp_rank}" if group.dp_rank else folder, count
    ).run(5)


@pytest.mark.parametrize("count", [7, 2])  # 2: a rank without prompts
def test_any_number_of_ranks_gives_the_same_metrics_and_files(tmp_path, count):
    alone = on_one_rank(validate, tmp_path / "one", count)
    assert run_threads(3, validate, tmp_path / "three", count) == [alone] * 3
    assert alone["val/rows"] == 4 * count
    assert 0 < alone["val/score/mean"] < 1
    assert alone["val/pass@1"] == pytest.approx(alone["val/score/mean"])
    assert alone["val/pass@4"] == alone["val/best/mean"]
    one = (tmp_path / "one" / "validation" / "step_000005.jsonl").read_text()
    assert one
    assert one == (tmp_path / "three" / "validation" / "step_000005.jsonl").read_text()
    assert not list((tmp_path / "three").glob("rank_*")), "the first rank alone writes"


def test_metrics_and_file_are_those_of_the_rows(tmp_path, capfd):
    found = on_one_rank(validate, tmp_path, 20)
    rows = [
        json.loads(line)
        for line in (tmp_path / "validation" / "step_000005.jsonl").read_text().splitlines()
    ]
    assert [(row["row"], row["sample"]) for row in rows] == [
        (4 * i + j, j) for i in range(20) for j in range(4)
    ]
    names = [
        "step",
        "row",
        "question",
        "response",
        "ground_truth",
        "score",
        "end",
        "data_source",
        "prompt",
        "sample",
    ]
    assert list(rows[0]) == names
    for row in rows:
        said = row_seed(row_seed(14, -1, 0), row["row"], 0) % 3
        assert row["response"] == f"it is {said}" + "." * (row["row"] % 4)
        assert (row["step"], row["score"]) == (5, said == row["ground_truth"])
        assert (row["prompt"], row["end"]) == (
            f"ask {row['row'] // 4}",
            "limit" if row["row"] % 4 == 3 else "eos",
        )
    assert found["val/score/mean"] == pytest.approx(fmean(row["score"] for row in rows))
    assert found["val/score/odd/mean"] == fmean(
        row["score"] for row in rows if row["data_source"] == "odd"
    )
    assert found["val/clip_ratio"] == pytest.approx(fmean(row["end"] == "limit" for row in rows))
    assert found["val/failures"] == 20
    told = (
        "[actor] step 5, held-out rows, rewards that failed: judge: 20 x timeout, first of row 3: "
        "took long"
    )
    assert told in capfd.readouterr().out.splitlines()
    assert found["val/response_length/mean"] == found["val/reward/length/mean"] == 8.5


def validate_twice(group: Group, folder: Path, log: LogConfig) -> Any:
    validator = make_validator(group, folder, 3, log)
    results = [validator.run(step) for step in (0, 5)]
    assert isinstance(validator.engine, FakeEngine)
    return results, validator.engine.calls, validator.engine.events


def test_every_validation_draws_with_the_same_noise_apart_from_trainings(tmp_path):
    (first, second), (call, again), _ = on_one_rank(validate_twice, tmp_path, SAMPLED)
    assert first == second
    assert call == again
    prompts, sampling, seed = call
    assert seed == row_seed(14, -1, 0) != 14
    assert prompts == {4 * i + j: [i, i + 1] for i in range(3) for j in range(4)}
    assert sampling == replace(ROLLOUT, temperature=0.7)
    before, after = ((tmp_path / "validation" / f"step_{n:06d}.jsonl").read_text() for n in (0, 5))
    assert before.replace('"step": 0', '"step": 5') == after
    assert len({json.loads(line)["response"].strip(".") for line in before.splitlines()}) > 1


def test_temperature_0_is_greedy(tmp_path):
    _, ((prompts, sampling, _), _), _ = on_one_rank(
        validate_twice, tmp_path, LogConfig(validate_every=5)
    )
    assert sampling == replace(ROLLOUT, temperature=0)
    assert prompts.keys() == {0, 1, 2}


def test_rows_are_scored_while_others_are_generated(tmp_path):
    _, _, events = on_one_rank(validate_twice, tmp_path, SAMPLED)
    assert events == [*["rows", "submit"] * 6, *["result"] * 6] * 2


def due_steps(group: Group, folder: Path, every: int, count: int) -> list[int]:
    validator = make_validator(group, folder, count, LogConfig(validate_every=every))
    return [step for step in range(13) if validator.due(step)]


@pytest.mark.parametrize(
    ("every", "count", "due"), [(5, 1, [0, 5, 10, 12]), (0, 1, []), (5, 0, [])]
)
def test_due_before_the_first_every_nth_and_after_the_last_step(tmp_path, every, count, due):
    assert on_one_rank(due_steps, tmp_path, every, count) == due


def test_file_holds_the_first_256_rows(tmp_path):
    found = on_one_rank(validate, tmp_path, 70)
    rows = [
        json.loads(line)
        for line in (tmp_path / "validation" / "step_000005.jsonl").read_text().splitlines()
    ]
    assert [row["row"] for row in rows] == list(range(256))
    assert found["val/rows"] == 280


def test_a_step_that_comes_again_overwrites_its_files(tmp_path):
    write_rows(tmp_path, 3, [{"row": i, "response": "old"} for i in range(5)])
    write_rows(tmp_path, 3, [{"row": 0, "response": "nëw"}])
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003.jsonl"]
    assert (tmp_path / "step_000003.jsonl").read_text(
        encoding="utf-8"
    ) == '{"row": 0, "response": "nëw"}\n'


def test_what_json_has_no_form_for_is_written_as_text(tmp_path):
    write_rows(tmp_path, 3, [{"ground_truth": Decimal("1.50")}])
    assert json.loads((tmp_path / "step_000003.jsonl").read_text()) == {"ground_truth": "1.50"}


def writer(said: str, config: Config | None = None) -> Context:
    """What writes rows of which a policy said this."""
    return Context(
        config or Config(), cast(Any, None), (), lambda ids: said if len(ids) else "", 10
    )


def test_a_dialogue_is_written_with_what_each_turn_was_worth():
    def sampled(ids: list[int], reward: float) -> Segment:
        return Segment(array("i", ids), array("f", [0.0] * len(ids)), 1, reward)

    # two stretches of one turn, an answer of two tokens, and the last turn
    answer = Segment(array("i", [9, 9]), None, spans=(Span("user", 1, 3), Span("tool", 0, 1)))
    parts = (sampled([4], 0.0), sampled([5, 6], 0.25), answer, sampled([7, 8], 0.5))
    row = Episode(3, array("i", [1]), parts, "environment")
    prompt = held_out(1)[0]
    asked = [{"role": "user", "content": "ask 0"}, {"role": "assistant", "content": "of before"}]
    context = writer("said", Config(env=EnvConfig(path="guess")))
    values = {"value": [0.1, 0.2, 0.3, None, None, 0.4, 0.5]}
    prompt = replace(prompt, messages=asked, tokens=[1])
    told = record(context, 5, prompt, row, 0.75, values)
    assert told["turns"] == [
        *asked,
        {"role": "assistant", "content": "said", "reward": 0.25, "value": 0.1},
        {"role": "user", "content": "ai"},
        {"role": "tool", "content": "s"},
        {"role": "assistant", "content": "said", "reward": 0.5, "value": 0.4},
    ]
    assert "value" not in record(context, 5, prompt, row, 0.75)["turns"][2]
    assert "turns" not in record(writer("said"), 5, prompt, row, 0.75)


def test_a_score_is_written_to_six_places():
    line = record(writer("said"), 5, held_out(1)[0], episode_of(3, [1], [2]), 2 / 3)
    assert (line["score"], line["row"], line["prompt"]) == (0.666667, 3, "ask 0")


def test_the_question_of_a_chat_is_what_the_user_said_last():
    said = [
        ("system", "be brief"),
        ("user", "hello"),
        ("assistant", "hi"),
        ("user", "12+7?"),
        ("assistant", "It is"),
    ]
    messages = [{"role": role, "content": content} for role, content in said]
    chat = Prompt("<|user|>12+7?<|end|>", [1], "here", "19", {}, messages)
    ended = episode_of(2, [1], [2])
    row = record(writer("19"), 3, chat, ended, 1.0)
    assert (row["question"], row["prompt"]) == ("12+7?", "<|user|>12+7?<|end|>")
    plain = record(writer("19"), 3, replace(chat, messages=None), ended, 1.0)
    assert plain["question"] == "<|user|>12+7?<|end|>"
    shown_row = {
        "step": 3,
        "row": 2,
        "question": "12+7?",
        "response": "19",
        "ground_truth": "19",
        "score": 1.0,
    }
    assert shown(row | {"tokens": {}, "turns": []}) == shown_row | {
        "end": "eos",
        "data_source": "here",
    }
    assert shown({"step": 3, "prompt": "of an older version"}) == {
        "step": 3,
        "prompt": "of an older version",
    }
