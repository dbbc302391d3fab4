"""Engines of ranks that own the same rows: each generates some of these rows, and all of the ranks get all of them."""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, cast

from splitppo.engine import RolloutEngine, Sampling
from splitppo.job.collectives import Group
from splitppo.rollout import Request, Sample


def over_set(engine: RolloutEngine, group: Group) -> RolloutEngine:
    """This rank's engine, joined with those of its tensor-parallel set, if it has one."""
    return engine if group.set_size == 1 else cast(RolloutEngine, _Joined(engine, group))


class _Joined:
    """This rank's engine, but for `generate`, which all ranks of the set call with the same requests."""

    def __init__(self, engine: RolloutEngine, group: Group):
        self.engine, self.group = engine, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, **noise: int
    ) -> Generator[list[Sample], None, None]:
        """Yields the rows of all engines of the set, in the same order on all of its ranks. The order is that of the
        engines' own, in turn, so it does not depend on which of them is the faster."""
        group, found = self.group, []
        waiting: list[deque[Sample]] = [deque() for _ in range(group.set_size)]
        own = self.engine.generate(requests[group.set_rank :: group.set_size], sampling, **cast(Any, noise))
        with closing(own):
            while found != [None] * group.set_size:
                found, ready = group.gather_set(next(own, None)), []
                for rows, part in zip(waiting, found, strict=True):
                    rows.extend(part or ())
                while any(waiting) and all(rows or part is None for rows, part in zip(waiting, found, strict=True)):
                    ready += [rows.popleft() for rows in waiting if rows]
                yield ready
