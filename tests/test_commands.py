"""Commands of the pages, as they stand there: what they promise is what comes of them."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from runs import in_one_process, names, run_command
from terminal import Terminal

from splitppo import train

DOCS = Path(__file__).parents[1] / "docs"
ONE = "def one(**row):\n    return 1.0\n"
SMALL = (
    "--rollout.batch-size=4 --ppo.mini-batches=1 --ppo.epochs=1 --data.validation-rows=4"
).split()


def command(page: str, *parts: str) -> list[str]:
    """The words of a page's only command with these parts; of one that starts two ranks, the flags
    of the trainer."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    (line,) = [
        line for line in lines if line.startswith("    ") and all(part in line for part in parts)
    ]
    return shlex.split(
        re.sub(r"^ *splitppo train --nproc_per_node 2 (?=--)", "", line), comments=True
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_goal_ends_the_run_and_another_run_begins_with_its_newest_checkpoint(tmp_path: Path):
    (tmp_path / "one.py").write_text(ONE)
    small = [*SMALL, "--reward.function=one.py:one"]
    goal = [*command("resuming.md", "stop-at"), *small]
    resumed = " ".join([*command("resuming.md", "--resume runs/mine"), *small, "--steps=9"])
    results = in_one_process(
        tmp_path,
        goal,
        [*goal, "--log.stop-at=None", "--steps=7"],
        resumed.replace("runs/mine", "runs/goal").split(),
    )
    assert [status for status, _ in results] == [0] * 3
    ended, _, second = [said for _, said in results]
    assert re.search(r"step +5/\d+ +held-out score(?s:.*)step 5: log.stop_at=0.9 is reached", ended)
    assert "done         5 of " in ended
    assert names(tmp_path / "runs/goal") == ["step_000005", "step_000007"]
    assert "resuming from runs/goal/checkpoints/step_000007" in second
    assert names(tmp_path / "runs/next") == ["step_000009"]


def test_turns_are_cut_in_training_and_in_validation(tmp_path: Path):
    argv = command("environments.md", "max-turn-tokens")
    ((status, said),) = in_one_process(tmp_path, [*argv, *SMALL, "--steps=1", "--run-dir=run"])
    assert status == 0, said
    for folder in ("samples", "validation"):
        rows = rows_of(tmp_path / "run" / folder / "step_000001.jsonl")
        texts = [
            turn["content"] for row in rows for turn in row["turns"] if turn["role"] == "assistant"
        ]
        assert max(map(len, texts)) == 2


def test_a_baseline_without_a_model_for_critic_ranks_chooses_its_placement(
    tmp_path: Path, monkeypatch, capsys
):
    """Also when the same command resumes, and when the folder says all of it."""
    argv = command("critic.md", "--ppo.baseline group")
    argv += ["--rollout.batch-size=8", *SMALL[1:], "--log.validate-every=0"]
    assert run_ranks(2, _in_folder, str(tmp_path), [*argv, "--steps=1"]) == [0, 0]
    resolved = [(tmp_path / "runs/group/resolved.json").read_text()]
    monkeypatch.chdir(tmp_path)
    for words in (argv, ["--run-dir=runs/group"]):
        assert train.main([*words, "--steps=2", "--dry-run", "--world-size=2"]) == 0
        resolved.append(capsys.readouterr().out.partition("resolved: ")[2])
    for text in resolved:
        facts, _ = json.JSONDecoder().raw_decode(text)
        assert (facts["placement"], facts["actor"], facts["critic"]) == ("colocated", 2, 2)


def _in_folder(_: int, folder: str, argv: list[str]) -> int:
    os.chdir(folder)
    return train.main(argv)


@pytest.mark.wide
def test_a_script_starts_with_a_quiet_screen(tmp_path: Path):
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    (tmp_path / "mine.py").write_text(f"import beside\n{script}")
    (tmp_path / "beside.py").touch()
    words = command("training.md", "splitppo train", "mine.py")
    more = "--steps 2 --run-dir=run --rollout.batch-size=8 --log.validate-every=0".split()
    terminal = Terminal([*words[1:], *more], folder=tmp_path)
    assert terminal.wait() == 0, terminal.said
    assert "done         2 of 2 steps" in terminal.said
    assert f"reward       {tmp_path}/mine.py:score" in terminal.said
    assert "elastic" not in terminal.said


def _eval(_: int, folder: str, argv: list[str]) -> tuple[int, str]:
    os.chdir(folder)
    return run_command(argv)


def measured(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.json").read_text())


def test_a_model_is_scored_alone(tmp_path: Path):
    """A run, its checkpoint and its exported policy have the scores of the run's own validation, on
    any number of ranks."""
    score = "def score(solution_str, **row):\n    return sum(map(ord, solution_str)) % 97 / 96\n"
    (tmp_path / "digits.py").write_text(score)
    run = "--steps=2 --run-dir=RUN --reward.function=digits.py:score".split()
    export = "RUN/export/step_000002/policy"
    small = [*SMALL, "--rollout.max-new-tokens=6", "--reward.function=digits.py:score"]
    results = in_one_process(
        tmp_path,
        [*SMALL, *run],
        "splitppo eval RUN/checkpoints/step_000002 --out one".split(),
        command("report.md", "splitppo eval"),
        "splitppo export RUN --dtype float32".split(),
        ["splitppo", "eval", export, *small, "--out", "three"],
        # a run that starts from a folder
        [*small, "--steps=2", "--run-dir=NEXT", "--log.validate-every=2", "--policy.path", export],
        "splitppo eval NEXT --out four".split(),
    )
    assert [status for status, _ in results] == [0] * 7, results
    due = last_validation(tmp_path / "RUN")
    ((status, said), _) = run_ranks(2, _eval, str(tmp_path), "splitppo eval RUN --out two".split())
    assert status == 0, said
    assert f"score {due['val/score/mean']:.4f} ± " in said
    for name in ("one", "two"):
        found = measured(tmp_path / name)
        assert {name: found[name] for name in MEASURED} == due
        assert 0 < found["val/score/half_interval_95"] < 1
    assert (tmp_path / "one/rows.jsonl").read_text() == (tmp_path / "two/rows.jsonl").read_text()
    assert "pass@4" in results[2][1]
    assert measured(tmp_path / "three")["val/score/mean"] == due["val/score/mean"]
    next_due = last_validation(tmp_path / "NEXT")
    assert measured(tmp_path / "four")["val/score/mean"] == next_due["val/score/mean"]
    # longer prompts are other data, not more than the run allows, also if the run's command set
    # nothing; and a copy of a checkpoint is none
    (tmp_path / "RUN/given.json").write_text("[]")
    shutil.copytree(tmp_path / "NEXT/checkpoints/step_000002", tmp_path / "NEXT/kept/step_000002")
    (other, _), (status, said) = in_one_process(
        tmp_path,
        "splitppo eval RUN --data.task=addition".split(),
        "splitppo eval NEXT/kept/step_000002".split(),
    )
    assert (other, status) == (0, 2)
    assert "NEXT/kept/step_000002: no config.json" in said
    (first, second) = sorted(tmp_path.glob("eval/*/rows.jsonl"))
    assert len(rows_of(first)) == 4 * due["val/rows"]
    assert "What is" in rows_of(second)[0]["prompt"]


def last_validation(run: Path) -> dict[str, float]:
    line = json.loads((run / "metrics/actor.jsonl").read_text().splitlines()[-1])
    return {name: line[name] for name in MEASURED}


MEASURED = ("val/score/mean", "val/rows", "val/response_length/mean")
