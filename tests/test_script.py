"""Scripts of a user's own: `from splitppo import Config, run`."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from ranks import run_ranks
from runs import records

from splitppo.config import (
    Config,
    DataConfig,
    LogConfig,
    OptimConfig,
    PolicyConfig,
    PPOConfig,
    RewardConfig,
    RolloutConfig,
    ValueConfig,
)
from splitppo.config.cli import as_flags, parse
from splitppo.errors import UserError
from splitppo.rewards.functions import find_function, name_function

README = Path(__file__).parents[1] / "README.md"
HEAD = "import functools\nfrom splitppo import Config, run\n"
SCORE = "def score(solution_str, **row):\n    return float(len(solution_str))\n"
GUARD = 'if __name__ == "__main__":\n    '
START = GUARD + "run(Config(steps=2), reward={})\n"


def start(file: Path, argv: list[str]) -> int:
    """Runs a script as Python does; the exit status with which it ends this process."""
    with (
        mock.patch.object(sys, "argv", [str(file), *argv]),
        mock.patch.object(os, "_exit", sys.exit),
    ):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as stop:
            return int(stop.code or 0)
    raise AssertionError("run() came back")


def rank(_: int, file: Path, argv: list[str]) -> int:
    return start(file, argv)


def test_the_script_of_the_readme_runs_and_goes_on(tmp_path: Path) -> None:
    (script,) = re.findall(
        r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S
    )
    assert len(script.split("\n")) <= 12
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(script)
    flags = [f"--run-dir={folder}", "--log.validate-every=0", "--checkpoint.every=2"]
    assert run_ranks(2, rank, file, [*flags, "--steps=2"]) == [0, 0]
    recorded = tomllib.loads((folder / "config.toml").read_text())
    assert recorded["reward"]["function"] == [f"{file}:score"]
    assert (
        recorded["steps"],
        recorded["rollout"]["batch_size"],
        recorded["rollout"]["samples"],
    ) == (2, 96, 2)
    assert run_ranks(1, rank, file, [*flags, "--steps=3"]) == [0]
    steps = records(folder, "critic")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(
        step["critic/reward_failures"] == 0 and step["critic/score/max"] > 0 for step in steps
    )


SETTINGS = {
    "the embedded model keeps its learning rates": (
        Config(steps=7, seed=1),
        "steps = 7\nseed = 1",
        "--steps 7 --seed=1",
    ),
    "a learning rate that is set": (
        Config(value=ValueConfig(optim=OptimConfig(lr=1e-6, warmup_steps=3))),
        "[value.optim]\nlr = 1e-6\nwarmup_steps = 3",
        "--value.optim.lr 1e-6 --value.optim.warmup-steps 3",
    ),
    "off, on, several": (
        Config(
            policy=PolicyConfig(path="~/m", freeze=("embeddings", "body")),
            data=DataConfig(chat=False, files=("a.jsonl", "b.jsonl"), system="Be brief, please."),
            ppo=PPOConfig(value_clip=None),
            reward=RewardConfig(clip=(-1, 2.5), missing_eos_penalty=1),
            log=LogConfig(trackers=("wandb",)),
        ),
        'policy.path = "~/m"\npolicy.freeze = ["embeddings", "body"]\nppo.value_clip = "None"\n'
        'log.trackers = ["wandb"]\n'
        '[data]\nchat = false\nfiles = ["a.jsonl", "b.jsonl"]\nsystem = "Be brief, please."\n'
        "[reward]\nclip = [-1, 2.5]\nmissing_eos_penalty = 1",
        "--policy.path ~/m --policy.freeze embeddings body --ppo.value-clip None --log.trackers "
        "wandb --data.no-chat "
        "--data.files a.jsonl b.jsonl --data.system=Be\0brief,\0please. --reward.clip -1 2.5 "
        "--reward.missing-eos-penalty 1",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_python_toml_and_flags_are_one(name: str, tmp_path: Path) -> None:
    config, toml, flags = SETTINGS[name]
    (tmp_path / "mine.toml").write_text(toml)
    by_flags = parse([word.replace("\0", " ") for word in flags.split()])
    assert parse(as_flags(config)) == by_flags
    by_toml = parse([f"--config={tmp_path / 'mine.toml'}"])
    assert replace(by_toml, config=None) == by_flags
    assert by_flags != parse([])


def test_a_learning_rate_is_named() -> None:
    """A default would be the policy's, and count as set in
    `ValueConfig(optim=OptimConfig(warmup_steps=3))`."""
    make: Any = OptimConfig
    with pytest.raises(TypeError, match="lr"):
        make(warmup_steps=3)


def test_flags_are_over_the_script_and_the_script_over_a_preset() -> None:
    script = as_flags(
        Config(config="smollm2/addition", steps=7, rollout=RolloutConfig(max_new_tokens=9))
    )
    config = parse([*script, "--steps", "8"])
    assert (config.steps, config.rollout.max_new_tokens) == (8, 9)
    assert (
        config.ppo.mini_batches
        == parse(["--config=smollm2/addition"]).ppo.mini_batches
        != PPOConfig().mini_batches
    )


REFUSED = {  # the script, its arguments, and parts of what it ends with
    "a lambda": (
        START.format("lambda **row: 1.0"), "", ["reward=<lambda>", "file and name", "top level"],
    ),
    "a nested function": (
        "def make():\n    def inner(**row): return 1.0\n    return inner\n"
        + START.format("make()"),
        "", ["reward=make.<locals>.inner", "top level"],
    ),
    "a method": (
        "class Judge:\n    def score(self, **row): return 1.0\n" + START.format("Judge().score"),
        "", ["reward=Judge.score", "top level"],
    ),
    "functools.partial": (
        START.format("functools.partial(score, extra_info=None)"), "", ["partial(", "top level"],
    ),
    "another function of the same name": (
        "def other(one):\n    return functools.wraps(one)(lambda **row: 2.0)\n"
        + START.format("other(score)"), "",
        ["reward=score", "top level"],
    ),
    "a built-in function": (START.format("len"), "", ["reward=len", "top level"]),
    "one under the guard": (
        GUARD + "def late(**row): return 1.0\n    run(Config(steps=2), reward=late)\n", "",
        ["has no late", "when it is imported"],
    ),
    "no guard": (
        "run(Config(steps=2), reward=score)\n", "",
        ['if __name__ == "__main__":', "mine.py, line 5"],
    ),
    "no guard, and a name": (
        "from splitppo.config import *\n"
        "run(Config(reward=RewardConfig(function=(__file__ + ':score',))))\n",
        "", ['if __name__ == "__main__":'],
    ),
    "other arguments": (
        "def two(a, b): return 1.0\n" + START.format("two"), "", ["mine.py:two", "solution_str"],
    ),
    "a word for a number": (GUARD + "run(Config(steps='ten'))\n", "", ["--steps", "ten", "INT"]),
    "a word among the flags": (START.format("score"), "more.py", ["more.py", "unknown word"]),
    "two presets": (
        GUARD + "run(Config(config='a.toml'))\n", "--config b.toml", ["--config", "twice"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_script_ends_in_a_line(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    source, argv, says = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(HEAD + SCORE + source)
    assert start(file, argv.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert [part for part in says if part not in line] == []
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}


def test_a_function_without_a_text_is_refused(monkeypatch) -> None:
    """As in a script that Python reads from standard input. The process goes on."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(UserError, match=r"reward=score.*\.py file"):
        exec(HEAD + SCORE + START.format("score"), vars(main))


def test_functions_that_have_a_name(tmp_path: Path, monkeypatch) -> None:
    """Also those that another file holds, or that a decorator wraps."""
    (tmp_path / "beside_mine.py").write_text(
        "import functools\n" + SCORE + "@functools.cache\ndef kept(**row): return 3.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    beside = __import__("beside_mine")
    assert name_function(beside.score) == f"{tmp_path}/beside_mine.py:score"
    assert find_function(name_function(beside.kept))() == 3.0


def test_the_names_import_no_torch() -> None:
    """`run` can be called although the package of that name has been imported, in whatever
    order."""
    code = (
        "import sys, splitppo.run; from splitppo import Config, run; print(callable(run), 'torch' "
        "in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
