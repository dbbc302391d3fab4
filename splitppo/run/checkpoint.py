"""Checkpoints on the disk: what they are made of, when they count, which to go on from, which to remove.

    RUN/checkpoints/step_000010/{actor,critic}/    a group's part
        *.distcp, .metadata                        tensors, by torch's distributed checkpoint
        state.json                                 the rest
        manifest.json                              size and CRC-32 of each file above, and the step

A group writes its part as `ROLE.partial` and renames it when all of it is on the disk (saving.py). A checkpoint counts
when both parts are there; it is damaged if anything in it is not what the manifests say. They reshard on loading, so a
run may go on under another placement. Everything else that a run needs to go on (order of the data, noise, learning
rate) is a function of the seed and the step.
"""

import json
import pickle
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta

from splitppo.errors import UserError
from splitppo.run.files import BROKEN, write_whole

ROLES = ("actor", "critic")
MANIFEST = "manifest.json"
PARTIAL = ".partial"
BLOCK = 2**24  # bytes read at once


@dataclass(frozen=True)
class File:
    """A file of a part, as it was written."""

    bytes: int
    crc32: int


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def measure(path: Path) -> File:
    """Of a file as it is now."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return File(size, crc)


def write_manifest(part: Path, step: int, files: Mapping[str, File]) -> None:
    """Says of what a part consists."""
    listed = {name: [file.bytes, file.crc32] for name, file in sorted(files.items())}
    write_whole(part / MANIFEST, json.dumps({"step": step, "files": listed}, indent=1) + "\n")


def read_manifest(part: Path) -> tuple[int, dict[str, File]]:
    """The step, and the files.

    Raises:
        ValueError: it isn't there, or is no manifest.
    """
    try:
        told = json.loads((part / MANIFEST).read_text())
        return int(told["step"]), {name: File(int(size), int(crc)) for name, (size, crc) in told["files"].items()}
    except BROKEN as error:
        raise ValueError(f"{part.name}/{MANIFEST} can't be read ({error})") from error


def parts_of(folder: Path) -> list[Path]:
    return [folder / role for role in ROLES]


def complete(run_dir: Path) -> list[Path]:
    """The checkpoints that both groups have written, oldest first."""
    found = [folder for folder in (run_dir / "checkpoints").glob("step_*") if step_of(folder)]
    return sorted((folder for folder in found if all(part.is_dir() for part in parts_of(folder))), key=step_of)


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was written, by its folder's name; 0 for a folder that is none."""
    return int(folder.name[5:]) if re.fullmatch(r"step_\d+", folder.name) else 0


def damage(folder: Path, *, share: int = 0, of: int = 1, sizes_only: bool = False) -> str:
    """What is wrong with a complete checkpoint; empty: nothing.

    Args:
        share, of: read only this share of its files; other ranks read the others.
        sizes_only: don't read them.
    """
    files = []
    for part in parts_of(folder):
        try:
            step, listed = read_manifest(part)
        except ValueError as error:
            return str(error)
        if step != step_of(folder):
            return f"{part.name}/{MANIFEST} is of step {step}"
        if not {".metadata", "state.json"} < listed.keys():  # and tensors
            return f"{part.name}/{MANIFEST} does not list what a part has"
        files += [(part / name, file) for name, file in listed.items()]
    for path, due in files[share::of]:
        name = f"{path.parent.name}/{path.name}"
        try:
            if (size := path.stat().st_size) != due.bytes:
                return f"{name} has {size} bytes, not {due.bytes}"
            if not sizes_only and measure(path) != due:
                return f"{name} is not what was written (CRC-32)"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
            return f"{name} can't be read ({error})"
    return ""


def is_in(folder: Path, run_dir: Path) -> bool:
    """Whether a checkpoint is one of the run in this folder."""
    return folder.parent.parent.resolve() == run_dir.resolve()


def candidates(run_dir: Path, resume: str) -> list[Path]:
    """The checkpoints that a run may go on from, oldest first.

    Raises:
        UserError: `resume` names a folder that is no complete checkpoint, or `never` would overwrite a run.
    """
    found = complete(run_dir)
    if resume == "auto":
        return found
    if resume == "never":
        if found:
            raise UserError(f"--resume never, but {run_dir} holds {found[-1].name}; choose another --run-dir")
        return []
    folder = Path(resume).resolve()  # a link may have another name
    if not step_of(folder) or not all(part.is_dir() for part in parts_of(folder)):
        raise UserError(f"--resume {resume}: no complete checkpoint there; name a RUN/checkpoints/step_* folder")
    if found and step_of(found[-1]) > step_of(folder):
        raise UserError(f"--resume {resume}: {run_dir} holds {found[-1].name}, a later one; choose another --run-dir")
    return [folder]


def choose(folders: Sequence[Path], damage_of: Callable[[Path], str], *, tell: bool = False) -> Path | None:
    """The newest of these checkpoints that is whole, None if there are none.

    Args:
        tell: name those that are skipped, since they are damaged, on the screen.

    Raises:
        UserError: all of them are damaged.
    """
    if not folders:
        return None
    found, skipped = None, []
    for folder in reversed(folders):
        if not (wrong := damage_of(folder)):
            found = folder
            break
        skipped.append(f"{folder}: {wrong}")
    told = "; ".join(skipped)
    if found is None:
        raise UserError(f"no checkpoint can be used: {told}; name another one, or begin anew in another --run-dir")
    if skipped and tell:
        print(f"damaged: {told}", flush=True)
    return found


def find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to go on from, by the sizes of its files alone.

    Raises:
        UserError: what `candidates` and `choose` say.
    """
    return choose(candidates(run_dir, resume), lambda folder: damage(folder, sizes_only=True))


def tidy(run_dir: Path, start: int) -> None:
    """Removes what earlier runs left of checkpoints that don't count, and puts damaged ones after `start` aside: a run
    that goes on from there writes these steps again, and the parts of two runs must never make one."""
    whole = set(complete(run_dir))
    for folder in sorted((run_dir / "checkpoints").glob("step_*")):
        if not re.fullmatch(r"step_\d+(\.gone)?", folder.name):
            continue  # put aside, by this or by its owner
        if folder not in whole:
            if step_of(folder):
                print(f"unfinished, removed: {folder}", flush=True)
            shutil.rmtree(folder)
        elif step_of(folder) > start:
            aside = folder.with_name(f"{folder.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        else:
            for part in folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(part)


def prune(run_dir: Path, keep: int, keep_every: int = 0) -> None:
    """Removes all but the newest `keep` complete checkpoints (0 keeps all) and those of every `keep_every`-th step.
    One that is damaged, by the sizes of its files, does not count as one of the newest."""
    good = 0
    for folder in reversed(complete(run_dir) if keep else []):
        if good < keep:
            good += not damage(folder, sizes_only=True)
            continue
        if keep_every and step_of(folder) % keep_every == 0:
            continue
        gone = folder.with_name(f"{folder.name}.gone")  # from here on it doesn't count, whatever happens
        with suppress(FileNotFoundError):  # both groups may be at it
            folder.rename(gone)
            # a file that another host has open stays on NFS; `tidy` takes it with the next start
            shutil.rmtree(gone, ignore_errors=True)


def read_tensors(into: dict[str, Any], part: Path, **how: Any) -> None:
    """Fills tensors from a part, as `torch.distributed.checkpoint.load` does with the arguments `how`.

    Raises:
        UserError: it can't. (What torch raises then is no Exception.)
    """
    try:
        dcp.load(into, storage_reader=TensorReader(part), **how)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        why = f"{part} can't be loaded ({type(cause).__name__}: {cause})"
        raise UserError(f"{why}; give the models that it was written with, or remove it") from cause


class TensorReader(FileSystemReader):
    """Reads tensors alone: a checkpoint can't make this process run code, as pickle would let it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _TensorsOnly(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _TensorsOnly(pickle.Unpickler):
    """Makes nothing but the descriptions of tensors. Bytes, which are pickled objects again, have none."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.2 pickles a member of an enumeration
            return _member
        if name not in _MADE.get(module, ()) and not (module == "torch" and name in _DTYPES):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"an attribute of {kind} has no place in a checkpoint")
    return _MEM_FORMAT_ENCODING[name]


_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")
_MADE = {
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}  # fmt: skip
