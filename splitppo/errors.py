"""What is the user's to mend is shown as one line, without a traceback: by every command, in one way."""

import errno
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import ParamSpec

P = ParamSpec("P")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk; they come without a path, too


class UserError(Exception):
    """Wrong input: its message says the value, the rule and the remedy."""


def one_line(text: str) -> str:
    """`text` as a line that any screen can show: control characters and lone surrogates as Python's escapes."""
    shown = " ".join(text.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def check_text(words: Sequence[str]) -> None:
    """Refuses what neither a file's name, a tokenizer nor JSON can hold: NUL, and bytes that are not UTF-8, which
    Python keeps as lone surrogates."""
    for word in words:
        if "\0" in word or word != word.encode(errors="replace").decode():
            raise UserError(f"{word[:80]!a} holds a NUL or bytes that are not UTF-8; write it without them")


def words() -> list[str]:
    """The arguments of a command whose texts are all paths: a shell leaves the `~` of `--out=~/a` to the program."""
    check_text(sys.argv)
    return [re.sub(r"^(--[\w-]+=)?(~.*)", lambda m: (m[1] or "") + os.path.expanduser(m[2]), w) for w in sys.argv[1:]]


def as_users(error: BaseException) -> UserError | None:
    """The error as the user's own: a UserError, what the disk says of a path, numbers that training cannot go on with,
    a closed standard output, or what was raised from one of these; None for all others."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, BrokenPipeError):
        try:
            print(flush=True)  # or it is another pipe's
        except BrokenPipeError:
            return UserError("standard output was closed by what read it; write it to a file (> run.log)")
    if isinstance(error, FloatingPointError) or any(
        f"(os error {n})" in str(error) for n in FULL
    ):  # the latter: Rust's
        return UserError(str(error))
    if isinstance(error, OSError) and (error.filename is not None or error.errno in FULL):
        path = "the disk" if error.filename is None else os.fsdecode(error.filename)
        shown = path if len(path) <= 200 else f"{path[:100]}...{path[-97:]}"
        return UserError(f"{shown}: {error.strerror}; mend that, or name another path")
    under = error.__cause__ or error.__context__
    while under and under is not error.__cause__ and getattr(under, "errno", 0) not in FULL:
        under = under.__context__  # of a crash while another error was handled, a full disk alone is the cause
    told = under and as_users(under)
    return UserError(f"{error}: {told}") if told else None


def command(main: Callable[P, int | None]) -> Callable[P, int]:
    """A command's `main` that returns the exit status: 2 after the line of a user's error, 130 after Ctrl-C, 141 if
    nobody reads the output any more (`| head`). What a screen cannot encode is shown as escapes."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                status = main(*args, **kwargs) or 0
            except SystemExit as stop:
                if stop.code:
                    raise
                status = 0  # --help
            if not status:
                sys.stdout.flush()
        except BrokenPipeError:
            status = 141
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            status = 130
        except Exception as error:
            if not (told := as_users(error)):
                raise
            print(f"error: {one_line(str(told))}", file=sys.stderr)
            status = 2
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try once more at its end
        return status

    return run
