"""The process of a reward worker: applies reward functions to rows.

    python -m splitppo.rewards.worker_main SOCKET PARENT  (started by workers.py, in process PARENT)

Each message is (key, ...), its answer (key, answer). The first message brings sys.path, the
functions' names, the time limit and whether the functions are async. The worker imports them and
answers "", or why that failed. The others bring rows: the name of a function, and keyword
arguments. It answers the outcome. Plain functions run one row after another; async functions run
all rows at once. What either returns is awaited if it can be. The messages are pickles: both ends
are processes of this program on one machine.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from splitppo.errors import UserError
from splitppo.job.child import end_with_parent
from splitppo.job.loading import awaited, describe
from splitppo.rewards.functions import (
    Failure,
    RewardFunction,
    find_function,
    read_result,
    timeout_failure,
)


def failure_of(name: str, error: BaseException) -> Failure:
    """The failure of a function that raised `error`."""
    return Failure("", "error", describe(error, os.path.realpath(name.rpartition(":")[0])))


def serve(connection: Connection, functions: Mapping[str, RewardFunction]) -> NoReturn:
    """Applies functions to one row after another. EOFError: the trainer closed the connection."""
    # one event loop for all rows: a function may keep a client that is bound to it
    with asyncio.Runner() as runner:
        while True:
            key, name, row = connection.recv()
            try:
                outcome = read_result(runner.run(awaited(functions[name](**row))))
            except BaseException as error:  # SystemExit, too, is a failure of this row
                outcome = failure_of(name, error)
            connection.send((key, outcome))


async def serve_async(
    connection: Connection, functions: Mapping[str, RewardFunction], timeout: float
) -> NoReturn:
    """Applies async functions to all rows at once, until the trainer closes the connection. Each
    has `timeout` seconds for a row, and then is cancelled."""

    async def run(key: int, name: str, row: dict[str, Any]) -> None:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                result = await awaited(functions[name](**row))
            outcome = read_result(result)
        except BaseException as error:
            if (task := asyncio.current_task()) and task.cancelling():  # this worker ends
                raise
            outcome = timeout_failure(timeout) if limit.expired() else failure_of(name, error)
        connection.send((key, outcome))

    async with asyncio.TaskGroup() as rows:
        while True:
            try:
                message = await asyncio.to_thread(connection.recv)
            except (EOFError, OSError):
                sys.exit()  # cancels the rows that are under way
            rows.create_task(run(*message))


def main() -> int:
    end_with_parent(int(sys.argv[2]), "reward worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    faulthandler.enable()
    connection = Connection(int(sys.argv[1]))
    # a program that a function starts must not hold it open
    os.set_inheritable(connection.fileno(), False)
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer closed the connection
        key, sys.path[:], names, timeout, asynchronous = connection.recv()
        try:
            functions = {name: find_function(name) for name in names}
        except UserError as error:
            connection.send((key, str(error)))
            return 1
        if "math" in names:
            importlib.import_module("math_verify")  # a second that must not count for the first row
        connection.send((key, ""))
        if asynchronous:
            asyncio.run(serve_async(connection, functions, timeout))
        else:
            serve(connection, functions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
