"""Reads the command line and its preset into the configuration."""

import argparse
import io
import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from itertools import takewhile
from pathlib import Path
from typing import Any

import tyro

from splitppo.config import Config
from splitppo.config.toml import as_flag, find_preset, read_preset, toml_value
from splitppo.errors import UserError, check_text

# settings that name files or folders: a leading `~` is the user's home
PATHS = ("run_dir", "resume", "policy.path", "reference.path", "value.path", "data.files", "data.validation_files")
PATHS += ("rollout.lengths", "reward.function", "reward.validation", "reward.model")
TINY = str(Path(__file__).with_name("tiny.toml"))  # defaults of the embedded model, which needs larger learning rates


def parse(argv: Sequence[str], *, recorded: bool = False) -> Config:
    """The configuration of a command line. Its flags override those of the preset that `--config` names; `recorded` is
    as in `read_preset`. A wrong preset or flag is a UserError; `--help` ends in SystemExit."""
    if argv and re.fullmatch(r"[^-].*\.toml", argv[0]):
        raise UserError(f"{argv[0]}: unknown word; did you mean --config {argv[0]}?")
    if sum(word == "--config" or word.startswith("--config=") for word in argv) > 1:
        raise UserError("--config is given twice: only one preset is read; put both into one file")
    preset = _value_of("--config", argv)
    path = "" if preset is None else find_preset(os.path.expanduser(preset))
    settings = {} if preset is None else read_preset(path, recorded=recorded)
    given = [*_flags(settings), *argv]
    if _value_of("--policy.path", given) in (None, "tiny"):
        given = [*_flags(read_preset(TINY)), *given]
    try:
        config = read_flags(Config, "splitppo.train", given)
    except UserError:
        with suppress(UserError):
            read_flags(Config, "", _flags(settings))
            settings = {}  # all of the preset's are right
        for name, value in settings.items():
            try:
                read_flags(Config, "", as_flag(name, value))
            except UserError as error:
                raise UserError(f"--config {path}: {name} = {toml_value(value)}: {error}") from error
        raise
    return map_paths(config, lambda _, file: os.path.expanduser(file))


def map_paths(config: Any, change: Callable[[str, str], str], prefix: str = "") -> Any:
    """The configuration with `change(setting, path)` in place of each of its paths."""
    changed: dict[str, Any] = {}
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if is_dataclass(value):
            changed[field.name] = map_paths(value, change, f"{name}.")
        elif name in PATHS and value:
            is_one = isinstance(value, str)
            changed[field.name] = change(name, value) if is_one else tuple(change(name, path) for path in value)
    return replace(config, **changed)


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The last value given to a flag, or None. A flag without a value is left for tyro to refuse."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(flag, nargs="?", dest="value")
    return finder.parse_known_args(argv)[0].value


def read_flags(wanted: Any, prog: str, args: Sequence[str], **how: Any) -> Any:
    """`wanted` made from a command line by tyro, to which `how` goes. A wrong flag is a UserError of one line."""
    check_text(args)
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(wanted, args=args, prog=prog, **how)
    except SystemExit as stop:
        if not stop.code:
            raise
        # without the colours that tyro writes for a terminal
        raise UserError(_message_of(re.sub(r"\x1b\[[\d;]*m", "", box.getvalue()))) from stop


def read_call(function: Callable[..., Any], prog: str, args: Sequence[str]) -> Callable[[], Any]:
    """A call of `function` with the arguments of a command line, to be made when they are known to be right."""

    @wraps(function)
    def bind(*given: Any, **named: Any) -> Any:
        return partial(function, *given, **named)

    return read_flags(bind, prog, args)


def _message_of(box: str) -> str:
    """The error in tyro's box, in one line."""
    lines = [line.strip("│|╭╮─ ") for line in box.splitlines() if re.search("[a-z']", line)]
    near = lines[lines.index("Perhaps you meant:") + 1] if "Perhaps you meant:" in lines else ""
    message = " ".join(takewhile(lambda line: not line.startswith(("Perhaps", "For full")), lines[1:]))
    message = re.sub(r"\[/?bold\]", "", message.partition(" Got errors")[0])
    if wrong := re.match(
        r"Error parsing (\S+): .*?('.*?')\]? Argument helptext: \S+ (\{.*?\}|\[.*?\]\]|\S+) (.*)", message
    ):
        return "{} {}: write {}: {}".format(*wrong.groups())
    return f"{message}; {f'did you mean {near}?' if near else 'see --help'}"


def _flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in as_flag(name, value)]
