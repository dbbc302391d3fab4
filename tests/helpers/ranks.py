"""Runs a function on several ranks: fresh processes that see torchrun's variables, or threads of
this process."""

import contextlib
import faulthandler
import itertools
import math
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from devices import gpus

from splitppo.job.collectives import Group

# Ranks are forked by a server that has imported what takes long and runs nothing. A fork of the
# tests' own process has its locks and process groups without the threads that serve them and can
# wait for these for ever: a rank forked while the store's thread greets another one never gets to
# the store. CUDA can't be forked at all: with GPUs in sight, each rank is a new interpreter.
START = "spawn" if gpus() else "forkserver"
FRESH: Any = multiprocessing.get_context(START)
FRESH.set_forkserver_preload(["warm"])


def fresh_process(target: Callable[..., object], *args: Any) -> Any:
    """Starts a process that is forked by the server (with GPUs, a new one); the first one starts
    the server."""
    path = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        process = FRESH.Process(target=target, args=args)
        process.start()
    return process


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 240, local_world: int = 0
) -> list:
    """`function(rank, *args)` on each of `world` ranks; their results in order of ranks.

    The function is one of a module's own: it reaches the ranks by its name. A rank that raises
    fails the call with its traceback, at once: the others are killed. Where the time is over, the
    error says what each rank was at.
    """
    # as under torchrun, the store is the launcher's and outlives each rank
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    with contextlib.ExitStack() as stack:
        stacks = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)]
        for rank in range(world):
            ours, theirs = FRESH.Pipe(duplex=False)
            environ = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank % (local_world or world)),
                "LOCAL_WORLD_SIZE": str(local_world or world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            files = _Files([1, 2, stacks[rank].fileno()])
            process = fresh_process(
                _child, rank, environ, files, theirs, 0.9 * timeout, function, args
            )
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout, stacks)
        finally:
            for process in processes:
                process.kill()
                process.join()


class _Files:
    """Open files of this process, for another one. (A test may have turned standard output to a
    file of its own.)"""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __getstate__(self) -> list:
        return [DupFd(number) for number in self.numbers]

    def __setstate__(self, state: list) -> None:
        self.numbers = [fd.detach() for fd in state]


def _collect(pipes: list, processes: list, deadline: float, stacks: list) -> list:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        if time.monotonic() > deadline:
            waiting = [rank for rank in range(len(pipes)) if rank not in results]
            for file in stacks:
                file.seek(0)
            told = "\n".join(f"rank {rank} was at\n{stacks[rank].read()}" for rank in waiting)
            raise TimeoutError(f"ranks {waiting} did not come back\n{told}")
        for rank, pipe in enumerate(pipes):
            if rank in results or not pipe.poll(0.01):
                continue
            try:
                error, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                error = f"died with exit status {processes[rank].exitcode}"
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
    return [results[rank] for rank in range(len(pipes))]


def _child(
    rank: int,
    environ: dict,
    files: _Files,
    pipe: Any,
    patience: float,
    function: Callable,
    args: tuple,
) -> None:
    out, err, stack = files.numbers
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(patience, file=stack)
    try:
        answer = (None, function(rank, *args))
    except BaseException:
        answer = (traceback.format_exc(), None)
    pipe.send_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    # no clean-up: process groups may have peers that are gone
    os._exit(0)


PATIENCE = 20.0  # seconds that a thread waits for the others


class _Line:
    """Ranks along one axis of a `ThreadMesh`: what a process group is to a DeviceMesh."""

    def __init__(self, size: int) -> None:
        self.shown: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)


class ThreadGroup:
    """A line as one of its ranks sees it."""

    def __init__(self, line: _Line, rank: int) -> None:
        self.line, self.rank = line, rank

    def exchange(self, value: Any) -> list:
        """What each rank gave, in order of ranks."""
        self.line.shown[self.rank] = value
        self.line.barrier.wait()
        found = list(self.line.shown)
        self.line.barrier.wait()
        return found


# A `Group` of one rank, as far as what only gathers and exchanges asks.
ALONE: Any = SimpleNamespace(
    dp_rank=0, dp_size=1, all_gather=lambda value: [value], all_to_all=list
)


class ThreadMesh:
    """The mesh of a rank that is a thread, as far as `Group` asks a DeviceMesh.

    Attributes:
        at: the rank's place along each axis: `rows`, `tensor`, or between them also `sequence`.
    """

    def __init__(
        self, shape: tuple[int, ...], at: tuple[int, ...], groups: list[ThreadGroup]
    ) -> None:
        self.shape, self.at, self.groups = shape, at, groups
        self.mesh_dim_names = (
            ("rows", "sequence", "tensor") if len(shape) > 2 else ("rows", "tensor")[: len(shape)]
        )

    def get_local_rank(self, axis: str) -> int:
        return self.at[self.mesh_dim_names.index(axis)]

    def size(self) -> int:
        return math.prod(self.shape)

    def get_group(self, axis: str) -> ThreadGroup:
        return self.groups[self.mesh_dim_names.index(axis)]


def thread_groups(*shape: int) -> tuple[list[Group], Callable[[], None]]:
    """The ranks of a mesh of this shape, the last axis running fastest, each as a `Group` for a
    thread; and what frees all of them from waiting. They work under `thread_collectives`."""
    lines: dict[tuple, _Line] = {}
    found = []
    for at in itertools.product(*map(range, shape)):
        own = []
        for axis, place in enumerate(at):
            line = lines.setdefault((axis, *at[:axis], None, *at[axis + 1 :]), _Line(shape[axis]))
            own.append(ThreadGroup(line, place))
        found.append(Group(cast(Any, ThreadMesh(shape, at, own))))

    def abort() -> None:
        for line in lines.values():
            line.barrier.abort()

    return found, abort


def thread_collectives() -> Any:
    """Puts what `thread_groups` can do in place of torch.distributed's, while the context lasts."""

    def gather_objects(found: list, value: Any, group: ThreadGroup) -> None:
        found[:] = group.exchange(value)

    def gather_tensors(found: torch.Tensor, part: torch.Tensor, group: ThreadGroup) -> None:
        parts = group.exchange(part)
        if len({(one.dtype, one.shape) for one in parts}) != 1:
            raise ValueError(
                f"tensors to gather must be alike, got "
                f"{[(one.dtype, tuple(one.shape)) for one in parts]}"
            )
        found.copy_(torch.cat(parts))

    def reduce(values: torch.Tensor, op: Any, group: ThreadGroup) -> None:
        parts = group.exchange(values.clone())
        if len({(one.dtype, one.shape) for one in parts}) != 1:
            raise ValueError(
                f"tensors to reduce must be alike, got "
                f"{[(one.dtype, tuple(one.shape)) for one in parts]}"
            )
        values.copy_(
            torch.stack(parts).amax(0) if op == dist.ReduceOp.MAX else torch.stack(parts).sum(0)
        )

    def to_all(
        found: torch.Tensor,
        sent: torch.Tensor,
        due: Any = None,
        sizes: Any = None,
        *,
        group: ThreadGroup,
    ) -> None:
        ranks = len(group.line.shown)
        parts = [
            given[group.rank]
            for given in group.exchange(sent.split(sizes or [len(sent) // ranks] * ranks))
        ]
        if due and [len(part) for part in parts] != due:
            raise ValueError(f"{due} elements are due, {[len(part) for part in parts]} come")
        found.copy_(torch.cat(parts))

    patches = {
        "all_gather_object": gather_objects,
        "all_gather_into_tensor": gather_tensors,
        "all_reduce": reduce,
    }
    patches["all_to_all_single"] = to_all
    return mock.patch.multiple(dist, get_world_size=lambda group: len(group.line.shown), **patches)


def run_threads(world: int | tuple[int, ...], function: Callable[..., Any], *args: Any) -> list:
    """`function(group, *args)` on each of `world` ranks that are threads; their results in order of
    ranks.

    In milliseconds where `run_ranks` takes seconds. The ranks share all that a process has, and may
    gather from each other, sum and take the maximum, no more.

    Args:
        world: the number of data-parallel ranks, or the shape of a mesh of several axes.
    """
    groups, abort = thread_groups(*((world,) if isinstance(world, int) else world))
    results: list[Any] = [None] * len(groups)
    errors: list[BaseException] = []

    def rank_thread(rank: int, group: Group) -> None:
        try:
            results[rank] = function(group, *args)
        # raised to the caller; the other ranks would wait for this one
        except BaseException as error:
            errors.append(error)
            abort()

    with thread_collectives():
        threads = [threading.Thread(target=rank_thread, args=pair) for pair in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results
