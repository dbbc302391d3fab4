"""A game with a reward after each turn and prompts that differ: the environment of
critic_study.py's study `stakes`."""

import random
import re
from typing import Any

from splitppo.envs import Message, Turn

TURNS = 4
STAKES = 9
REACH = 4  # a digit that is so far off is worth nothing


class Stakes:
    """The policy repeats a digit, `TURNS` times; a message without one ends the game. A turn is
    worth the more, the nearer the digit is, and the higher the game's stake, which the prompt
    tells: 1 to 9. The best score of a game is its stake by 9, so .56 in the mean.

    The game follows from the data row, not from the seed: responses to one prompt play one game.
    """

    def __init__(self, row: dict[str, Any], seed: int):
        drawn = random.Random(f"stakes/{row['extra_info']['index']}")
        self.stake = drawn.randint(1, STAKES)
        self.digits = [str(drawn.randrange(10)) for _ in range(TURNS)]

    def reset(self) -> list[Message]:
        return [Message("user", f"{self.stake}:{self.digits[0]}=")]

    def step(self, message: Message) -> Turn:
        found = re.search(r"\d", message.content)
        digit = self.digits.pop(0)
        missed = abs(int(found[0]) - int(digit)) if found else REACH
        reward = self.stake / STAKES / TURNS * max(0.0, 1 - missed / REACH)
        if not (found and self.digits):
            return Turn(reward=reward, done=True)
        return Turn([Message("user", f"{self.digits[0]}=")], reward)

    def close(self) -> None:
        pass
