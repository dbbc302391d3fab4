"""What a run's memory is at its peak, phase by phase, as the allocator counts it; and what was
estimated beforehand."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from splitppo.critic import Critic
from splitppo.models.offload import Offloaded
from splitppo.policy import Policy
from splitppo.run import memory
from splitppo.run.resolve import Resolved

VERBS = {
    "actor logprobs": (Policy, "logprobs"),
    "actor update": (Policy, "update"),
    "critic update": (Critic, "update"),
}
VERBS |= {"critic score": (Critic, "score")}


def live_bytes() -> int:
    """Of all tensors on the CPU that Python sees, but for those in which offloaded ones wait."""

    def subclasses(kind: type) -> set[type]:
        return {kind}.union(*map(subclasses, kind.__subclasses__()))

    wanted = subclasses(Offloaded) | subclasses(torch.Tensor) - subclasses(DTensor)
    gc.unfreeze()
    objects, storages, waiting = (
        [found for found in gc.get_objects() if type(found) in wanted],
        {},
        set(),
    )
    gc.freeze()
    for found in objects:
        if isinstance(found, Offloaded):
            waiting |= {copy.untyped_storage().data_ptr() for _, copy in found.pairs}
        elif found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for place, size in storages.items() if place not in waiting)


@contextmanager
def counted(found: Callable[[int], object], others: int = 0) -> Iterator[None]:
    """Calls `found` with the highest number of bytes that were allocated in the block, less those
    of `others`."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        yield
        found(torch.cuda.max_memory_allocated())
        return
    gc.collect()
    before = live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield
    results: Any = profiler.profiler
    events = [
        (e.start_ns(), e.nbytes())
        for e in results.kineto_results.events()
        if e.name() == "[memory]"
    ]
    now = most = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        now += size
        most = max(most, now)
    found(before + most - others)


def count_peaks(peaks: dict[str, list[int]]) -> None:
    """Each call of a verb but the first one adds its peak to its phase's; what is there already
    does not count."""
    others = 0 if torch.cuda.is_available() else live_bytes()
    for phase, (owner, name) in VERBS.items():
        plain = getattr(owner, name)
        plain = getattr(plain, "__wrapped__", plain)

        def verb(*args: Any, phase: str = phase, plain: Any = plain, **named: Any) -> Any:
            known = phase in peaks
            sizes = peaks.setdefault(phase, [])
            with counted(sizes.append, others) if known else nullcontext():
                return plain(*args, **named)

        setattr(owner, name, wraps(plain)(verb))


def estimated(resolved: Resolved, total: float = memory.GPU) -> dict[str, float]:
    """Of the trainer's own process, as PyTorch's allocator counts: without the engine's process and
    CUDA."""
    outside = (memory.VLLM, "CUDA")
    return {
        phase: sum(size for part, size in parts.items() if not part.startswith(outside))
        for phase, parts in memory.phases(resolved, total).items()
    }
