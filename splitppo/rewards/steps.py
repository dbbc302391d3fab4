"""The steps of a response, which a process reward model scores one by one."""

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from splitppo.config import RewardConfig
from splitppo.errors import UserError


@dataclass(frozen=True)
class Steps:
    """What ends a step of a text. `token`: what stands in its place in the reward model's text,
    where the model scores the step."""

    separator: str
    token: str | None = None

    def ends(self, text: str) -> list[int]:
        """Where the steps end, in characters: behind each separator, and with the text. What is
        blank is no step."""
        parts = re.finditer(rf"(.*?)({re.escape(self.separator)}|\Z)", text, re.DOTALL)
        return [part.end() for part in parts if part[1].strip()]

    def mark(self, text: str) -> tuple[str, list[int]]:
        """The text as the reward model reads it, and where its steps end there."""
        ends = self.ends(text)
        if self.token is None:
            return text, ends
        parts = [
            text[begin:end].removesuffix(self.separator) + self.token
            for begin, end in pairwise([0, *ends])
        ]
        return "".join(parts), list(accumulate(map(len, parts)))


def check_steps(tokenizer: Any, reward: RewardConfig) -> None:
    """Raises UserError if the reward model's tokenizer can't tell where a step ends."""
    if reward.steps and not tokenizer.is_fast:
        raise UserError(
            f"reward.steps={reward.steps!r}: the reward model's tokenizer does not say which token "
            "holds a character; save it as tokenizer.json, or unset reward.steps"
        )


def find_places(offsets: list[tuple[int, int]], ends: list[int]) -> list[int]:
    """The tokens that hold the last characters of the parts of a text that end there. `offsets`:
    where each token begins and ends in the text, alike if it is none of it."""
    tokens = [(begin, i) for i, (begin, end) in enumerate(offsets) if begin < end]
    # of a character of several tokens each begins with it
    return [tokens[bisect_left(tokens, (end,)) - 1][1] for end in ends]
