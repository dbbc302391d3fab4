"""The study of critics, tests/gpu/critic_block.py: its data, extra baselines, intervals."""

import argparse
import json
import re
import subprocess
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import critic_seconds
import pytest
import torch
from critic_advantages import fused, of_prompt, positive
from critic_arms import Arm, Deviation, Digits, first_tokens
from critic_block import Block, Job, write_data
from critic_plan import DIGITS, TASKS
from critic_rewards import answer, written
from critic_study import flags_of
from critic_tables import (
    best_rate,
    difference,
    estimate,
    holm,
    mean_of_curve,
    printed,
    read_all,
    student_limit,
    verdict,
)
from critic_tasks import quotas, write_sums
from measured import DOCS, read_figures

from splitppo.rollout import Episode, Rollout, Segment


def sums_of(file: Path) -> list[tuple[frozenset[int], str]]:
    lines = map(json.loads, file.read_text().splitlines())
    return [
        (frozenset(map(int, re.findall(r"\d+", line["prompt"]))), line["data_source"])
        for line in lines
    ]


def test_no_sum_is_trained_on_and_held_out_in_either_order(tmp_path: Path) -> None:
    write_sums(tmp_path, DIGITS)
    held_out = sums_of(tmp_path / "held_out.jsonl")
    assert {pair for pair, _ in held_out}.isdisjoint(
        pair for pair, _ in sums_of(tmp_path / "training.jsonl")
    )
    assert len({pair for pair, _ in held_out}) == 998
    sizes = quotas([1, 2, 3, 4])
    assert sizes == {1: 14, 2: 328, 3: 328, 4: 328}
    counts = {count: [of for _, of in held_out].count(f"addition_{count}") for count in sizes}
    assert counts == sizes


def advantages(
    arm: type[Arm], sources: list[str], samples: int, scores: list[float], lengths: list[int]
) -> list[float]:
    """Of the first token of each row."""
    config = SimpleNamespace(
        rollout=SimpleNamespace(batch_size=len(sources), samples=samples),
        ppo=SimpleNamespace(gamma=1.0),
    )
    prompts = [SimpleNamespace(data_source=source) for source in sources]
    context: Any = SimpleNamespace(config=config, prompt=prompts.__getitem__)
    episodes = [
        Episode(row, array("i"), (Segment(array("i", [1] * count), array("f", [0] * count)),))
        for row, count in enumerate(lengths)
    ]
    rollout = Rollout(episodes)
    sizes = torch.tensor(lengths)
    rewards = torch.zeros(rollout.tokens)
    rewards[sizes.cumsum(0) - 1] = torch.tensor(scores)
    found = arm(context, cast(Any, None)).estimate(rollout, rewards, rewards)
    assert torch.equal(
        found.advantages, found.advantages[first_tokens(sizes)].repeat_interleave(sizes)
    )
    return found.advantages[first_tokens(sizes)].tolist()


def test_baselines_by_hand() -> None:
    rows = [1.0, 0, 0, 1], [1, 2, 1, 3]  # scores and lengths
    third = 1 / 3
    found = advantages(Digits, ["a", "b", "b", "b"], 1, *rows)
    assert found == pytest.approx([0, -third, -third, 2 * third])
    # mean 1/2, deviation sqrt(4 * 1/4 / 3)
    z = 0.5 / (third**0.5 + 1e-6)
    assert advantages(Deviation, ["a"] * 4, 4, *rows) == pytest.approx([z, -z, -z, z])
    # two prompts of two responses: the second's are alike
    z = 0.5 / (0.5**0.5 + 1e-6)
    found = advantages(Deviation, ["a"] * 4, 2, [1.0, 0, 1, 1], [1, 2, 1, 3])
    assert found == pytest.approx([z, -z, 0, 0])


ROWS = torch.tensor([1, 2, 1, 1])  # tokens of four rows, two of each prompt
SCORES = torch.tensor([1.0, 0, 0, 1, 1])


def test_advantages_of_papers_by_hand() -> None:
    found = positive(rewards=SCORES, lengths=ROWS, values=SCORES, prompts=ROWS)
    # scores 1 0 1 1: mean 3/4, deviation sqrt(3)/4
    assert found.tolist() == pytest.approx([3**-0.5, 0, 0, 3**-0.5, 3**-0.5])
    pair = torch.tensor([3, 3, 7, 7])
    values = torch.tensor([0.5, 0.5, 0, 0.9, 0.9])
    # the first prompt's mean, 1/2, has the error 1/4, and its value says the same; the second's
    # responses agree, so the mean counts alone
    found = fused(
        rewards=torch.tensor([1.0, 0, 0, 1, 1]), values=values, lengths=ROWS, prompts=pair
    )
    assert found.tolist() == pytest.approx([0.5, -0.5, -0.5, 0, 0])
    # mean 1/2, error 1/4, value 2: bias 9/4 - 1/4 = 2, so the value weighs 1/9
    found = fused(rewards=SCORES, values=values * 4, lengths=ROWS, prompts=pair)
    assert found[:3].tolist() == pytest.approx([1 - 2 / 3, -2 / 3, -2 / 3], abs=1e-6)


def test_what_the_prompt_tells_is_a_line_by_the_first_value() -> None:
    lengths = torch.tensor([2, 2, 2, 1])
    rewards = torch.tensor([0.0, 3, 0, 1, 0, 5, 2])
    values = torch.tensor([1.0, 9, 2, 9, 3, 9, 2])  # later ones count for nothing
    found = of_prompt(rewards=rewards, values=values, lengths=lengths)
    # first token: returns 3 1 5 2 by values 1 2 3 2: mean 11/4, slope 1; second: 3 1 5 by 1 2 3
    assert found.tolist() == pytest.approx([1.25, 1, -1.75, -2, 1.25, 1, -0.75])


def test_an_error_costs_what_is_behind_it() -> None:
    def spans(text: str) -> list[float]:
        return [paid for _, paid in written("", text, "432", None)["spans"]]

    assert spans("432") == pytest.approx([1 / 3] * 3)
    assert spans("422") == pytest.approx([1 / 3, 0.8 / 3, 0.8 / 3])
    assert spans("932x") == pytest.approx([0, 0, 0, -1 / 3])
    assert answer("", "It is 3 + 4 = 7.\n8", "7", None) == 1
    assert answer("", "I say: Foundation, acute!", "foundation, acute", None) == 1
    assert answer("", "acute", "foundation, acute", None) == 0


def test_intervals_are_those_of_the_tables() -> None:
    assert student_limit(9) == pytest.approx(2.2622, abs=1e-4)
    assert student_limit(1) == pytest.approx(12.706, abs=1e-2)
    result = estimate([1.0, 2.0, 3.0])  # deviation 1
    assert (result.mean, result.half) == pytest.approx((2, 4.3027 / 3**0.5), abs=1e-3)
    paired = difference({1: 1.0, 2: 3.0, 3: 9.0}, {1: 0.5, 2: 2.0}, paired=True)
    assert (paired.mean, paired.n) == (0.75, 2)
    # Welch: errors 1/2 and 1/6, so 4/9 a mean of squares; freedom by hand
    welch = difference({1: 1.0, 2: 2.0}, {3: 0.0, 4: 0.5, 5: 1.0}, paired=False)
    error = (0.5 / 2 + 0.25 / 3) ** 0.5
    freedom = error**4 / (0.25**2 / 1 + (0.25 / 3) ** 2 / 2)
    assert welch.half == pytest.approx(student_limit(freedom) * error)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_the_verdict_follows_the_plan() -> None:
    for mean, half, said in (
        (0.03, 0.02, "first better"),
        (-0.03, 0.02, "second better"),
        (0.01, 0.005, "first better, but within 0.02"),
        (0.005, 0.01, "as good, within 0.02"),
        (0.005, 0.03, "not decided"),
    ):
        assert verdict(SimpleNamespace(mean=mean, half=half)) == said  # type: ignore


def test_a_mean_by_trapezoids_ends_inside_a_piece() -> None:
    points = [(0.0, 0.0), (10.0, 1.0), (20.0, 1.0)]
    assert mean_of_curve(points, 20) == pytest.approx(0.75)
    assert mean_of_curve(points, 5) == pytest.approx(0.25)


def line(arm: str, rate: str, seed: int, score: float) -> dict[str, Any]:
    held_out = [[0, score], [2, score]]
    return {"arm": arm, "rate": rate, "seed": seed, "held_out": held_out}


def test_fresh_seeds_wait_for_the_rates_and_a_failed_run_ends_no_other(tmp_path: Path) -> None:
    options = argparse.Namespace(
        arms=["V1", "V1old"], rates=["1e-5", "2e-5"], rate_seeds=[1], seeds=[11]
    )
    block = Block(tmp_path, options, [], time.time() + 1000)
    assert [job.name for job in block.jobs()] == ["V1_1e-5_1", "V1_2e-5_1"]
    block.done["V1_2e-5_1"] = line("V1", "2e-5", 1, 0.5)
    block.failures["V1_1e-5_1"] = 1
    assert block.next() == Job("V1", "1e-5", 1)  # tried once more
    block.failures["V1_1e-5_1"] = 2
    names = [job.name for job in block.jobs()]
    assert names[2:] == ["V1_2e-5_11", "V1old_2e-5_11"]
    assert block.next() == Job("V1", "2e-5", 11)
    options.seeds = []
    assert block.next() is None  # not a third time
    options.seeds = [11]
    block.seconds = [2000.0]
    assert block.next() is None  # it could not end in time
    options.rates = ["4e-5"]  # no choice: no seeds for it
    assert [job.name for job in block.jobs()] == ["V1_4e-5_11", "V1old_4e-5_11"]


def test_a_run_that_was_cut_off_begins_anew(tmp_path: Path, monkeypatch) -> None:
    options = argparse.Namespace(gpus=0, mps=None)
    block = Block(tmp_path, options, ["--steps", "3"], time.time() + 1000)
    left = tmp_path / "runs" / "B1_2e-5_11" / "metrics"
    left.mkdir(parents=True)
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    block.start(Job("B1", "2e-5", 11))
    assert not left.exists()
    assert commands[0][-2:] == ["--run-dir", str(left.parent)]


def test_files_of_a_task_are_written_once(tmp_path: Path) -> None:
    sizes = write_data(tmp_path, TASKS["written"])
    assert sizes == {"written": 256}
    training, held_out = (tmp_path / f"{name}.jsonl" for name in ("training", "held_out"))
    prompts = [
        {json.loads(line)["prompt"] for line in file.open()} for file in (training, held_out)
    ]
    assert prompts[0].isdisjoint(prompts[1])
    assert [len(each) for each in prompts] == [4000, 256]
    training.write_text("mine\n")
    assert write_data(tmp_path, TASKS["written"]) == sizes
    assert training.read_text() == "mine\n"


def test_scores_by_seconds_are_those_by_tokens_at_each_ones_speed(tmp_path: Path) -> None:
    run = {"rate": "2e-5", "tokens": [100, 100], "held_out": [[0, 0.0], [2, 1.0]]}
    lines = [{"seeds": [1, 2]}]
    lines += [run | {"arm": arm, "seed": seed} for arm in ("V1", "G8") for seed in (1, 2)]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    speed = {"V1, windows": 200.0, "G8, whole rows": 100.0}
    rows = critic_seconds.printed(speed, file).splitlines()[2:]
    # one second: the first has gone all the way, the second half of it
    assert [row.split("|")[3].strip() for row in rows] == [".500 ± .000", ".250 ± .000"]


def test_the_best_rate_is_of_the_mean_over_seeds() -> None:
    runs = [line("V1", "1e-5", 1, 0.6), line("V1", "1e-5", 2, 0.2), line("V1", "2e-5", 1, 0.5)]
    assert best_rate(runs) == "2e-5"
    assert best_rate([]) is None


def test_an_arm_without_a_value_model_takes_no_settings_of_one() -> None:
    flags = "--steps 3 --value.optim.lr 2e-5 --value.layers 2 --ppo.value-epochs 2 --ppo.lam 0.95"
    batch = ["--ppo.baseline", "batch"]
    assert flags_of(batch, flags.split()) == ["--steps", "3", "--ppo.lam", "0.95", *batch]
    assert flags_of(["--value.layers", "8"], flags.split()) == [
        *flags.split(),
        *["--value.layers", "8"],
    ]


ENTRIES = {
    key: (entry, re.findall(r"docs/(\w+\.jsonl)", entry.get("command", "")))
    for key, entry in read_figures()[1].items()
    if entry.get("command", "").strip().startswith("python tests/gpu/critic_block.py table docs/")
}


def test_the_page_has_what_the_command_prints() -> None:
    """Each table of the page; and the plan's commit."""
    assert len(ENTRIES) == 13
    for key, (entry, files) in ENTRIES.items():
        text = printed(*read_all([DOCS / file for file in files]))
        for cells in (entry["columns"], *entry["rows"]):
            assert f"| {' | '.join(cells)} |" in text, key
        plan = re.findall(r"Plan: commit (\w+)", text)[0]
        assert f"`{plan}`" in (DOCS / "critic_study.md").read_text(encoding="utf-8")
