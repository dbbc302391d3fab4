"""The process of a worker: answers messages by what a user wrote.

    python -m splitppo.workers.main SOCKET PARENT  (started by pool.py, in process PARENT)

Each message is (key, ...), its answer (key, answer). The first message brings sys.path and the
`Work`. The worker makes the handler and answers "", or why that failed. The handler answers the
others. Plain work is done one message after another, async work all at once. What a user's function
returns is awaited if it can be. The messages are pickles: both ends are processes of this program
on one machine.
"""

import asyncio
import contextlib
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from splitppo.errors import UserError
from splitppo.job.child import forget_words, fork_supervised
from splitppo.workers import Handler, Work, awaited, retry_after


def serve(connection: Connection, handler: Handler, work: Work) -> NoReturn:
    """Answers one message after another. EOFError: the trainer closed the connection."""
    # one event loop for all: a function may keep a client that is bound to it
    with asyncio.Runner() as runner:
        while True:
            key, *message = connection.recv()
            forget_words()
            try:
                result, read = handler(*message)
                answer = read(runner.run(awaited(result)))
            except BaseException as error:  # SystemExit, too, is a failure of this row
                answer = work.failed(error)
            connection.send((key, answer))


async def call(
    handler: Handler, message: Sequence[Any], end: float, least: float = 0.1
) -> tuple[Any, Any]:
    """What the user's function returns, and what reads it. If a request of it is refused, and the
    refusal says when to come again, the function is called again then, or after `least` seconds;
    the refusal is raised if that is later than `end` on the event loop's clock."""
    try:
        result, read = handler(*message)
        return await awaited(result), read
    except Exception as error:
        wait = max(retry_after(error), least)
        if asyncio.get_running_loop().time() + wait > end:
            raise
    await asyncio.sleep(wait)
    return await call(handler, message, end, 2 * least)


async def serve_async(connection: Connection, handler: Handler, work: Work) -> NoReturn:
    """Answers all messages at once, until the trainer closes the connection. Each has `timeout`
    seconds, and then is cancelled. Refused requests of rewards come again: an environment may have
    heard a message that it then fails on."""

    async def run(key: int, *message: Any) -> None:
        limit = asyncio.timeout(work.timeout)
        try:
            async with limit:
                end = limit.when() if work.section == "reward" else None
                result, read = await call(handler, message, end or 0.0)
            answer = read(result)
        except BaseException as error:
            if (task := asyncio.current_task()) and task.cancelling():  # this worker ends
                raise
            answer = work.timed_out() if limit.expired() else work.failed(error)
        connection.send((key, answer))

    async with asyncio.TaskGroup() as tasks:
        while True:
            try:
                message = await asyncio.to_thread(connection.recv)
            except (EOFError, OSError):
                sys.exit()  # cancels what is under way
            tasks.create_task(run(*message))


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    fork_supervised(int(sys.argv[2]))
    connection = Connection(int(sys.argv[1]))
    faulthandler.enable()
    # a program that a function starts must not hold it open
    os.set_inheritable(connection.fileno(), False)
    # nor answer on it: a process that a function forks, and that returns from it, ends there
    os.register_at_fork(after_in_child=lambda: setattr(connection, "send", lambda _: os._exit(0)))
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer closed the connection
        key, sys.path[:], work = connection.recv()
        if work.memory:
            with contextlib.suppress(ValueError):  # the machine's limit is lower
                resource.setrlimit(
                    resource.RLIMIT_DATA, (work.memory, resource.getrlimit(resource.RLIMIT_DATA)[1])
                )
        try:
            handler = work.make()
        except UserError as error:
            connection.send((key, str(error)))
            return 1
        connection.send((key, ""))
        if work.asynchronous:
            asyncio.run(serve_async(connection, handler, work))
        else:
            serve(connection, handler, work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
