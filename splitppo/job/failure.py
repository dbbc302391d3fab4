"""How a rank reports its failure: one rank explains the cause, last on the screen, and the others
add one line each."""

import os
import re
import time
import traceback
from contextlib import suppress

import torch.distributed as dist

from splitppo.errors import UserError, one_line, say
from splitppo.job.launch import ERROR_FILE, Launch, ends_quietly, record_error
from splitppo.job.runtime import Runtime
from splitppo.job.wire import WireError

DIED = "died without an error message: killed, perhaps because memory ran out"
# a killed process closes its connections at most so many seconds before it counts as dead
DYING = 1.0


def report_failure(error: BaseException, runtime: Runtime | None, launch: Launch) -> int:
    """Prints an error, with a traceback if this rank failed first and no user can fix it. Returns
    the exit status. `runtime` is None if the rank had not joined the others."""
    if runtime is None and launch.local_rank:
        # Most of these errors are the same on all ranks. torchrun ends the job as soon as one rank
        # has printed it and ended. So this rank waits: if it still lives then, the ranks before it
        # had no such error.
        time.sleep(2 + launch.local_rank)
    if isinstance(error, UserError):
        text = one_line("; ".join([str(error), *getattr(error, "__notes__", [])]))
        if runtime is None or runtime.status.report_failure():
            say(f"error: {text}", error=True)
        record_error(UserError(text))
        return 2
    if runtime is not None:
        causes = causes_of(error, runtime)  # before `report_failure`, which wakes suspended ranks
        killed = any(DIED in cause for cause in causes)  # then a traceback from here says nothing
        if not runtime.status.report_failure() or killed:
            what = str(error) if isinstance(error, WireError) else type(error).__name__
            why = "; ".join([what, *causes, *(getattr(error, "__notes__", []) if killed else [])])
            if not ends_quietly():
                say(f"rank {launch.rank} stops: another rank failed ({why})", error=True)
            if ERROR_FILE in os.environ:
                # torchrun reports the rank that ends first: let the failed rank be that rank
                time.sleep(2)
            return 1
        error.add_note(f"on {runtime.status.describe(launch.rank)}")
        for cause in causes:
            error.add_note(f"it follows from this: {cause}")
    say("".join(traceback.format_exception(error)).rstrip(), error=True)
    record_error(error)
    return 1


def causes_of(error: BaseException, runtime: Runtime) -> list[str]:
    """Problems of other ranks that may have caused this error."""
    deadline = time.monotonic() + DYING * bool(re.search("by peer|Broken pipe", str(error)))
    while (dead := runtime.status.dead_rank()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    causes = [f"{dead} {DIED}" if dead else runtime.heartbeat.lost_host()]
    with suppress(RuntimeError, dist.DistError):  # the store may be lost
        causes.append(runtime.status.suspended_ranks())
        # Gloo and NCCL name no rank, and the rank that the wire names may itself wait for another
        if isinstance(error, WireError | dist.DistError) or re.search(
            "imed out|closed by peer", str(error)
        ):
            causes.append(f"a rank did not come to a collective: {runtime.status.phases()}")
    return [cause for cause in causes if cause]
