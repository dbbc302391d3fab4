"""How a run starts: `run()` of a user's script or of a notebook's cell; and `splitppo train
--nproc_per_node N ...`, torchrun in this process, with a screen that shows what a person needs."""

import importlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from splitppo.config import Config, cli, rules
from splitppo.errors import UserError, one_line, say
from splitppo.job.child import kill_with_parent
from splitppo.rewards.functions import RewardFunction, name_function
from splitppo.workers import IMPORTED

# torchrun's flags that make sense here; an underscore may stand for a dash
FLAGS = (
    *("--standalone", "--nproc-per-node", "--nnodes", "--node-rank", "--numa-binding", "--role"),
    *("--master-addr", "--master-port", "--local-addr", "--max-restarts", "--monitor-interval"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    *("--log-dir", "--redirects", "--tee", "--local-ranks-filter"),
    *("--signals-to-handle", "--shutdown-timeout"),
)
# SIGINT ends a rank in its imports, too: they take seconds, and each rank would show a traceback
START = "import os, runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
RANK = f"{START} runpy.run_module('splitppo.train', run_name='__main__')"
SCRIPT = (  # as `python FILE` does
    f"{START} sys.argv.pop(0); sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]));"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
CAUSE = r"error: |[\w.]+(Error|Exception)\b"  # how the line of a cause begins


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """torchrun's flags of a command line, each with its value in one word; and the trainer's
    flags."""
    flags: list[str] = []
    trainer_flags: list[str] = []
    words = iter(argv)
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in FLAGS and name != "--standalone" and "=" not in word:
            word += f"={next(words, '')}"
        (flags if name in FLAGS else trainer_flags).append(word)
    return flags, trainer_flags


def launch(flags: Sequence[str], argv: Sequence[str]) -> int:
    """Trains with the trainer's flags `argv`, or a script and its flags, on the ranks that
    torchrun's `flags` describe. Returns 0, or the exit status of the rank that caused the end: 2,
    75 or 130 as `run_rank` returns them, else 1. Raises UserError for wrong flags, but those of a
    script, before a rank starts."""
    code = SCRIPT if script_of(argv) else RANK
    run_dir = None
    if code == RANK:
        config = cli.parse(argv)
        rules.check(config)
        run_dir = config.run_dir
    elif not Path(argv[0]).is_file():
        raise UserError(f"{argv[0]}: no such script (from {Path.cwd()}); name a file")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read when torch is imported
    from torch.distributed import run as torchrun  # takes seconds
    from torch.distributed.elastic.multiprocessing import SignalException, errors

    from splitppo.job.ends import RESUMABLE
    from splitppo.job.launch import LAUNCHER

    logging.disable()  # torchrun's messages; the ranks are other processes
    parser = torchrun.get_args_parser()
    parser.exit_on_error = False
    with tempfile.TemporaryDirectory(prefix="splitppo_") as temporary:
        run = Path(temporary, "folder")
        run.write_text(run_dir or "")
        os.environ[LAUNCHER] = str(run)
        os.environ.setdefault("SPLITPPO_STOPPED", f"{temporary}/saved")
        handled = "--signals-to-handle=SIGTERM,SIGHUP,SIGQUIT"
        signal.signal(signal.SIGINT, _interrupt)
        try:
            words = [handled, *flags, "--no-python", sys.executable, "-u", "-c", code, *argv]
            torchrun.run(parser.parse_args(words))
            return 0
        except errors.ChildFailedError as error:
            rank, failure = error.get_first_failure()
            status = failure.exitcode
            if status in (2, RESUMABLE) or (status == 1 and Path(failure.error_file).exists()):
                return status  # the rank has said why
            who = f"rank {rank} on {os.uname().nodename}"
        except SignalException as error:
            status = -error.sigval
            who = "the job"
        except Exception as error:
            cause = error.__cause__ if "See inner exception" in str(error) else error
            problem = one_line(str(cause).partition("\n")[0]).rstrip(".")
            raise UserError(
                f"{' '.join(flags)}: {problem or 'numbers must be above 0'}; see torchrun --help"
            ) from error
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C
        if status < 0 and Path(os.environ["SPLITPPO_STOPPED"]).exists():
            return RESUMABLE
        say(f"{_what(status, who)}; {_state(run.read_text())}", error=True)
    return 130 if status == -signal.SIGINT else 1


def run(
    config: Config, reward: RewardFunction | None = None, argv: Sequence[str] | None = None
) -> None:
    """Trains from a user's script, as `-m splitppo.train` does, and ends the process with the run's
    exit status. In a notebook cell it starts the ranks as processes, prints their output, and
    returns when the run has ended.

    Reward workers import the script, so call this under `if __name__ == "__main__":`.

    Args:
        config: Settings. Flags of the command line override those that differ from the defaults;
            these override a preset (`--config`, or `config.config`).
        reward: The function that scores a row, in place of `reward.function`. It is defined at the
            top level of its file or cell.
        argv: The command line's flags. None: those that the script was started with, or in a cell
            none. In a cell they may include torchrun's: `["--nproc_per_node", "2"]`.

    Raises:
        RuntimeError: if the script is imported as the file of a reward. Other errors are printed,
            as on a command line.
        UserError: in a cell, with the cause of a failure.
    """
    frames = traceback.walk_stack(sys._getframe())
    if any(frame.f_globals.get("__name__", "").startswith(IMPORTED) for frame, _ in frames):
        raise RuntimeError(
            'run() starts when its file is imported; write if __name__ == "__main__": before it'
        )

    def flags() -> list[str]:
        function = [] if reward is None else ["--reward.function", name_function(reward)]
        typed = [] if in_cell() else sys.argv[1:]
        return cli.as_flags(config, *function, arguments=typed if argv is None else argv)

    if in_cell():
        launch_from_cell(flags())
        return
    from splitppo.run.main import run_rank  # with torch, which takes seconds to import

    # under torchrun at once, as at the end of train.py; alone as any script
    leave = os._exit if "RANK" in os.environ else sys.exit
    leave(run_rank(importlib.import_module("splitppo.train").train, flags))


def in_cell() -> bool:
    """Whether this process is no rank and runs no file: a notebook, or a Python prompt."""
    return "RANK" not in os.environ and not hasattr(sys.modules["__main__"], "__file__")


def launch_from_cell(flags: Sequence[str]) -> None:
    """Trains as `splitppo train` does with these flags, of the trainer and of torchrun, and prints
    its lines; without `--nproc_per_node` on one rank for each GPU, or on one. It ends with this
    process. An interrupt is handed on as Ctrl-C. Raises UserError with the cause of a failure, and
    KeyboardInterrupt if the cell was interrupted."""
    from torch.cuda import device_count

    interrupted = False
    said: list[str] = []
    ranks = f"--nproc-per-node={device_count() or 1}"
    with subprocess.Popen(
        [sys.executable, "-m", "splitppo", "train", "--standalone", ranks, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Jupyter interrupts all processes of the kernel's group
        preexec_fn=lambda: kill_with_parent(signal.SIGTERM),
    ) as launcher:
        lines = iter(cast(IO[str], launcher.stdout).readline, "")
        while launcher.returncode is None:
            try:
                for line in lines:
                    print(line, end="")
                    said.append(line)
                launcher.wait()
            except KeyboardInterrupt:
                interrupted = True
                launcher.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    if launcher.returncode:
        cause = max((i for i, line in enumerate(said) if re.match(CAUSE, line)), default=-1)
        raise UserError("".join(said[cause:]).removeprefix("error: ").strip())


def script_of(argv: Sequence[str]) -> Sequence[str]:
    """The user's script with which the words for the ranks begin, if they do."""
    return [word for word in argv[:1] if word.endswith(".py") and not word.startswith("-")]


def _interrupt(*_: object) -> None:
    """Hands the first Ctrl-C on to the ranks, which a terminal does not reach: they end after their
    step. With the second one torchrun ends them."""
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGTERM))  # torchrun's
    ranks = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for rank in ranks:
        os.kill(int(rank), signal.SIGINT)
    if not ranks:
        raise KeyboardInterrupt


def _what(status: int, who: str) -> str:
    if status > 0:
        return (
            f"{who} ended with exit status {status}: "
            "another rank failed, or it died without an error message"
        )
    if status == -signal.SIGINT:
        return "interrupted"
    why = ", perhaps because memory ran out" * (status == -signal.SIGKILL)
    return f"{who} was killed by {signal.Signals(-status).name}{why}"


def _state(run: str) -> str:
    """What is saved in a run's folder ("": it has none yet), and how to go on."""
    from splitppo.run.checkpoint import complete

    if saved := complete(Path(run)) if run else []:
        return f"{saved[-1]} is saved; the same command with --run-dir {run} resumes"
    return "nothing is saved"
