"""`splitppo train --nproc_per_node 2` on a terminal: what its screen shows when a run ends early,
and how it ends."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from runs import names
from terminal import Terminal
from torch.distributed.run import get_args_parser

from splitppo.__main__ import main
from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.config.toml import leaves
from splitppo.errors import UserError
from splitppo.job.ends import RESUMABLE
from splitppo.run.launcher import FLAGS, split
from splitppo.run.life import Run
from splitppo.run.metrics import ColumnLog
from splitppo.run.screen import PAUSE

TRAIN = "train --nproc_per_node 2 --reward.workers=1 --ppo.epochs=1 --log.validate-every=0".split()
TRAIN += ["--checkpoint.every=1"]
NOISE = (
    "FAILED|ChildFailed|SignalException|closing signal|OMP_NUM|elastic|rank . stops|died without"
)


def test_torchruns_flags_are_none_of_the_trainers() -> None:
    own = {f"--{name}".replace("_", "-") for name, _ in leaves(asdict(Config()))}
    assert "--nodes" in own
    assert not own & set(FLAGS)
    # torch 2.11 lacks one
    assert set(FLAGS) - {"--shutdown-timeout"} <= set(get_args_parser()._option_string_actions)
    line = "--nproc-per-node=8 --steps 3 --rdzv_endpoint a:1 --nodes 2 --standalone --nproc".split()
    flags = ["--nproc-per-node=8", "--rdzv_endpoint=a:1", "--standalone"]
    assert split(line) == (flags, ["--steps", "3", "--nodes", "2", "--nproc"])
    for short in ("--step=3", "--node=2", "--nproc_per_node=2"):
        with pytest.raises(UserError):
            parse([short])


def in_step_3(do: Callable[[], Any]) -> None:
    """Makes the critic's rank call `do` in its third step, in the job's first start."""
    finish = ColumnLog.finish

    def finishing(self: ColumnLog, step: int, metrics: Any) -> None:
        finish(self, step, metrics)
        if (self.role, step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("critic", 3, "0"):
            do()

    ColumnLog.finish = finishing


def fail() -> None:
    raise RuntimeError("injected")


def failing() -> None:
    """The actor ends the step right after the critic's cause is on the screen."""
    in_step_3(fail)
    finish = Run.finish

    def late(self: Run, role: Any, step: int, metrics: dict[str, Any]) -> None:
        if (role, step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("actor", 3, "0"):
            while not self.runtime.status.has_failure():
                time.sleep(0.01)
            time.sleep(0.05)
            cast(Any, self.logs["actor"].screen).since = PAUSE  # a line is due
        finish(self, role, step, metrics)

    Run.finish = late


def killed() -> None:
    in_step_3(lambda: os.kill(os.getpid(), signal.SIGKILL))


def after_the_steps(terminal: Terminal) -> list[str]:
    lines = terminal.lines()
    last = max(
        i for i, line in enumerate(lines) if re.search(r"\] +(step +\d+/|question |answer )", line)
    )
    return lines[last + 1 :]


def test_after_a_crash_the_cause_is_last(tmp_path: Path) -> None:
    terminal = Terminal([*TRAIN, "--run-dir=run", "--steps=9"], folder=tmp_path, before=failing)
    assert terminal.wait() == 1
    found = "\n".join(after_the_steps(terminal))
    assert not re.search(NOISE, terminal.said), terminal.said
    assert found.count("Traceback") == 1
    last = (
        r"RuntimeError: injected\nthe last good checkpoint is run/checkpoints/step_000002\non "
        r"critic rank 1 on \S+ .*"
    )
    assert re.search(f"{last}$", found), found


def test_a_killed_rank_is_a_line(tmp_path: Path) -> None:
    terminal = Terminal(
        [*TRAIN, "--run-dir=run", "--steps=9"], folder=tmp_path, before=killed, width=300
    )
    assert terminal.wait() == 1
    (line,) = after_the_steps(terminal)
    why = f"rank 1 on {os.uname().nodename} was killed by SIGKILL, perhaps because memory ran out"
    saved = "run/checkpoints/step_000002 is saved; the same command with --run-dir run resumes"
    assert line == f"{why}; {saved}"


def test_ctrl_c_ends_the_step_and_says_how_to_go_on(tmp_path: Path) -> None:
    words = [*TRAIN, "--steps=10000", "--run-dir=run", "--checkpoint.every=0"]
    terminal = Terminal(words, folder=tmp_path, width=300)
    terminal.until("step +([3-9]|[1-9][0-9]+)/")  # steps soon after another print no line
    assert not names(tmp_path / "run")
    terminal.type(b"\x03")
    assert terminal.wait() == RESUMABLE, terminal.said
    (saved,) = names(tmp_path / "run")
    assert terminal.said.count("interrupted: finishing and saving this step") == 1
    how = f"stopped by SIGINT to rank [01]: {saved} is saved; the same command with --run-dir run"
    assert re.search(how, terminal.said), terminal.said
    assert not re.search(f"Traceback|{NOISE}", terminal.said), terminal.said


def slow() -> None:
    """The critic's third step takes longer than the test."""
    in_step_3(lambda: print("asleep", flush=True) or time.sleep(60))


@pytest.mark.wide
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    terminal = Terminal([*TRAIN, "--steps=10000"], folder=tmp_path, before=slow, width=300)
    terminal.until("asleep")
    terminal.type(b"\x03")
    terminal.until("Ctrl-C again ends the run now")
    terminal.type(b"\x03")
    assert terminal.wait() == 130
    (run,) = (tmp_path / "runs").iterdir()
    state = (
        f"{run}/checkpoints/{names(run)[-1]} is saved; the same command with --run-dir {run} "
        f"resumes"
    )
    state = state.replace(f"{tmp_path}/", "")
    assert terminal.lines()[-1] == f"interrupted; {state}"
    assert not re.search(f"Traceback|{NOISE}", terminal.said), terminal.said


@pytest.mark.wide
def test_after_sigterm_the_status_says_that_the_run_can_go_on(tmp_path: Path) -> None:
    terminal = Terminal([*TRAIN, "--run-dir=run", "--steps=10000"], folder=tmp_path)
    terminal.until("step +1/")
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.wait() == RESUMABLE
    assert "stopped by SIGTERM to rank" in "".join(terminal.lines()[-2:])
    assert not re.search(f"Traceback|{NOISE}", terminal.said), terminal.said


@pytest.mark.wide
def test_a_job_that_may_start_again_does(tmp_path: Path) -> None:
    line = [*TRAIN, "--max-restarts", "1", "--run-dir=run", "--steps=4"]
    terminal = Terminal(line, folder=tmp_path, before=failing)
    assert terminal.wait() == 0
    assert "RuntimeError: injected" in terminal.said
    assert re.search("step +4/4 ", terminal.said)
    assert names(tmp_path / "run")[-1] == "step_000004"


def test_a_dry_run_on_two_ranks_is_printed_once(tmp_path: Path) -> None:
    terminal = Terminal([*TRAIN, "--dry-run"], folder=tmp_path)
    assert terminal.wait() == 0
    assert terminal.said.count("resolved: ") == 1
    assert "1 actor, 1 critic" in terminal.said


def children(pid: int) -> list[str]:
    return subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()


def imports_torch(pid: str) -> bool:
    maps = Path(f"/proc/{pid}/maps")
    return maps.exists() and "libtorch" in maps.read_text()


@pytest.mark.wide
def test_ranks_that_are_new_interpreters_are_as_quiet(tmp_path: Path) -> None:
    terminal = Terminal([*TRAIN, "--policy.path=./mine"], folder=tmp_path, anew=True)
    assert terminal.wait() == 2
    assert terminal.lines()[0].startswith("error: policy.path=./mine: no such folder")
    assert len(terminal.lines()) == 2
    terminal = Terminal(TRAIN, folder=tmp_path, anew=True)
    while sum(map(imports_torch, children(terminal.process.pid))) < 2:
        assert terminal.process.exitcode is None
        time.sleep(0.02)
    terminal.type(b"\x03")
    assert terminal.wait() == 130
    assert terminal.lines() == ["interrupted; nothing is saved"]


def test_a_script_alone_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun's flags; the trainer's alone run in this process."""
    launched: list[Any] = []
    monkeypatch.setattr("splitppo.run.launcher.launch", lambda *words: launched.append(words))
    monkeypatch.setattr("sys.argv", ["splitppo", "train", "mine.py", "--steps", "3"])
    assert main() == 0
    assert launched == [([], ["mine.py", "--steps", "3"])]
