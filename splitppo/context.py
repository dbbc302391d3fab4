"""What both roles know of a run."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitppo.config import Config
from splitppo.config.cli import map_paths
from splitppo.rollout import Prompt


@dataclass(frozen=True)
class Context:
    """What both roles know of the run.

    Attributes:
        prompt: row -> its prompt.
        decode: token ids -> their text, without control tokens.
        held_out: prompts of the validation.
        vocabulary_size: ids from 0 that a policy may sample.
    """

    config: Config
    prompt: Callable[[int], Prompt]
    held_out: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]
    vocabulary_size: int

    @property
    def named(self) -> Config:
        """The configuration with names in the place of paths. A checkpoint says by it what its
        state belongs to, since files may be moved."""
        return map_paths(self.config, lambda _, path: os.path.basename(path))
