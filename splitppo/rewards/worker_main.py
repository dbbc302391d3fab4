"""The process of a reward worker: applies reward functions to rows.

    python -m splitppo.rewards.worker_main SOCKET PARENT     (started by workers.py in the process PARENT)

It receives sys.path, the functions' names, the time limit and whether the functions are async. It imports them and
answers `ready`, or `failed` and why. Then it receives rows as (key, index of the function, keyword arguments), and
answers `began` and `done` for each. Plain functions run one row after another; async functions run all rows at once.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from splitppo.errors import UserError
from splitppo.job.child import end_with_parent
from splitppo.rewards import frames
from splitppo.rewards.functions import Outcome, RewardFunction, failure_of, find_function, read_result, timeout_failure

Named = Sequence[tuple[str, RewardFunction]]


def apply(name: str, function: RewardFunction, row: dict[str, Any]) -> Outcome:
    """The function's outcome for a row. Anything that it raises, SystemExit included, is a failure of this row."""
    try:
        return read_result(function(**row))
    except BaseException as error:
        return failure_of(name, error)


async def apply_async(name: str, function: RewardFunction, row: dict[str, Any], timeout: float) -> Outcome:
    """As `apply`, for an async function, which is cancelled after `timeout` seconds."""
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            result = await function(**row)
        return read_result(result)
    except BaseException as error:
        if (task := asyncio.current_task()) and task.cancelling():  # this worker ends
            raise
        late = isinstance(error, TimeoutError) and limit.expired()
        return timeout_failure(name, timeout) if late else failure_of(name, error)


def serve(sock: socket.socket, functions: Named) -> NoReturn:
    """Applies functions to one row after another. EOFError: the trainer closed the socket."""
    stream = sock.makefile("rb")
    while True:
        key, index, row = frames.receive(stream)
        sock.sendall(frames.pack(("began", key)))
        sock.sendall(frames.pack(("done", key, apply(*functions[index], row=row))))


async def serve_async(sock: socket.socket, functions: Named, timeout: float) -> NoReturn:
    """Applies async functions to all rows at once. EOFError: the trainer closed the socket."""
    reader, writer = await asyncio.open_connection(sock=sock)
    running: set[asyncio.Task[None]] = set()  # the event loop itself holds tasks weakly

    async def run(key: int, index: int, row: dict[str, Any]) -> None:
        writer.write(frames.pack(("began", key)))
        writer.write(frames.pack(("done", key, await apply_async(*functions[index], row=row, timeout=timeout))))

    while True:
        task = asyncio.create_task(run(*await frames.read(reader)))
        running.add(task)
        task.add_done_callback(running.discard)


def main() -> int:
    end_with_parent(int(sys.argv[2]), "reward worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    faulthandler.enable()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)  # a program that a function starts must not hold the socket open
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer closed the socket
        with sock.makefile("rb") as stream:  # buffers no row: the trainer first waits for the answer
            sys.path[:], names, timeout, asynchronous = frames.receive(stream)
        try:
            functions = [(name, find_function(name)) for name in names]
        except UserError as error:
            sock.sendall(frames.pack(("failed", str(error))))
            return 1
        if "math" in names:
            importlib.import_module("math_verify")  # a second that must not count for the first row
        sock.sendall(frames.pack(("ready",)))
        if asynchronous:
            asyncio.run(serve_async(sock, functions, timeout))
        else:
            serve(sock, functions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
