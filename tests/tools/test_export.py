"""Folders that `splitppo export` writes: what an earlier export left there goes, what others left
stays; and what a model card says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_families import PLAIN, configured, written

from splitppo import train
from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.models.hub import public_name
from splitppo.tools.export import export
from splitppo.tools.saved import public_settings

COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    argv = (
        f"--run-dir={folder} --steps=1 --rollout.batch-size=4 --rollout.max-new-tokens=4 "
        "--ppo.mini-batches=1 --log.validate-every=0 --policy.lora.rank=2 --checkpoint.every=1"
    )
    assert train.main(argv.split()) == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "notes.txt"}


@pytest.mark.ranks
@pytest.mark.parametrize("order", [(False, True), (True, False)], ids=["merged last", "first"])
def test_an_export_replaces_the_one_before(order: tuple[bool, bool], run: Path, tmp_path: Path):
    fresh = export(run, out=tmp_path / "fresh", merged=order[1]) / "policy"
    out = tmp_path / "out" / "policy"
    for merged in order:
        export(run, out=out.parent, merged=merged)
        (out / "notes.txt").write_text("of the user")
    assert contents(out) == contents(fresh)
    assert (out / "notes.txt").read_text() == "of the user"
    assert {path.name for path in out.parent.iterdir()} == {"policy", "value"}


@pytest.mark.ranks
def test_a_folder_of_others_is_not_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "value").mkdir()
    (tmp_path / "value" / "model.safetensors").write_text("a user's")
    with pytest.raises(UserError, match="not written by splitppo export"):
        export(run, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["value"], "nothing is written before"


@pytest.mark.ranks
def test_buffers_which_no_checkpoint_holds_are_the_folders(tmp_path: Path) -> None:
    written(tmp_path / "model", configured(*PLAIN["apertus, with buffers"][:2]))
    argv = (
        f"--policy.path={tmp_path}/model --run-dir={tmp_path}/run --steps=1 --ppo.baseline=batch "
        "--rollout.batch-size=4 --rollout.max-prompt-tokens=16 --rollout.max-new-tokens=4 "
        "--ppo.mini-batches=1 --log.validate-every=0 --checkpoint.every=1 "
        "--policy.optim.lr=0.01 --policy.no-random-init"
    )
    assert train.main(argv.split()) == 0
    after = load_file(export(tmp_path / "run", dtype="float32") / "policy" / "model.safetensors")
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.endswith((".beta", ".eps"))}


@pytest.mark.parametrize(
    ("name", "public"),
    [
        (f"acme/tiny@{COMMIT}", f"acme/tiny@{COMMIT}"),
        (f"hf://datasets/acme/qa@{COMMIT}/a.jsonl", f"hf://datasets/acme/qa@{COMMIT}/a.jsonl"),
        ("tiny", "tiny"),
        ("/home/alice/models/mine/", "mine"),
        ("../alice/mine", "mine"),
        ("alice/mine", "mine"),
        ("alice/mine@v1", "mine@v1"),
    ],
)
def test_a_public_name_has_no_folder(name: str, public: str) -> None:
    assert public_name(name) == public


def test_a_card_has_numbers_and_choices_and_no_text_that_was_typed() -> None:
    typed = "alice-secret"
    argv = [
        f"--policy.path=/home/{typed}/base", f"--data.files=/home/{typed}/a.jsonl",
        f"--run-dir={typed}", f"--reward.function=/home/{typed}/rw.py:score",
        "--policy.lora.rank=2",
        f"--policy.lora.targets={typed}", f"--rollout.stop={typed}", "--ppo.lam=0.9",
        f"--data.system={typed}",
    ]  # fmt: skip
    settings = dict(public_settings(parse(argv)))
    assert settings["policy.path"] == ["base"]
    assert settings["data.files"] == ["a.jsonl"]
    assert settings["ppo.lam"] == 0.9
    assert settings["policy.lora.rank"] == 2
    assert typed not in str(settings)
    assert len(settings) > 60
    assert "steps" in dict(public_settings(replace(Config(), steps=3)))
