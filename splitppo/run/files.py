"""Small files of a run: whole ones and JSON lines. Without torch, so that the tools start fast."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from splitppo.errors import UserError

T = TypeVar("T")
# what reading a damaged or hand-made JSON or TOML file may raise
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def read_file(path: Path, parse: Callable[[str], Any], remedy: str) -> Any:
    """Returns `parse(text)` of a file's text. Raises UserError if the file can't be read or
    parsed."""
    try:
        # Windows' editors put a byte-order mark before UTF-8
        return parse(path.read_text(encoding="utf-8-sig"))
    except BROKEN as error:
        raise UserError(
            f"{path} can't be read ({type(error).__name__}: {error}); {remedy}"
        ) from error


def read_if_there(path: Path, parse: Callable[[str], Any]) -> Any:
    """The same; None if there is no such file."""
    return read_file(path, parse, "fix or remove it") if path.exists() else None


def write_whole(path: Path, text: str) -> None:
    """Writes and syncs a new file, then renames it to `path`: after a crash it is the old or the
    new one."""
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


def parse_line(line: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line. Raises UserError, which names `where` (FILE:LINE), if the line
    holds none."""
    with suppress(*BROKEN):
        if isinstance(record := json.loads(line), dict):
            return record
    raise UserError(f"{where}: {line[:40]!r} is not a JSON object; fix or remove that line")


def parse_record(line: str | bytes, where: str) -> dict[str, Any]:
    """The record of a step: `step` (int), numbers (as floats), `spans` (tuples of name, start and
    end in Unix seconds) and what else is in the line. Raises UserError if the line holds no such
    record."""
    record = parse_line(line, where)
    try:
        spans = [(str(n), float(a), float(b)) for n, a, b in record.get("spans", [])]
        if not all(math.isfinite(end - start) for _, start, end in spans):
            raise ValueError("a span that never begins or ends")
        record |= {
            name: float(value) for name, value in record.items() if isinstance(value, int | float)
        } | {"step": int(record["step"]), "spans": spans}
    except BROKEN as error:
        raise UserError(
            f"{where}: {line[:40]!r} is not the record of a step; "
            "a record has `step`, numbers and `spans` of [name, start, end]; "
            "fix or remove that line"
        ) from error
    return record


@dataclass
class Tail:
    """The lines that a file of records gains: an iteration yields each new one, and its FILE:LINE.
    Every reader of a file that another process may be writing goes through it: a line that lacks
    its end is still being written, so the iteration stops there, and the next one begins with it.
    The file may not be there yet."""

    path: Path
    offset: int = 0  # bytes that were read
    number: int = 0  # and lines
    is_torn: bool = False  # whether the last iteration stopped at a line without its end

    def __iter__(self) -> Iterator[tuple[bytes, str]]:
        with self.path.open("rb") if self.path.is_file() else BytesIO() as file:
            file.seek(self.offset)
            for line in file:
                self.is_torn = not line.endswith(b"\n")
                if self.is_torn:  # a later read could return the rest of it as a line
                    break
                self.offset += len(line)
                self.number += 1
                yield line, f"{self.path}:{self.number}"


def read_lines(path: Path, parse: Callable[[str, str], T] = parse_line) -> Iterator[T]:
    """What `parse` makes of each line of a file. Skips a torn last line with a note: the run may be
    writing it, or was killed while it wrote it. Another line that can't be parsed is a
    UserError."""
    lines = Tail(path)
    for line, where in lines:
        yield parse(line.decode(errors="replace").removesuffix("\n"), where)
    if lines.is_torn:
        print(f"note: {path}:{lines.number + 1} is incomplete and was skipped", file=sys.stderr)


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a table shows of a row: the question in place of the rendered prompt, and neither
    figures of single tokens nor messages of single turns."""
    hidden = ["tokens", "turns", *["prompt"] * ("question" in row)]
    return {name: value for name, value in row.items() if name not in hidden}


def write_rows(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows to FOLDER/step_NNNNNN.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"step_{step:06d}.jsonl").write_text(
        "".join([json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]),
        encoding="utf-8",
        errors="backslashreplace",
    )
