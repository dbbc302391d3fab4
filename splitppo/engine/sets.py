"""Engines of ranks that own the same rows: each generates some of these rows, and all of the ranks get all of them."""

from collections.abc import Generator, Iterable, Sequence
from typing import Any

from torch import Tensor

from splitppo.engine import RolloutEngine, Sampling
from splitppo.job.collectives import Group
from splitppo.rollout import Request, Sample


def over_set(engine: RolloutEngine, group: Group) -> RolloutEngine:
    """This rank's engine, joined with those of its tensor-parallel set, if it has one."""
    return engine if group.set_size == 1 else _Joined(engine, group)


class _Joined:
    """`RolloutEngine` documents the methods. All ranks of the set call them with the same arguments."""

    def __init__(self, engine: RolloutEngine, group: Group):
        self.engine, self.group = engine, group

    @property
    def loaded(self) -> bool:
        return self.engine.loaded

    @property
    def step_ms(self) -> float:
        return self.engine.step_ms

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.engine.load_weights(weights)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, **noise: Any
    ) -> Generator[list[Sample], None, None]:
        own = requests[self.group.set_rank :: self.group.set_size]
        return self._exchange(self.engine.generate(own, sampling, **noise))

    def _exchange(self, own: Generator[list[Sample], None, None]) -> Generator[list[Sample], None, None]:
        """Yields what the engines of all ranks of the set have yielded, in the same order on all of them."""
        try:
            while True:
                found = self.group.gather_set(next(own, None))
                if all(part is None for part in found):
                    return
                yield [sample for part in found for sample in part or ()]
        finally:
            own.close()

    def release_memory(self, *, trained: bool) -> None:
        self.engine.release_memory(trained=trained)

    def close(self) -> None:
        self.engine.close()
