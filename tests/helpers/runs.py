"""Small runs, what they leave behind, and checkpoints that hold nothing."""

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts import enter
from ranks import START, fresh_process, run_ranks
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from splitppo import __main__ as tools
from splitppo import train
from splitppo.run import checkpoint

MARK = "SPLITPPO_TEST_JOB"  # variable by which the processes of a job are known
SMALL = (
    "--steps=4 --rollout.batch-size=12 --ppo.mini-batches=2 --log.validate-every=2 "
    "--ppo.kl-coef=0.01"
).split()


def main_rank(rank: int, argv: list[str]) -> int:
    status = train.main(argv)
    if status:
        raise RuntimeError(f"exit status {status}")
    return status


def in_one_process(folder: Path, *commands: Sequence[str]) -> list[tuple[int, str]]:
    """Exit status and screen of commands of one rank, one after the other, in a folder: flags of
    the trainer, or `splitppo` and its words."""
    return run_ranks(1, _run_all, str(folder), commands)[0]


def _run_all(_: int, folder: str, commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    del os.environ["RANK"]
    os.chdir(folder)
    return [run_command(argv) for argv in commands]


def run_command(argv: Sequence[str]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        if argv[0] == "splitppo":
            sys.argv = [*argv]
            status = tools.main()
        else:
            status = train.main(argv)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status, said.getvalue()


def records(run_dir: Path, role: str) -> list[dict]:
    return [
        json.loads(line)
        for line in (run_dir / "metrics" / f"{role}.jsonl").read_text().splitlines()
    ]


def figures(run_dir: Path, role: str) -> dict[int, dict]:
    """step -> what doesn't depend on the clock."""
    clock = ("time", "spans")
    return {
        record["step"]: {
            k: v
            for k, v in record.items()
            if k not in clock and not k.startswith(("timing_s", "perf"))
        }
        for record in records(run_dir, role)
    }


def once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]
) -> tuple[Path, Any]:
    """A folder that `make` fills, and the JSON that it returns, made by the first of the tests'
    workers that asks."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, found = base / name, base / f"{name}.json"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            folder.mkdir()
            found.write_text(json.dumps(make(folder)))
    return folder, json.loads(found.read_text())


class Torchrun:
    """A job as torchrun runs it: torch's elastic agent in a process of its own. All of it is
    forked, the ranks too, so that nothing is imported anew.

    Args:
        main: what each rank runs, with `args`; its ranks end with the status that it returns.
        out: where agent and ranks write.
        restarts: `--max-restarts`.
        rendezvous: torchrun's arguments of several nodes.
        host: a process whose host (hosts.py) this is on.
        env: environment variables beside this process's own.
        anew: torchrun and its ranks are started by their command lines after all; `args` are then
            those of splitppo.train.

    Attributes:
        pid: the agent's.
    """

    def __init__(
        self, ranks: int, main: Callable[..., int | None], *args: Any, out: Path, restarts: int = 0,
        rendezvous: Sequence[str] = (), host: int = 0, env: Mapping[str, str] | None = None,
        anew: bool = False,
    ) -> None:  # fmt: skip
        self.out, self.mark = out, uuid.uuid4().hex
        rendezvous = rendezvous or ("--rdzv_endpoint=127.0.0.1:0", f"--rdzv_id={self.mark}")
        line = [
            f"--nproc_per_node={ranks}",
            f"--max-restarts={restarts}",
            "--rdzv_backend=c10d",
            *rendezvous,
        ]
        env = {**os.environ, **(env or {}), MARK: self.mark}
        self._process = fresh_process(
            _agent, line, None if anew else main, args, str(out), host, env
        )
        self.pid = self._process.pid or 0

    @property
    def runs(self) -> bool:
        return self._process.exitcode is None

    def wait(self, limit: float) -> int:
        """The exit status; 124 if the job had to be killed."""
        self._process.join(limit)
        if self._process.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()
            return 124
        return self._process.exitcode

    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in ascending order."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.pid)], capture_output=True, text=True, check=False
        ).stdout
        return sorted(map(int, found.split()))

    def left(self) -> list[str]:
        """The job's processes that are still there."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes()
                session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
            except (OSError, ValueError, IndexError):
                continue
            if marked or session == self.pid:
                found.append(f"{path.name} {(path / 'cmdline').read_text()[:80]}")
        return found


def _agent(
    line: list[str],
    main: Callable[..., int | None] | None,
    args: tuple,
    out: str,
    host: int,
    env: dict[str, str],
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    # a test's may be others
    sys.stdout, sys.stderr = (os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1))
    if host:
        enter(host)
    if main is None:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *line,
            "-m",
            "splitppo.train",
            *args[0],
        ]
        os.execve(sys.executable, command, env)
    try:
        forking_torchrun(line, main, *args)
    except Exception as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def forking_torchrun(line: list[str], main: Callable[..., int | None], *args: Any) -> None:
    """torchrun with these arguments, but its ranks are forks of this process, which has imported
    what takes long."""
    config, *_ = config_from_args(parse_args([*line, "none"]))
    config.start_method = "fork" if START == "forkserver" else START
    elastic_launch(config, _forked_rank)(main, *args)


def _forked_rank(main: Callable[..., int | None], *args: Any) -> None:
    torch.set_num_threads(1)
    status = main(*args)
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)


def assert_same(got: dict[int, dict], due: dict[int, dict]) -> None:
    assert got.keys() == due.keys()
    for step, record in due.items():
        assert got[step].keys() == record.keys(), (
            f"step {step}: {sorted(got[step].keys() ^ record.keys())}"
        )
        for name, value in record.items():
            flat = (
                [value]
                if isinstance(value, float | int)
                else [v for figure in value for v in figure.values()]
            )
            seen = got[step][name]
            seen = (
                [seen]
                if isinstance(seen, float | int)
                else [v for figure in seen for v in figure.values()]
            )
            # explained variance is a ratio of variances, of a few tokens perhaps
            apart = 2e-4 if "explained" in name else 1e-5
            assert seen == pytest.approx(flat, rel=1e-4, abs=apart), f"step {step} {name}"


def made_up(run_dir: Path, step: int, roles: Sequence[str] = checkpoint.ROLES) -> Path:
    """A checkpoint that holds nothing."""
    for role in roles:
        part = checkpoint.step_folder(run_dir, step) / role
        part.mkdir(parents=True)
        for name in (".metadata", "__0_0.distcp", "state.json"):
            (part / name).write_text("{}")
        checkpoint.write_manifest(
            part, step, {path.name: checkpoint.measure(path) for path in part.iterdir()}
        )
    return checkpoint.step_folder(run_dir, step)


def names(run_dir: Path) -> list[str]:
    return [folder.name for folder in checkpoint.complete(run_dir)]
