"""Worker processes: what a user wrote, reward functions and environments, runs there and not in a
rank. What fails there is a `Failure` of one row, and nothing of it is left over.

A worker imports this package: no torch, no numpy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from splitppo.errors import say
from splitppo.workers.loading import describe

# Answers a worker's messages: called with each, it returns the user's result, or an awaitable of
# it, and a function that checks it.
Handler = Callable[..., tuple[Any, Callable[[Any], Any]]]

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
        memory: bytes that a worker, and each process that it starts, may have of its own; 0: any.
    """

    make: Callable[[], Handler]
    section: Literal["reward", "env"]
    names: str
    timeout: float
    asynchronous: bool
    memory: int = 0

    def failed(self, error: BaseException) -> Failure:
        """The failure of a call that raised `error`."""
        if not (self.memory and isinstance(error, MemoryError)):
            return Failure("", "error", describe(error))
        text = f"{describe(error)}: its process may have {self.memory / 2**30:g} GiB"
        return Failure("", "memory", text, sure=False)

    def timed_out(self, why: str = "", *, sure: bool = True) -> Failure:
        """The failure of a call that took too long."""
        limit = f"{self.section}.timeout={self.timeout:g}"
        return Failure("", "timeout", f"took longer than {limit} s{why}", sure)


def say_failures(
    where: str, failures: Sequence[tuple[int, Failure]], what: str = "rewards"
) -> None:
    """Prints a step's failures, if there are any, in one line that begins with `where`: the number
    of each function and kind, and the first of them."""
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for row, failure in failures:
        found.setdefault((failure.function, failure.kind), []).append((row, failure.text))
    if found:
        texts = (
            f"{name}: {len(rows)} x {kind}, first of row {min(rows)[0]}: {min(rows)[1]}"
            for (name, kind), rows in sorted(found.items())
        )
        say(f"{where}{what} that failed: {'; '.join(texts)}")
