"""What a rollout engine is: full weights in, finished rows out, one after the other while it goes on generating."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from splitppo.rollout import Request, Sample


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn; `config.check` has seen to the ranges.

    Attributes:
        temperature: the logits are divided by it; above 0, also if greedy, since log-probs are taken at it.
        max_new_tokens: a response is cut here if it has not ended; at least 1.
        stop: strings that end a response and stay part of it; looked for in the response alone, never in the prompt.
        greedy: take the likeliest token in place of drawing one.
    """

    temperature: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    greedy: bool = False


class RolloutEngine(Protocol):
    """Generates the rows of one actor rank."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the policy's weights: full (unsharded) tensors by Hugging Face name, cast to the engine's dtype.

        An unknown name, a missing name or another shape is a ValueError; the engine then waits for a whole new load.
        """

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, step: int
    ) -> Generator[list[Sample], None, None]:
        """Generate every request exactly once, in the background, from the first `next` on.

        The noise follows from (seed, step, row, position) alone: neither the other rows nor the rank change a row.

        Yields:
            the rows that have just finished, or an empty list as a tick (every few milliseconds), so that the caller
            can do other work meanwhile. Closing the iterator stops the background work before `close` returns; so does
            dropping it, for instance by an exception in a `for` loop over it.

        Raises:
            RuntimeError: no weights have been loaded.
            Exception: whatever went wrong in the background, with its own traceback.
        """
        ...

    def close(self) -> None:
        """Give the memory back; the engine can't be used after it."""
