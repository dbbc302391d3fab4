"""`--data.task guess`, as it is, teaches the embedded model to play."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks
from runs import main_rank, records


def held_out(run: Path) -> list[float]:
    return [line["val/score/mean"] for line in records(run, "actor") if "val/score/mean" in line]


@pytest.mark.campaign
def test_the_first_steps(tmp_path: Path):
    argv = ["--data.task=guess", "--steps=4", f"--run-dir={tmp_path}", "--data.validation-rows=32"]
    run_ranks(1, main_rank, argv)
    assert held_out(tmp_path)[0] < 0.05
    scores = [line["critic/score/mean"] for line in records(tmp_path, "critic")]
    assert scores[-1] > 2 * scores[0] > 0
    rows = (tmp_path / "samples" / "step_000004.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["question"].startswith("Guess a number.")


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(3))
def test_the_whole_run(tmp_path: Path, seed: int):
    """From nothing to four fifths of the best score, which is 1, with the defaults."""
    run_ranks(2, main_rank, ["--data.task=guess", f"--run-dir={tmp_path}", f"--seed={seed}"])
    scores = held_out(tmp_path)
    assert scores[0] < 0.05
    assert scores[-1] > 0.8
