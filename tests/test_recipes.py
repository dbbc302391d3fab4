"""docs/recipes.md: its commands as they stand there, one after the other, with fewer steps: also
configs/rlhf/prepare_digits.py and configs/sentiment/prepare_reward.py."""

import re
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from runs import records
from terminal import Terminal
from tiers import wide

from splitppo.__main__ import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
# what each command gets in addition
FEWER = {
    "splitppo train": "--steps 2 --rollout.batch-size 32 --log.validate-every 2",
    "python configs/sentiment/prepare_reward.py": "--epochs 1 --max-rows 400",
}


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return text


def commands(title: str) -> list[str]:
    """The commands of a section, but for those that need what is not here."""
    text = re.sub(r"^<!-- needs.*?-->\n\n(?:    .*\n)+", "", section(title), flags=re.M)
    return re.findall(r"^    ((?:splitppo|python) .*)$", text, re.M)


def play(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    name = " ".join(words[:2])
    words += FEWER.get(name, "").split()
    if name == "splitppo train":
        if "--resume" in words:
            words += ["--steps", "4"]
        terminal = Terminal(words[1:], folder=folder)
        assert terminal.wait() == 0, terminal.said
    elif words[0] == "splitppo":
        monkeypatch.setattr(sys, "argv", words)
        assert main() == 0
    else:
        monkeypatch.setattr(sys, "argv", words[1:])
        with suppress(SystemExit):  # what failed leaves no files for the next command
            runpy.run_path(words[1], run_name="__main__")


def of_rlhf(folder: Path) -> None:
    (score, _), (held_out, *_) = (
        records(folder / "runs/rlhf", "critic"),
        records(folder / "runs/rlhf", "actor"),
    )
    assert score["critic/score/mean"] == pytest.approx(score["critic/reward_model/mean"])
    assert 0 <= held_out["val/score/mean"] <= 1
    assert (folder / "runs/rlhf/report.html").is_file()


def last(folder: Path, run: str, role: str = "critic") -> dict[str, Any]:
    return records(folder / "runs" / run, role)[-1]


CHECKS: dict[str, Callable[[Path], Any]] = {
    "RLHF with a reward model": of_rlhf,
    "Tools": lambda folder: last(folder, "guess", "actor")["env/turns"] >= 1,
    "Distillation": lambda folder: "distill/kl" in last(folder, "student"),
    "Rewards by token": lambda folder: last(folder, "copied")["critic/spans/mean"] > 0,
    "From easy to hard": lambda folder: last(folder, "hard")["step"] == 4,
}


@pytest.mark.ranks
@pytest.mark.parametrize("title", [next(iter(CHECKS)), *(wide(name) for name in [*CHECKS][1:])])
def test_a_recipe(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name, text in re.findall(
        r"As `(\w+\.py)`:\n\n```python\n(.*?)^```", section(title), re.M | re.S
    ):
        Path(name).write_text(text)
    for command in commands(title):
        play(command, tmp_path, monkeypatch)
    assert CHECKS[title](tmp_path) is not False
