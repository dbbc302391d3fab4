"""A requested stop: all ranks end with the same step, also where no row makes one of them wait for
another."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from runs import names

from splitppo import train
from splitppo.config import PlacementConfig
from splitppo.config.cli import parse
from splitppo.job import status
from splitppo.job.nodes import Peer
from splitppo.job.status import Status
from splitppo.job.wire import WireError
from splitppo.placement import place
from splitppo.run.life import STOPPED, Run

DELAY = 0.3  # seconds by which rank 0 is late


def statuses(timeout: float = 20.0) -> list[Status]:
    """Of an actor rank and a critic rank on one store."""
    store, peers = dist.HashStore(), [Peer.of_this_process(torch.device("cpu"))] * 2
    placement = place(PlacementConfig(actor=1), world=2, local_world=2)
    return [Status(store, rank, peers, placement, timeout) for rank in range(2)]


def test_no_rank_ends_a_step_before_rank_0_has_said_whether_it_is_the_last():
    """Steps without rows: nothing but the answer makes the critic rank wait for the actor rank, or
    the other way."""
    both, saved, asked = statuses(), {"actor": [], "critic": []}, threading.Event()
    job = dist.HashStore()

    def play(role: Any, status: Status) -> None:
        run: Any = object.__new__(Run)
        run.config, run.start, run.stopped = parse(["--steps=5"]), 1, None
        run.runtime = SimpleNamespace(status=status, job=job)
        run.savers = {role: SimpleNamespace(begin=lambda step, _: saved[role].append(step))}
        for step in run.steps():
            if role == "actor":
                assert step < 3 or asked.wait(20)
                time.sleep(DELAY)
                status.answer_stop(step)
            elif step == 3:
                status.request_stop("SIGTERM")
                asked.set()
            run.save(role, step, SimpleNamespace(state=dict))
        saved[role].append(run.stopped)

    threads = [threading.Thread(target=play, args=pair) for pair in zip(saved, both, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    due = [3, "SIGTERM to rank 1"]
    assert saved == {"actor": due, "critic": due}
    assert job.check([STOPPED])


def test_the_validation_that_comes_to_the_goal_is_of_the_last_step_on_every_rank():
    """The critic rank is early, in steps with a validation and in others."""
    both, saved = statuses(), {"actor": [], "critic": []}

    def play(role: Any, status: Status) -> None:
        run: Any = object.__new__(Run)
        run.config = parse(["--steps=9", "--log.validate-every=2", "--log.stop-at=0.5"])
        run.start, run.stopped = 0, None
        run.runtime = SimpleNamespace(
            status=status, job=dist.HashStore(), launch=SimpleNamespace(rank=status.rank)
        )
        run.savers = {role: SimpleNamespace(begin=lambda step, _: saved[role].append(step))}
        for step in run.steps():
            if role == "actor":
                run.answer_stop(step)
                time.sleep(DELAY / 3)
                run.answer_stop(step, {"val/score/mean": step / 8} if step % 2 == 0 else {})
            run.save(role, step, SimpleNamespace(state=dict))
        saved[role].append(run.stopped)

    threads = [threading.Thread(target=play, args=pair) for pair in zip(saved, both, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert saved == {"actor": [4, None], "critic": [4, None]}


def test_restarted_ranks_go_on_if_the_step_that_was_to_be_the_last_has_not_ended():
    actor, critic = statuses()
    critic.request_stop("SIGTERM")
    actor.answer_stop(3)
    assert critic.stopped_by(3)


@pytest.mark.parametrize(("ranks", "pause"), [(2, 0.01), (4096, 0.4096)])
def test_many_ranks_ask_for_the_answer_less_often(ranks, pause, monkeypatch):
    actor, critic = statuses()
    critic.peers = critic.peers[:1] * ranks
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        actor.answer_stop(1)

    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert critic.stopped_by(1) is None
    assert pauses == [pytest.approx(pause)]


def test_a_wait_for_an_answer_that_does_not_come_names_the_rank():
    with pytest.raises(
        WireError,
        match=r"step 1: critic rank 1 .* waited 0.02 s until actor rank 0 .*raise --timeout",
    ):
        statuses(timeout=0.02)[1].stopped_by(1)


def late_answer_rank(rank: int, argv: list[str]) -> int:
    """The signal comes in step 2, in which no row ends, and rank 0 is late with its answer."""
    answer = Status.answer_stop

    def late(self: Status, step: int, why: str) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(DELAY)
        answer(self, step, why)

    cast(Any, Status).answer_stop = late
    return train.main(argv)


def test_a_run_that_stops_in_a_step_without_rows_saves_one_checkpoint(tmp_path: Path):
    (tmp_path / "lengths").write_text("9")
    argv = [
        "--rollout.window=2",
        f"--rollout.lengths={tmp_path / 'lengths'}",
        "--rollout.batch-size=2",
    ]
    argv += (
        "--rollout.max-new-tokens=9 --ppo.mini-batches=1 --log.validate-every=0 --placement.actor=1"
    ).split()
    argv += ["--steps=9", "--timeout=20", f"--run-dir={tmp_path / 'run'}"]
    assert run_ranks(2, late_answer_rank, argv) == [75, 75]
    assert names(tmp_path / "run") == ["step_000002"]
