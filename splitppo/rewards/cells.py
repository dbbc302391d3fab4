"""Writes a reward function of a notebook's cell to a file, with what it uses from other cells."""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from symtable import SymbolTable, symtable
from types import ModuleType
from typing import Any

from splitppo.errors import UserError

FOLDER = Path("runs", "cells")


def write_cell(name: str, cells: Mapping[str, Any]) -> str:
    """Writes the function `name` of `cells`, the names that a notebook's cells have bound, into a
    file in FOLDER, and returns its path. Equal texts share a file. Raises UserError if the function
    uses something that can't be written to a file."""
    text = "\n".join(_texts(name, cells, name, set()))
    path = FOLDER / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    FOLDER.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def _texts(name: str, cells: Mapping[str, Any], function: str, done: set[str]) -> Iterator[str]:
    """The text that binds a name of the cells, behind those of what it uses, each once."""
    done.add(name)  # it may use itself
    try:
        text = _text(name, cells)
    except (OSError, TypeError, ValueError, SyntaxError, RecursionError) as error:
        raise UserError(
            f"reward={function}: it uses {name} of another cell, a {type(cells[name]).__name__} "
            "that can't be written to a file; create it inside the function that uses it, or move "
            f"{name} and the functions that use it to a .py file (%%writefile) and import them"
        ) from error
    for used in _globals(symtable(text, name, "exec")):
        if used in cells and used not in done:
            yield from _texts(used, cells, function, done)
    yield text


def _text(name: str, cells: Mapping[str, Any]) -> str:
    """An import, a function's source, or `name = ...` of a number, a text, or a collection of
    them."""
    value = cells[name]
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}\n"
    short = getattr(value, "__name__", "")
    module = inspect.getmodule(value)
    if module and vars(module) is not cells and getattr(module, short, None) is value:
        return f"from {module.__name__} import {short} as {name}\n"
    if getattr(value, "__qualname__", None) == name:
        return textwrap.dedent(inspect.getsource(value))
    if ast.literal_eval(repr(value)) != value:
        raise ValueError
    return f"{name} = {value!r}\n"


def _globals(scope: SymbolTable) -> Iterator[str]:
    """The global names of a text and of the functions in it."""
    yield from (symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global())
    for inner in scope.get_children():
        yield from _globals(inner)
