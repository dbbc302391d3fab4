"""Schedules the rows that are generated: which row a slot decodes next, and how far. It alone asks
the engine for tokens, and it alone appends them to rows.

Slot s of S has the rows s, s + S, s + 2S, ... of the data order. Without windows it generates one a
step. With `rollout.window = W` it decodes W tokens a step: a row that ends is followed at once by
the next one, and a row that has not ended goes on in the next step, with the new weights. No row is
skipped or taken twice, and no slot asks another.
"""

import sys
from array import array
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from splitppo.config import RolloutConfig
from splitppo.engine import Ask, Piece, RolloutEngine
from splitppo.errors import UserError
from splitppo.job.collectives import Group
from splitppo.rollout import IDS, LOGPROBS, Episode, Prompt, Segment, digest, exchange_rows

RECORDED = 32  # slots, the first, whose rows the metrics have


class OpenRow(NamedTuple):
    """What every rank knows of a slot's open row: its number, the response tokens that it has so
    far, and how many of them are of the last step."""

    row: int
    tokens: int = 0
    fresh: int = 0


class Sampler:
    """The rows of all slots, as a rank of the actor group sees them, and those that go on from one
    step to the next.

    Args:
        slots: S. prompt: row -> its prompt.
        limit: most tokens of a response.
        window: tokens that a slot decodes in a step; 0: no windows.
        lengths: of the responses, in the order of the rows, in a benchmark; else empty.

    Attributes:
        open: slot -> its row that goes on, or that comes next and has no token yet. The same on all
            ranks.
        held: slot -> the open row with its contents, on the rank that owns the slot. After
            `load_state`, on all ranks.
    """

    def __init__(
        self,
        slots: int,
        prompt: Callable[[int], Prompt],
        *,
        limit: int,
        window: int = 0,
        lengths: Sequence[int] = (),
    ):
        self.slots = slots
        self.prompt = prompt
        self.limit = limit
        self.window = window
        self.lengths = lengths
        self.open: dict[int, OpenRow] = {}
        self.held: dict[int, Episode] = {}
        # whether each rank holds every open row, as before the first rollout
        self._everywhere = True
        # by this rank in this step: of the first slots, the (row, tokens) that they decoded
        self._decoded: dict[int, list[tuple[int, int]]] = {}

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
        each one's engine takes a part of them, and all get the same rows.

        Yields:
            the rows that have just ended, and every few milliseconds an empty list, so that the
            caller can do other work. Closing or dropping the iterator (an exception in a `for` loop
            drops it) stops the engine's work.
        """
        rank, size = (group.set_rank, group.set_size) if group else (0, 1)
        with closing(self._decode(engine, step, slots[rank::size], sampling, seed)) as own:
            for stopped in _of_set(own, group) if group and size > 1 else own:
                yield [row for row in stopped if self._keep(row)]

    def row(self, step: int, slot: int) -> Episode:
        """The row that a slot begins a step with; this rank owns the slot."""
        return self.held[slot] if slot in self.open else self._fresh((step - 1) * self.slots + slot)

    def move_open(self, group: Group, owned: Sequence[Sequence[int]]) -> None:
        """Moves the contents of open rows to the ranks that own their slots from now on; `owned`:
        the slots of each rank, ascending. All ranks of the actor group call it before a rollout."""
        sent = [[self.held[slot] for slot in own if slot in self.held] for own in owned]
        self.held = {slot: self.held[slot] for slot in owned[group.dp_rank] if slot in self.held}
        if self.window and not self._everywhere:
            self.held |= {
                row.row % self.slots: row for row in exchange_rows(group, sent, logprobs=True)
            }

    def gather_open(self, group: Group) -> list[list[tuple[int, int]]]:
        """Tells every rank of the actor group about the open rows of all slots, after a rollout.
        Returns what the first `RECORDED` slots have decoded: (row, tokens) one after another."""
        known = {slot: OpenRow(row.row, row.tokens, row.fresh) for slot, row in self.held.items()}
        decoded = {}
        for rows, part in group.all_gather((known, self._decoded)):
            self.open |= rows
            decoded |= part
        self._everywhere = False
        self._decoded = {}
        return [decoded[slot] for slot in sorted(decoded)]

    def contexts(self) -> list[int]:
        """Tokens of the row that each slot goes on with: those that the engine's KV cache must hold
        at once."""
        rows = (self.open.get(slot) or OpenRow(slot) for slot in range(self.slots))
        return [len(self.prompt(row.row).tokens) + row.tokens for row in rows]

    def state(self, group: Group) -> list[Any]:
        """The open rows as a checkpoint holds them: number, response, its log-probs, stretches, and
        the hash of what was asked for. Prompts follow from data. All ranks of the actor group call
        it; the first one gets the rows."""
        if not self.window:
            return []
        parts = [[*self.held.values()], *[[] for _ in range(group.dp_size - 1)]]
        rows = {row.row % self.slots: row for row in exchange_rows(group, parts, logprobs=True)}
        return [
            [
                row.row,
                b64encode(row.response).decode(),
                b64encode(row.logprobs).decode(),
                list(row.stretches),
                self._asked(row),
            ]
            for _, row in sorted(rows.items())
        ]

    def load_state(self, state: Sequence[Any]) -> None:
        """Goes on from what `state` returned, also with another window; every rank holds all rows
        then. Raises UserError if there are other slots now, or rows do not go on, have another
        prompt, or are too long. Older checkpoints have no hashes, or lists for arrays."""
        if state and not (self.window and len(state) == self.slots):
            raise UserError(
                f"the checkpoint holds the rows of {len(state)} slots that go on;"
                f" set rollout.window above 0 and rollout.batch_size={len(state)}"
            )
        longest = max((sum(tokens for _, tokens in entry[3]) for entry in state), default=0)
        for number, response, logprobs, stretches, *asked in state:
            ids = _array(response, IDS)
            sampled = _array(logprobs, LOGPROBS)
            ends = accumulate(tokens for _, tokens in stretches)
            segments = [
                Segment(ids[end - tokens : end], sampled[end - tokens : end], step)
                for (step, tokens), end in zip(stretches, ends, strict=True)
            ]
            row = replace(self._fresh(number), segments=tuple(segments))
            if segments and asked not in ([], [self._asked(row)]):
                raise UserError(
                    f"row {number} of the checkpoint goes on, and its prompt is another one here"
                    f" (hash {self._asked(row)}, not {asked[0]}); restore seed, data,"
                    " rollout.samples and rollout.lengths of its run, or start from its exported"
                    " policy (splitppo export)"
                )
            if self._left(row) < 1:
                raise UserError(
                    f"rollout.max_new_tokens={self.limit}, and row {number} of the checkpoint goes"
                    f" on after {row.tokens} tokens; set it to {longest + 1} at least"
                )
            slot = number % self.slots
            self.open[slot] = OpenRow(number, row.tokens, row.fresh)
            self.held[slot] = row

    def _decode(
        self,
        engine: RolloutEngine,
        step: int,
        slots: Sequence[int],
        sampling: RolloutConfig,
        seed: int,
    ) -> Generator[list[Episode], None, None]:
        """The rows of these slots as they stop: ended, or open since their slot has decoded the
        window's tokens."""
        budgets = dict.fromkeys(slots, self.window or sys.maxsize)
        asked: dict[int, Episode] = {}

        def ask(row: Episode) -> Ask:
            asked[row.row] = row
            tokens = min(self._left(row), budgets[row.row % self.slots])
            free = self._length(row.row) is None
            return Ask(row.row, [*row.prompt, *row.response], row.tokens, tokens, free)

        def take(piece: Piece) -> Episode:
            row = asked.pop(piece.row)
            slot = piece.row % self.slots
            budgets[slot] -= len(piece.tokens)
            # the engine knows how many tokens it was asked for, and not why
            goes_on = piece.end == "limit" and len(piece.tokens) < self._left(row)
            if self.window and not goes_on and budgets[slot]:
                # first of all: its place is empty
                engine.submit([ask(self._fresh(piece.row + self.slots))])
            segment = Segment(array(IDS, piece.tokens), array(LOGPROBS, piece.logprobs), step)
            return replace(
                row, segments=(*row.segments, segment), end=None if goes_on else piece.end
            )

        engine.begin(sampling, seed)
        try:
            first = [self.row(step, slot) for slot in slots]
            first.sort(key=lambda row: len(row.prompt) + row.tokens)
            engine.submit([ask(row) for row in first])
            while asked:
                yield [take(piece) for piece in engine.poll()]
        finally:
            engine.abort()

    def _keep(self, row: Episode) -> bool:
        """Remembers what a slot goes on with. Returns whether the row has ended."""
        slot = row.row % self.slots
        if slot < RECORDED:
            self._decoded.setdefault(slot, []).append((row.row, row.fresh))
        if self.window:
            self.held[slot] = self._fresh(row.row + self.slots) if row.end else row
        return row.end is not None

    def _left(self, row: Episode) -> int:
        """Tokens that a row may still get."""
        return (self._length(row.row) or self.limit) - row.tokens

    def _length(self, row: int) -> int | None:
        return self.lengths[row % len(self.lengths)] if self.lengths else None

    def _asked(self, row: Episode) -> str:
        return digest(self.prompt(row.row).tokens, self._length(row.row))

    def _fresh(self, row: int) -> Episode:
        return Episode(row, array(IDS, self.prompt(row).tokens))


def _of_set(own: Iterator[list[Episode]], group: Group) -> Iterator[list[Episode]]:
    """The rows of all engines of a set, on each of its ranks in the same order, whichever engine is
    the faster."""
    waiting = [deque[Episode]() for _ in range(group.set_size)]
    found: list[Any] = []
    while found != [None] * group.set_size:
        found = group.gather_set(next(own, None))
        for rows, part in zip(waiting, found, strict=True):
            rows.extend(part or ())
        ready = []
        while any(waiting) and all(
            rows or part is None for rows, part in zip(waiting, found, strict=True)
        ):
            ready += [rows.popleft() for rows in waiting if rows]
        yield ready


def _array(stored: str | list[float], kind: str) -> array:
    """An array of a checkpoint's JSON, where older ones have a list."""
    return array(kind, b64decode(stored) if isinstance(stored, str) else stored)
