"""Schedules the rows that are generated: which row a slot decodes next, and how far. It alone asks
the engine for tokens, and it alone appends them to rows.

Slot s of S has the rows s, s + S, s + 2S, ... of the data order. Without windows it generates one a
step. With `rollout.window = W` it decodes W tokens a step: a row that ends is followed at once by
the next one, and a row that has not ended continues in the next step, with the new weights. No row
is skipped or taken twice, and no slot asks another.

With environments a row has turns. When one ends, the row frees its place in the engine and keeps
its slot until its environment has answered: what is sampled must not depend on how long an answer
takes. A turn that ends with the slot's last token of the step is answered while others train.
"""

import sys
from array import array
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from splitppo.config import RolloutConfig
from splitppo.engine import TICK, Ask, Piece, RolloutEngine, row_seed
from splitppo.envs.player import Player, Reply
from splitppo.envs.single import SINGLE_TURN, SingleTurn
from splitppo.errors import UserError
from splitppo.job.collectives import Group
from splitppo.placement import Streams
from splitppo.rollout import IDS, LOGPROBS, Episode, Prompt, Segment, digest, tensor_of
from splitppo.rollout.wire import exchange_rows, pack_rows, unpack_rows

ENV_NOISE = -1  # in the place of a row's tokens: the seed of its environment


class OpenRow(NamedTuple):
    """What every rank knows of a slot's open row: its number, and as of an `Episode` its tokens."""

    row: int
    tokens: int = 0
    last_step_tokens: int = 0
    total: int = 0


class Sampler:
    """The rows of all slots, as a rank of the actor group sees them, and those that go on from one
    step to the next.

    Args:
        slots: S. prompts: number of a prompt -> the prompt. samples: rows of each prompt.
        limit: most response tokens of a row. context: most tokens of a row in all.
        window: tokens that a slot decodes in a step; 0: no windows.
        lengths: of the responses, in the order of the rows, in a benchmark; else empty.
        player: plays the rows' environments.
        origin: what makes the rows beside their prompts, such as the seed, by name. An open row of
            a checkpoint goes on only where it is the same.

    Attributes:
        streams: which rows a slot has.
        open: slot -> its row that goes on, or that comes next and has no token yet. The same on all
            ranks.
        held: slot -> the open row with its contents, on the rank that owns the slot. After
            `load_state`, on all ranks.
    """

    def __init__(
        self,
        slots: int,
        prompts: Callable[[int], Prompt],
        *,
        limit: int,
        samples: int = 1,
        context: int | None = None,
        window: int = 0,
        lengths: Sequence[int] = (),
        player: Player | SingleTurn = SINGLE_TURN,
        origin: Mapping[str, object] | None = None,
    ):
        self.origin = origin or {}
        self.streams = Streams(slots, samples)
        self._prompts = prompts
        self.limit = limit
        self.context = context or sys.maxsize
        self.window = window
        self.lengths = lengths
        self.player = player
        self.open: dict[int, OpenRow] = {}
        self.held: dict[int, Episode] = {}
        self._everywhere = True  # each rank holds every open row, as before the first rollout

    def generate(
        self,
        engine: RolloutEngine,
        step: int,
        slots: Sequence[int],
        sampling: RolloutConfig,
        seed: int,
        group: Group | None = None,
    ) -> Iterator[list[Episode]]:
        """Generates the step's rows of these slots. The ranks of a set call it with the same slots;
        each one's engine takes a part of them, and all get the same rows. Yields the rows that have
        just ended, and every few milliseconds an empty list, so that the caller can do other work.
        Closing or dropping the iterator stops the engine's work."""
        rank, size = (group.set_rank, group.set_size) if group else (0, 1)
        decoding = _Decoding(self, engine, step, sampling, seed)
        with closing(decoding.run(slots[rank::size])) as lists:
            for stopped in _of_set(lists, group) if group and size > 1 else lists:
                yield [row for row in stopped if self._keep(row)]

    def row(self, step: int, slot: int) -> Episode:
        """The row that a slot begins a step with; this rank owns the slot."""
        if slot in self.open:
            return self.held[slot]
        return self.new_episode(self.streams.row(step, slot))

    def move_open(self, group: Group, owned: Sequence[Sequence[int]]) -> None:
        """Moves the contents of open rows to the ranks that own their slots from now on; `owned`:
        the slots of each rank, ascending. All ranks of the actor group call it before a rollout."""
        sent = [[self.held[slot] for slot in slots if slot in self.held] for slots in owned]
        self.held = {slot: self.held[slot] for slot in owned[group.dp_rank] if slot in self.held}
        if self.window and not self._everywhere:
            self.held |= self._by_slot(exchange_rows(group, sent, logprobs=True))

    def gather_open(self, group: Group) -> None:
        """Tells every rank of the actor group about the open rows of all slots, after a rollout."""
        for rows in group.all_gather(self._known()):
            self.open |= rows
        self._everywhere = False

    def contexts(self) -> list[int]:
        """Tokens of the row that each slot goes on with: those that the engine's KV cache must hold
        at once."""
        return [
            self.open[slot].total if slot in self.open else len(self.prompt(slot).tokens)
            for slot in range(self.streams.slots)
        ]

    def state(self, group: Group) -> list[Any]:
        """The open rows as a checkpoint holds them: number, the row as a message, and the hashes of
        what made it. All ranks of the actor group call it; the first one gets the rows."""
        if not self.window:
            return []
        parts = [[*self.held.values()], *[[] for _ in range(group.dp_size - 1)]]
        rows = self._by_slot(exchange_rows(group, parts, logprobs=True))
        return [
            [
                row.row,
                b64encode(pack_rows([row], logprobs=True, experts=True).numpy().data).decode(),
                self._made_by(row.row),
            ]
            for _, row in sorted(rows.items())
        ]

    def load_state(self, state: Sequence[Any]) -> None:
        """Goes on from what `state` returned, also with another window; every rank holds all rows
        then. Raises UserError if there are other slots now, or rows do not go on, were made by
        something else, or are too long."""
        if state and not (self.window and len(state) == self.streams.slots):
            raise UserError(
                f"the checkpoint holds the partial rollouts of {len(state)} slots;"
                f" set rollout.window above 0 and rollout.batch_size={len(state)}"
            )
        rows = [
            row
            for _, message, _ in state
            for row in unpack_rows(tensor_of([b64decode(message)], torch.int32))
        ]
        longest = max((row.tokens for row in rows), default=0)
        for row, (*_, before) in zip(rows, state, strict=True):
            now = self._made_by(row.row)
            others = [name for name in before if before[name] != now.get(name)]
            if row.segments and others:
                raise UserError(
                    f"row {row.row} of the checkpoint is unfinished, and its {', '.join(others)} "
                    "changed; restore seed, data, env, rollout.samples and rollout.lengths of the "
                    "checkpoint's run, or start from its exported policy (splitppo export)"
                )
            if self.left(row) < 1 and not row.awaits:
                raise UserError(
                    f"rollout.max_new_tokens={self.limit}, and row {row.row} of the checkpoint has "
                    f"{row.tokens} tokens so far; set it to at least {longest + 1}"
                )
        self.held |= self._by_slot(rows)
        self.open |= self._known()

    def _known(self) -> dict[int, OpenRow]:
        return {
            slot: OpenRow(row.row, row.tokens, row.last_step_tokens, row.total)
            for slot, row in self.held.items()
        }

    def _by_slot(self, rows: Iterable[Episode]) -> dict[int, Episode]:
        return {self.streams.slot(row.row): row for row in rows}

    def _keep(self, row: Episode) -> bool:
        """Remembers what a slot goes on with. Returns whether the row has ended."""
        slot = self.streams.slot(row.row)
        if self.window:
            self.held[slot] = self.new_episode(self.streams.next(row.row)) if row.end else row
        return row.end is not None

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row."""
        return self._prompts(self.streams.prompt(row))

    def left(self, row: Episode) -> int:
        """Tokens that a row may still get."""
        return min((self.length(row.row) or self.limit) - row.tokens, self.context - row.total)

    def left_in_turn(self, row: Episode) -> int:
        """Tokens that the turn of a row may still get."""
        said = takewhile(lambda segment: segment.logprobs is not None, reversed(row.segments))
        return self.player.max_turn_tokens - sum(len(segment.ids) for segment in said)

    def length(self, row: int) -> int | None:
        """The length of a row's response in a benchmark."""
        return self.lengths[row % len(self.lengths)] if self.lengths else None

    def _made_by(self, row: int) -> dict[str, str]:
        """Hashes of all that makes a row, by name."""
        prompt = self.prompt(row)
        return {
            "prompt": digest(prompt.tokens, self.length(row)),
            "ground_truth": digest(prompt.data_source, prompt.ground_truth),
            "extra_info": digest(prompt.extra_info),
            **{name: digest(value) for name, value in self.origin.items()},
        }

    def new_episode(self, row: int) -> Episode:
        """A row without a token."""
        return Episode(row, array(IDS, self.prompt(row).tokens))


@dataclass
class _Decoding:
    """A step's work on a rank's slots: who is asked for tokens, who waits for an environment, and
    what either says.

    Attributes:
        step: whose weights the engine has.
        budgets: slot -> tokens that it may still decode.
        drawing, waiting: row -> the row, which waits for the engine or its environment.
    """

    sampler: Sampler
    engine: RolloutEngine
    step: int
    sampling: RolloutConfig
    seed: int
    budgets: dict[int, int] = field(default_factory=dict)
    drawing: dict[int, Episode] = field(default_factory=dict)
    waiting: dict[int, Episode] = field(default_factory=dict)

    def run(self, slots: Sequence[int]) -> Generator[list[Episode], None, None]:
        """The rows of these slots as they stop: ended, or open since their slot has decoded the
        window's tokens."""
        sampler = self.sampler
        self.budgets = dict.fromkeys(slots, sampler.window or sys.maxsize)
        try:
            first = [sampler.row(self.step, slot) for slot in slots]
            first.sort(key=lambda row: len(row.prompt) + row.tokens)
            sampler.player.keep({row.row for row in first})
            self._start(first)
            while self.drawing or self.waiting:
                idle = not self.drawing
                polled = [] if idle else self.engine.poll()
                stopped = [row for piece in polled for row in self._take(piece)]
                if self.waiting:
                    for reply in sampler.player.poll(self.waiting, TICK if idle else 0):
                        stopped += self._answer(reply)
                yield stopped
        finally:
            self.engine.abort()

    def _start(self, rows: Sequence[Episode]) -> None:
        """Asks for tokens of the rows that need not hear from their environments first."""
        asks = [self._ask(row) for row in rows if not self._waits(row)]
        self.engine.submit(asks, self.sampling, self.seed)

    def _waits(self, row: Episode) -> bool:
        """Has the row's environment hear the row. Returns whether the row waits for a reply."""
        prompt = self.sampler.prompt(row.row)
        player = self.sampler.player
        number = self.sampler.streams.prompt(row.row) if player.seeds == "prompt" else row.row
        if player.ask(row, prompt, row_seed(self.seed, number, ENV_NOISE)):
            self.waiting[row.row] = row
        return row.row in self.waiting

    def _ask(self, row: Episode) -> Ask:
        self.drawing[row.row] = row
        # a row that was begun under a larger limit may be over it
        in_turn = max(self.sampler.left_in_turn(row), 1)
        tokens = min(self.sampler.left(row), self._budget(row), in_turn)
        may_stop = self.sampler.length(row.row) is None
        return Ask(row.row, row.prompt + row.response, row.tokens, tokens, may_stop)

    def _take(self, piece: Piece) -> Iterator[Episode]:
        """Appends what was sampled. Yields the row if it has ended, or its window has."""
        row = self.drawing.pop(piece.row)
        self.budgets[self.sampler.streams.slot(row.row)] -= len(piece.tokens)
        ids = array(IDS, piece.tokens)
        logprobs = array(LOGPROBS, piece.logprobs)
        sampled = Segment(ids, logprobs, self.step, experts=piece.experts)
        row = replace(row, segments=(*row.segments, sampled))
        cut = piece.end == "limit"  # the ask is used up
        # the turn may get more tokens: only the window has ended, and the row goes on in the next
        if cut and self.sampler.left(row) and self.sampler.left_in_turn(row) > 0:
            yield row
        # the row has ended, perhaps before its window: the slot's next row follows (`_stop`)
        elif (cut and not self.sampler.left(row)) or not self.sampler.player.answers:
            yield self._stop(replace(row, end=piece.end))
        else:  # the turn has ended
            answer = Segment(array(IDS), None, self.step)
            self._waits(replace(row, segments=(*row.segments, answer)))
            if not self._budget(row):  # it is answered while the others train
                yield self.waiting.pop(row.row)

    def _answer(self, reply: Reply) -> Iterator[Episode]:
        """Appends what an environment said. Yields the row if it has ended."""
        row = self.waiting.pop(reply.row)
        begun = replace(row, prompt=reply.observed.ids, spans=reply.observed.spans)
        row = self._answered(row, reply) if row.awaits else begun
        if row.end:
            yield self._stop(row)
        else:
            self.engine.submit([self._ask(row)], self.sampling, self.seed)

    def _answered(self, row: Episode, reply: Reply) -> Episode:
        """The row with the answer to its last turn. What ends it, in this order: the environment,
        `env.max_turns`, `rollout.max_new_tokens`, `rollout.max_context`."""
        *before, turn, _ = row.segments
        if reply.end == "failed":  # its reward is that of the whole row
            before = [segment._replace(reward=0.0) for segment in before]
        said = (*before, turn._replace(reward=reply.reward))
        answered = reply.observed._replace(version=self.step)
        longer = replace(row, segments=(*said, answered), end=reply.end)
        if not reply.end and self.sampler.left(longer) < 1:  # then nobody reads the answer
            answered = answered._replace(ids=array(IDS), spans=())
            return replace(row, segments=(*said, answered), end="limit")
        return longer

    def _stop(self, row: Episode) -> Episode:
        """Has the slot's next row follow one that has ended."""
        self.sampler.player.end(row.row)
        if self.sampler.window and self._budget(row):
            following = self.sampler.streams.next(row.row)
            self._start([self.sampler.new_episode(following)])
        return row

    def _budget(self, row: Episode) -> int:
        """Tokens that the row's slot may still decode in this step."""
        return self.budgets[self.sampler.streams.slot(row.row)]


def _of_set(lists: Iterator[list[Episode]], group: Group) -> Iterator[list[Episode]]:
    """The rows of all engines of a set, on each of its ranks in the same order, whichever engine is
    the faster."""
    waiting = [deque[Episode]() for _ in range(group.set_size)]
    parts: list[Any] = []
    while parts != [None] * group.set_size:
        parts = group.gather_set(next(lists, None))
        for rows, part in zip(waiting, parts, strict=True):
            rows.extend(part or ())
        ready = []
        while any(waiting) and all(
            rows or part is None for rows, part in zip(waiting, parts, strict=True)
        ):
            ready += [rows.popleft() for rows in waiting if rows]
        yield ready
