"""TOML presets: saved flags. `[ppo] lam = 0.95` is `--ppo.lam 0.95`; sections are the configuration's, nested alike."""

import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from splitppo.errors import UserError


def preset_path(argv: Sequence[str]) -> str | None:
    """The file that `--config` names on a command line, if any."""
    path = None
    for flag, value in zip(argv, [*argv[1:], None], strict=True):
        if flag == "--config":
            path = value
        elif flag.startswith("--config="):
            path = flag.removeprefix("--config=")
    return path


def read_preset(path: str, known: dict[str, Any]) -> dict[str, Any]:
    """The settings of a preset by their flag's name, `{"ppo.lam": 0.95}`.

    Args:
        known: the whole configuration as nested dicts: the keys and sections that there are.

    Raises:
        UserError: no such file, no TOML, an unknown key, or a section where a value is due, and the reverse.
    """
    if not Path(path).is_file():
        raise UserError(f"--config {path}: no such file; presets are TOML files, see configs/")
    try:
        table = tomllib.loads(Path(path).read_text())
    except ValueError as error:  # TOMLDecodeError, or bytes that are no text
        raise UserError(f"--config {path}: not TOML: {error}; write it as [section] and key = value") from error
    return dict(_settings(table, known, path, ""))


def as_flag(name: str, value: Any) -> list[str]:
    """A setting as it is written on the command line."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        head, _, tail = flag[2:].rpartition(".")
        return [flag if value else f"--{head}.no-{tail}" if head else f"--no-{tail}"]
    return [flag, *(str(item) for item in (value if isinstance(value, list) else [value]))]


def as_toml(table: dict[str, Any]) -> str:
    """A whole configuration as a preset that gives it again; what is unset, and the preset's own name, is left out."""
    lines, section = [], None
    for name, value in sorted(leaves(table), key=lambda leaf: leaf[0].split(".")[:-1]):
        *path, key = name.split(".")
        if name == "config" or value is None:
            continue
        if path != section:
            section = path
            lines += ["", f"[{'.'.join(path)}]"] if path else []
        lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested dicts."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, str):
        # json's escapes are TOML's for basic strings
        return json.dumps(value)
    return repr(value)


def _settings(table: dict[str, Any], known: dict[str, Any], path: str, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = prefix + key
        if key not in known or name == "config":
            near = difflib.get_close_matches(key.replace("-", "_"), known.keys() - {"config"}, n=1)
            use = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(known.keys() - {'config'})}"
            raise UserError(f"--config {path}: unknown key {name!r}; {use}")
        if isinstance(value, dict) and not isinstance(known[key], dict):
            raise UserError(f"--config {path}: {name} is a section there, but it is a setting; write {key} = value")
        if isinstance(known[key], dict) and not isinstance(value, dict):
            raise UserError(
                f"--config {path}: {name} = {toml_value(value)}, but it is a section; write [{name}] and its keys below"
            )
        if isinstance(value, dict):
            yield from _settings(value, known[key], path, f"{name}.")
        else:
            yield name, value
