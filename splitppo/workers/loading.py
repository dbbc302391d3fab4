"""A user's Python file and what the settings name in it: `path/to/file.py:name`.

Workers import this module: no torch, no numpy.
"""

import functools
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from splitppo.errors import UserError, one_line

# how the names of modules begin that are imported from a user's file
IMPORTED = "splitppo_reward_"


def find_in_file(named: str, setting: str, what: str, known: str) -> Any:
    """What `path/to/file.py:name` names, once the file is imported. `what` the file is and the
    `known` names that need no file are for messages. Raises UserError if there is no such file or
    name, or the import fails."""
    wrong = f"{setting}={named}:"
    path, _, name = named.rpartition(":")
    if not path.endswith(".py") or not name:
        raise UserError(f"{wrong} no such {known} or path/to/file.py:name")
    file = Path(os.path.realpath(path))  # Path.resolve raises on a link to itself
    if not file.is_file():
        raise UserError(f"{wrong} no such file {file}; give a path that every rank can read")
    try:
        module = _import_file(file)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"importing the {what} file {file} failed: {describe(error)}; fix the file"
        ) from error
    if not hasattr(module, name):
        kind = type if what == "environment" else FunctionType
        defined = ", ".join(key for key, value in vars(module).items() if isinstance(value, kind))
        raise UserError(
            f"{wrong} {path} has no {name} when it is imported; "
            f"{'classes' if kind is type else 'functions'} there: {defined or 'none'}"
        )
    return getattr(module, name)


@functools.cache  # imports a file once: its top level may load a model
def _import_file(file: Path) -> ModuleType:
    # the file may import modules beside it; last, so that they hide no library
    sys.path += {str(file.parent)} - {*sys.path}
    # a name of its own in sys.modules, where dataclasses and pickle look it up: two files may be
    # called reward.py
    name = f"{IMPORTED}{file.stem}_{hash(file)}"
    spec: Any = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    """The error in one line, with the last line of a user's file that led to it; if none did, the
    last line of all."""
    if isinstance(error, SyntaxError):  # its text names the place
        return one_line(f"{type(error).__name__}: {error}")[:300]
    text = one_line("".join(traceback.format_exception_only(error)))[:300]
    frames = [*traceback.walk_tb(error.__traceback__)]
    own = [at for at in frames if at[0].f_globals.get("__name__", "").startswith(IMPORTED)]
    frame, line = (own or frames)[-1]
    return f"{text} ({frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name})"


def is_async(function: Any) -> bool:
    """Whether the function, or the `__call__` of an object, is defined with `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


async def awaited(result: Any) -> Any:
    """The result of a function, awaited if it can be: a decorator or a lambda may hide an async
    function."""
    while inspect.isawaitable(result):
        result = await result
    return result
