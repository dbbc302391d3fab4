"""Writing small files so that a crash leaves the old one or the new one, never half of it; reading broken ones."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from splitppo.errors import UserError


def read_whole(path: Path, parse: Callable[[str], Any]) -> Any:
    """What `parse` makes of a file of a run; None if it isn't there.

    Raises:
        UserError: it is broken.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} can't be read ({error}): mend or remove it") from error


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
