"""Errors that the user can fix: every command shows them as one line, without a traceback."""

import difflib
import errno
import functools
import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import distributions
from typing import Any

OTHER = "; fix that, or name another path"
FREE = "; free space on that disk, or choose another --run-dir"
CLEAR = "\r\x1b[K"  # empties a terminal's line
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk; they come without a path, too


def find_docs() -> str:
    """Where the pages are that messages name: the address that a release has in its metadata, else
    the folder of a clone."""
    for package in distributions(name="splitppo"):
        for url in package.metadata.get_all("Project-URL", []):
            if url.startswith("Documentation, "):
                return os.path.dirname(url.split(", ")[1])
    return "docs"


DOCS = find_docs()


class UserError(Exception):
    """Wrong input: its message says the value, the rule and the remedy."""


def say(*parts: str, error: bool = False) -> None:
    """Prints a line of the parts that are not empty, an error to standard error; on a terminal in
    the place of a ^C that was typed."""
    stream = sys.stderr if error else sys.stdout
    # one write: torchrun starts ranks without buffers, and the lines of two ranks would mix
    start = CLEAR if stream.isatty() else ""
    print(f"{start}{'; '.join(filter(None, parts))}\n", end="", flush=True, file=stream)


def warn(message: str) -> None:
    """Prints a warning. Only one rank should call this: the first of the job, or of the group."""
    say(f"warning: {message}")


def one_line(text: str) -> str:
    """`text` as a line that any screen can show: control characters and lone surrogates as Python's
    escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in " ".join(text.split())
    )


def well_formed(text: str) -> str:
    """`text` as a plain string, with U+FFFD for each half of a character (lone surrogate), which no
    tokenizer and no file takes."""
    # by str's own method: a user's class may have another
    return str.encode(text, "utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def check_text(words: Sequence[str]) -> None:
    """Refuses what no file's name, tokenizer or JSON can hold: NUL, and bytes that are not UTF-8
    (lone surrogates)."""
    for word in words:
        if "\0" in word or word != word.encode(errors="replace").decode():
            raise UserError(f"{word[:80]!a} holds a NUL or bytes that are not UTF-8; remove them")


def need(module: str, setting: str, package: str) -> None:
    """Raises UserError if the module that a setting needs is not installed; pip installs it as
    `package`."""
    # a folder of that name has no origin
    if getattr(importlib.util.find_spec(module), "origin", None) is None:
        raise UserError(
            f"{setting}: {module} is not installed; pip install {package}, "
            "or leave this setting out"
        )


def need_known(name: str, known: Iterable[str], what: str) -> None:
    """Raises UserError, which begins with `what`, if a name is not among those that are known."""
    if name not in known:
        near = difflib.get_close_matches(name, known, cutoff=0)
        raise UserError(f"{what}: there is no {name}; did you mean {', '.join(near)}?")


def unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` for JSON of a user's: raises ValueError where an object has a name
    twice, since the last value would silently win."""
    names = [name for name, _ in pairs]
    for name in names if len({*names}) < len(names) else ():
        if names.count(name) > 1:
            raise ValueError(f"it has {name[:80]!r} twice")
    return dict(pairs)


def words() -> list[str]:
    """The arguments of a command whose texts are all paths: a shell leaves the `~` of `--out=~/a`
    to the program."""
    check_text(sys.argv)
    return [
        re.sub(r"^(--[\w-]+=)?(~.*)", lambda m: (m[1] or "") + os.path.expanduser(m[2]), w)
        for w in sys.argv[1:]
    ]


def to_user_error(error: BaseException) -> UserError | None:
    """The error as one that the user can fix, or None: of the disk, numbers that are not finite, a
    closed standard output, or what was raised from one of these."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, BrokenPipeError):
        try:
            print(flush=True)  # or it is another pipe's
        except BrokenPipeError:
            return UserError(
                "standard output was closed by its reader; write it to a file (> run.log)"
            )
    by_rust = any(f"(os error {n})" in str(error) for n in FULL)
    if by_rust or isinstance(error, FloatingPointError):
        return UserError(f"{error}{FREE * by_rust}")
    if isinstance(error, OSError) and (error.filename is not None or error.errno in FULL):
        path = "the run folder's disk" if error.filename is None else os.fsdecode(error.filename)
        shown = path if len(path) <= 200 else f"{path[:100]}...{path[-97:]}"
        return UserError(f"{shown}: {error.strerror}{FREE if error.errno in FULL else OTHER}")
    under = error.__cause__ or error.__context__
    # of a crash while another error was handled, a full disk alone is the cause
    while under and under is not error.__cause__ and getattr(under, "errno", 0) not in FULL:
        under = under.__context__
    cause = under and to_user_error(under)
    return UserError(f"{error}: {cause}") if cause else None


def command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Makes a command's `main` return an exit status: 2 after an error that the user can fix, 130
    after Ctrl-C, 141 if the reader of its output is gone (`| head`). What a screen cannot encode is
    shown as escapes."""

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            status = main(*args, **kwargs) or 0
        except SystemExit as stop:
            if stop.code:
                raise
            status = 0  # --help
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            status = 130
        except Exception as error:
            status = _explain(error)
        try:
            sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try again when it exits
            status = status or _explain(error)
        return status

    return run


def _explain(error: Exception) -> int:
    """Prints an error that the user can fix, and returns the exit status; raises any other
    error."""
    if isinstance(error, BrokenPipeError):
        return 141
    if not (users := to_user_error(error)):
        raise error
    print(f"error: {one_line(str(users))}", file=sys.stderr)
    return 2
