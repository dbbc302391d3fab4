"""Between torchrun and a rank: what torchrun sets in the environment, and how a rank reports its
error back."""

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from splitppo.errors import UserError

# environment variable: the file where torchrun looks for a rank's error
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# environment variable: the file where run/launcher.py looks for the run's folder
LAUNCHER = "SPLITPPO_LAUNCHER"


@dataclass(frozen=True)
class Launch:
    """The numbers that torchrun gives a process. The defaults are those of a process without
    torchrun."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    nodes: int = 1

    @classmethod
    def from_env(cls) -> "Launch":
        """Raises UserError if RANK is set, but the other variables are not as torchrun sets
        them."""
        if "RANK" not in os.environ:
            return cls()
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_WORLD_SIZE",
            "MASTER_PORT",
        )
        env = {
            "LOCAL_RANK": os.environ["RANK"],
            "LOCAL_WORLD_SIZE": os.environ.get("WORLD_SIZE", ""),
            "GROUP_WORLD_SIZE": "1",
            **os.environ,
        }
        values = [env.get(name, "unset") for name in (*names, "MASTER_ADDR")]
        numbers = [int(value) for value in values[:-1] if value.isdecimal()]
        if len(numbers) < len(names) or numbers[0] >= numbers[1] or values[-1] == "unset":
            variables = map("=".join, zip((*names, "MASTER_ADDR"), values, strict=True))
            raise UserError(
                f"{' '.join(variables)}: all of these must be set; start with "
                "torchrun, or unset RANK for a single process"
            )
        return cls(*numbers[:5])

    def check_nodes(self) -> None:
        """Raises UserError if this node has more or fewer ranks than the average node."""
        if self.nodes > 1 and self.local_world * self.nodes != self.world:
            raise UserError(
                f"{self.world} ranks on {self.nodes} nodes, {self.local_world} of them on "
                f"{socket.gethostname()}: all nodes need the same number; "
                "give every torchrun the same --nproc_per_node"
            )


def ends_quietly() -> bool:
    """Whether run/launcher.py started this rank and will say how the job ended, for it starts the
    ranks no more."""
    return LAUNCHER in os.environ and (
        os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    )


def record_error(error: BaseException) -> None:
    """Writes the error to the file that torchrun prints last, if there is one: a user's error
    without a traceback."""
    if ERROR_FILE in os.environ and isinstance(error, UserError):
        # what torchrun's own handler writes, but for the "py_callstack"
        report = {"message": {"message": str(error), "extraInfo": {"timestamp": int(time.time())}}}
        Path(os.environ[ERROR_FILE]).write_text(json.dumps(report))
    elif ERROR_FILE in os.environ:
        get_error_handler().record_exception(error)


def end_rank(message: str, *, torchrun: int | None = None) -> None:
    """Says why and ends this rank from any thread, while the main thread may wait in C++. Kills the
    process `torchrun`: without its store it ignores every other signal until the kernel gives up
    the connection, after 15 minutes."""
    try:
        with suppress(OSError):  # the screen may be on a lost host
            print(message, file=sys.stderr, flush=True)
        record_error(RuntimeError(message))
        if torchrun is not None and os.getppid() == torchrun:
            time.sleep(2)  # the other ranks of the host end by themselves
            os.kill(torchrun, signal.SIGKILL)
    finally:
        os._exit(1)
