"""Generations as files: a line of JSON for each row, and the first rows as a Markdown table."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TABLE_ROWS = 16  # rows of a table at most
CELL = 120  # characters of a table's cell at most, before escapes


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a table shows of a row: the question in place of the rendered prompt, and no figures of single tokens."""
    hidden = {"tokens", *(["prompt"] if "question" in row else [])}
    return {name: value for name, value in row.items() if name not in hidden}


def write_rows(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows to FOLDER/step_NNNNNN.jsonl, and the first of them as a table (.md); older files are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.jsonl"
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    path.with_suffix(".md").write_text(table([shown(row) for row in rows[:TABLE_ROWS]]), encoding="utf-8")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table whose columns are the first row's keys.

    A cell shows the beginning and the end of what is longer than 120 characters, and `↵` for a new line.
    """
    names = list(rows[0]) if rows else []
    cells = [names, ["---"] * len(names)] if names else []
    cells += [[_cell(row[name]) for name in names] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _cell(value: Any) -> str:
    text = str(value)
    if len(text) > CELL:
        half = (CELL - 3) // 2
        text = f"{text[:half]} … {text[-half:]}"
    text = "".join(char if char.isprintable() else " " for char in "↵".join(text.splitlines()))
    # what Markdown, or the HTML in it, would take for its own
    return re.sub(r"([\\`*_<>\[\]|~&$])", r"\\\1", text)
