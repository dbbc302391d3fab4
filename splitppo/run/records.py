"""Reads JSON lines: RUN/metrics (one record a step) and RUN/samples. Without torch, so that the tools start fast."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from splitppo.errors import UserError
from splitppo.run.files import BROKEN

T = TypeVar("T")


def parse_line(line: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line. Raises UserError, which names `where` (FILE:LINE), if the line holds none."""
    try:
        found = json.loads(line)
    except BROKEN as error:
        raise UserError(f"{where}: {line[:40]!r} is no JSON, and each line must be; fix or remove that line") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: {line[:40]!r} is no JSON object, and each line must be; fix or remove that line")
    return found


def parse_record(line: str | bytes, where: str) -> dict[str, Any]:
    """The record of a step: `step` (int), numbers (as floats), `spans` (tuples of name, start and end in Unix seconds)
    and what else is in the line. Raises UserError if the line holds no such record."""
    record = parse_line(line, where)
    try:
        spans = [(str(n), float(a), float(b)) for n, a, b in record.get("spans", [])]
        if not all(math.isfinite(end - start) for _, start, end in spans):
            raise ValueError("a span that never begins or ends")
        numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
        record |= numbers | {"step": int(record["step"]), "spans": spans}
    except BROKEN as error:
        rule = "a record has `step`, numbers and `spans` of [name, start, end]"
        raise UserError(f"{where}: {line[:40]!r} is no record of a step; {rule}; fix or remove that line") from error
    return record


def read_lines(path: Path, parse: Callable[[str, str], T] = parse_line) -> Iterator[T]:
    """What `parse` makes of each line of a file. Skips a torn last line with a note: the run may be writing it, or was
    killed while it wrote it. Another line that can't be parsed is a UserError."""
    # not splitlines(): a text may hold Unicode's line separators
    *whole, torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate([*whole, torn] if torn else whole, 1):
        try:
            found = parse(line, f"{path}:{number}")
        except UserError:
            if number <= len(whole):
                raise
            print(f"note: {path}:{number} is torn and was skipped", file=sys.stderr)
            return
        yield found
