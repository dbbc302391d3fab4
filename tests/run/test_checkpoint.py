"""The bookkeeping of checkpoints on made-up folders: which count, which are damaged and how, which
go."""

import collections
import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import made_up, names
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from splitppo.errors import UserError
from splitppo.run import checkpoint


def there(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_size_and_checksum_are_of_the_whole_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(10)))
    assert checkpoint.measure(path) == (10, zlib.crc32(bytes(range(10))))
    monkeypatch.setattr(checkpoint, "BLOCK", 4)
    assert checkpoint.measure(path) == (10, zlib.crc32(bytes(range(10))))


def test_a_manifest_reads_as_it_was_written(tmp_path):
    files = {"b": (3, 2**32 - 1), "a": (0, 0)}
    checkpoint.write_manifest(tmp_path, 7, files)
    assert checkpoint.read_manifest(tmp_path) == (7, files)
    written = json.loads((tmp_path / "manifest.json").read_text())
    assert written == {"step": 7, "files": {"a": [0, 0], "b": [3, 2**32 - 1]}}
    assert list(written["files"]) == ["a", "b"]


def test_only_folders_of_a_step_with_both_parts_count(tmp_path):
    made_up(tmp_path, 3)
    made_up(tmp_path, 4, ["actor"])
    made_up(tmp_path, 5, ["critic"])
    shutil.copytree(
        checkpoint.step_folder(tmp_path, 3), tmp_path / "checkpoints" / "step_000006.gone"
    )
    shutil.copytree(
        checkpoint.step_folder(tmp_path, 3), tmp_path / "checkpoints" / "old_step_000007"
    )
    (tmp_path / "checkpoints" / "step_000008").write_text("a file")
    assert names(tmp_path) == ["step_000003"]
    found = [
        checkpoint.step_of(Path(name))
        for name in ("a/step_000012", "step_1000000", "step_12.gone", "step_", "x")
    ]
    assert found == [12, 1_000_000, 0, 0, 0]


def test_the_newest_is_that_of_the_highest_step(tmp_path):
    for step in (999_999, 1_000_000, 2):
        made_up(tmp_path, step)
    assert names(tmp_path) == ["step_000002", "step_999999", "step_1000000"]
    assert checkpoint.find(tmp_path, "auto") == checkpoint.step_folder(tmp_path, 1_000_000)
    with pytest.raises(UserError, match="holds step_1000000, a later one"):
        checkpoint.find(tmp_path, str(checkpoint.step_folder(tmp_path, 999_999)))


def lost(folder: Path) -> None:
    (folder / "critic" / "__0_0.distcp").unlink()


def no_description(folder: Path) -> None:
    (folder / "actor" / ".metadata").unlink()


def longer(folder: Path) -> None:
    (folder / "actor" / "__0_0.distcp").write_text("{} ")


def other_content(folder: Path) -> None:
    (folder / "critic" / "state.json").write_text("[]")


def folder_for_file(folder: Path) -> None:
    path = folder / "actor" / "state.json"
    path.unlink()
    path.mkdir()
    files = checkpoint.read_manifest(folder / "actor")[1] | {"state.json": (path.stat().st_size, 0)}
    checkpoint.write_manifest(folder / "actor", 4, files)


def torn(folder: Path) -> None:
    (folder / "critic" / "manifest.json").write_text('{"step": 4, "fi')


def no_object(folder: Path) -> None:
    (folder / "critic" / "manifest.json").write_text("[1]")


def no_manifest(folder: Path) -> None:
    (folder / "actor" / "manifest.json").unlink()


def of_another_step(folder: Path) -> None:
    shutil.rmtree(folder / "critic")
    shutil.copytree(made_up(folder.parent, 5) / "critic", folder / "critic")


def listing(*left: str) -> Callable[[Path], None]:
    """The manifest lists these files alone."""

    def spoil(folder: Path) -> None:
        files = checkpoint.read_manifest(folder / "actor")[1]
        checkpoint.write_manifest(folder / "actor", 4, {name: files[name] for name in left})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message", "by_size"),
    [
        (lost, r"^critic/__0_0\.distcp can't be read", True),
        (no_description, r"^actor/\.metadata can't be read", True),
        (longer, r"^actor/__0_0\.distcp has 3 bytes, not 2", True),
        (other_content, r"^critic/state\.json does not match its checksum", False),
        (folder_for_file, r"^actor/state\.json can't be read", False),
        (torn, r"^critic/manifest\.json can't be read", True),
        (no_object, r"^critic/manifest\.json can't be read", True),
        (no_manifest, r"^actor/manifest\.json can't be read", True),
        (of_another_step, r"^critic/manifest\.json is of step 5", True),
        (listing(), r"^actor/manifest\.json lists no complete", True),
        (listing(".metadata", "state.json"), r"^actor/manifest\.json lists no complete", True),
        (listing("__0_0.distcp", "state.json"), r"^actor/manifest\.json lists no complete", True),
        (listing("__0_0.distcp", ".metadata"), r"^actor/manifest\.json lists no complete", True),
    ],
)
def test_damage_is_named_and_what_is_damaged_skipped(tmp_path, capsys, spoil, message, by_size):
    good, bad = made_up(tmp_path, 2), made_up(tmp_path, 4)
    assert (checkpoint.damage(good), checkpoint.damage(bad)) == ("", "")
    spoil(bad)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(checkpoint.damage(bad))
    assert bool(checkpoint.damage(bad, sizes_only=True)) == by_size
    assert checkpoint.choose([good, bad], checkpoint.damage, report=True) == good
    assert checkpoint.damage(bad) in capsys.readouterr().out
    assert checkpoint.choose([good, bad], checkpoint.damage) == good
    assert checkpoint.choose([bad, good], checkpoint.damage, report=True) == good
    assert capsys.readouterr().out == ""
    assert checkpoint.choose([], checkpoint.damage) is None
    with pytest.raises(UserError, match="no checkpoint can be used"):
        checkpoint.choose([bad], checkpoint.damage)


def test_ranks_share_the_reading(tmp_path):
    """Six files over four ranks: the first two read two of them; the fifth is the second of the
    first rank."""
    folder = made_up(tmp_path, 4)
    listed = [
        (role, name)
        for role in checkpoint.ROLES
        for name in (".metadata", "__0_0.distcp", "state.json")
    ]
    for number, (role, name) in enumerate(listed):
        path = folder / role / name
        path.write_text("[]")
        found = [checkpoint.damage(folder, rank=rank, ranks=4) for rank in range(4)]
        assert [bool(wrong) for wrong in found] == [rank == number % 4 for rank in range(4)]
        path.write_text("{}")


def test_what_a_run_may_go_on_from(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    assert checkpoint.candidates(run, "auto") == []
    assert checkpoint.find(run, "auto") is None
    second, fourth = made_up(run, 2), made_up(run, 4)
    assert checkpoint.candidates(run, "auto") == [second, fourth]
    assert (
        checkpoint.candidates(run, str(fourth))
        == checkpoint.candidates(other, str(fourth))
        == [fourth]
    )
    assert checkpoint.candidates(other, str(second)) == [second]
    assert checkpoint.candidates(other, str(run)) == [second, fourth]
    with pytest.raises(UserError, match="holds step_000004, a later one"):
        checkpoint.candidates(run, str(second))
    half = made_up(other, 6, ["actor"])
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.candidates(run, str(half))
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.candidates(other, str(shutil.copytree(second, tmp_path / "mine")))


def test_by_its_size_alone_a_checkpoint_is_good_enough_to_be_found(tmp_path):
    good, bad = made_up(tmp_path, 2), made_up(tmp_path, 4)
    other_content(bad)
    assert checkpoint.find(tmp_path, "auto") == bad
    longer(bad)
    assert checkpoint.find(tmp_path, "auto") == good


def test_what_earlier_runs_left_is_removed_or_put_aside(tmp_path, capsys):
    for step in (1, 2, 3, 4):
        made_up(tmp_path, step)
    made_up(tmp_path, 5, ["actor"])
    folder = tmp_path / "checkpoints"
    for name in ("step_000006.gone", "step_000004.damaged", "step_000009.mine"):
        (folder / name / "old").mkdir(parents=True)
    checkpoint.tidy(tmp_path, 2)
    left = [
        "step_000001",
        "step_000002",
        "step_000003.damaged",
        "step_000004.damaged",
        "step_000009.mine",
    ]
    assert there(tmp_path) == left
    said = capsys.readouterr().out
    assert all(f"{folder / name}" in said for name in ("step_000005", "step_000003.damaged"))
    assert not (folder / "step_000004.damaged" / "old").exists(), "the one before is in the way"
    assert (folder / "step_000009.mine" / "old").is_dir()


def test_of_links_the_link_alone_is_removed_and_a_users_copies_stay(tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3, 4, 5, 6):
        made_up(tmp_path, step)
    for step in (1, 5):  # as who moves them to a larger disk does
        (folder / f"step_{step:06d}").rename(elsewhere.with_name(f"elsewhere_{step}"))
        (folder / f"step_{step:06d}").symlink_to(elsewhere.with_name(f"elsewhere_{step}"))
    shutil.rmtree(tmp_path / "elsewhere_5" / "critic")
    for name, target in (
        ("step_000007", "nowhere"),
        ("step_000008", "step_000008"),
        ("step_000006.gone", "../elsewhere_1"),
        ("step_000006.damaged", "../elsewhere_1"),
        ("step_latest", "step_000003"),
    ):
        (folder / name).symlink_to(target)
    copies = [
        "step_3",
        "step_0000009",
        "step_\u0660\u0660\u0660\u0660\u0660\u0663",
        "step_000003 (copy)",
    ]
    kept = [*copies, "step_latest"]
    for name in copies:
        shutil.copytree(folder / "step_000003", folder / name)
    checkpoint.tidy(tmp_path, 4)
    assert there(tmp_path) == sorted(
        [*(f"step_00000{step}" for step in (1, 2, 3, 4)), "step_000006.damaged", *kept]
    )
    said = capsys.readouterr().out
    assert "removed an unfinished checkpoint" in said
    assert "step_3" not in said
    checkpoint.tidy(tmp_path, 4)  # a later start
    checkpoint.prune(tmp_path, 1)
    assert there(tmp_path) == sorted(["step_000004", "step_000006.damaged", *kept])
    assert (tmp_path / "elsewhere_1" / "actor").is_dir()
    assert (tmp_path / "elsewhere_5" / "actor").is_dir()


def test_prune_keeps_the_newest_and_every_nth(tmp_path):
    for step in range(1, 8):
        made_up(tmp_path, step)
    checkpoint.prune(tmp_path, 0)
    assert len(names(tmp_path)) == 7
    checkpoint.prune(tmp_path, 2, 3)
    assert there(tmp_path) == ["step_000003", "step_000006", "step_000007"]
    checkpoint.prune(tmp_path, 2)
    assert there(tmp_path) == ["step_000006", "step_000007"]
    longer(made_up(tmp_path, 8))
    checkpoint.prune(tmp_path, 1)
    assert there(tmp_path) == ["step_000007", "step_000008"], "a damaged one is not the newest"
    other_content(made_up(tmp_path, 9))
    checkpoint.prune(tmp_path, 1)
    assert there(tmp_path) == ["step_000009"], (
        "its sizes are as they should be, and no more is looked at"
    )


def test_the_other_group_may_be_at_it(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        made_up(tmp_path, step)
    rename = Path.rename

    def gone(self: Path, target: Path) -> Path:
        if self.name == "step_000002":
            shutil.rmtree(self)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", gone)
    checkpoint.prune(tmp_path, 1)
    assert there(tmp_path) == ["step_000003"]


def test_what_another_host_has_open_stays_for_the_next_start(tmp_path, monkeypatch):
    """A file that is open there can't be removed over NFS, but its checkpoint counts no more."""
    for step in (1, 2):
        made_up(tmp_path, step)
    rmtree = shutil.rmtree

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("busy")

    monkeypatch.setattr(shutil, "rmtree", busy)
    checkpoint.prune(tmp_path, 1)
    assert there(tmp_path) == ["step_000001.gone", "step_000002"]
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    checkpoint.tidy(tmp_path, 2)
    assert there(tmp_path) == ["step_000002"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_come_back_and_other_models_are_refused(tmp_path):
    kinds = (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.bool,
    )
    saved = {str(kind): torch.tensor([[0.0, 1.0]]).to(kind) for kind in kinds}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    read: dict[str, Any] = {name: torch.full_like(tensor, 1) for name, tensor in saved.items()}
    checkpoint.read_tensors(read, tmp_path, no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in saved.items())
    with pytest.raises(UserError, match=r"can't be loaded.*another_name"):
        checkpoint.read_tensors({"another_name": torch.zeros(1)}, tmp_path, no_dist=True)
    some: dict[str, Any] = {
        "another_name": torch.full((1,), 7.0),
        "torch.float32": torch.full((1, 2), 7.0),
    }
    dcp.load(
        some,
        storage_reader=checkpoint.TensorReader(tmp_path),
        planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
        no_dist=True,
    )
    assert (some["another_name"].tolist(), some["torch.float32"].tolist()) == ([7.0], [[0.0, 1.0]])


@pytest.mark.parametrize(
    ("kind", "name", "read"),
    [(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT", True), (torch.Size, "numel", False)],
)
def test_a_member_of_the_one_enumeration_may_be_named(kind: Any, name: str, read: bool) -> None:
    """As Python 3.11.2 pickles it, whatever this one does."""

    class Named:
        def __reduce__(self) -> Any:
            return (getattr, (kind, name))

    reader = checkpoint._TensorsOnly(io.BytesIO(pickle.dumps(Named())))
    if read:
        assert reader.load() is getattr(kind, name)
    else:
        with pytest.raises(KeyError, match="numel"):
            reader.load()


def test_a_checkpoint_of_another_python_is_read(tmp_path: Path) -> None:
    """Python 3.13 pickles a path by another name than 3.12 and 3.14."""
    for module in ("pathlib", "pathlib._local"):
        text = f"c{module}\nPosixPath\n(V/a\ntR.".encode()  # protocol 0
        assert checkpoint._TensorsOnly(io.BytesIO(text)).load() == PosixPath("/a")


def test_nothing_but_tensors_is_read(tmp_path):
    class Bad:
        def __reduce__(self) -> Any:
            return (os.system, (f"touch {tmp_path / 'run'}",))

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system has no place in a checkpoint"):
        checkpoint.TensorReader(tmp_path).read_metadata()
    assert not (tmp_path / "run").exists()
    # beside what is let in, and no dtype of torch's
    for other in (torch.load, numpy.float32, collections.Counter):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(other))
        with pytest.raises(pickle.UnpicklingError, match="has no place in a checkpoint"):
            checkpoint.TensorReader(tmp_path).read_metadata()
