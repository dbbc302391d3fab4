"""Folders that `splitppo export` writes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_families import PLAIN, configured, written

from splitppo import train
from splitppo.errors import UserError
from splitppo.tools.export import export


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    argv = (
        f"--run-dir={folder} --steps=1 --rollout.batch-size=4 --rollout.max-new-tokens=4 "
        "--ppo.mini-batches=1 --log.validate-every=0 --policy.lora.rank=2 --checkpoint.every=1"
    )
    assert train.main(argv.split()) == 0
    return folder


@pytest.mark.ranks
def test_a_folder_that_exists_is_not_written_to(run: Path, tmp_path: Path) -> None:
    (tmp_path / "value").mkdir()
    (tmp_path / "value" / "model.safetensors").write_text("a user's")
    with pytest.raises(UserError, match="value exists; remove it"):
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
