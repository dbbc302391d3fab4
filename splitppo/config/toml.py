"""TOML presets: saved flags. `[ppo] lam = 0.95` is `--ppo.lam 0.95`; sections are the configuration's, nested alike."""

import difflib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitppo.errors import UserError

WRITTEN = 'write it as [section] and key = value, texts in quotes, and what is off as "None"'


def read_preset(path: str, known: dict[str, Any]) -> dict[str, Any]:
    """The settings of a preset by their flag's name, `{"ppo.lam": 0.95}`; `known`: all that there are, nested."""
    if not Path(path).is_file():
        wrong = "it is a folder" if Path(path).is_dir() else "no such file"
        raise UserError(f"--config {path}: {wrong}; presets are TOML files, see configs/")
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: TOMLDecodeError, or bytes that are no text
        raise UserError(f"--config {path}: not TOML: {error}; {WRITTEN}") from error
    return dict(_settings(table, known, path, ""))


def _settings(table: dict[str, Any], known: dict[str, Any], path: str, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = prefix + key
        if key not in known or name == "config":
            here, word = [other for other in known if other != "config"], key.replace("-", "_")
            near = difflib.get_close_matches(word, here, n=1)
            near += [below for below, _ in leaves(known) if below.endswith(f".{word}")]  # in a section of this one
            use = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(here)}"
            raise UserError(f"--config {path}: unknown key {name!r}; {use}")
        match value, known[key]:
            case dict(), dict():
                yield from _settings(value, known[key], path, f"{name}.")
            case dict(), _:
                raise UserError(f"--config {path}: {name} is a section there, but it is a setting; write {key} = value")
            case _, dict():
                given = f"{name} = {toml_value(value)}"
                raise UserError(f"--config {path}: {given}, but it is a section; write [{name}] and its keys below")
            case bool(), usual if not isinstance(usual, bool):
                given = f"{name} = {toml_value(value)}"
                raise UserError(f'--config {path}: {given}, but it is no switch; write a value, or "None" for off')
            case _, bool() if not isinstance(value, bool):
                raise UserError(f"--config {path}: {name} = {toml_value(value)}: write true or false")
            case _:
                yield name, value


def as_flag(name: str, value: Any) -> list[str]:
    """A setting as it is written on the command line."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        head, dot, tail = flag[2:].rpartition(".")
        return [flag if value else f"--{head}{dot}no-{tail}"]
    return [flag, *(str(item) for item in (value if isinstance(value, list) else [value]))]


def to_toml(config: Any) -> str:
    """A whole configuration as a preset that gives it again; what is unset by default, and the preset's own name, is
    left out. TOML has no null: what was turned off is "None", as it is on the command line."""
    sections: dict[str, list[str]] = {}
    usual = dict(leaves(asdict(type(config)())))
    for name, value in leaves(asdict(config)):
        value = "None" if value is None and usual[name] is not None else value
        if name != "config" and value is not None:
            path, _, key = name.rpartition(".")
            sections.setdefault(path, ["", f"[{path}]"] if path else []).append(f"{key} = {toml_value(value)}")
    return "\n".join(line for path in sorted(sections) for line in sections[path]) + "\n"


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested dicts."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def toml_value(value: Any) -> str:
    """A value as TOML writes it: but for inf, nan and one character, json's numbers, strings and lists are TOML's."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)
    return text.replace("\x7f", r"\u007f")
