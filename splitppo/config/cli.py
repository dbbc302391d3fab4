"""Reads the command line and its preset into the configuration."""

import argparse
import io
import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import asdict, fields, is_dataclass, replace
from functools import partial, wraps
from itertools import takewhile
from pathlib import Path
from typing import Any

import tyro

from splitppo.config import OF_VALUES, Config, toml
from splitppo.errors import DOCS, UserError, check_text

# settings that name files or folders: a leading `~` is the user's home
PATHS = (
    *("run_dir", "resume", "policy.path", "reference.path", "value.path", "reward.model"),
    *("teacher.path", "policy.lora.path", "value.lora.path"),
    *("data.files", "data.validation_files", "rollout.lengths"),
    *("reward.function", "reward.validation", "env.path", "env.tools"),
    *("ppo.loss", "ppo.advantages", "log.trackers"),
)
# settings that a resumed run does not keep: those of this start, and those of the machine
ANEW = (
    r"run_dir|resume|force|dry_run|config|world_size|nodes|placement\..*|fsdp\..*|compute\.device"
    r"|.*\.(tensor|sequence)_parallel|(policy|value)\.offload"
)
LORA_RATE = 10  # learning rates with LoRA, by those without, where none is set (docs/lora.md)


def parse(argv: Sequence[str], *, recorded: bool = False) -> Config:
    """The configuration of a command line. Its flags override those of the preset that `--config`
    names. What neither sets is as in the run that goes on in `run_dir`, or else the default.
    `recorded` is as in `read_preset`, whose preset is complete. A wrong preset or flag is a
    UserError; `--help` ends in SystemExit."""
    if sum(word == "--config" or word.startswith("--config=") for word in argv) > 1:
        raise UserError("--config is given twice: only one preset is read; put both into one file")
    path, settings = _preset(argv, recorded)
    try:
        read_flags(Config, "", _flags(settings))
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from error
    flags = [*_flags(settings), *argv]
    config = _read(flags)
    run = Path(os.path.expanduser(config.run_dir or ""))
    if config.run_dir and not recorded and has_steps(run):
        # of a file that can't be read, the checks of the folder say what is wrong
        with suppress(UserError), redirect_stderr(io.StringIO()):
            run_settings = toml.read_preset(str(run / "config.toml"), recorded=True)
            run_settings = {
                name: value for name, value in run_settings.items() if not re.fullmatch(ANEW, name)
            }
            config = _read([*_flags(run_settings), *flags])
    return map_paths(config, lambda _, file: os.path.expanduser(file))


def as_flags(config: Config, *more: str, arguments: Sequence[str] = ()) -> list[str]:
    """The settings that differ from their defaults, as arguments of the command line; then `more`,
    and the `arguments` of a script. Raises UserError if the latter begin with no flag."""
    if arguments and not arguments[0].startswith("-"):  # it would count for the script's last flag
        raise UserError(f"{arguments[0]}: unknown word; settings are flags, such as --steps 20")
    defaults = dict(toml.leaves(asdict(Config())))
    changed = {
        name: value for name, value in toml.leaves(asdict(config)) if value != defaults.get(name)
    }
    return [*_flags(changed), *more, *arguments]


def given_settings(argv: Sequence[str]) -> list[str]:
    """The settings that a command line or its preset sets."""
    flags = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    names = {*flags, *(re.sub(r"(^|\.)no_", r"\1", flag) for flag in flags), *_preset(argv)[1]}
    return [name for name, _ in toml.leaves(asdict(Config())) if name in names]


def has_steps(run_dir: Path) -> bool:
    """Whether a run in this folder has finished a step: its metrics have a line, or it has a
    checkpoint."""
    return any(
        path.stat().st_size
        for pattern in ("metrics/*.jsonl", "checkpoints/step_*/actor/manifest.json")
        for path in run_dir.glob(pattern)
    )


def _preset(argv: Sequence[str], recorded: bool = False) -> tuple[str, dict[str, Any]]:
    """The file that `--config` names, and its settings; none without it."""
    preset = _value_of("--config", argv)
    path = "" if preset is None else toml.find_preset(os.path.expanduser(preset))
    settings = {} if preset is None else toml.read_preset(path, recorded=recorded)
    return path, _used(settings, argv)


def _read(argv: Sequence[str]) -> Config:
    """The configuration of flags, over the defaults; the embedded model has some of its own."""
    flags = argv
    if _value_of("--policy.path", argv) in (None, "tiny"):
        flags = [*_flags(_used(toml.read_preset(str(toml.TINY)), argv)), *argv]
    config = read_flags(Config, "splitppo.train", flags)
    for name in ("policy", "value"):
        model = getattr(config, name)
        if model.lora.rank > 0 and _value_of(f"--{name}.optim.lr", argv) is None:
            optim = replace(model.optim, lr=float(f"{LORA_RATE * model.optim.lr:g}"))
            config = replace(config, **{name: replace(model, optim=optim)})
    return config


def kept_rates(config: Config, argv: Sequence[str]) -> list[str]:
    """A warning of each learning rate that the preset has for a whole model, where flags add
    LoRA."""
    preset = _preset(argv)[1]
    return [
        f"warning: {name}.optim.lr={model.optim.lr:g} comes from a preset without LoRA; LoRA needs "
        f"about {LORA_RATE} times the learning rate of a whole model: "
        f"set --{name}.optim.lr {LORA_RATE * model.optim.lr:g} ({DOCS}/lora.md)"
        for name, model in {"policy": config.policy, "value": config.value}.items()
        if model.lora.rank > 0
        and not preset.get(f"{name}.lora.rank")
        and f"{name}.optim.lr" in preset
        and _value_of(f"--{name}.optim.lr", argv) is None
    ]


def _used(preset: dict[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """A preset's settings, without those of values if the flags choose a baseline that has none."""
    unused = () if _value_of("--ppo.baseline", argv) in (None, "value") else OF_VALUES
    return {name: value for name, value in preset.items() if not name.startswith(unused)}


def map_paths(config: Any, change: Callable[[str, str], str], prefix: str = "") -> Any:
    """The configuration with `change(setting, path)` in place of each of its paths."""
    changed: dict[str, Any] = {}
    for field in fields(config):
        name = prefix + field.name
        value = getattr(config, field.name)
        if is_dataclass(value):
            changed[field.name] = map_paths(value, change, f"{name}.")
        elif name in PATHS and value:
            changed[field.name] = (
                change(name, value)
                if isinstance(value, str)
                else tuple(change(name, path) for path in value)
            )
    return replace(config, **changed)


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The last value given to a flag, or None. A flag without a value is left for tyro to
    refuse."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(flag, nargs="?", dest="value")
    return finder.parse_known_args(argv)[0].value


def read_flags(
    wanted: Any, prog: str, args: Sequence[str], *, return_unknown_args: bool = False
) -> Any:
    """`wanted` made from a command line by tyro. A wrong flag is a UserError of one line; unknown
    ones are returned beside it on demand."""
    check_text(args)
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(wanted, args=args, prog=prog, return_unknown_args=return_unknown_args)
    except SystemExit as stop:
        if not stop.code:
            raise
        # without the colours that tyro writes for a terminal
        raise UserError(_message_of(re.sub(r"\x1b\[[\d;]*m", "", box.getvalue()))) from stop


def read_call(function: Callable[..., Any], prog: str, args: Sequence[str]) -> Callable[[], Any]:
    """A call of `function` with the arguments of a command line, to be made when they are known to
    be right."""

    @wraps(function)
    def bind(*args: Any, **named: Any) -> Any:
        return partial(function, *args, **named)

    return read_flags(bind, prog, args)


def _message_of(box: str) -> str:
    """The error in tyro's box, in one line."""
    lines = [line.strip("│|╭╮─ ") for line in box.splitlines() if re.search("[a-z']", line)]
    near = lines[lines.index("Perhaps you meant:") + 1] if "Perhaps you meant:" in lines else ""
    said = takewhile(lambda line: not line.startswith(("Perhaps", "For full")), lines[1:])
    message = re.sub(r"\[/?bold\]", "", " ".join(said).partition(" Got errors")[0])
    if wrong := re.match(
        r"Error parsing (\S+): .*?('.*?')\]? Argument helptext: \S+ (\{.*?\}|\[.*?\]\]|\S+) (.*)",
        message,
    ):
        return "{} {}: write {}: {}".format(*wrong.groups())
    is_word = re.match("Unrecognized options: [^-]", message) and not near
    lone = (
        "; a switch takes no value: write --data.chat or --data.no-chat; a preset follows --config"
    )
    return f"{message}{lone * bool(is_word)}; {f'did you mean {near}?' if near else 'see --help'}"


def _flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in toml.as_flag(name, value)]
