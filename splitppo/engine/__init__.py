"""What a rollout engine is: full weights in, finished rows out, one after the other while it goes on generating."""

import hashlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from splitppo.config import RolloutConfig
from splitppo.rollout import Request, Sample


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn; `limits.check` has seen to the ranges.

    Attributes:
        temperature: the logits are divided by it; above 0. Greedy rows have log-probs at temperature 1.
        max_new_tokens: a response is cut here if it has not ended; at least 1.
        stop: strings that end a response and stay part of it; looked for in the response alone, never in the prompt.
        greedy: take the likeliest token in place of drawing one.
        top_p: draw from the fewest likeliest tokens that have this probability together; 1: from all.
        top_k: draw from this many likeliest tokens; 0: from all. Applied before top_p. Log-probs are those of the
            distribution that was drawn from.
    """

    temperature: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, rollout: RolloutConfig) -> "Sampling":
        """How a run's rollouts draw."""
        limits = {"top_p": rollout.top_p, "top_k": rollout.top_k}
        return cls(rollout.temperature, rollout.max_new_tokens, rollout.stop, **limits)


def row_seed(seed: int, step: int, row: int) -> int:
    """The seed of a row's noise, 63 bits, for engines that take one a row."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def check_requests(requests: Sequence[Request], *, loaded: bool) -> None:
    """What every engine refuses: to generate without weights (RuntimeError), a row without a prompt (ValueError)."""
    if not loaded:
        raise RuntimeError("generate before a complete load_weights")
    if empty := [request.row for request in requests if not request.prompt]:
        raise ValueError(f"row {empty[0]} has an empty prompt; it needs at least one token")


class RolloutEngine(Protocol):
    """Generates the rows of one actor rank.

    Attributes:
        loaded: whether it has a complete set of weights; generating gives them up where memory is short.
        step_ms: milliseconds of a step of the last `generate` that came to its end, on average: a token of each row
            that was alive. 0 if it had no rows.
    """

    loaded: bool
    step_ms: float

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the policy's weights and persistent buffers: full (unsharded) tensors by Hugging Face name, cast to
        the engine's dtype.

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

    def rest(self, *, trained: bool) -> None:
        """The trainer needs the device now: give back what memory it will need. Afterwards `loaded` may be False.

        Args:
            trained: the trainer's peak so far holds an update.
        """

    def close(self) -> None:
        """Give the memory back; the engine can't be used after it."""
