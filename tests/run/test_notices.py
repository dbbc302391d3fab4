"""What is said when nothing can be learned: each sentence for a run that deserves it, and none for
healthy ones."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from healthy import METRICS, PATH
from ranks import run_ranks

from splitppo import train
from splitppo.config.cli import parse
from splitppo.placement import ROLES, place
from splitppo.run.notices import SENTENCES, follow, silent
from splitppo.run.resolve import resolve

HEALTHY = {
    "actor": {
        "actor/pg_loss": 0.1, "actor/grad_norm": 0.5, "actor/entropy": 0.4, "actor/lr": 1e-6,
        "tokens": 64.0 * 120, "response_length/mean": 100.0, "prompt_length/mean": 20.0,
        "response_length/clip_ratio": 0.2,
    },
    "critic": {
        "critic/score/mean": 0.4, "critic/score/min": 0.0, "critic/score/max": 1.0,
        "critic/vf_loss": 0.1, "critic/vf_explained_var": 0.3, "critic/kl_row": 0.5,
        "critic/reward_failures": 0.0,
    },
}  # fmt: skip
UNSCORED = {"critic/score/mean": 0.0, "critic/score/max": 0.0}
STILL = {"actor/pg_loss": 0.0, "actor/grad_norm": 0.0}


def write(run: Path, steps: int, *changes: tuple[range, Mapping[str, Any]], start: int = 1) -> None:
    """The metrics of a run that is healthy, but for the changes in a range of steps. A value may be
    a function of the step."""
    (run / "metrics").mkdir(exist_ok=True)
    for role in ROLES:
        with (run / "metrics" / f"{role}.jsonl").open("a") as file:
            for step in range(start, steps + 1):
                record: dict[str, Any] = {"step": step, **HEALTHY[role]}
                for span, change in changes:
                    for name, value in change.items():
                        if step in span and (role == "critic") == name.startswith("critic/"):
                            record[name] = value(step) if callable(value) else value
                file.write(json.dumps(record) + "\n")


def said(run: Path, steps: int, *changes: tuple[range, Mapping[str, Any]]) -> list[str]:
    """(step, key) of what is said."""
    write(run, steps, *changes)
    keys = {text: name for name, text in SENTENCES.items()}
    found = [line.removeprefix("step ").split(": ", 1) for line in next(follow(run))]
    return [f"{step} {keys[text]}" for step, text in found]


def held_out(*scores: float) -> list[tuple[range, dict[str, float]]]:
    """Validations of 256 rows, one each tenth step."""
    return [
        (range(10 * n, 10 * n + 1), {"val/score/mean": score, "val/rows": 256.0})
        for n, score in enumerate(scores, 1)
    ]


ALL = range(1000)
RISING = {"critic/score/mean": lambda step: step / 100}


@pytest.mark.parametrize(
    ("steps", "changes", "expected"),
    [
        (40, [], []),
        (9, [(ALL, UNSCORED | STILL)], ["5 nothing"]),
        (4, [(ALL, UNSCORED | STILL)], []),
        # the policy waits for the value model
        (9, [(ALL, UNSCORED | STILL | {"actor/lr": 0.0})], ["5 flat"]),
        (9, [(ALL, UNSCORED)], ["5 flat"]),
        (9, [(range(3, 5), UNSCORED)], []),
        (9, [(ALL, {"critic/score/min": 1.0})], ["5 flat"]),  # right from the first step
        (40, [(range(20, 41), {"critic/score/min": 1.0})], []),  # solved
        (40, [(range(20, 41), UNSCORED)], ["39 flat"]),  # collapsed
        (40, [(range(20, 39), UNSCORED)], []),  # a rare reward
        # for want of scores
        (40, [(range(20, 41), UNSCORED | {"critic/reward_failures": 64.0})], []),
        (40, [(ALL, UNSCORED | {"tokens": 120 * 8.0})], ["38 flat"]),  # eight rows a step
        (9, [(range(3, 4), {
            "critic/reward_failures/share": 0.9, "val/failures": 7.0, "val/rows": 8.0,
        })], []),
        (9, [(range(3, 4), {"critic/reward_failures/share": 1.0})], ["3 failing"]),
        (9, [(range(3, 4), {"val/failures": 8.0, "val/rows": 8.0})], ["3 failing"]),
        (9, [(ALL, {"response_length/clip_ratio": 1.0})], ["5 cut"]),
        (9, [(ALL, {"response_length/clip_ratio": lambda step: 1 - (step == 5) / 64})], []),
        (40, [(ALL, {"critic/vf_explained_var": -3.0})], ["10 critic"]),
        # nothing is left to explain
        (40, [(ALL, {"critic/vf_explained_var": -3.0, "critic/vf_loss": 0.001})], []),
        (12, [(ALL, {"critic/vf_explained_var": lambda step: -20 / step})], []),  # it learns
        (9, [(ALL, {"critic/vf_explained_var": -3.0})], []),
        (40, [(range(20, 30), {"critic/kl_row": 11.0})], ["24 kl"]),
        (40, [(range(20, 24), {"critic/kl_row": 11.0})], []),
        (9, [(range(3, 5), {"perf/alloc_retries": 2.0})], ["3 memory"]),
        (9, [(ALL, {"perf/alloc_retries": 1.0})], []),
        (40, [(range(15, 30), {"actor/entropy": 0.001})], ["20 entropy"]),
        (40, [(ALL, {"actor/entropy": 0.001} | RISING)], []),
        (40, [(ALL, {"actor/entropy": 0.001, "critic/score/mean": 0.95})], []),
        (60, [(ALL, RISING), *held_out(0.2, 0.5, 0.3, 0.35, 0.3, 0.2)], ["50 held-out"]),
        (60, [(ALL, RISING), *held_out(0.2, 0.5, 0.3, 0.45, 0.3, 0.2)], []),  # by chance
        (60, [*held_out(0.2, 0.5, 0.3, 0.35, 0.3, 0.2)], []),  # training does not rise
        (60, [(ALL, RISING), *held_out(0.2, 0.3, 0.4, 0.5, 0.55, 0.6)], []),
    ],
)  # fmt: skip
def test_what_is_said_and_when(
    tmp_path: Path, steps: int, changes: Any, expected: list[str]
) -> None:
    assert said(tmp_path, steps, *changes) == expected


def test_a_sentence_is_said_once_while_the_run_goes_on_and_again_by_another_reader(
    tmp_path: Path,
) -> None:
    notices, found = follow(tmp_path), []
    assert next(notices) == []  # no file yet
    for step in range(1, 31):
        write(tmp_path, step, (range(10, 31), {"critic/kl_row": 11.0}), start=step)
        with (tmp_path / "metrics" / "critic.jsonl").open("a") as file:
            file.write("{")  # a line that is being written
        found += next(notices)
        with (tmp_path / "metrics" / "critic.jsonl").open("r+") as file:
            file.truncate(file.seek(0, 2) - 1)
    assert found == [f"step 14: {SENTENCES['kl']}"]
    assert next(follow(tmp_path)) == found
    assert next(follow(tmp_path, {"kl"})) == []


@pytest.mark.parametrize("sentence", SENTENCES.values())
def test_a_sentence_fits_the_screen_and_names_a_page_that_is_there(sentence: str) -> None:
    assert len(f"warning: step 12345: {sentence}") <= 120
    page = sentence[sentence.index("(docs/") + 1 : -1]
    assert (Path(__file__).parents[2] / page).is_file()
    assert sentence in (Path(__file__).parents[2] / "docs" / "failures.md").read_text()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"kl"}),  # random weights
        ("--reward.function none", {"flat", "nothing", "kl"}),
        ("--ppo.kl-coef 0.1", {"kl"}),
        ("--data.no-chat", {"cut", "kl"}),
        ("--data.no-chat --rollout.stop x", {"kl"}),
    ],
)
def test_a_run_that_is_meant_to_be_so_is_not_warned(flags: str, expected: set[str]) -> None:
    config = parse(flags.split())
    device = torch.device("cpu")
    assert (
        silent(
            resolve(config, place(config.placement, world=2, local_world=2), 2, device, probe=False)
        )
        == expected
    )


@pytest.mark.parametrize(
    ("name", "parameters", "function", "expected"),
    [
        ("teacher", 7, "exact_match", {"flat", "kl"}),
        ("teacher", 5, "none", {"flat", "kl", "nothing"}),
        ("earlier", 5, "exact_match", set()),
        ("policy", 5, "exact_match", set()),
        ("policy", 5, "exact_match --teacher.path=t", {"flat", "kl"}),
        ("policy", 5, "none --teacher.path=t", {"flat", "kl", "nothing"}),
    ],
)
def test_a_run_that_follows_a_teacher_is_not_told_to_stay_near(
    name: str, parameters: int, function: str, expected: set[str]
) -> None:
    config = parse(["--policy.path", "policy", "--reward.function", *function.split()])
    policy = SimpleNamespace(name="policy", counts=SimpleNamespace(parameters=5), random_init=False)
    counts = SimpleNamespace(parameters=parameters)
    reference = SimpleNamespace(name=name, counts=counts, random_init=False)
    models = {"policy": policy, "reference": reference}
    assert silent(cast(Any, SimpleNamespace(config=config, models=models))) == expected


@pytest.mark.parametrize("run", json.loads(PATH.read_text()), ids=lambda run: run["flags"])
def test_healthy_runs_are_not_warned(run: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    for role in ROLES:
        count = len(run[role]["step"])
        columns = {name: run[role][name] for name in METRICS[role] if name in run[role]}
        lists = {
            name: column if isinstance(column, list) else [column] * count
            for name, column in columns.items()
        }
        with (tmp_path / "metrics" / f"{role}.jsonl").open("w") as file:
            for values in zip(*lists.values(), strict=True):
                step = {
                    name: value
                    for name, value in zip(lists, values, strict=True)
                    if value is not None
                }
                file.write(json.dumps(step) + "\n")
    assert next(follow(tmp_path, {"kl"} if "kl-coef" in run["flags"] else set())) == []


REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    {}
"""


@pytest.mark.parametrize(
    ("body", "flags", "sentence"),
    [
        ("return 0.0", "--steps=6 --ppo.entropy-coef=0", "nothing"),
        ("return 1 / (extra_info['index'] % 2)", "--steps=2", None),
    ],
)
@pytest.mark.ranks
def test_a_real_run_says_it_on_the_screen_and_in_its_summary(
    body: str, flags: str, sentence: str | None, tmp_path: Path, capfd: Any
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.format(body))
    given = [
        "--rollout.batch-size=64",
        f"--run-dir={tmp_path / 'run'}",
        "--log.validate-every=0",
        *flags.split(),
    ]
    assert train.main([*given, f"--reward.function={reward}:score"]) == 0
    out = capfd.readouterr().out
    lines = [line for line in out.splitlines() if re.match("warning(: step|  )", line)]
    expected = (
        [f"warning: step 5: {SENTENCES[sentence]}", f"warning      step 5: {SENTENCES[sentence]}"]
        if sentence
        else []
    )
    assert lines == expected


def status_of(rank: int, flags: list[str]) -> int:
    return train.main(flags)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_in_which_every_reward_failed_has_another_status(
    steps: int, tmp_path: Path, capfd: Any
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.format("raise ValueError('no key')"))
    flags = [
        f"--steps={steps}",
        "--rollout.batch-size=4",
        "--ppo.mini-batches=1",
        "--log.validate-every=0",
    ]
    flags += [f"--run-dir={tmp_path / 'run'}", f"--reward.function={reward}:score"]
    assert run_ranks(1, status_of, flags) == [2]
    out, error = capfd.readouterr()
    count = f"{steps} step{'s' * (steps > 1)}"
    assert f"failed on every row for {count}: ValueError: no key" in error.splitlines()[-1]
    assert (SENTENCES["failing"] in out) == (steps > 1)
