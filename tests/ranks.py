"""Runs a function on several ranks: forked processes that see torchrun's variables."""

import gc
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 240, local_world: int = 0) -> list:
    """`function(rank, *args)` on each of `world` forked ranks; their results in order of ranks.

    A rank that raises fails the call with its traceback, at once: the others are killed.
    """
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    # as under torchrun, the store is the launcher's and outlives each rank
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_child, args=(rank, world, local_world or world, store.port, theirs, function, args)
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, processes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list, processes: list, deadline: float) -> list:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        if time.monotonic() > deadline:
            waiting = [rank for rank in range(len(pipes)) if rank not in results]
            raise TimeoutError(f"ranks {waiting} did not come back")
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


def _child(rank: int, world: int, local_world: int, port: int, pipe: Any, function: Callable, args: tuple) -> None:
    # garbage of the parent's must not be collected here: a process group would wait for threads that it has only there
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % local_world),
        LOCAL_WORLD_SIZE=str(local_world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    try:
        answer = (None, function(rank, *args))
    except BaseException:
        answer = (traceback.format_exc(), None)
    pipe.send_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    # no clean-up: process groups may have peers that are gone
    os._exit(0)
