"""Games of textarena for one player: `--data.task textarena:GuessTheNumber-v0`."""

import importlib
import json
import random
from typing import Any

from splitppo.envs import Message, Turn


class Game:
    """One game, rewarded in its last turn. The policy reads what the game says since the last turn;
    textarena's wrappers would repeat the whole dialogue.

    Games draw from Python's global generator, which games of other rows use in between. So each
    turn has its own seed.
    """

    def __init__(self, name: str, settings: str, row: dict[str, Any], seed: int):
        self.arena = importlib.import_module("textarena")
        self.seed = seed % 2**32  # as numpy's generators take it
        random.seed(self.seed)
        self.game = self.arena.make(name, **json.loads(settings))

    def reset(self) -> list[Message]:
        self.game.reset(num_players=1, seed=self.seed)
        if not isinstance(self.game.state, self.arena.SinglePlayerState):
            raise ValueError("it is for several players")
        return self._heard()

    def step(self, message: Message) -> Turn:
        random.seed(f"{self.seed}/{len(self.game.state.logs)}")
        done, _ = self.game.step(message.content)
        return Turn(self._heard(), self.game.close()[0][0] if done else 0.0, done)

    def _heard(self) -> list[Message]:
        said = self.game.state.get_current_player_observation()
        played = self.arena.ObservationType.PLAYER_ACTION
        return [Message("user", "".join(f"{text}\n" for _, text, kind in said if kind != played))]
