"""Environments in worker processes: `EnvPool` for the sampler of a rank, `Envs` in the worker."""

import asyncio
import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from splitppo.envs import Env, EnvFactory, Message, Turn, load_env, read_messages, read_turn
from splitppo.envs.tools import load_tools, tool_env
from splitppo.errors import one_line
from splitppo.job.loading import awaited, is_async
from splitppo.workers import Failure, Work
from splitppo.workers.pool import Pool, Worker

MEMORY = 4 << 30  # bytes that a worker, and each process that it starts, may have of its own


class Source(NamedTuple):
    """What environments are made of, by the settings of `env`: `path`, or else `tools`."""

    path: str | None = None
    tools: tuple[str, ...] = ()
    format_reward: float = 0.0
    network: bool = False

    def load(self) -> tuple[EnvFactory, bool]:
        """What makes an environment, and whether its steps are async. Raises UserError."""
        if self.path:
            factory = load_env(self.path)
            return factory, is_async(getattr(factory, "step", None))
        tools = load_tools(self.tools, network=self.network)
        return tool_env(tools, self.format_reward), any(map(is_async, tools.values()))


class Began(NamedTuple):
    """An environment that waits for a message.

    Attributes:
        messages: the prompt that it asks for; None: the row's own.
        turns: what it answered to the messages that were played again.
    """

    messages: list[Message] | None
    turns: list[Turn]


@dataclass
class _Row:
    """An open row.

    Attributes:
        worker: where its environment is, unless the process has ended.
        played: the assistant's messages so far.
        record: what the environment said: the prompt, and each turn.
    """

    key: int
    row: dict[str, Any]
    seed: int
    worker: Worker
    played: list[Message]
    record: list[Any]


class EnvPool(Pool):
    """The environments of a rank's open rows. A worker has several. Plain ones take their steps one
    after another; those with `async def step` all at once.

    If its worker has ended, an environment is made and played again in the next one. If a worker
    ends or has no memory left during a step, that step is taken once more, without any other row
    in the process. So what a row gets follows from its seed, its data and the messages, whatever
    runs beside it.

    Args:
        source: what the environments are. Raises UserError as `Source.load` does.
        workers: processes.
        timeout: seconds for a step, or to make an environment.
        memory: bytes that a worker, and each process that it starts, may have of its own; 0: any.
    """

    def __init__(self, source: Source, workers: int, timeout: float, memory: int = MEMORY):
        _, asynchronous = source.load()
        named = (source.path,) if source.path else source.tools
        names = f"the environment's {', '.join(named)}"
        work = Work(f"{__name__}:Envs", (source,), "env", names, timeout, asynchronous, memory)
        super().__init__(work, workers)
        self._name = ", ".join(name.rpartition(":")[2] for name in named)
        self._rows: dict[int, _Row] = {}

    def begin(
        self,
        key: int,
        row: dict[str, Any],
        seed: int,
        played: Sequence[Message] = (),
        record: Sequence[list[Message] | Turn | None] = (),
    ) -> Future[Began | Failure]:
        """Makes a row's environment, and plays the assistant's messages again. The row fails
        (`replay`) if the environment does not say what it said before.

        The futures of `begin` and `step` raise UserError if a worker can't import the files.

        Args:
            key: any number that no other open row has.
            row: the columns of the data. seed: of the environment.
            record: what it said before, as far as it is known: `Began.messages`, and each turn.
        """
        worker = min(self._workers, key=lambda worker: worker.rows)
        worker.rows += 1
        self._rows[key] = _Row(key, row, seed, worker, [*played], [*record])
        return self._run(self._say(self._rows[key]))

    def step(self, key: int, message: Message) -> Future[Turn | Failure]:
        """What the environment says to an assistant's message. A row that failed takes no more."""
        return self._run(self._say(self._rows[key], message))

    def end(self, key: int) -> None:
        """Has the environment closed, and does not wait. For each `begin` once, also after a
        failure, when nothing of the row is under way. An error costs nothing here."""
        one = self._rows.pop(key)
        one.worker.rows -= 1
        self._run(one.worker.call("end", key))

    async def _say(self, one: _Row, *message: Message) -> Any:
        """What the environment says to the message, or, without one, in the beginning."""

        async def ask(worker: Worker) -> tuple[Any, bool]:
            said, sure = await worker.call("step", one.key, *message)
            if said is None:
                said, sure = await self._play(one, message, worker)
            failed = isinstance(said, Failure)
            if failed or worker is not one.worker:
                await worker.call("end", one.key)
            # memory may be gone that an earlier row left behind; the next process has it again
            others = ("crash", "memory") if worker is one.worker else ("memory",)
            return said, sure and not (failed and said.kind in others)

        said = await self._settle(one.worker, ask)
        if isinstance(said, Failure):
            return replace(said, function=self._name)
        one.record = said if isinstance(said, list) else [*one.record, said]
        one.played += message
        return one.record[-1] if message else Began(one.record[0], one.record[1:])

    async def _play(
        self, one: _Row, more: Sequence[Message], worker: Worker
    ) -> tuple[list[Any] | Failure, bool]:
        """Makes the environment in a worker, and plays what was played and then `more`. Returns all
        that it says."""
        calls = [("begin", one.row, one.seed), *(("step", old) for old in (*one.played, *more))]
        heard: list[Any] = []
        for number, (what, *given) in enumerate(calls):
            said, sure = await worker.call(what, one.key, *given)
            if number and said is None:  # another row has ended the process meanwhile
                return await self._play(one, more, worker)
            if isinstance(said, Failure):
                return said, sure
            if number < len(one.record) and said != one.record[number]:
                where = f"to message {number}" if number else "in reset"
                why = (
                    f"said something else when it was played again, {where}; let all that it says "
                    "follow from the row, the seed and the messages"
                )
                return Failure("", "replay", why), True
            heard.append(said)
        return heard, True


class Envs:
    """An environment worker's handler. Its messages, each with the row's key:

        begin, row, seed -> what `reset` returns
        step, an assistant's message -> a Turn; None: the row has no environment here
        end -> None, once the environment is closed

    What is left is closed when the process ends by itself.
    """

    def __init__(self, source: Source):
        self.make, _ = source.load()
        self.held: dict[int, Env] = {}
        atexit.register(self._close)

    def __call__(self, what: str, key: int, *given: Any) -> tuple[Any, Callable[[Any], Any]]:
        if what == "begin":
            self.held[key] = self.make(*given)
            return self.held[key].reset(), partial(_checked, read_messages)
        if key not in self.held:
            return None, lambda _: None
        if what == "end":
            return self.held.pop(key).close(), lambda _: None
        return self.held[key].step(*given), partial(_checked, read_turn)

    def _close(self) -> None:
        for env in self.held.values():
            with suppress(Exception):
                asyncio.run(awaited(env.close()))


def _checked(read: Callable[[Any], Any], said: Any) -> Any:
    """What a method returned, as `read` reads it; if it can't, the failure. `reset` may return
    None."""
    try:
        return said if said is None and read is read_messages else read(said)
    except Exception as error:  # of whatever stands in for a message or a number
        return Failure("", "invalid", one_line(str(error))[:300])
