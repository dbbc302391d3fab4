"""Faults: what clusters do to jobs, injected into whole runs (tests/faults.py), and numbers gone bad."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import faults
import pytest
import torch.distributed as dist
from ranks import run_ranks
from test_run import SMALL, assert_same, figures, main_rank, names, torchrun

from splitppo import algo, train
from splitppo.channel import WireError
from splitppo.job import signals as stopping
from splitppo.job.failure import GONE, report_failure
from splitppo.job.nodes import Launch
from splitppo.run import checkpoint
from splitppo.run.metrics import ColumnLog

INJECTIONS = faults.draw(25, seed=2584)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


def test_the_injections_are_of_every_kind_and_moment():
    assert {fault.kind for fault in INJECTIONS} == set(faults.KINDS)
    assert {fault.moment for fault in INJECTIONS} == set(faults.MOMENTS)
    assert {fault.placement for fault in INJECTIONS} == set(faults.PLACEMENTS)


@pytest.mark.parametrize("fault", INJECTIONS, ids=lambda fault: str(fault).replace(" ", "_"))
def test_a_job_ends_in_time_says_why_and_goes_on(folder, fault):
    wrong, _ = faults.trouble(fault, folder)
    assert not wrong, wrong


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_is_told_to_end_saves_its_step_and_goes_on(tmp_path, number):
    """A scheduler's SIGTERM goes to torchrun, which hands it on; SIGUSR1 goes to a rank, whose end torchrun takes for a
    failure: the next attempt must not go on."""
    run_dir = tmp_path / "run"
    argv = [*SMALL, "--steps=40", "--ppo.epochs=1", f"--run-dir={run_dir}"]
    process = torchrun(2, *argv, program=["--max-restarts=1", "-m", "splitppo.train"])
    lines = run_dir / "metrics" / "actor.jsonl"
    deadline = time.monotonic() + 200
    while not (lines.is_file() and len(lines.read_text().splitlines()) >= 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    if number == signal.SIGTERM:
        os.kill(process.pid, number)
    else:
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
        os.kill(int(ranks.split()[-1]), number)
    out, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert re.search(rf"stopped by {number.name} to rank \d: step_\d+ is saved", out), out
    assert ("not started anew" in out) == (number == signal.SIGUSR1)
    (saved,) = names(run_dir)
    step = int(saved.removeprefix("step_"))
    assert 3 <= step < 40
    left = subprocess.run(["pgrep", "-f", str(run_dir)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
    more = [*argv, f"--steps={step + 2}"]
    run_ranks(2, main_rank, more)
    whole = tmp_path / "whole"
    run_ranks(2, main_rank, [*more, f"--run-dir={whole}"])
    for role in ("actor", "critic"):
        ours, due = figures(run_dir, role), figures(whole, role)
        due = {k: {n: v for n, v in record.items() if not n.startswith("val/")} for k, record in due.items()}
        ours = {k: {n: v for n, v in record.items() if not n.startswith("val/")} for k, record in ours.items()}
        assert_same(ours, due)


def early_signal_rank(rank: int, argv: list[str]) -> int:
    stopping.note_early()  # as train.main does first of all
    os.kill(os.getpid(), signal.SIGUSR1)
    return train.main(argv)


def test_a_signal_that_comes_before_the_ranks_have_met_stops_the_run_after_a_step(tmp_path):
    run_dir = tmp_path / "run"
    argv = [*SMALL, "--steps=40", "--ppo.epochs=1", f"--run-dir={run_dir}"]
    assert run_ranks(1, early_signal_rank, argv) == [stopping.RESUMABLE]
    (saved,) = names(run_dir)
    assert int(saved.removeprefix("step_")) < 4


def test_a_rank_that_is_gone_is_told_with_the_last_good_checkpoint(monkeypatch, capsys):
    def leave(status: int) -> None:
        raise SystemExit(status)

    signals = object.__new__(stopping.StopSignals)
    good = Path("runs/mine/checkpoints/step_000002")
    told: Any = {"ask_to_stop": print, "over": False, "lost": lambda: "actor rank 1", "last_good": lambda: good}
    told["stopped"] = lambda: "actor rank 0 is stopped"
    signals.runtime = cast(Any, SimpleNamespace(**told))
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="1"):
        signals._hear(signal.SIGTERM)
    due = f"actor rank 1 {GONE}; actor rank 0 is stopped; the last good checkpoint is {good}\n"
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
def test_who_is_stopped_and_who_is_where_is_told_with_an_error_of_a_wait(capsys, error, phases, first):
    told: Any = {"lost": lambda: None, "stopped": lambda: "rank 1 is stopped", "phases": lambda: "rank 1 in 'update'"}
    told |= {"watch": SimpleNamespace(silent=lambda: None), "describe": lambda rank: f"rank {rank}"}

    def failed(_: BaseException) -> bool:
        told["stopped"] = lambda: pytest.fail("asked when the stopped ranks go on already")
        return first

    runtime = cast(Any, SimpleNamespace(**told, failed=failed))
    assert report_failure(error, runtime, Launch(rank=0, world=2)) == 1
    said = capsys.readouterr().err
    assert "rank 1 is stopped" in said
    assert ("on rank 0" in said) == first
    assert ("a rank did not come: rank 1 in 'update'" in said) == phases
    assert said.count("\n") == 1 or first


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
    records = [json.loads(line) for line in (tmp_path / "run/metrics/critic.jsonl").read_text().splitlines()]
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
    return train.main([*SMALL, f"--run-dir={folder}", "--checkpoint.every=1", "--checkpoint.keep=0"])


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
    argv = [*SMALL, "--steps=90", "--ppo.epochs=1", f"--run-dir={folder}", "--checkpoint.every=5"]
    assert train.main([*argv, "--log.validate-every=0"]) == 0
    return seen


def test_a_long_run_takes_no_more_than_a_short_one(tmp_path):
    """File handles, threads and memory of a rank, the disk's part of a run."""

    (seen,) = run_ranks(1, long_run_rank, tmp_path / "run")
    early, late = seen[20:40], seen[-20:]
    for i, name in enumerate(("file handles", "threads")):
        # a thread that writes comes and goes
        assert min(step[i] for step in late) <= max(step[i] for step in early), name
    assert min(step[2] for step in late) < 1.02 * max(step[2] for step in early)
    assert max(step[3] for step in seen) <= 4  # two that are kept, one before it is removed, one being written
