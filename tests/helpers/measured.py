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
    """Name of each page of measured figures -> its text. Sections stand in the order in which the
    file first names them."""
    pages, entries = read_figures(text)
    written = {}
    for name, page in pages.items():
        sections: dict[str, list[str]] = {}
        for key, entry in entries.items():
            if entry["page"] == name:
                parts = sections.setdefault(entry.get("section", ""), [])
                parts += render_entry(key, entry)
        blocks = [f"# {page['title']}", page["intro"].strip()]
        for section, parts in sections.items():
            blocks += [f"## {section}", *parts] if section else parts
        written[f"{name}.md"] = "\n\n".join(blocks) + "\n"
    return written


def render_entry(key: str, entry: dict[str, Any]) -> list[str]:
    level = "###" if "section" in entry else "##"
    parts = [f"{level} {entry['title']}", entry["what"].strip()]
    if "rows" in entry:
        lines = [entry["columns"], ["---"] * len(entry["columns"]), *entry["rows"]]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        parts.append(table.replace("|  |", "| |").replace("|  |", "| |"))
    if "notes" in entry:
        parts.append(entry["notes"].strip())
    source = f"Source `{key}`: {entry['date']}, {entry['machine']}."
    if "command" not in entry:
        return [*parts, f"{source} The script was not kept."]
    lines = entry["command"].strip().splitlines()
    return [*parts, source, "\n".join(f"    {line}".rstrip() for line in lines)]


if __name__ == "__main__":
    for name, text in render_pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
