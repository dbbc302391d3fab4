"""Small files: written so that a crash leaves the old one or the new one, never half; read, or refused in a line."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from splitppo.errors import UserError

# what a file that is damaged or made by hand may raise while it is read as JSON or TOML and taken apart
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def read_file(path: Path, parse: Callable[[str], Any], remedy: str) -> Any:
    """What `parse` makes of a file's text.

    Raises:
        UserError: the file can't be read, or not be parsed.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except BROKEN as error:
        raise UserError(f"{path} can't be read ({type(error).__name__}: {error}); {remedy}") from error


def read_if_there(path: Path, parse: Callable[[str], Any]) -> Any:
    """The same of a file of a run; None if it isn't there."""
    return read_file(path, parse, "mend or remove it") if path.exists() else None


def write_whole(path: Path, text: str) -> None:
    """Writes a file aside, on the disk for good, and puts it in place."""
    aside = path.with_name(f"{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes renames in it survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
