"""Writing small files so that a crash leaves the old one or the new one, never half of it."""

import os
from pathlib import Path


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
