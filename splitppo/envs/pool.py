"""Environments in worker processes: `EnvPool` for the sampler of a rank, `Envs` in the worker."""

import asyncio
import atexit
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from splitppo.config import EnvConfig
from splitppo.envs import Message, read_messages, read_turn
from splitppo.envs.guess import Guess
from splitppo.envs.textarena import Game
from splitppo.envs.tools import ToolEnv, load_tools, tool_schemas
from splitppo.errors import UserError, need, need_known, one_line
from splitppo.workers import Failure, Work, awaited, describe, find_in_file, is_async
from splitppo.workers.pool import Pool, Worker

BUILT_IN = {"guess": Guess}  # that `env.path` may name
MEMORY = 4 << 30  # bytes that a worker, and each process that it starts, may have of its own


def load(
    env: EnvConfig, schemas: Sequence[dict[str, Any]] = ()
) -> tuple[Callable[[dict[str, Any], int], Any], bool]:
    """The factory of a row's environment, and whether its steps are async. `schemas`: those of its
    tools, or none. Raises UserError if there is no such class or tool, its import fails, or it
    lacks a method."""
    if not env.path:
        tools = load_tools(env.tools, network=env.network)
        tool_env = ToolEnv(tools, env.format_reward, schemas)
        return lambda row, seed: tool_env, any(map(is_async, tools.values()))
    if env.path.startswith("textarena:"):
        return _find_game(env.path, env.settings), False
    environment = BUILT_IN.get(env.path) or find_in_file(
        env.path, "env.path", "environment", f"environment; use {', '.join(BUILT_IN)}"
    )
    for method in ("reset", "step", "close"):
        if not hasattr(environment, method):
            raise UserError(
                f"env.path={env.path} lacks {method}; define a class with reset(self), "
                "step(self, message) and close(self)"
            )
    return environment, is_async(environment.step)


def _find_game(path: str, settings: str) -> Callable[[dict[str, Any], int], Game]:
    """What makes a row's game of textarena. Raises UserError if the package is missing, there is no
    such game, or it does not begin."""
    wrong = f"data.task={path}"
    need("textarena", wrong, "'splitppo[textarena]'")
    name = path.partition(":")[2]
    known = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    need_known(name, known, wrong)
    make = partial(Game, name, settings)
    try:
        make({}, 0).reset()
    except Exception as error:  # of whatever the game needs
        raise UserError(
            f"{wrong}: the game does not start with one player and env.settings={settings} "
            f"({describe(error)}); provide what it lacks, choose other settings (it has "
            f"{known[name].kwargs}), or another game for one player"
        ) from error
    return make


class EnvPool(Pool):
    """The environments of a rank's open rows. Each worker has several. Environments with a plain
    `step` run one after another, those with `async def step` concurrently.

    If a worker has ended, its environments are made and replayed in the next worker. If a worker
    ends or runs out of memory during a step, the step is repeated once, alone in a process. So a
    row's answers depend on its seed, its data and the messages, not on other rows. Tools have no
    state, so only the last message is sent, to any process.

    Args:
        env: the environments, and the time limit of a step or of making one. Raises UserError as
            `load` does.
        workers: number of processes.
        memory: most bytes of a worker, and of each process that it starts. 0: no limit.
    """

    def __init__(self, env: EnvConfig, workers: int, memory: int = MEMORY):
        named = (env.path,) if env.path else env.tools
        # here: workers do without transformers
        schemas = tool_schemas(load_tools(env.tools, network=env.network))
        super().__init__(
            Work(
                partial(Envs, env, schemas), "env", f"the environment's {', '.join(named)}",
                env.timeout, load(env, schemas)[1], memory,
            ),
            workers,
        )  # fmt: skip
        self.name = ", ".join(name.rpartition(":")[2] for name in named)
        self._has_state = bool(env.path)
        self._held: dict[int, Worker] = {}

    def play(
        self, key: int, row: dict[str, Any], seed: int, messages: Sequence[Message]
    ) -> Future[list[Any] | Failure]:
        """The environment's answer to the last of the assistant's messages: `[Turn]`. If the
        environment is not in its worker, it is made and gets all messages: `[the messages of reset,
        Turn, ...]`. Tools only get the last one.

        The future raises UserError if a worker can't import the files.

        Args:
            key: a number that no other open row has.
            row: the columns of the data row.
            seed: the environment's seed.
        """
        if key not in self._held:
            self._held[key] = min(self._workers, key=lambda worker: worker.rows)
            self._held[key].rows += 1
        if not self._has_state:
            messages = messages[-1:]
        calls = [("reset", key, row, seed), *(("step", key, message) for message in messages)]
        return self._run(self._play(self._held[key], calls))

    def end(self, key: int) -> None:
        """Closes the environment, if it was started, without waiting. Call it once for each key,
        also after a failure, when nothing of the row is in progress. Errors are ignored."""
        if worker := self._held.pop(key, None):
            worker.rows -= 1
            self._run(worker.call("close", key))

    async def _play(self, held: Worker, calls: Sequence[tuple[Any, ...]]) -> list[Any] | Failure:
        async def ask(worker: Worker) -> list[Any] | Failure:
            said = await _hear(worker, calls)
            if worker is not held:
                await worker.call("close", calls[0][1])
            elif isinstance(said, Failure) and said.kind == "crash":
                return replace(said, sure=False)  # another environment there may have ended it
            return said

        said = await self._settle(held, ask)
        return replace(said, function=self.name) if isinstance(said, Failure) else said


async def _hear(worker: Worker, calls: Sequence[tuple[Any, ...]]) -> list[Any] | Failure:
    """What a worker answers to the last call; to all, if it or its next process must begin."""
    heard: list[Any] = []
    at = len(calls) - 1
    while at < len(calls):
        said = await worker.call(*calls[at])
        if isinstance(said, Failure):
            return said
        # None: the environment is not in this process
        heard = [] if said is None else [*heard, said]
        at = 0 if said is None else at + 1
    return heard


class Envs:
    """An environment worker's handler. Its messages, each with the row's key:

        reset, row, seed -> the messages of `reset`, of a new environment
        step, an assistant's message -> a Turn; None: the row has no environment here
        close -> None, once the environment is closed

    What is left is closed when the process ends by itself.
    """

    def __init__(self, env: EnvConfig, schemas: Sequence[dict[str, Any]] = ()):
        self.make, _ = load(env, schemas)
        self.held: dict[int, Any] = {}  # the environments
        atexit.register(self._close)

    def __call__(self, method: str, key: int, *arguments: Any) -> tuple[Any, Callable[[Any], Any]]:
        if method == "reset":
            self.held[key] = self.make(*arguments)
            arguments = ()
        if key not in self.held:
            return None, lambda _: None
        env = self.held.pop(key) if method == "close" else self.held[key]
        # tools have a step alone
        return getattr(env, method, lambda: None)(*arguments), partial(_read, method)

    def _close(self) -> None:
        for env in self.held.values():
            with suppress(Exception):
                asyncio.run(awaited(env.close()))


def _read(method: str, said: Any) -> Any:
    """What a method returned, checked; a failure if it is nothing that the sampler can read."""
    try:
        return {"reset": read_messages, "step": read_turn}.get(method, lambda _: None)(said)
    except Exception as error:  # of whatever stands in for a message or a number
        return Failure("", "invalid", one_line(str(error))[:300])
