"""How a rank's failure is told: once, with its cause last on the screen, and on all ranks at the same time."""

import os
import re
import signal
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from splitppo.channel import WireError
from splitppo.errors import UserError, one_line
from splitppo.job.nodes import Launch

if TYPE_CHECKING:
    from splitppo.job.runtime import Runtime

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # variable: where torchrun reads a rank's error
GONE = "is gone without a word: killed, perhaps for its memory"


def report_failure(error: BaseException, runtime: "Runtime | None", launch: Launch) -> int:
    """Tells a failure once: the user's own as a line, the first rank's with its traceback, the others in a word.
    Returns the exit status."""
    if isinstance(error, UserError):
        if runtime is None and launch.local_rank:
            # Most such errors are all ranks' own, and one is to tell them. torchrun ends the job as soon as one rank
            # is gone, so this one waits: if it lives on, the ranks before it had no such trouble.
            time.sleep(2 + launch.local_rank)
        if runtime is None or runtime.failed(error):
            told = "; ".join([str(error), *getattr(error, "__notes__", [])])
            print(f"error: {one_line(told)}", file=sys.stderr, flush=True)
        _for_torchrun(error.with_traceback(None))
        return 2
    causes = causes_of(error, runtime) if runtime is not None else []  # `failed` wakes those that are stopped
    if runtime is not None and not runtime.failed(error):
        why = "; ".join([str(error) if isinstance(error, WireError) else type(error).__name__, *causes])
        print(f"rank {launch.rank} stops: another rank failed ({why})", file=sys.stderr, flush=True)
        if ERROR_FILE in os.environ:
            time.sleep(2)  # torchrun ends with the rank that failed first, by its clock: let that be the one that did
        return 1
    if isinstance(error, torch.OutOfMemoryError):
        error.add_note(
            "to need less of the GPU: a lower --compute.micro-batch-tokens or --engine.memory-fraction, "
            "--compute.activation-checkpointing, --reference.offload, or more ranks"
        )
    if runtime is not None:
        error.add_note(f"on {runtime.describe(launch.rank)}")
        for cause in causes:
            error.add_note(f"it follows from this: {cause}")
    traceback.print_exception(error)
    _for_torchrun(error)
    return 1


def causes_of(error: BaseException, runtime: "Runtime") -> list[str]:
    """What is wrong with other ranks, of which an error here may be the consequence."""
    gone = runtime.lost()
    causes = [f"{gone} {GONE}" if gone else runtime.watch.silent()]
    with suppress(RuntimeError, dist.DistError):  # the store may be gone
        causes.append(runtime.stopped())
        # Gloo and NCCL name no rank, and the one that the wire names may itself wait for another
        if isinstance(error, WireError | dist.DistError) or re.search("imed out|closed by peer", str(error)):
            causes.append(f"a rank did not come: {runtime.phases()}")
    return [cause for cause in causes if cause]


def end_rank(launcher: int | None, error: Exception, *, store_lost: bool) -> None:
    """Ends this rank from another thread than the one that works, and a torchrun (`launcher`) that cannot end itself
    any more."""
    try:
        _for_torchrun(error)
        if store_lost and launcher is not None and os.getppid() == launcher:
            time.sleep(2)  # the other ranks of the host find out for themselves
            # it waits for its store, too, in C++, where it hears no other signal, until the kernel gives up in 15 min
            os.kill(launcher, signal.SIGKILL)
    finally:
        os._exit(1)


def _for_torchrun(error: BaseException) -> None:
    """Puts the error where torchrun reads it, to print it last."""
    if ERROR_FILE in os.environ and isinstance(error, Exception):
        get_error_handler().record_exception(error)
