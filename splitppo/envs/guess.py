"""The environment `guess`: find a hidden number. Each turn is rewarded by the information it
gained.

The seed draws one of `NUMBERS` numbers from 0. The policy guesses, and learns whether the number is
higher or lower. A turn's reward is the share of the number's `log2(NUMBERS)` bits that it revealed,
so a row's rewards sum to 1 when one number is left. With ten numbers each is one token of the
embedded model.
"""

import math
import random
import re
from typing import Any

from splitppo.envs import Message, Turn

NUMBERS = 10
TURNS = 3  # most guesses: as many as the best player needs


class Guess:
    """One game. The guess is the first number in a message; a message without a number reveals
    nothing."""

    def __init__(self, row: dict[str, Any], seed: int):
        self.turns = TURNS  # that are left
        self.number = random.Random(seed).randrange(NUMBERS)
        self.left = range(NUMBERS)  # that it may be

    def reset(self) -> list[Message]:
        return [Message("user", f"A number from 0 to {NUMBERS - 1}?\n")]

    def step(self, message: Message) -> Turn:
        self.turns -= 1
        before = len(self.left)
        number = re.search(r"\d{1,9}", message.content)
        guess = int(number[0]) if number else None
        if guess is None:
            answer = "a number"
        elif guess == self.number:
            answer = "yes"
            self.left = range(guess, guess + 1)
        elif guess < self.number:
            answer = "higher"
            self.left = range(max(self.left.start, guess + 1), self.left.stop)
        else:
            answer = "lower"
            self.left = range(self.left.start, min(self.left.stop, guess))
        return Turn(
            [Message("user", f"{answer}\n")],
            reward=math.log2(before / len(self.left)) / math.log2(NUMBERS),
            done=len(self.left) == 1 or self.turns == 0,
            metrics={"guessed": float(guess is not None), "found": float(len(self.left) == 1)},
        )

    def close(self) -> None:
        pass
