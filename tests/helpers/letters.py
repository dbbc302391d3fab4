"""An environment whose rewards differ from text to text: for runs in which something is to be
learned from the first step on."""

from typing import Any

from splitppo.envs import Message, Turn

TURNS = 3


class Letters:
    """Pays for letters, and answers each turn in another way."""

    def __init__(self, row: dict[str, Any], seed: int):
        self.seed = seed
        self.heard = 0

    def reset(self) -> None: ...

    def step(self, message: Message) -> Turn:
        self.heard += 1
        reward = sum(map(ord, message.content)) % 7 / 7
        answer = Message("user", f"{(self.seed + self.heard) % 10}=")
        return Turn([answer], reward, self.heard == TURNS, metrics={"heard": self.heard})

    def close(self) -> None: ...
