"""Checkpoints on disk: layout, damage, the one to resume from, the ones to remove.

    RUN/checkpoints/step_000010/{actor,critic}/    each group's part
        *.distcp, .metadata                        tensors, by torch.distributed.checkpoint
        adapter_*                                  with LoRA: the adapters once more, as peft does
        state.json                                 everything else
        manifest.json                              the step; size and CRC-32 of each file above

A group writes its part as `ROLE.partial` and renames it when all of it is on disk (saver.py). A
checkpoint is complete when both parts are there, and damaged if a file differs from its manifest.
Loading reshards the tensors. The order of the data, the noise and the learning rate are functions
of seed and step: no checkpoint holds them.
"""

import json
import pickle
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from splitppo.errors import UserError, warn
from splitppo.placement import ROLES
from splitppo.run.files import BROKEN, write_whole

File = tuple[int, int]  # size in bytes, CRC-32
MANIFEST = "manifest.json"
PARTIAL = ".partial"
GONE = ".gone"
BLOCK = 2**24  # bytes read at once


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def step_of(folder: Path | None) -> int:
    """The step after which a checkpoint was written, from its folder's name; 0 for any other
    folder, such as a user's copy `step_3`, and for none."""
    name = re.fullmatch(r"step_([0-9]{6}|[1-9][0-9]{6,})", folder.name if folder else "")
    return int(name[1]) if name else 0


def is_complete(folder: Path) -> bool:
    """Whether a folder is a checkpoint with both groups' parts."""
    return step_of(folder) > 0 and all((folder / role).is_dir() for role in ROLES)


def complete(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(filter(is_complete, (run_dir / "checkpoints").glob("step_*")), key=step_of)


def measure(path: Path) -> File:
    """Reads a file's size and checksum."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
        return file.tell(), crc


def write_manifest(part: Path, step: int, files: Mapping[str, File]) -> None:
    write_whole(
        part / MANIFEST,
        json.dumps({"step": step, "files": dict(sorted(files.items()))}, indent=1) + "\n",
    )


def read_manifest(part: Path) -> tuple[int, dict[str, File]]:
    """A part's step and files. Raises one of the errors in BROKEN if the manifest is missing or
    damaged."""
    manifest = json.loads((part / MANIFEST).read_text())
    return int(manifest["step"]), {
        name: (int(size), int(crc)) for name, (size, crc) in manifest["files"].items()
    }


def damage(folder: Path, *, rank: int = 0, ranks: int = 1, sizes_only: bool = False) -> str:
    """Describes the first damage of a complete checkpoint; "" if there is none. This rank checks
    every `ranks`-th file, the other ranks the others. `sizes_only`: compares only the sizes of the
    files."""
    listed = []
    for part in (folder / role for role in ROLES):
        try:
            step, files = read_manifest(part)
        except BROKEN as error:
            return f"{part.name}/{MANIFEST} can't be read ({error})"
        if step != step_of(folder):
            return f"{part.name}/{MANIFEST} is of step {step}"
        if not {".metadata", "state.json"} < files.keys():  # and at least one file of tensors
            return f"{part.name}/{MANIFEST} lists no complete part"
        listed += [(f"{part.name}/{name}", file) for name, file in files.items()]
    for name, written in listed[rank::ranks]:
        try:
            if (size := (folder / name).stat().st_size) != written[0]:
                return f"{name} has {size} bytes, not {written[0]}"
            if not sizes_only and measure(folder / name) != written:
                return f"{name} does not match its checksum (CRC-32)"
        except (OSError, ValueError) as error:  # ValueError: no file can have this name
            return f"{name} can't be read ({error})"
    return ""


def candidates(run_dir: Path, resume: str) -> list[Path]:
    """The checkpoints that a run may resume from, oldest first. Raises UserError if `resume` is
    neither a complete checkpoint nor a run's folder with some, or is older than the run's
    newest."""
    checkpoints = complete(run_dir)
    if resume == "auto":
        return checkpoints
    folder = Path(resume)
    # a link, or what it leads to, may have another name
    folder = folder.absolute() if is_complete(folder) else folder.resolve()
    named = [folder] if is_complete(folder) else complete(Path(resume))
    if not named:
        raise UserError(
            f"--resume {resume}: no complete checkpoint there; "
            "name a run's folder, or one of its checkpoints/step_*"
        )
    if checkpoints and step_of(checkpoints[-1]) > step_of(named[-1]):
        raise UserError(
            f"--resume {resume}: {run_dir} holds {checkpoints[-1].name}, a later one; "
            "choose another --run-dir"
        )
    return named


def choose(
    folders: Sequence[Path], damage_of: Callable[[Path], str], *, report: bool = False
) -> Path | None:
    """The newest undamaged one of these checkpoints; None if the list is empty. `report` prints the
    damaged ones. Raises UserError if all of them are damaged."""
    damaged = []
    for folder in reversed(folders):
        if not (wrong := damage_of(folder)):
            if damaged and report:
                warn(f"damaged, not used: {'; '.join(damaged)}")
            return folder
        damaged.append(f"{folder}: {wrong}")
    if damaged:
        raise UserError(
            f"no checkpoint can be used: {'; '.join(damaged)}; "
            "to continue from another one, give --resume CHECKPOINT and a new --run-dir; to start "
            "from step 0, only a new --run-dir"
        )
    return None


def find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to resume from, by the sizes of its files. Raises UserError as `candidates`
    and `choose` do."""
    return choose(candidates(run_dir, resume), lambda folder: damage(folder, sizes_only=True))


def tidy(run_dir: Path, start: int) -> None:
    """Before a run resumes after step `start`: removes unfinished checkpoints and renames later
    ones (all damaged), so that parts of two runs never make one checkpoint."""
    for folder in sorted((run_dir / "checkpoints").glob("step_*")):
        if not is_complete(folder):
            # any other name was given by the user
            if step_of(folder.with_name(folder.name.removesuffix(GONE))):
                remove(folder)
                warn(f"removed an unfinished checkpoint: {folder}")
        elif step_of(folder) > start:
            aside = folder.with_name(f"{folder.name}.damaged")
            with suppress(FileNotFoundError):
                remove(aside)
            folder.rename(aside)
            warn(f"renamed a damaged checkpoint: it is {aside} now")


def remove(folder: Path, *, ignore_errors: bool = False) -> None:
    """Removes a folder with its contents; of a link the link alone, since what it leads to is the
    user's."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=ignore_errors)


def prune(run_dir: Path, keep: int, keep_every: int = 0) -> None:
    """Removes all but the newest `keep` complete checkpoints (0: keeps all) and those of every
    `keep_every`-th step. A checkpoint with a file of a wrong size does not count towards `keep`."""
    good = 0
    for folder in reversed(complete(run_dir) if keep else []):
        if good < keep:
            good += not damage(folder, sizes_only=True)
        elif not keep_every or step_of(folder) % keep_every:
            # not a checkpoint, even if a part of it stays
            old = folder.with_name(f"{folder.name}{GONE}")
            with suppress(OSError):  # the other group may remove it, too
                folder.rename(old)
                # a file that another host has open stays on NFS; the next start removes it (`tidy`)
                remove(old, ignore_errors=True)


def read_tensors(
    into: dict[str, Any], part: Path, *, process_group: Any = None, no_dist: bool = False
) -> None:
    """Fills the tensors of `into` from a part: in all ranks of a process group, or in this process
    alone (`no_dist`). Raises UserError if the part can't be read, or holds other tensors."""
    reader = TensorReader(part)
    try:
        dcp.load(into, storage_reader=reader, process_group=process_group, no_dist=no_dist)
    except dcp.CheckpointException as error:  # a BaseException
        cause, _ = next(iter(error.failures.values()))
        raise UserError(
            f"{part} can't be loaded ({type(cause).__name__}: {cause}); "
            "use the models that it was written with, or remove it"
        ) from cause


class TensorReader(dcp.FileSystemReader):
    """Reads tensors and nothing else: unpickling a checkpoint must not run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            return _TensorsOnly(file).load()


class _TensorsOnly(pickle.Unpickler):
    """Makes only descriptions of tensors. Not of bytes: those are pickled objects again."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            # Python 3.11.2 pickles an enumeration's members with it
            return lambda _, member: _MEM_FORMAT_ENCODING[member]
        module = module.removesuffix("._local")  # Python 3.13's name of pathlib
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


_ALLOWED = {
    "torch": {
        *("Size", "device", "float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}
