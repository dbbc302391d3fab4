"""Schedules the rows that are generated: which row a slot decodes next, and how far. It alone asks the engine for
tokens, and it alone appends them to rows.

Slot s of S has the rows s, s + S, s + 2S, ... of the data order. Without windows it generates one a step. With
`rollout.window = W` it decodes W tokens a step: a row that ends is followed at once by the next one, and a row that has
not ended goes on in the next step, with the new weights. No row is skipped or taken twice, and no slot asks another.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from splitppo.config import RolloutConfig
from splitppo.engine import Ask, RolloutEngine
from splitppo.errors import UserError
from splitppo.job.collectives import Group
from splitppo.rollout import Prompt, Sample, digest

RECORDED = 32  # slots, the first, whose rows the metrics have


class Sampler:
    """The rows of all slots, as a rank of the actor group sees them, and those that go on from one step to the next.

    Args:
        slots: S. prompt: row -> its prompt.
        limit: most tokens of a response.
        window: tokens that a slot decodes in a step; 0: no windows.
        lengths: of the responses, in the order of the rows, in a benchmark; else empty.

    Attributes:
        open: slot -> its row that goes on, or that comes next and has no response yet. All ranks hold the same rows.
    """

    def __init__(
        self, slots: int, prompt: Callable[[int], Prompt], *, limit: int, window: int = 0, lengths: Sequence[int] = ()
    ):
        self.slots, self.prompt, self.limit = slots, prompt, limit
        self.window, self.lengths = window, lengths
        self.open: dict[int, Sample] = {}
        # by this rank since the last `share`: slots' open rows; of the first slots, the (row, tokens) that they decoded
        self._changed: dict[int, Sample] = {}
        self._decoded: dict[int, list[tuple[int, int]]] = {}

    def generate(
        self,
        engine: RolloutEngine,
        step: int,
        slots: Sequence[int],
        sampling: RolloutConfig,
        seed: int,
        group: Group | None = None,
    ) -> Iterator[list[Sample]]:
        """Generates the step's rows of these slots. The ranks of a set call it with the same slots; each one's engine
        takes a part of them, and all get the same rows.

        Yields:
            the rows that have just ended, and every few milliseconds an empty list, so that the caller can do other
            work. Closing or dropping the iterator (an exception in a `for` loop drops it) stops the engine's work.
        """
        rank, size = (group.set_rank, group.set_size) if group else (0, 1)
        with closing(self._decode(engine, step, slots[rank::size], sampling, seed)) as own:
            for stopped in _of_set(own, group) if group and size > 1 else own:
                yield [row for row in stopped if self._keep(row)]

    def row(self, step: int, slot: int) -> Sample:
        """The row that a slot begins a step with."""
        return self.open.get(slot) or self._fresh((step - 1) * self.slots + slot)

    def share(self, gather: Callable[[Any], list[Any]]) -> list[list[tuple[int, int]]]:
        """Makes every rank know the rows of all slots, by `Group.all_gather` after each rollout. Returns what the first
        `RECORDED` slots have decoded: (row, tokens) one after another."""
        decoded = {}
        for changed, part in gather((self._changed, self._decoded)):
            self.open |= changed
            decoded |= part
        self._changed, self._decoded = {}, {}
        return [decoded[slot] for slot in sorted(decoded)]

    def contexts(self) -> list[int]:
        """Tokens of the row that each slot goes on with: those that the engine's KV cache must hold at once."""
        rows = (self.row(1, slot) for slot in range(self.slots))
        return [len(row.prompt) + len(row.response) for row in rows]

    def state(self) -> list[Any]:
        """The rows as a checkpoint holds them: number, response, its log-probs, stretches, and the hash of what was
        asked for. Prompts follow from data."""
        rows = (self.open[slot] for slot in sorted(self.open))
        return [
            [row.row, list(row.response), list(row.logprobs), list(row.stretches), self._asked(row)] for row in rows
        ]

    def load_state(self, state: Sequence[Any]) -> None:
        """Goes on from what `state` returned, also with another window. Raises UserError if there are other slots now,
        or rows do not go on, have another prompt, or are too long. Older checkpoints have no hashes."""
        if state and not (self.window and len(state) == self.slots):
            raise UserError(
                f"the checkpoint holds the rows of {len(state)} slots that go on; set rollout.window above 0 and"
                f" rollout.batch_size={len(state)}"
            )
        for number, response, logprobs, stretches, *asked in state:
            row = Sample(
                number,
                self.prompt(number).tokens,
                response,
                logprobs,
                stretches=tuple((step, tokens) for step, tokens in stretches),
            )
            if response and asked not in ([], [self._asked(row)]):
                raise UserError(
                    f"row {number} of the checkpoint goes on, and its prompt is another one here (hash"
                    f" {self._asked(row)}, not {asked[0]}); restore seed, data, rollout.samples and rollout.lengths"
                    " of its run, or start from its exported policy (splitppo export)"
                )
            if self._left(row) < 1:
                raise UserError(
                    f"rollout.max_new_tokens={self.limit}, and row {number} of the checkpoint goes on after"
                    f" {len(response)} tokens; set it to {max(len(part[1]) for part in state) + 1} at least"
                )
            self.open[number % self.slots] = row

    def _decode(
        self, engine: RolloutEngine, step: int, slots: Sequence[int], sampling: RolloutConfig, seed: int
    ) -> Iterator[list[Sample]]:
        """The rows of these slots as they stop: ended, or open since their slot has decoded the window's tokens."""
        budgets = dict.fromkeys(slots, self.window or sys.maxsize)
        asked: dict[int, Sample] = {}

        def ask(row: Sample) -> Ask:
            asked[row.row] = row
            tokens = min(self._left(row), budgets[row.row % self.slots])
            free = self._length(row.row) is None
            return Ask(row.row, [*row.prompt, *row.response], len(row.response), tokens, free)

        engine.begin(sampling, seed)
        try:
            first = [self.row(step, slot) for slot in slots]
            first.sort(key=lambda row: len(row.prompt) + len(row.response))
            engine.submit([ask(row) for row in first])
            while asked:
                stopped = []
                for piece in engine.poll():
                    before = asked.pop(piece.row)
                    slot = piece.row % self.slots
                    budgets[slot] -= len(piece.tokens)
                    # the engine knows how many tokens it was asked for, and not why
                    goes_on = piece.end == "limit" and len(piece.tokens) < self._left(before)
                    if self.window and not goes_on and budgets[slot]:
                        engine.submit([ask(self._fresh(piece.row + self.slots))])  # first of all: its place is empty
                    stopped.append(before.extended(step, piece.tokens, piece.logprobs, None if goes_on else piece.end))
                yield stopped
        finally:
            engine.abort()

    def _keep(self, row: Sample) -> bool:
        """Remembers what a slot goes on with. Returns whether the row has ended."""
        slot = row.row % self.slots
        if slot < RECORDED:
            self._decoded.setdefault(slot, []).append((row.row, row.stretches[-1][1]))
        if self.window:
            self._changed[slot] = self._fresh(row.row + self.slots) if row.end else row
        return row.end is not None

    def _left(self, row: Sample) -> int:
        """Tokens that a row may still get."""
        return (self._length(row.row) or self.limit) - len(row.response)

    def _length(self, row: int) -> int | None:
        return self.lengths[row % len(self.lengths)] if self.lengths else None

    def _asked(self, row: Sample) -> str:
        return digest(self.prompt(row.row).tokens, self._length(row.row))

    def _fresh(self, row: int) -> Sample:
        return Sample(row, self.prompt(row).tokens, [], [])


def _of_set(own: Iterator[list[Sample]], group: Group) -> Iterator[list[Sample]]:
    """The rows of all engines of a set, on each of its ranks in the same order, whichever engine is the faster."""
    waiting = [deque[Sample]() for _ in range(group.set_size)]
    found: list[Any] = []
    while found != [None] * group.set_size:
        found = group.gather_set(next(own, None))
        for rows, part in zip(waiting, found, strict=True):
            rows.extend(part or ())
        ready = []
        while any(waiting) and all(rows or part is None for rows, part in zip(waiting, found, strict=True)):
            ready += [rows.popleft() for rows in waiting if rows]
        yield ready
