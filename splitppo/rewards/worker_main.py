"""The process of a reward worker: applies reward functions to rows.

    python -m splitppo.rewards.worker_main SOCKET PARENT     (started by workers.py in the process PARENT)

Each message is (key, ...), its answer (key, answer). The first message brings sys.path, the functions' names, the time
limit and whether the functions are async. The worker imports them and answers "", or why that failed. The others bring
rows: the index of a function, and keyword arguments. It answers the outcome. Plain functions run one row after another;
async functions run all rows at once. The messages are pickles: both ends are processes of this program on one machine.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from splitppo.errors import UserError
from splitppo.job.child import end_with_parent
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


def serve(connection: Connection, functions: Named) -> NoReturn:
    """Applies functions to one row after another. EOFError: the trainer closed the connection."""
    while True:
        key, index, row = connection.recv()
        connection.send((key, apply(*functions[index], row=row)))


async def serve_async(connection: Connection, functions: Named, timeout: float) -> NoReturn:
    """Applies async functions to all rows at once, until the trainer closes the connection."""

    async def run(key: int, index: int, row: dict[str, Any]) -> None:
        connection.send((key, await apply_async(*functions[index], row=row, timeout=timeout)))

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
    os.set_inheritable(connection.fileno(), False)  # a program that a function starts must not hold it open
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer closed the connection
        key, sys.path[:], names, timeout, asynchronous = connection.recv()
        try:
            functions = [(name, find_function(name)) for name in names]
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
