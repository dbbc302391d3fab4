"""Checkpoints on the disk: what they are made of, when they count, which to go on from, which to remove.

    RUN/checkpoints/step_000010/{actor,critic}/    a group's part
        *.distcp, .metadata                        tensors, by torch's distributed checkpoint
        state.json                                 the rest
        manifest.json                              size and CRC-32 of each file above, and the step

A group writes its part as `ROLE.partial` and renames it when all of it is on the disk (saving.py). A checkpoint counts
when both parts are there. They reshard on loading, so a run may go on under another placement. Everything else that a
run needs to go on (order of the data, noise, learning rate) is a function of the seed and the step.
"""

import json
import pickle
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from splitppo.errors import UserError
from splitppo.files import write_whole

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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{part.name}/{MANIFEST} can't be read ({error})") from error


def parts_of(folder: Path) -> list[Path]:
    return [folder / role for role in ROLES]


def complete(run_dir: Path) -> list[Path]:
    """The checkpoints that both groups have written, oldest first."""
    found = [folder for folder in (run_dir / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d+", folder.name)]
    folders = sorted(found, key=lambda folder: (len(folder.name), folder.name))  # a millionth has a digit more
    return [folder for folder in folders if all((part / MANIFEST).is_file() for part in parts_of(folder))]


def read_step(folder: Path) -> int:
    """The step after which a checkpoint was written."""
    return read_manifest(folder / "actor")[0]


def damage(folder: Path, *, share: int = 0, of: int = 1, sizes_only: bool = False) -> str:
    """What is wrong with a complete checkpoint; empty: nothing.

    Args:
        share, of: read only this share of its files; other ranks read the others.
        sizes_only: don't read them.
    """
    files = []
    for part in parts_of(folder):
        try:
            files += [(part / name, file) for name, file in read_manifest(part)[1].items()]
        except ValueError as error:
            return str(error)
    for path, due in files[share::of]:
        name = f"{path.parent.name}/{path.name}"
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != due.bytes:
            return f"{name} has {size} bytes, not {due.bytes}"
        if not sizes_only and measure(path) != due:
            return f"{name} is not what was written (CRC-32)"
    return ""


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
    folder = Path(resume)
    missing = [part.name for part in parts_of(folder) if not (part / MANIFEST).is_file()]
    if missing:
        missed = f"no complete checkpoint there ({missing[0]}/{MANIFEST} is missing)"
        raise UserError(f"--resume {resume}: {missed}; name a RUN/checkpoints/step_* folder")
    if found and int(found[-1].name.removeprefix("step_")) > _step(folder):
        raise UserError(f"--resume {resume}: {run_dir} holds {found[-1].name}, a later one; choose another --run-dir")
    return [folder]


def _step(folder: Path) -> int:
    try:
        return read_step(folder)
    except ValueError as error:
        raise UserError(f"--resume {folder}: it is damaged: {error}; name another one") from error


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
            shutil.rmtree(folder)
        elif int(folder.name.removeprefix("step_")) > start:
            aside = folder.with_name(f"{folder.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        else:
            for part in folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(part)


def prune(run_dir: Path, keep: int, keep_every: int = 0) -> None:
    """Removes all but the newest `keep` complete checkpoints (0 keeps all) and those of every `keep_every`-th step."""
    for folder in complete(run_dir)[:-keep] if keep else []:
        if keep_every and int(folder.name.removeprefix("step_")) % keep_every == 0:
            continue
        gone = folder.with_name(f"{folder.name}.gone")  # from here on it doesn't count, whatever happens
        with suppress(FileNotFoundError):  # both groups may be at it
            folder.rename(gone)
            # a file that another host has open stays on NFS; `tidy` takes it with the next start
            shutil.rmtree(gone, ignore_errors=True)


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
        if name not in _MADE.get(module, ()) and not (module == "torch" and name in _DTYPES):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


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
