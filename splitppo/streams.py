"""The slots' streams of rows, and the rows that go on from one step to the next.

Slot s of S has rows s, s + S, s + 2S, ... of the data order. Without windows it generates one a step. With
`rollout.window = W` it decodes W tokens a step: a row that ends is followed at once by the next one, and a row that has
not ended goes on in the next step, with the new weights. So no row is skipped or taken twice, and no slot asks another.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from splitppo.errors import UserError
from splitppo.rollout import Prompt, Request, Sample

RECORDED = 32  # slots, the first, whose rows the metrics have


class Streams:
    """The rows of all slots, as a rank of the actor group sees them.

    Args:
        slots: S. windows: whether rows go on.
        prompt: row -> its prompt.
        lengths: of the responses, in the order of the rows, in a benchmark; else empty.

    Attributes:
        open: slot -> its row that goes on, or that comes next and has no response yet. All ranks hold the same rows.
    """

    def __init__(self, slots: int, prompt: Callable[[int], Prompt], lengths: Sequence[int], *, windows: bool):
        self.slots, self.prompt, self.lengths, self.windows = slots, prompt, lengths, windows
        self.open: dict[int, Sample] = {}
        # by this rank since the last `share`: slots' open rows; of the first slots, the (row, tokens) that they decoded
        self._changed: dict[int, Sample] = {}
        self._decoded: dict[int, list[tuple[int, int]]] = {}

    def request(self, step: int, slot: int) -> Request:
        """What a slot's engine begins a step with."""
        return self._request(self.open.get(slot) or self._fresh((step - 1) * self.slots + slot))

    def following(self, row: int) -> Request:
        """The row after another one in its stream."""
        return self._request(self._fresh(row + self.slots))

    def take(self, step: int, samples: Sequence[Sample]) -> list[Sample]:
        """Keeps the rows that go on. Returns those that have ended, with the steps that sampled them."""
        ended = []
        for given in samples:
            slot, before = given.row % self.slots, self.open.get(given.row % self.slots)
            stretches = before.stretches if before and before.row == given.row else ()
            sampled = given.tokens - sum(tokens for _, tokens in stretches)
            sample = replace(given, stretches=(*stretches, (step, sampled)))
            if slot < RECORDED:
                self._decoded.setdefault(slot, []).append((given.row, sampled))
            goes_on = sample.end == "window"
            ended += [] if goes_on else [sample]
            if self.windows:
                self._changed[slot] = sample if goes_on else self._fresh(sample.row + self.slots)
        return ended

    def share(self, gather: Callable[[Any], list[Any]]) -> list[list[tuple[int, int]]]:
        """Makes every rank know the rows of all slots; all ranks of a group call it after each rollout, with
        `Group.all_gather`. Returns what the first `RECORDED` slots have decoded: (row, tokens) one after another."""
        decoded = {}
        for changed, part in gather((self._changed, self._decoded)):
            self.open |= changed
            decoded |= part
        self._changed, self._decoded = {}, {}
        return [decoded[slot] for slot in sorted(decoded)]

    def contexts(self) -> list[int]:
        """Tokens of the row that each slot goes on with: those that the engine's KV cache must hold at once."""
        rows = (self.open.get(slot) or self._fresh(slot) for slot in range(self.slots))
        return [len(row.prompt) + len(row.response) for row in rows]

    def state(self) -> list[Any]:
        """The rows as a checkpoint holds them: number, response, its log-probs, stretches. Prompts follow from data."""
        rows = (self.open[slot] for slot in sorted(self.open))
        return [[row.row, list(row.response), list(row.logprobs), list(row.stretches)] for row in rows]

    def load_state(self, state: Sequence[Any]) -> None:
        """Goes on from what `state` returned, also with another window.

        Raises:
            UserError: there are other slots now, or rows do not go on.
        """
        if state and not (self.windows and len(state) == self.slots):
            raise UserError(
                f"the checkpoint holds the rows of {len(state)} slots that go on; set rollout.window above 0 and "
                f"rollout.batch_size={len(state)}"
            )
        for row, response, logprobs, stretches in state:
            past = tuple((step, tokens) for step, tokens in stretches)
            self.open[row % self.slots] = replace(
                self._fresh(row), response=response, logprobs=logprobs, stretches=past
            )

    def _request(self, row: Sample) -> Request:
        length = self.lengths[row.row % len(self.lengths)] if self.lengths else None
        return Request(row.row, row.prompt, length, row.response, row.logprobs)

    def _fresh(self, row: int) -> Sample:
        return Sample(row, self.prompt(row).tokens, [], [], "window")
