"""TOML presets: saved flags. `[ppo] lam = 0.95` is `--ppo.lam 0.95`; the sections nest as the configuration's do."""

import difflib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitppo.errors import UserError

_INSTALLED = Path(__file__).with_name("presets")  # pyproject.toml puts them there
PRESETS = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs"


def find_preset(name: str) -> str:
    """The file of a preset: a path, or the name of one that ships with splitppo, such as gsm8k/qwen2.5_0.5b."""
    own = PRESETS / f"{name.removeprefix('configs/').removesuffix('.toml')}.toml"
    return str(own) if own.is_file() and not Path(name).exists() else name


def read_preset(path: str, known: dict[str, Any]) -> dict[str, Any]:
    """The settings of a preset by the names of their flags: `{"ppo.lam": 0.95}`. `known`: the defaults of all settings,
    nested."""
    if not Path(path).is_file():
        wrong = "it is a folder" if Path(path).is_dir() else "no such file"
        own = ", ".join(sorted(f"{file.parent.name}/{file.stem}" for file in PRESETS.glob("*/*.toml")))
        raise UserError(f"--config {path}: {wrong}; name a TOML file, or one of {own}")
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: TOMLDecodeError, or bytes that are no text
        use = 'write it as [section] and key = value, with texts in quotes and "None" for off'
        raise UserError(f"--config {path}: not TOML: {error}; {use}") from error
    return dict(_settings(table, known, path, ""))


def _settings(table: dict[str, Any], known: dict[str, Any], path: str, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = prefix + key
        if key not in known or name == "config":
            raise UserError(f"--config {path}: unknown key {name!r}; {_suggestion(key, known, prefix)}")
        default, wrong = known[key], ""
        if isinstance(value, dict) != isinstance(default, dict):
            wrong = f"write {f'[{name}] and its keys below' if isinstance(default, dict) else f'{key} = value'}"
        elif isinstance(value, bool) != isinstance(default, bool):
            wrong = "write true or false" if isinstance(default, bool) else 'write a value, or "None" for off'
        if wrong:
            raise UserError(f"--config {path}: {name} = {toml_value(value)}: {wrong}")
        if isinstance(value, dict):
            yield from _settings(value, known[key], path, f"{name}.")
        else:
            yield name, value


def _suggestion(key: str, known: dict[str, Any], prefix: str) -> str:
    names, key = [name for name in known if name != "config"], key.replace("-", "_")
    near = difflib.get_close_matches(key, names, n=1)
    near += [name for name, _ in leaves(known) if name.endswith(f".{key}")]  # in a section below
    return f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(names)}"


def as_flag(name: str, value: Any) -> list[str]:
    """A setting as arguments of the command line."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        head, dot, tail = flag[2:].rpartition(".")
        return [flag if value else f"--{head}{dot}no-{tail}"]
    return [flag, *(str(item) for item in (value if isinstance(value, list) else [value]))]


def to_toml(config: Any) -> str:
    """The configuration as a preset. Left out: settings that are unset by default, and the name of the preset.

    TOML has no null: a setting that was turned off is "None", as on the command line.
    """
    sections: dict[str, list[str]] = {}
    defaults = dict(leaves(asdict(type(config)())))
    for name, value in leaves(asdict(config)):
        value = "None" if value is None and defaults[name] is not None else value
        if name != "config" and value is not None:
            path, _, key = name.rpartition(".")
            sections.setdefault(path, ["", f"[{path}]"] if path else []).append(f"{key} = {toml_value(value)}")
    return "\n".join(line for path in sorted(sections) for line in sections[path]) + "\n"


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each value in nested dicts."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def toml_value(value: Any) -> str:
    """A value in TOML, which is JSON but for inf, nan and the character DEL."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)
    return text.replace("\x7f", r"\u007f")
