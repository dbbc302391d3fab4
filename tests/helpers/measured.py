"""Writes the pages of measured figures from docs/figures.toml: python tests/helpers/measured.py"""

import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
HOME = DOCS / "figures.toml"


def read_figures(text: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pages to write, and the entries by key, of the file or of its text."""
    entries = tomllib.loads(HOME.read_text(encoding="utf-8") if text is None else text)
    return entries.pop("pages"), entries


def render_pages(text: str | None = None) -> dict[str, str]:
    """Name of each page of measured figures -> its text."""
    pages, entries = read_figures(text)
    written = {}
    for name, page in pages.items():
        parts = [f"# {page['title']}", page["intro"].strip()]
        for key, entry in entries.items():
            if entry["page"] == name:
                parts += render_entry(key, entry)
        written[f"{name}.md"] = "\n\n".join(parts) + "\n"
    return written


def render_entry(key: str, entry: dict[str, Any]) -> list[str]:
    command = "\n".join(f"    {line}".rstrip() for line in entry["command"].strip().splitlines())
    parts = [
        f"## {entry['title']}",
        entry["what"].strip(),
        f"`{key}`, {entry['date']}, {entry['machine']}:",
        command,
    ]
    if "rows" in entry:
        lines = [entry["columns"], ["---"] * len(entry["columns"]), *entry["rows"]]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        parts.append(table.replace("|  |", "| |").replace("|  |", "| |"))
    notes = entry.get("notes", "").strip()
    return [*parts, notes] if notes else parts


if __name__ == "__main__":
    for name, text in render_pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
