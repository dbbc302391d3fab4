"""Worker processes: what a user wrote, reward functions and environments, runs there and not in a
rank. What fails there is a `Failure` of one row, and nothing of it is left over. And how a user's
file is imported: the settings name what is in it, `path/to/file.py:name`.

A worker imports this package: no torch, no numpy.
"""

import importlib.util
import inspect
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal, cast

from splitppo.errors import UserError, one_line, say
from splitppo.job.child import last_words

# Answers a worker's messages: called with each, it returns the user's result, or an awaitable of
# it, and a function that checks it.
Handler = Callable[..., tuple[Any, Callable[[Any], Any]]]

# a user's process has ended, and what it said of that is on its standard error
ENDED = (BrokenExecutor, EOFError, ConnectionError, subprocess.SubprocessError)
# how the names of modules begin that are imported from a user's file
IMPORTED = "splitppo_reward_"
FLOAT32_MAX = 3.4028234663852886e38  # the largest number that a user's function may return
FAILING_STEPS = 3  # the run ends when in so many steps in a row nothing has given a result


@dataclass(frozen=True)
class Failure:
    """A function or an environment that gave no result for a row. Kinds: `timeout`; `error`: it
    raised; `invalid`: its result is none; `crash`: its process ended; `memory`: it took more than
    it may; `replay`: an environment answered otherwise when it was played again."""

    function: str  # its short name; workers leave it empty
    kind: Literal["timeout", "error", "invalid", "crash", "memory", "replay"]
    text: str  # one line: the exception and its place, or how the process ended
    sure: bool = True  # or another row of the process may be the cause


@dataclass(frozen=True)
class Work:
    """What a pool's workers do.

    Attributes:
        make: makes the handler in the worker; raises UserError.
        section: of the settings. names: what the worker imports, for messages.
        timeout: seconds for a message.
        asynchronous: a worker answers many messages at a time; else one after another.
        concurrency: most messages that a pool's asynchronous workers have at a time.
        memory: bytes that a worker, and each process that it starts, may have of its own; 0: any.
    """

    make: Callable[[], Handler]
    section: Literal["reward", "env"]
    names: str
    timeout: float
    asynchronous: bool
    memory: int = 0
    concurrency: int | None = None

    def failed(self, error: BaseException) -> Failure:
        """The failure of a call that raised `error`."""
        if not (self.memory and isinstance(error, MemoryError)):
            printed = last_words() if is_of_process(error) else ""
            return Failure("", "error", describe(error) + f"; it printed {printed}" * bool(printed))
        return Failure(
            "",
            "memory",
            f"{describe(error)}: its process may have {self.memory / 2**30:g} GiB",
            sure=False,
        )

    def timed_out(self, why: str = "", *, sure: bool = True) -> Failure:
        """The failure of a call that took too long."""
        return Failure(
            "", "timeout", f"took longer than {self.section}.timeout={self.timeout:g} s{why}", sure
        )


def say_failures(
    where: str, failures: Sequence[tuple[int, Failure]], what: str = "rewards"
) -> None:
    """Prints a step's failures, if there are any, in one line that begins with `where`: the number
    of each function and kind, and the first of them."""
    by_kind: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for row, failure in failures:
        by_kind.setdefault((failure.function, failure.kind), []).append((row, failure.text))
    if by_kind:
        say(
            f"{where}{what} that failed: "
            + "; ".join(
                f"{name}: {len(rows)} x {kind}, first of row {min(rows)[0]}: {min(rows)[1]}"
                for (name, kind), rows in sorted(by_kind.items())
            )
        )


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
    # the file may import modules beside it; last, so that they hide no library
    sys.path += {str(file.parent)} - {*sys.path}
    try:
        module = importlib.import_module(f"{IMPORTED}{os.fsencode(file).hex()}")
    except (Exception, SystemExit) as error:
        raise UserError(
            f"importing the {what} file {file} failed: {describe(error)}; fix the file"
        ) from error
    if not hasattr(module, name):
        raise UserError(f"{wrong} {path} has no {name} when it is imported; check its spelling")
    return getattr(module, name)


class UsersFiles:
    """Finds modules whose names hold their files' paths: two files may be called reward.py. A
    process that a user's function starts imports this package, and then finds them, too."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        if not name.startswith(IMPORTED):
            return None
        file = os.fsdecode(bytes.fromhex(name.removeprefix(IMPORTED)))
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(cast(Any, UsersFiles))


def describe(error: BaseException) -> str:
    """The error in one line, with the last line of a user's file that led to it; if none did, the
    last line of all."""
    if isinstance(error, SyntaxError):  # its text names the place
        return one_line(f"{type(error).__name__}: {error}")[:300]
    said = traceback.format_exception_only(error)[0]
    text = one_line(re.sub(rf"^{IMPORTED}\w*\.", "", said))[:300]
    frames = [*traceback.walk_tb(error.__traceback__)]
    user_frames = [at for at in frames if at[0].f_globals.get("__name__", "").startswith(IMPORTED)]
    frame, line = (user_frames or frames)[-1]
    return f"{text} ({frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name})"


def is_of_process(error: BaseException | None) -> bool:
    """Whether the error, or one that led to it, says that a process of the user's has ended."""
    return error is not None and (
        isinstance(error, ENDED) or is_of_process(error.__cause__ or error.__context__)
    )


def is_async(function: Any) -> bool:
    """Whether the function, or the `__call__` of an object, is defined with `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def read_numbers(numbers: Mapping[Any, Any]) -> dict[str, float]:
    """A user's numbers (`read_number`) under names that every file, screen and tracker can hold.
    Raises ValueError if two names become the same text."""
    named = {one_line(str(name)): number for name, number in numbers.items()}
    if len(named) < len(numbers):
        raise ValueError(f"two of its names are the same text: {', '.join(map(repr, numbers))}")
    return {name: read_number(name, number) for name, number in named.items()}


def read_number(name: str, value: Any) -> float:
    """`value` as a float. It may be one of Python's numbers (Decimal and Fraction, too), numpy's or
    torch's, alone or as the only element of a list, array or tensor. Raises ValueError if it is
    not one number, or not finite in float32."""
    with suppress(Exception):  # each library has its own errors
        while type(value) in (list, tuple) and len(value) == 1:
            value = value[0]
        value = value.item() if hasattr(value, "item") else value
        number: float = value.__float__()  # which a text lacks
        if abs(number) <= FLOAT32_MAX:
            return number
    raise ValueError(f"{name!r} is not a finite number ({one_line(repr(value)[:40])})")


def retry_after(error: BaseException | None) -> float:
    """Seconds after which a request that was refused may come again, as the error says or one that
    led to it; infinite if none does. They stand in an attribute `retry_after`, or in the header
    Retry-After of the error (aiohttp, urllib) or of its response (httpx, requests, openai,
    anthropic). A date there says nothing."""
    waits: list[Any] = [getattr(error, "retry_after", None)]
    response = getattr(error, "response", None)
    headers: Any = getattr(error if response is None else response, "headers", None)
    with suppress(Exception):  # whatever a library has under that name
        named = {str(name).lower(): value for name, value in headers.items()}
        waits = [named["retry-after"], *waits]
    for wait in waits:
        with suppress(TypeError, ValueError):  # nonsense says no time
            if math.isfinite(seconds := float(wait)):
                return seconds
    return retry_after(error.__cause__ or error.__context__) if error else math.inf


async def awaited(result: Any) -> Any:
    """The result of a function, awaited if it can be: a decorator or a lambda may hide an async
    function."""
    while inspect.isawaitable(result):
        result = await result
    return result
