"""A worker: a process that runs reward functions for a pool.

    python -m splitppo.rewards.worker_main SOCKET PARENT     (started by crew.py of the process PARENT)

It is told the pool's sys.path, the functions, the time limit and whether they are async, imports them and says `ready`,
or `failed` and why. Then it gets rows as (key, number of the function, keyword arguments), and says `began` and `done`
of each: functions in the main thread, a row after the other; async ones in one event loop, all rows that it has got.
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
from splitppo.rewards.functions import (
    Fault,
    InvalidResult,
    Outcome,
    RewardFunction,
    error_fault,
    find_function,
    read_result,
    timeout_fault,
)

Named = Sequence[tuple[str, RewardFunction]]


def judge(name: str, function: RewardFunction, row: dict[str, Any]) -> Outcome:
    """What the function makes of a row. Whatever it raises, sys.exit included, is the row's own failure."""
    try:
        return read_result(function(**row))
    except InvalidResult as error:
        return Fault("invalid", str(error))
    except BaseException as error:
        return error_fault(error, name)


async def judge_async(name: str, function: RewardFunction, row: dict[str, Any], timeout: float) -> Outcome:
    """`judge`, of an async function, which is cancelled after `timeout` seconds."""
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            result = await function(**row)
        return read_result(result)
    except InvalidResult as error:
        return Fault("invalid", str(error))
    except BaseException as error:
        if (task := asyncio.current_task()) and task.cancelling():  # by this worker's end, not by the function
            raise
        late = isinstance(error, TimeoutError) and limit.expired()
        return timeout_fault(timeout) if late else error_fault(error, name)


def serve(sock: socket.socket, functions: Named) -> NoReturn:
    """Rows one after the other, until the pool is gone (EOFError)."""
    stream = sock.makefile("rb")
    while True:
        key, number, row = frames.receive(stream)
        sock.sendall(frames.pack(("began", key)))
        sock.sendall(frames.pack(("done", key, judge(*functions[number], row=row))))


async def serve_async(sock: socket.socket, functions: Named, timeout: float) -> NoReturn:
    """Rows all at the same time, until the pool is gone (EOFError)."""
    reader, writer = await asyncio.open_connection(sock=sock)
    running: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly

    async def run(key: int, number: int, row: dict[str, Any]) -> None:
        writer.write(frames.pack(("began", key)))
        writer.write(frames.pack(("done", key, await judge_async(*functions[number], row=row, timeout=timeout))))

    while True:
        key, number, row = await frames.read(reader)
        task = asyncio.create_task(run(key, number, row))
        running.add(task)
        task.add_done_callback(running.discard)


def main() -> int:
    end_with_parent(int(sys.argv[2]), "reward worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, with which this ends
    faulthandler.enable()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)  # a program that a function starts must not keep the pool waiting
    with contextlib.suppress(EOFError, ConnectionError):  # the pool is closed
        with sock.makefile("rb") as stream:  # reads no further: the pool waits for the answer
            sys.path[:], names, timeout, together = frames.receive(stream)
        try:
            functions = [(name, find_function(name)) for name in names]
        except UserError as error:
            sock.sendall(frames.pack(("failed", str(error))))
            return 1
        if "math" in names:
            importlib.import_module("math_verify")  # takes a second, which is no row's
        sock.sendall(frames.pack(("ready",)))
        if together:
            asyncio.run(serve_async(sock, functions, timeout))
        else:
            serve(sock, functions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
