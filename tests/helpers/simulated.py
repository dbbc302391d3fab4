"""An engine and tools on a clock that counts decode steps, for the real sampler."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

from envs import LocalPool
from ranks import ALONE

from splitppo.config import Config, EnvConfig, RolloutConfig
from splitppo.engine import Ask, Piece
from splitppo.envs import Message, Turn
from splitppo.envs.player import SINGLE_TURN, Player, turns_of
from splitppo.generator.sampler import Sampler
from splitppo.models.tiny import VOCABULARY, build_tokenizer
from splitppo.rollout import Prompt

EOS = VOCABULARY["<eos>"]


@dataclass
class Clock:
    """Decode steps since the start, and what comes when: answers of tools.

    Attributes:
        asked: steps that the tool takes which is being called.
    """

    now: int = 0
    asked: int = 0
    due: list[tuple[int, int, Future[Any], Any]] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Does the work at once, and says so when the tool's time is over; as an executor's."""
        self.asked = 0
        future: Future[Any] = Future()
        result = work()
        heapq.heappush(self.due, (self.now + self.asked, next(self.numbers), future, result))
        self.go_on(0)
        return future

    def go_on(self, steps: int) -> None:
        self.now += steps
        while self.due and self.due[0][0] <= self.now:
            *_, future, result = heapq.heappop(self.due)
            future.set_result(result)


class SimulatedEngine:
    """Each turn of a row has a length of its own. Rows enter places in the order of their asks, and
    a decode step draws a token for each row in a place.

    Args:
        turns: row -> the lengths of its turns. whole: they are one turn, without tools.
    """

    def __init__(
        self, clock: Clock, places: int, turns: Callable[[int], Sequence[int]], *, whole: bool
    ):
        self.clock, self.places, self.turns, self.whole = clock, places, turns, whole
        self.queue: list[list[Any]] = []  # of each row: tokens that it still gets, and its piece
        self.rows: list[list[Any]] = []
        self.tokens = 0

    def abort(self) -> None: ...

    def submit(self, asks: Sequence[Ask], sampling: RolloutConfig, seed: int) -> None:
        for ask in asks:
            turns = self.turns(ask.row)
            ends = [sum(turns)] if self.whole else accumulate(turns)
            left = next(end for end in ends if end > ask.begun) - ask.begun
            count = min(left, ask.tokens)
            ids = [EOS if k == left - 1 else 20 for k in range(count)]
            end = "eos" if count == left else "limit"
            self.queue.append([count, Piece(ask.row, ids, [-1.0] * count, end)])

    def poll(self) -> list[Piece]:
        entering = self.queue[: self.places - len(self.rows)]
        del self.queue[: len(entering)]
        self.rows += entering
        steps = min(left for left, _ in self.rows)
        if self.clock.due:  # no further than the next answer
            steps = min(steps, self.clock.due[0][0] - self.clock.now)
        self.tokens += steps * len(self.rows)
        for row in self.rows:
            row[0] -= steps
        ended = [piece for left, piece in self.rows if not left]
        self.rows = [row for row in self.rows if row[0]]
        self.clock.go_on(steps)
        return ended


class SimulatedPlayer(Player):
    """Time passes also where the engine has nothing to do."""

    clock: Clock

    def poll(self, rows: Any, timeout: float) -> Any:
        found = super().poll(rows, 0)
        if timeout and not found:
            self.clock.go_on(self.clock.due[0][0] - self.clock.now)
        return found


@dataclass
class Simulation:
    """A sampler's steps.

    Args:
        slots, places: S, and the engine's. window: W, or 0.
        tool: (row, turn from 0) -> decode steps that the turn's answer takes; None: no tools.
        turns: row -> the lengths of its turns.
    """

    slots: int
    places: int
    window: int
    tool: Callable[[int, int], int] | None
    turns: Callable[[int], Sequence[int]]

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.engine = SimulatedEngine(self.clock, self.places, self.turns, whole=not self.tool)
        tokenizer = build_tokenizer()
        config = Config(env=EnvConfig(path="env.py:Env", max_turns=10**6))
        pool: Any = LocalPool(self.env)
        pool.threads.shutdown()
        pool.threads = self.clock
        player = SimulatedPlayer(pool, cast(Any, turns_of(config, tokenizer)), config)
        player.clock = self.clock
        self.sampler = Sampler(
            self.slots,
            lambda row: Prompt("go", [20], "", "", {"row": row}),
            limit=10**6,
            window=self.window,
            player=player if self.tool else SINGLE_TURN,
        )

    def env(self, row: dict[str, Any], seed: int) -> Any:
        return _Env(self, row["extra_info"]["row"])

    def step(self, number: int) -> list[Any]:
        """Runs a step; returns the rows that ended."""
        engine: Any = self.engine
        sampled = self.sampler.generate(engine, number, range(self.slots), RolloutConfig(), 0)
        found = [row for rows in sampled for row in rows]
        self.sampler.gather_open(ALONE)
        return found


@dataclass
class _Env:
    run: Simulation
    row: int
    turn: int = 0

    def reset(self) -> None: ...

    def step(self, message: Message) -> Turn:
        self.run.clock.asked = cast(Any, self.run.tool)(self.row, self.turn)
        self.turn += 1
        done = self.turn == len(self.run.turns(self.row))
        return Turn([Message("user", "so?")], done=done)

    def close(self) -> None: ...
