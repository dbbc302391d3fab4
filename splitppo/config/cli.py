"""Reads the command line and its preset into the configuration."""

import argparse
import io
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, fields, is_dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import tyro

from splitppo.config import Config
from splitppo.config.toml import as_flag, read_preset, toml_value
from splitppo.errors import UserError, check_text

# settings that name files or folders: a leading `~` is the user's home
PATHS = ("run_dir", "resume", "policy.path", "reference.path", "value.path", "data.files", "data.validation_files")
PATHS += ("rollout.lengths", "reward.function", "reward.validation", "reward.model")
TINY = str(Path(__file__).with_name("tiny.toml"))  # defaults of the embedded model, which needs larger learning rates


def parse(argv: Sequence[str], *, quiet: bool = False) -> Config:
    """The configuration of a command line. Its flags override those of the preset that `--config` names.

    A wrong preset is a UserError. A wrong flag ends in tyro's box and SystemExit, or is a UserError if `quiet`.
    """
    if argv and re.fullmatch(r"[^-].*\.toml", argv[0]):
        raise UserError(f"{argv[0]}: unknown word; did you mean --config {argv[0]}?")
    if sum(word == "--config" or word.startswith("--config=") for word in argv) > 1:
        raise UserError("--config is given twice: only one preset is read; put both into one file")
    preset = _value_of("--config", argv)
    given = [*(_preset_flags(os.path.expanduser(preset)) if preset is not None else []), *argv]
    if _value_of("--policy.path", given) in (None, "tiny"):
        given = [*_flags(_read(TINY)), *given]
    return _expand_home(_run_tyro(given, quiet))


def _expand_home(config: Any, prefix: str = "") -> Any:
    """The configuration with `~` replaced in its paths."""
    changed: dict[str, Any] = {}
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if is_dataclass(value):
            changed[field.name] = _expand_home(value, f"{name}.")
        elif name in PATHS and value:
            is_one = isinstance(value, str)
            changed[field.name] = os.path.expanduser(value) if is_one else tuple(map(os.path.expanduser, value))
    return replace(config, **changed)


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The last value given to a flag, or None. A flag without a value is left for tyro to refuse."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(flag, nargs="?", dest="value")
    return finder.parse_known_args(argv)[0].value


def _run_tyro(args: Sequence[str], quiet: bool) -> Config:
    check_text(args)
    if not quiet:
        return tyro.cli(Config, args=args, prog="splitppo.train")
    box = io.StringIO()
    try:
        with redirect_stdout(box), redirect_stderr(box):
            return tyro.cli(Config, args=args, prog="splitppo.train")
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_message_of(box.getvalue())) from stop


def _message_of(box: str) -> str:
    """The error in tyro's box, in one line."""
    lines = [line.strip("│|╭╮─ ") for line in box.splitlines() if re.search("[a-z]", line)]
    near = lines[lines.index("Perhaps you meant:") + 1] if "Perhaps you meant:" in lines else ""
    message = " ".join(takewhile(lambda line: not line.startswith(("Perhaps", "For full")), lines[1:]))
    message = re.sub(r"\[/?bold\]", "", message.partition(" Got errors")[0])
    return f"{message}; {f'did you mean {near}?' if near else 'see --help'}"


def _read(preset: str) -> dict[str, Any]:
    return read_preset(preset, asdict(Config()))


def _flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in as_flag(name, value)]


def _preset_flags(path: str) -> list[str]:
    """The flags of a user's preset. An error names the preset and the setting."""
    settings = _read(path)
    try:
        _run_tyro(_flags(settings), quiet=True)
    except UserError:
        for name, value in settings.items():
            try:
                _run_tyro(as_flag(name, value), quiet=True)
            except UserError as error:
                raise UserError(f"--config {path}: {name} = {toml_value(value)}: {error}") from error
        raise
    return _flags(settings)
