"""Rows without an environment: dialogues of one turn."""

import sys
from collections.abc import Mapping, Set
from typing import Any

from splitppo.rollout import Episode, Prompt


class SingleTurn:
    """Takes the place of a `Player` (player.py) where there is no environment: nobody answers a
    turn, so a row ends with its first turn and none waits."""

    answers = False
    render = None
    seeds = "row"
    max_turn_tokens = sys.maxsize

    def ask(self, row: Episode, prompt: Prompt, seed: int) -> bool:
        return False

    def poll(self, rows: Mapping[int, Episode], timeout: float) -> list[Any]:
        return []

    def keep(self, rows: Set[int]) -> None:
        pass

    def end(self, row: int) -> None:
        pass

    def take(self) -> tuple[dict[str, float], list[Any]]:
        return {}, []

    def metrics(self, group: Any) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


SINGLE_TURN = SingleTurn()
