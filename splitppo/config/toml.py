"""TOML presets: saved flags. `[ppo] lam = 0.95` is `--ppo.lam 0.95`; the sections nest as the
configuration's do."""

import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitppo.config import Config
from splitppo.errors import UserError, need_known

PRESETS = Path(__file__).with_name("presets")  # in a clone, a link to configs/
# the embedded model's settings: it needs larger learning rates
TINY = Path(__file__).with_name("tiny.toml")


def find_preset(name: str) -> str:
    """The file of a preset: a path, or the name of one that ships with splitppo, such as tiny or
    gsm8k/qwen2.5_0.5b."""
    by_name = PRESETS / f"{name.removeprefix('configs/').removesuffix('.toml')}.toml"
    shipped = TINY if name == TINY.stem else by_name
    return str(shipped) if shipped.is_file() and not Path(name).exists() else name


def read_preset(path: str, *, recorded: bool = False) -> dict[str, Any]:
    """The settings of a preset by the names of their flags: `{"ppo.lam": 0.95}`. `recorded`: it is
    a run's own, in which a setting that this version lacks is left out, with a line on standard
    error. In a user's file it is a UserError."""
    # a preset names no other
    known = {name: value for name, value in leaves(asdict(Config())) if name != "config"}
    if not Path(path).is_file():
        wrong = "it is a folder" if Path(path).is_dir() else "no such file"
        shipped = sorted(f"{file.parent.name}/{file.stem}" for file in PRESETS.glob("*/*.toml"))
        raise UserError(
            f"--config {path}: {wrong}; name a TOML file, or one of {', '.join(['tiny', *shipped])}"
        )
    try:
        settings = dict(leaves(tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))))
    # ValueError: TOMLDecodeError, or bytes that are no text
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--config {path}: not TOML: {error}; "
            'write it as [section] and key = value, with texts in quotes and "None" for off'
        ) from error
    sections = {name.rpartition(".")[0] for name in known}
    settings = {name: v for name, v in settings.items() if v != {} or name not in sections}
    for name in sorted(settings.keys() - known.keys()) if recorded else ():
        print(f"note: {path}: this version has no setting {name}; left out", file=sys.stderr)
        del settings[name]
    for name, value in settings.items():
        need_known(name, known, f"--config {path}")
        if isinstance(value, bool) != isinstance(known[name], bool):
            use = "true or false" if isinstance(known[name], bool) else 'a value, or "None" for off'
            raise UserError(f"--config {path}: {name} = {toml_value(value)}: write {use}")
    return settings


def flag(name: str) -> str:
    """A setting's flag, as messages and commands write it."""
    return "--" + name.replace("_", "-")


def as_flag(name: str, value: Any) -> list[str]:
    """A setting as arguments of the command line."""
    if isinstance(value, bool):
        head, dot, tail = name.rpartition(".")
        return [flag(name if value else f"{head}{dot}no-{tail}")]
    return [
        flag(name),
        *(str(item) for item in (value if isinstance(value, list | tuple) else [value])),
    ]


def to_toml(config: Any) -> str:
    """The configuration as a preset, without the name of its own and settings that are unset by
    default. TOML has no null: a setting that was turned off is "None", as on the command line."""
    sections: dict[str, list[str]] = {}
    defaults = dict(leaves(asdict(type(config)())))
    for name, value in leaves(asdict(config)):
        value = "None" if value is None and defaults[name] is not None else value
        if name != "config" and value is not None:
            path, _, key = name.rpartition(".")
            sections.setdefault(path, ["", f"[{path}]"] if path else []).append(
                f"{key} = {toml_value(value)}"
            )
    return "\n".join(line for path in sorted(sections) for line in sections[path]) + "\n"


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each value in nested dicts; an empty one is a value."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def toml_value(value: Any) -> str:
    """A value in TOML, which is JSON but for inf, nan and the character DEL."""
    text = (
        repr(value)
        if isinstance(value, float)
        else json.dumps(value, default=str, ensure_ascii=False)
    )
    return text.replace("\x7f", r"\u007f")
