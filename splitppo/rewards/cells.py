"""Writes a reward function of a notebook's cell to a file."""

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from symtable import SymbolTable, symtable
from typing import Any

from splitppo.errors import UserError

FOLDER = Path("runs", "cells")


def write_cell(function: Any, name: str, cells: Mapping[str, Any]) -> str:
    """Writes the cell that defines a function into a file in FOLDER, and returns its path. Equal
    cells share a file. `cells`: what the notebook's cells have bound. Raises UserError if the cell
    uses what other cells define, OSError if its text is not known."""
    text = "".join(inspect.findsource(inspect.unwrap(function))[0])
    scope = symtable(text, name, "exec")
    bound = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_local()}
    if others := {*_globals(scope)} & cells.keys() - bound:
        raise UserError(
            f"reward={name}: its cell uses {', '.join(sorted(others))} of other cells; move that "
            "into the cell, or all into a .py file (%%writefile)"
        )
    path = FOLDER / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    FOLDER.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def _globals(scope: SymbolTable) -> Iterator[str]:
    """The global names of a text and of the functions in it."""
    yield from (symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global())
    for inner in scope.get_children():
        yield from _globals(inner)
