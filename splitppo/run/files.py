"""Reads and writes small files. After a crash a file has its old or its new content, never a part of it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from splitppo.errors import UserError

# what reading a damaged or hand-made JSON or TOML file may raise
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def read_file(path: Path, parse: Callable[[str], Any], remedy: str) -> Any:
    """Returns `parse(text)` of a file's text. Raises UserError if the file can't be read or parsed."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except BROKEN as error:
        raise UserError(f"{path} can't be read ({type(error).__name__}: {error}); {remedy}") from error


def read_if_there(path: Path, parse: Callable[[str], Any]) -> Any:
    """The same; None if there is no such file."""
    return read_file(path, parse, "fix or remove it") if path.exists() else None


def write_whole(path: Path, text: str) -> None:
    """Writes and syncs a new file, then renames it to `path`."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Syncs a folder: the renames in it survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
