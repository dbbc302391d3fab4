"""Faults: what clusters do to jobs, injected into whole runs (tests/helpers/faults.py), and numbers
gone bad."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import faults
import pytest
import torch.distributed as dist
from ranks import run_ranks
from runs import SMALL, Torchrun, names
from tiers import wide
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from splitppo import algo, train
from splitppo.errors import UserError
from splitppo.job import ends
from splitppo.job.ends import DIED, causes_of, report_failure
from splitppo.job.launch import ERROR_FILE, Launch, record_error
from splitppo.job.wire import WireError
from splitppo.run import checkpoint
from splitppo.run.metrics import ColumnLog

# of all kinds, moments and placements; neighbours share the run that they are compared with
INJECTIONS = sorted(faults.draw(11, seed=485969), key=lambda fault: fault.placement)


# in the suite; the others are wide
TAKEN = ("2+1 with windows rank 2",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


def test_the_injections_are_of_every_kind_and_moment():
    assert {fault.kind for fault in INJECTIONS} == set(faults.KINDS)
    assert {fault.moment for fault in INJECTIONS} == set(faults.MOMENTS)
    assert {fault.placement for fault in INJECTIONS} == set(faults.PLACEMENTS) - {"2+1 all"}


@pytest.mark.parametrize(
    "fault",
    [fault if str(fault).startswith(TAKEN) else wide(fault) for fault in INJECTIONS],
    ids=lambda fault: str(fault).replace(" ", "_"),
)
def test_a_job_ends_in_time_says_why_and_goes_on(folder, fault):
    wrong, _ = faults.trouble(fault, folder)
    assert not wrong, wrong


@pytest.mark.wide
@pytest.mark.parametrize("fault", faults.draw(2, 1, ["2+1 all"], ["kill"]), ids=str)
def test_a_kill_of_a_job_with_experts_environments_adapters_cut_rows_and_windows(folder, fault):
    with faults.reading(folder):
        wrong, _ = faults.trouble(fault, folder)
    (folder / "done").unlink()
    assert not wrong, wrong


@pytest.mark.parametrize("number", [signal.SIGTERM, wide(signal.SIGUSR1), wide(signal.SIGINT)])
def test_a_job_that_is_asked_to_end_saves_its_step(tmp_path, number):
    """A scheduler's SIGTERM and a Ctrl-C go to torchrun, which hands them on; SIGUSR1 goes to a
    rank, whose end torchrun takes for a failure: the restarted ranks must not go on."""
    run_dir = tmp_path / "run"
    argv = [
        *SMALL,
        "--steps=40",
        "--ppo.epochs=1",
        "--log.validate-every=0",
        f"--run-dir={run_dir}",
    ]
    job = Torchrun(2, train.main, argv, out=tmp_path / "out", restarts=1)
    lines = run_dir / "metrics" / "actor.jsonl"
    deadline = time.monotonic() + 200
    while (
        not (lines.is_file() and len(lines.read_text().splitlines()) >= 3)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    os.kill(job.ranks()[-1] if number == signal.SIGUSR1 else job.pid, number)
    assert job.wait(200) not in (0, 124)
    assert re.search(rf"stopped by {number.name} to rank \d: step_\d+ is saved", job.said()), (
        job.said()
    )
    assert ("a stop was requested before this restart" in job.said()) == (number == signal.SIGUSR1)
    (saved,) = names(run_dir)
    step = int(saved.removeprefix("step_"))
    assert 3 <= step < 40
    assert not job.left()


def early_signal_rank(rank: int, argv: list[str]) -> int:
    ends.keep_early_signals()  # as train.main does first of all
    os.kill(os.getpid(), signal.SIGUSR1)
    return train.main(argv)


def test_a_signal_that_comes_before_the_ranks_have_joined_stops_the_run_after_a_step(tmp_path):
    run_dir = tmp_path / "run"
    argv = [*SMALL, "--steps=40", "--ppo.epochs=1", f"--run-dir={run_dir}"]
    assert run_ranks(1, early_signal_rank, argv) == [ends.RESUMABLE]
    (saved,) = names(run_dir)
    assert int(saved.removeprefix("step_")) < 4


def test_a_dead_rank_is_reported_with_the_last_good_checkpoint(monkeypatch, capsys):
    """It is no request to stop, after which restarted ranks would not go on."""

    def leave(status: int) -> None:
        raise SystemExit(status)

    signals = object.__new__(ends.StopSignals)
    good = Path("runs/mine/checkpoints/step_000002")
    status: Any = {
        "dead_rank": lambda: "actor rank 1",
        "suspended_ranks": lambda: "actor rank 0 is suspended",
    }
    runtime: Any = {"status": SimpleNamespace(**status, request_stop=pytest.fail)}
    runtime |= {"work_done": threading.Event(), "last_checkpoint": lambda: good}
    signals.runtime = cast(Any, SimpleNamespace(**runtime))
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="1"):
        signals._handle(signal.SIGTERM)
    due = f"actor rank 1 {DIED}; actor rank 0 is suspended; the last good checkpoint is {good}\n"
    assert capsys.readouterr().err == due


@pytest.mark.parametrize(
    ("error", "phases"),
    [
        (WireError("step 2 rollouts: rank 0 waited 5 s"), True),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), True),
        (RuntimeError("Connection closed by peer [::1]:5"), True),
        (dist.DistBackendError("NCCL error"), True),
        (ValueError("its own"), False),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_an_error_of_a_wait_names_the_suspended_ranks_and_all_phases(capsys, error, phases, first):
    status = SimpleNamespace(dead_rank=lambda: None, phases=lambda: "rank 1 in 'update'")
    status.suspended_ranks, status.describe = (
        lambda: "rank 1 is suspended",
        lambda rank: f"rank {rank}",
    )

    def failed() -> bool:
        status.suspended_ranks = lambda: pytest.fail("asked after the suspended ranks were resumed")
        return first

    status.report_failure = failed
    runtime = cast(
        Any, SimpleNamespace(status=status, heartbeat=SimpleNamespace(lost_host=lambda: None))
    )
    assert report_failure(error, runtime, Launch(rank=0, world=2)) == 1
    said = capsys.readouterr().err
    assert "rank 1 is suspended" in said
    assert ("on rank 0" in said) == first
    assert ("a rank did not reach a collective: rank 1 in 'update'" in said) == phases
    assert said.count("\n") == 1 or first


def test_a_killed_rank_is_named_although_its_connections_close_before_it_ends():
    states = iter([None, None, "critic rank 1"])
    status = SimpleNamespace(dead_rank=lambda: next(states), phases=str, suspended_ranks=str)
    runtime = cast(
        Any, SimpleNamespace(status=status, heartbeat=SimpleNamespace(lost_host=lambda: None))
    )
    assert (
        causes_of(RuntimeError("Connection closed by peer [::1]:5"), runtime)[0]
        == f"critic rank 1 {DIED}"
    )


def test_the_error_that_follows_from_a_killed_rank_is_a_line(capsys):
    status = SimpleNamespace(dead_rank=lambda: "critic rank 1", report_failure=lambda: True)
    status.phases, status.suspended_ranks = str, str
    runtime = cast(
        Any, SimpleNamespace(status=status, heartbeat=SimpleNamespace(lost_host=lambda: None))
    )
    error = RuntimeError("Connection closed by peer [::1]:5")
    error.add_note("the last good checkpoint is RUN")
    assert report_failure(error, runtime, Launch(rank=0, world=2)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"critic rank 1 {DIED}; " in line
    assert "; the last good checkpoint is RUN)" in line


def test_torchrun_shows_the_users_error_in_its_own_form(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(file))
    record_error(UserError("steps=0 must be at least 1"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert isinstance(failure.message, dict)  # torchrun warns of any other
    assert "traceback : steps=0 must be at least 1\n" in str(
        ChildFailedError("ranks", {0: failure})
    )


def bad_gradients_rank(rank: int, folder: Path) -> int:
    loss = algo.value_loss
    calls = []

    def bad(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        value, metrics = loss(*args, **kwargs)
        return (value if len(calls) <= 2 else value * float("nan")), metrics

    algo.value_loss = bad
    argv = [*SMALL, "--steps=9", "--ppo.epochs=1", f"--run-dir={folder}", "--checkpoint.every=1"]
    return train.main(argv)


def test_gradients_that_stay_bad_end_the_run_with_the_last_good_checkpoint(tmp_path, capfd):
    assert run_ranks(1, bad_gradients_rank, tmp_path / "run") == [2]
    said = capfd.readouterr()
    assert "no gradient of the critic's last 3 steps was finite" in said.err
    assert "the last good checkpoint is" in said.err
    records = [
        json.loads(line)
        for line in (tmp_path / "run/metrics/critic.jsonl").read_text().splitlines()
    ]
    assert [record["critic/skipped"] for record in records] == [0, 2, 2, 2]


def bad_weights_rank(rank: int, folder: Path) -> int:
    finish = ColumnLog.finish

    def spoiling(self: ColumnLog, step: int, metrics: Any) -> None:
        if step == 2 and self.role == "actor":
            next(iter(learners[0].sharded().values())).data.fill_(float("inf"))
        finish(self, step, metrics)

    learners: list[Any] = []
    made = faults.Learner.__init__
    faults.Learner.__init__ = lambda self, *a, **k: (made(self, *a, **k), learners.append(self))[0]
    ColumnLog.finish = spoiling
    return train.main(
        [*SMALL, f"--run-dir={folder}", "--checkpoint.every=1", "--checkpoint.keep=0"]
    )


def test_bad_weights_are_neither_saved_nor_given_to_the_engine(tmp_path, capfd):
    assert run_ranks(1, bad_weights_rank, tmp_path / "run") == [2]
    told = capfd.readouterr().err
    assert "\nerror: weights are not finite: 1 tensors" in f"\n{told}"
    assert "; on actor+critic rank 0" in told
    assert "Traceback" not in told
    assert names(tmp_path / "run") == ["step_000001", "step_000002"]
    assert not any(checkpoint.damage(folder) for folder in checkpoint.complete(tmp_path / "run"))


def long_run_rank(rank: int, folder: Path) -> list[tuple[int, int, int, int]]:
    seen, finish, checkpoints = [], ColumnLog.finish, folder / "checkpoints"

    def noting(self: ColumnLog, step: int, metrics: Any) -> None:
        finish(self, step, metrics)
        if self.role == "critic":
            memory = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            threads = len(list(Path("/proc/self/task").iterdir()))
            handles = len(list(Path("/proc/self/fd").iterdir()))
            seen.append((handles, threads, memory, len(list(checkpoints.glob("step_*")))))

    ColumnLog.finish = noting
    argv = [*SMALL, "--steps=30", "--ppo.epochs=1", f"--run-dir={folder}", "--checkpoint.every=5"]
    assert train.main([*argv, "--log.validate-every=0"]) == 0
    return seen


@pytest.mark.wide
def test_a_long_run_takes_no_more_than_a_short_one(tmp_path):
    """File handles, threads and memory of a rank, the disk's part of a run."""

    (seen,) = run_ranks(1, long_run_rank, tmp_path / "run")
    early, late = seen[10:20], seen[-10:]
    for i, name in enumerate(("file handles", "threads")):
        # a thread that writes comes and goes
        assert min(step[i] for step in late) <= max(step[i] for step in early), name
    assert min(step[2] for step in late) < 1.02 * max(step[2] for step in early)
    # two that are kept, one before it is removed, one being written
    assert max(step[3] for step in seen) <= 4
