"""Plays the environments of a rank's rows: begins them, passes each turn's message on, and turns
what they answer into tokens. The sampler says when, and appends."""

import itertools
import json
import math
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Container, Sequence, Set
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from splitppo.config import Config
from splitppo.envs import Message, Turn
from splitppo.envs.pool import Began, EnvPool, Source
from splitppo.envs.tools import CallReader, instructions, load_tools, tool_schemas
from splitppo.envs.turns import Turns
from splitppo.errors import UserError
from splitppo.rollout import IDS, LOGPROBS, End, Episode, Prompt
from splitppo.workers import Failure


def language_of(config: Config, tokenizer: Any) -> tuple[Turns, CallReader]:
    """What makes tokens of an environment's messages, and a message of the policy's tokens. Raises
    UserError if the tools or the chat template can't be used."""
    env = config.env
    schemas = tool_schemas(load_tools(env.tools, network=env.network))
    turns = Turns(
        tokenizer,
        tools=schemas,
        instructions=instructions(schemas, env.call_format),
        arguments=json.loads(config.data.chat_kwargs),
    )
    return turns, CallReader(tokenizer, schemas, env.call_format)


def source_of(config: Config) -> Source:
    """What the run's environments are made of."""
    env = config.env
    return Source(config.env_path, env.tools, env.format_reward, env.network)


def rehearse(config: Config, prompt: Prompt) -> str | None:
    """Makes a prompt's environment and takes a step with an empty message. Returns how the step
    failed, if it did. Raises UserError if the environment can't be made."""
    with closing(EnvPool(source_of(config), 1, config.env.timeout)) as pool:
        began = pool.begin(0, _columns(prompt), config.seed).result()
        if isinstance(began, Failure):
            raise UserError(f"the environment {began.function} does not begin: {began.text}")
        said = pool.step(0, Message("assistant", "")).result()
        pool.end(0)
    if not isinstance(said, Failure):
        return None
    return f"the environment {said.function} fails on an empty message: {said.text}"


def players_of(config: Config, tokenizer: Any) -> "list[Player] | tuple[None, None]":
    """What plays the environments of a rank's rows, and of its held-out rows; they share the
    workers. None without environments."""
    if not config.has_env:
        return None, None
    pool = EnvPool(source_of(config), config.reward.workers, config.env.timeout)
    turns, read = language_of(config, tokenizer)
    return [Player(pool, turns, read, config, number) for number in range(2)]


@dataclass(frozen=True)
class Reply:
    """What an environment said.

    Attributes:
        row: its number.
        begins: whether `ids` are the prompt; else they answer a turn.
        reward: of that turn; of the whole row if the environment failed.
        end: what has ended the row, if something has.
    """

    row: int
    ids: array
    begins: bool = False
    reward: float = 0.0
    end: End | None = None


class Player:
    """The environments of a rank's rows.

    One that fails at its beginning fails at the end of the row's first turn: a row without a token
    can't be trained on.

    Args:
        number: 0, or 1 for the second player of a pool.

    Attributes:
        failures: (row, failure) of the rows that failed.
        metrics: of the turns that were answered, by name; `turns` is 1 for each, `seconds` what
            its environment took.
    """

    def __init__(
        self, pool: EnvPool, turns: Turns, read: CallReader, config: Config, number: int = 0
    ):
        self.failures: list[tuple[int, Failure]] = []
        self.metrics = defaultdict[str, list[float]](list)
        self._numbers = itertools.count(number, 2)
        self._pool = pool
        self._turns = turns
        self._read = read
        self._max_turns = config.env.max_turns
        self._limit = config.env.max_observation_tokens
        self._room = config.rollout.max_context or math.inf
        self._failed_score = config.reward.failed_score
        self._keys: dict[int, int] = {}  # the pool's, of the rows whose environments are here
        self._broken: dict[int, Failure] = {}  # the rows whose environment did not begin
        self._waiting: dict[int, Future[Any]] = {}  # the rows that want a reply
        # of each future that is done: the row, the future, what makes its reply, and its seconds
        self._arrived: SimpleQueue[tuple[Episode, Future[Any], Any, float]] = SimpleQueue()
        self._early: list[tuple[Episode, Future[Any], Any, float]] = []  # for a later step

    def enter(self, row: Episode, prompt: Prompt, seed: int) -> bool:
        """Begins a row's environment, unless it is here, and plays the row's turns again. Returns
        whether the row waits for a reply."""
        if row.row not in self._keys:
            key = self._keys[row.row] = next(self._numbers)
            played = []
            before = [*row.prompt]
            for said, answered in row.turns[:-1]:
                played.append(self._read(before, said))
                before += [*said, *answered]
            self._wait(row, self._pool.begin(key, _columns(prompt), seed, played), self._begin)
        return row.row in self._waiting

    def step(self, row: Episode) -> None:
        """Passes on the turn that has ended."""
        if broken := self._broken.get(row.row):
            future: Future[Any] = Future()
            future.set_result(broken)
        else:
            said = row.said
            message = self._read([*row.prompt, *row.response][: -len(said)], said)
            future = self._pool.step(self._keys[row.row], message)
        self._wait(row, future, self._answer)

    def poll(self, rows: Container[int], timeout: float) -> list[Reply]:
        """What has been said to these rows since the last call. Waits so many seconds for the first
        reply."""
        found: list[Reply] = []
        with suppress(Empty):
            while True:
                arrived = self._arrived.get(timeout=0 if found else timeout)
                row, future, make, seconds = arrived
                if self._waiting.get(row.row) is not future:  # its environment has been ended
                    continue
                if row.row not in rows:
                    self._early.append(arrived)
                    continue
                del self._waiting[row.row]
                self.metrics["seconds"].append(seconds)
                found.append(make(row, future.result()))
        return found

    def end(self, row: int) -> None:
        """The row has ended, or goes on elsewhere. A call that is under way is waited for."""
        key = self._keys.pop(row)
        self._broken.pop(row, None)
        if future := self._waiting.pop(row, None):
            future.add_done_callback(lambda _: self._pool.end(key))
        else:
            self._pool.end(key)

    def keep(self, rows: Set[int]) -> None:
        """A step begins with these rows: ends the environments of all others."""
        for row in self._keys.keys() - rows:
            self.end(row)
        for arrived in self._early:
            self._arrived.put(arrived)
        self._early = []

    def take(self) -> tuple[dict[str, float], list[tuple[int, Failure]]]:
        """Sums of the metrics, and failures, since the last call."""
        # exact: they do not depend on the order in which answers came
        found = {name: math.fsum(part) for name, part in self.metrics.items()}, self.failures
        self.metrics = defaultdict(list)
        self.failures = []
        return found

    def close(self) -> None:
        """Ends the workers."""
        self._pool.close()

    def _wait(
        self, row: Episode, future: Future[Any], make: Callable[[Episode, Any], Reply]
    ) -> None:
        started = time.monotonic()
        self._waiting[row.row] = future
        future.add_done_callback(
            lambda done: self._arrived.put((row, done, make, time.monotonic() - started))
        )

    def _begin(self, row: Episode, said: Began | Failure) -> Reply:
        """The reply to `enter`."""
        if isinstance(said, Began):
            ids = row.prompt
            if said.messages is not None:
                ids = array(IDS, self._turns.prompt(said.messages))
            if not (wrong := self._wrong(row, ids, said.turns)):
                return Reply(row.row, ids, begins=True)
            said = Failure("", "invalid", wrong)
        self._broken[row.row] = said
        return Reply(row.row, row.prompt, begins=True)

    def _wrong(self, row: Episode, ids: array, turns: Sequence[Turn]) -> str:
        """Why a row can't go on from a prompt and turns that were played again; "": it can."""
        if not 0 < len(ids) < self._room:
            return f"its prompt has {len(ids)} tokens; use 1 to rollout.max_context - 1"
        if row.segments and ids != row.prompt:
            return "played again, it began with another prompt; let it follow from row and seed"
        for number, (turn, (said, answered)) in enumerate(zip(turns, row.turns, strict=False)):
            if turn.done or self._observe(turn, said) != answered:
                return (
                    f"played again, it answered turn {number + 1} otherwise; "
                    "let it follow from row, seed and messages"
                )
        return ""

    def _answer(self, row: Episode, said: Turn | Failure) -> Reply:
        """The reply to `step`."""
        if isinstance(said, Failure):
            self.failures.append((row.row, said))
            return Reply(row.row, array(IDS), reward=self._failed_score, end="failed")
        for name, number in {"turns": 1, **said.metrics}.items():
            self.metrics[name].append(number)
        reward = array(LOGPROBS, [said.reward])[0]  # as a message holds it
        if said.done and not said.truncated:
            return Reply(row.row, array(IDS), reward=reward, end="environment")
        if said.truncated or len(row.turns) == self._max_turns:
            return Reply(row.row, array(IDS), reward=reward, end="limit")
        return Reply(row.row, self._observe(said, row.said), reward=reward)

    def _observe(self, turn: Turn, said: array) -> array:
        return array(IDS, self._turns.observation(turn.messages, said, self._limit).ids)


def _columns(prompt: Prompt) -> dict[str, Any]:
    """A data row, as its environment gets it."""
    return {
        "prompt": prompt.column,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }
