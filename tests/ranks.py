"""Runs a function on several ranks: fresh processes that see torchrun's variables, or threads of this process."""

import contextlib
import faulthandler
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
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# Ranks are forked by a server that has imported what takes long and runs nothing. A fork of the tests' own process has
# its locks and process groups without the threads that serve them and can wait for these for ever: a rank forked while
# the store's thread greets another one never gets to the store.
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(
    [
        "splitppo.train",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
        "torch._dynamo",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.bert.modeling_bert",
        "pytest",
    ]
)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 240, local_world: int = 0) -> list:
    """`function(rank, *args)` on each of `world` ranks; their results in order of ranks.

    The function is one of a module's own: it reaches the ranks by its name. A rank that raises fails the call with its
    traceback, at once: the others are killed. Where the time is over, the error says what each rank was at.
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
            process = FRESH.Process(target=_child, args=(rank, environ, files, theirs, 0.9 * timeout, function, args))
            process.start()
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
    """Open files of this process, for another one. (A test may have turned standard output to a file of its own.)"""

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
    rank: int, environ: dict, files: _Files, pipe: Any, patience: float, function: Callable, args: tuple
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


class ThreadMesh:
    """The group of a rank that is a thread, as far as a DeviceMesh is asked for its size, its rank and its messages."""

    def __init__(self, rank: int, shown: list, barrier: threading.Barrier) -> None:
        self.rank, self.shown, self.barrier = rank, shown, barrier

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return len(self.shown)

    def get_group(self) -> "ThreadMesh":
        return self

    def exchange(self, value: Any) -> list:
        """What each rank gave, in order of ranks."""
        self.shown[self.rank] = value
        self.barrier.wait()
        found = list(self.shown)
        self.barrier.wait()
        return found


def run_threads(world: int, function: Callable[..., Any], *args: Any) -> list:
    """`function(mesh, *args)` on each of `world` ranks that are threads; their results in order of ranks.

    In milliseconds where `run_ranks` takes seconds. The ranks share all that a process has, and may gather from each
    other, sum and take the maximum, no more.
    """
    barrier, shown, results, errors = threading.Barrier(world, timeout=20), [None] * world, [None] * world, []

    def gather_objects(found: list, value: Any, group: ThreadMesh) -> None:
        found[:] = group.exchange(value)

    def gather_tensors(found: torch.Tensor, part: torch.Tensor, group: ThreadMesh) -> None:
        parts = group.exchange(part)
        if len({(one.dtype, one.shape) for one in parts}) != 1:
            raise ValueError(f"tensors to gather must be alike, got {[(one.dtype, tuple(one.shape)) for one in parts]}")
        found.copy_(torch.cat(parts))

    def rank_thread(rank: int) -> None:
        try:
            results[rank] = function(ThreadMesh(rank, shown, barrier), *args)
        except BaseException as error:  # told to the caller; the other ranks would wait for this one
            errors.append(error)
            barrier.abort()

    def reduce(values: torch.Tensor, op: Any, group: ThreadMesh) -> None:
        parts = torch.stack(group.exchange(values.clone()))
        values.copy_(parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0))

    patches = {"all_gather_object": gather_objects, "all_gather_into_tensor": gather_tensors, "all_reduce": reduce}
    with mock.patch.multiple(dist, **patches):
        threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results
