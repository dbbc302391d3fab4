"""Flags and the presets behind them, read into the configuration."""

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

# settings that name files or folders, for which `~` is the user's home
PATHS = ("run_dir", "resume", "policy.path", "reference.path", "value.path", "data.files", "data.validation_files")
PATHS += ("rollout.lengths", "reward.function", "reward.validation", "reward.model")


def parse(argv: Sequence[str], *, quiet: bool = False) -> Config:
    """Reads the flags, behind those of the preset that `--config` names: one given by hand wins.

    A wrong preset is a UserError; a wrong flag ends in tyro's box and SystemExit or, if `quiet`, is a UserError too.
    All texts and paths of a run come in here.
    """
    if argv and re.fullmatch(r"[^-].*\.toml", argv[0]):
        raise UserError(f"{argv[0]}: unknown word; did you mean --config {argv[0]}?")
    if sum(word == "--config" or word.startswith("--config=") for word in argv) > 1:
        raise UserError("--config is given twice: only one preset is read; put both into one file")
    preset = _value_of("--config", argv)
    given = [*(_checked(os.path.expanduser(preset)) if preset is not None else []), *argv]
    if _value_of("--policy.path", given) in (None, "tiny"):
        # the embedded model has settings of its own, under all of them: one that small learns at other rates
        given = [*_preset_flags(str(Path(__file__).with_name("tiny.toml"))), *given]
    return _at_home(_cli(given, quiet))


def _at_home(config: Any, prefix: str = "") -> Any:
    """The configuration, the `~` of its paths made the user's home."""
    changed: dict[str, Any] = {}
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if is_dataclass(value):
            changed[field.name] = _at_home(value, f"{name}.")
        elif name in PATHS and value:
            one = isinstance(value, str)
            changed[field.name] = os.path.expanduser(value) if one else tuple(map(os.path.expanduser, value))
    return replace(config, **changed)


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """What a flag is given last, if at all; if it lacks its value, it is tyro that complains."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(flag, nargs="?", dest="value")
    return finder.parse_known_args(argv)[0].value


def _cli(args: Sequence[str], quiet: bool) -> Config:
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
        lines = [line.strip("│|╭╮─ ") for line in box.getvalue().splitlines() if re.search("[a-z]", line)]
        near = lines[lines.index("Perhaps you meant:") + 1] if "Perhaps you meant:" in lines else ""
        told = " ".join(takewhile(lambda line: not line.startswith(("Perhaps", "For full")), lines[1:]))
        told = re.sub(r"\[/?bold\]", "", told.partition(" Got errors")[0])
        raise UserError(f"{told}; {f'did you mean {near}?' if near else 'see --help'}") from stop


def _preset_flags(path: str) -> list[str]:
    """The flags that a preset stands for."""
    settings = read_preset(path, asdict(Config()))
    return [word for name, value in settings.items() for word in as_flag(name, value)]


def _checked(path: str) -> list[str]:
    """The same of a preset that isn't ours, each flag good by itself."""
    flags = _preset_flags(path)
    try:
        _cli(flags, quiet=True)
    except UserError:
        for name, value in read_preset(path, asdict(Config())).items():
            try:
                _cli(as_flag(name, value), quiet=True)
            except UserError as error:
                raise UserError(f"--config {path}: {name} = {toml_value(value)}: {error}") from error
        raise
    return flags
