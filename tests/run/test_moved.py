"""A run's folder stands alone: moved elsewhere, with another home and no network, and what it was
made from at other places or gone."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hub import Hub, settings
from huggingface_hub import constants
from ranks import run_ranks
from runs import SMALL, assert_same, figures
from safetensors.torch import load_file
from transformers import AutoTokenizer

from splitppo import __main__ as tools
from splitppo import __version__, train
from splitppo.config.cli import parse
from splitppo.config.toml import to_toml
from splitppo.models.tiny import build_tiny
from splitppo.run import checkpoint
from splitppo.run import folder as run_files
from splitppo.run.sources import model_folder
from splitppo.tools.push import card_of

NOWHERE = "http://127.0.0.1:9"
FLAGS = [
    *SMALL,
    "--checkpoint.every=2",
    "--checkpoint.keep=0",
    "--data.prompt-key=question",
    "--data.answer-key=answer",
]
FLAGS += ["--rollout.max-new-tokens=6", "--ppo.entropy-coef=0.05", "--reward.normalize=running"]
FLAGS += ["--policy.optim.lr=0.01", "--value.optim.lr=0.01", "--reward.workers=1", "--run-dir=run"]
BASE, DATA = "--policy.path=models/base", "--data.files=rows.jsonl"
HELD_OUT, REWARD = "--data.validation-files=held_out.jsonl", "--reward.function=rewards/rw.py:score"
SCORE = """
def score(data_source, solution_str, ground_truth, extra_info):
    return 0.1 * sum(c in ground_truth for c in solution_str)
"""
TEMPLATE = "{% for message in messages %}{{ message.content }}={% endfor %}"


def start(rank: int, place: str, home: str, argv: list[str]) -> int:
    """A run that is started in the folder `place`, with no network."""
    os.chdir(place)
    os.environ["HOME"] = home
    for name, value in settings(NOWHERE, home).items():
        setattr(constants, name, value)
    return train.main(argv)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of four steps with checkpoints of two of them, and what it was made from, both no
    longer where they were. That place."""
    place = tmp_path_factory.mktemp("place")
    kept = tmp_path_factory.mktemp("kept")
    build_tiny(place / "models" / "base", seed=3)
    (place / "models" / "base" / "chat_template.jinja").write_text(TEMPLATE)
    (place / "models" / "base" / "generation_config.json").write_text('{"eos_token_id": 1}')
    for file, first in (("rows.jsonl", 0), ("held_out.jsonl", 40)):
        rows = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(first, first + 40)]
        (place / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "rewards").mkdir()
    (place / "rewards" / "rw.py").write_text(SCORE)
    given = [*FLAGS, BASE, DATA, HELD_OUT, REWARD]
    assert run_ranks(1, start, str(place), str(place), given) == [0]
    for path in place.iterdir():
        path.rename(kept / path.name)
    place.rmdir()
    return kept, place


@pytest.fixture
def moved(kept: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nothing but a copy of the run, in which this process is, with another home and
    no network."""
    shutil.copytree(kept[0] / "run", tmp_path / "here" / "run")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name, value in settings(NOWHERE, tmp_path / "home").items():
        monkeypatch.setattr(constants, name, value)
    return tmp_path / "here"


def typed(monkeypatch: pytest.MonkeyPatch, *words: object, asked: str = "") -> int:
    monkeypatch.setattr(sys, "argv", ["splitppo", *map(str, words)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    return tools.main()


def going_on(kept: Path, place: Path) -> list[str]:
    """A run's settings when what it was made from lies in the folder `kept`, but for the reward:
    that is gone."""
    data = [f"--data.files={kept}/rows.jsonl", f"--data.validation-files={kept}/held_out.jsonl"]
    return [
        *FLAGS,
        f"--policy.path={kept}/models/base",
        *data,
        f"--reward.function=run/rewards{place}/rewards/rw.py:score",
    ]


def test_a_run_records_where_it_comes_from_and_what_its_tools_need(kept: tuple[Path, Path]) -> None:
    run = kept[0] / "run"
    place = kept[1]
    config = parse([f"--config={run}/config.toml"])
    assert config.policy.path == f"{place}/models/base"
    assert (config.data.files, config.data.validation_files) == (
        (f"{place}/rows.jsonl",),
        (f"{place}/held_out.jsonl",),
    )
    assert config.reward.function == (f"{place}/rewards/rw.py:score",)
    assert (
        json.loads((run / "resolved.json").read_text())["models"]["value"]["folder"]
        == f"{place}/models/base"
    )
    assert [path.name for path in (run / "models").iterdir()] == ["policy"]
    names = {path.name for path in (run / "models" / "policy").iterdir()}
    assert names == {path.name for path in (kept[0] / "models" / "base").iterdir()} - {
        "model.safetensors"
    }
    rewards = run.joinpath("rewards", *place.parts[1:], "rewards")
    copied = {str(path.relative_to(rewards)) for path in rewards.rglob("*.py")}
    assert copied == {"rw.py"}


def test_report_export_and_the_trained_policys_chat_need_the_folder_alone(
    moved: Path,
    kept: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert typed(monkeypatch, "report", "run") == 0
    assert typed(monkeypatch, "export", "run", "--dtype=float32") == 0
    told = capsys.readouterr()
    assert told.err == ""
    policy = moved / "run" / "export" / "step_000004" / "policy"
    for file in policy.iterdir():
        for secret in (str(kept[1]), str(moved)):
            assert secret.encode() not in file.read_bytes(), (file.name, secret)
    assert AutoTokenizer.from_pretrained(policy).chat_template == TEMPLATE
    before, after = (
        load_file(kept[0] / "models" / "base" / "model.safetensors"),
        load_file(policy / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert not any((before[name] == after[name]).all() for name in before)
    assert typed(monkeypatch, "chat", "run", asked="1+1\n") == 0
    told = capsys.readouterr()
    assert [line.partition(": ")[0] for line in told.out.splitlines()] == [
        "trained",
        "trained, values",
    ]
    assert told.err.count("\n") == 1
    assert told.err.startswith(
        f"note: no answers of the policy before training: policy.path={kept[1]}/models/base: "
    )
    assert "HF_HUB_OFFLINE" not in told.err
    assert told.err.endswith("or its files into run/models/policy\n")
    shutil.copy(
        kept[0] / "models" / "base" / "model.safetensors", moved / "run" / "models" / "policy"
    )
    assert typed(monkeypatch, "chat", "run", asked="1+1\n") == 0
    again = capsys.readouterr()
    assert again.out.startswith(told.out)
    assert again.out.count("before training") == 2
    assert again.err == ""


def test_a_moved_run_goes_on_as_if_nothing_had_been(
    moved: Path, kept: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.rmtree(checkpoint.step_folder(moved / "run", 4))
    assert run_ranks(1, start, str(moved), str(tmp_path / "home"), going_on(*kept)) == [0]
    for role in ("actor", "critic"):
        assert_same(figures(moved / "run", role), figures(kept[0] / "run", role))
    config = parse(["--config=run/config.toml"])
    assert config.policy.path == f"{kept[0]}/models/base"
    assert not (moved / "run" / "rewards" / moved.relative_to("/")).exists()


def test_models_of_one_folder_are_kept_once(tmp_path: Path) -> None:
    for name in ("policy", "value", "reward"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").touch()
    config = parse(
        (
            "--policy.path=/a --value.path=/b --reference.path=/b --reward.model=/a --ppo.kl-coef=1"
        ).split()
    )
    found = {
        kind: model_folder(config, tmp_path, kind).name
        for kind in ("policy", "value", "reference", "reward")
    }
    assert found == {"policy": "policy", "value": "value", "reference": "value", "reward": "policy"}


# what is missing -> what is done to (the run, its sources), and how the error begins
FAULTS: dict[str, Any] = {
    "base": (
        lambda run, kept: shutil.rmtree(kept / "models"),
        "policy.path={kept}/models/base: no such folder",
    ),
    "data": (
        lambda run, kept: (kept / "rows.jsonl").unlink(),
        "data.files={kept}/rows.jsonl: no such file",
    ),
    "reward": (
        lambda run, kept: shutil.rmtree(run / "rewards"), "reward.function=run/rewards{place}/rew",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_resume_misses_is_one_line(
    fault: str,
    moved: Path,
    kept: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(kept[0], tmp_path / "sources")
    spoil, begins = FAULTS[fault]
    spoil(moved / "run", tmp_path / "sources")
    argv = [*going_on(tmp_path / "sources", kept[1]), "--steps=6"]
    for flags in ([], ["--dry-run"]):
        assert train.main([*argv, *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {begins.format(kept=tmp_path / 'sources', place=kept[1])}")
        assert "; " in line, "the remedy"


@pytest.mark.parametrize("command", ["export", "chat"])
def test_a_run_of_an_earlier_version_says_what_it_lacks(
    command: str, moved: Path, kept: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    shutil.rmtree(moved / "run" / "models")
    (moved / "run" / "config.toml").write_text(to_toml(parse([*FLAGS, BASE])))
    assert typed(monkeypatch, command, "run", asked="1+1\n") == 2
    told = capsys.readouterr()
    missing = (
        f"error: policy.path=models/base: no such folder (from {moved}), and not in the hub's cache"
    )
    assert told.err == f"{missing}; put that model there, or its files into run/models/policy\n"
    shutil.copytree(kept[0] / "models", moved / "models")
    assert typed(monkeypatch, command, "run", asked="1+1\n") == 0


def test_files_are_compared_by_their_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With paths from the folder in which the run was started."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder / "m").mkdir(parents=True)
        (tmp_path / folder / "m" / "config.json").write_text("{}")
        for name in ("one.jsonl", "two.jsonl", "rw.py"):
            (tmp_path / folder / name).write_text(name)

    def read(
        folder: str, *, files: str = "one two", function: str = "f"
    ) -> tuple[Any, dict[str, str]]:
        data = [f"{folder}/{name}.jsonl" for name in files.split()]
        argv = [
            f"--policy.path={folder}/m",
            f"--reward.function={folder}/rw.py:{function}",
            "--data.files",
            *data,
        ]
        return parse(argv), run_files.inputs_of(parse(argv), {"policy": f"{folder}/m"}, {})

    config, inputs = read("a")
    (tmp_path / "config.toml").write_text(to_toml(config))
    (tmp_path / "inputs.json").write_text(json.dumps(inputs))
    for same in ("a", "b", f"{tmp_path}/b"):
        config, inputs = read(same)
        assert run_files.changes(config, tmp_path, inputs) == []
    # a version without these settings wrote none
    known = [line for line in to_toml(config).splitlines() if not line.startswith("task")]
    (tmp_path / "config.toml").write_text("\n".join(known))
    assert run_files.changes(config, tmp_path, inputs) == []
    for other, name in (
        ({"files": "two one"}, "data.files"),
        ({"function": "g"}, "reward.function"),
    ):
        found = run_files.changes(read("b", **other)[0], tmp_path)
        assert [change[0] for change in found] == [name]
    (tmp_path / "b" / "two.jsonl").write_text("2")
    config, inputs = read("b")
    assert [change[0] for change in run_files.changes(config, tmp_path, inputs)] == [
        "data.files b/two.jsonl"
    ]


def test_push_uploads_what_export_writes_and_a_card(
    moved: Path,
    kept: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub = Hub()
    hub.use(monkeypatch, tmp_path / "cache")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    lines = []
    for words in (["run", "me"], ["run", "me/it"]):
        assert typed(monkeypatch, "push", *words) == 2
        lines.append(capsys.readouterr().err)
    assert lines[0] == "error: me: no name of a repository on the hub; write OWNER/NAME\n"
    assert lines[1].startswith(f"error: uploading to {hub.endpoint}/me/it failed (")
    assert "HF_TOKEN" in lines[1]
    assert lines[1].count("\n") == 1
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    assert typed(monkeypatch, "push", "run", "me/it", "--value") == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        f"policy: {hub.endpoint}/me/it",
        f"value: {hub.endpoint}/me/it-value",
    ]
    assert hub.private == {"me/it", "me/it-value"}
    assert typed(monkeypatch, "export", "run") == 0
    for repo, kind in (("me/it", "policy"), ("me/it-value", "value")):
        files = dict(hub.repos["model", repo][hub.refs["model", repo]["main"]])
        card = files.pop("README.md").decode()
        assert "- splitppo\n" in card
        assert "base_model" not in card  # it has no name on the hub
        for secret in (str(kept[1]), str(moved)):
            assert not any(
                secret.encode() in content for content in [*files.values(), card.encode()]
            )
        folder = moved / "run" / "export" / "step_000004" / kind
        assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
    mine = {"notes.md": b"mine", "gguf/config.json": b"{}"}
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}
    uploaded = hub.repos["model", "me/it"][hub.refs["model", "me/it"]["main"]]
    hub.push("me/it", {**uploaded, **mine, **adapter})
    assert typed(monkeypatch, "push", "run", "me/it") == 0
    assert hub.repos["model", "me/it"][hub.refs["model", "me/it"]["main"]] == {**uploaded, **mine}
    capsys.readouterr()
    hub.private.clear()
    assert typed(monkeypatch, "push", "run", "me/it") == 2
    assert capsys.readouterr().err.startswith(
        f"error: {hub.endpoint}/me/it is public; give --public"
    )
    assert typed(monkeypatch, "push", "run", "me/it", "--public") == 0
    hub.status = 503
    capsys.readouterr()
    assert typed(monkeypatch, "push", "run", "me/it") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not [*(moved / "run").glob(".push-*")]
    hub.close()


@pytest.mark.parametrize(
    ("base", "public"),
    [
        ("acme/own@" + "0123456789" * 4, "acme/own"),
        ("acme/own", "acme/own"),
        ("/home/alice-secret/base", None),
        ("tiny", None),
    ],
)
def test_a_card_names_a_base_of_the_hub_and_no_folder(base: str, public: str | None) -> None:
    card = card_of(base)
    assert card.data.base_model == public
    assert "alice" not in str(card)
    assert f"splitppo {__version__}" in card.text
