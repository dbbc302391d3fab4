"""What the tests' processes see of the machine: no GPU, however they are started."""

import os
import subprocess
from pathlib import Path

import pytest
import suite
import torch
from devices import VISIBLE, choose
from ranks import run_ranks
from runs import Torchrun


def seen(*_: object) -> tuple[str | None, int]:
    return os.environ.get(VISIBLE), torch.cuda.device_count()


def said(*_: object) -> None:
    print(*seen(), sep=",")


def test_no_process_of_the_tests_sees_a_gpu(tmp_path: Path) -> None:
    """This one, a rank, a rank of torchrun's, a command."""
    assert [seen(), *run_ranks(1, seen)] == [("", 0)] * 2
    job = Torchrun(1, said, out=tmp_path / "said")
    assert (job.wait(100), job.said().split()[-1]) == (0, ",0")
    printed = subprocess.run(["printenv", VISIBLE], stdout=subprocess.PIPE, check=True).stdout
    assert printed == b"\n"


@pytest.mark.parametrize(
    ("markers", "visible"),
    [
        ("", ""),
        ("vllm and not gpu", ""),
        ("gpu", "3"),
        ("gpu and not gpus", "3"),
        ("gpus(count=2)", "3"),
    ],
)
def test_only_the_tests_of_gpus_see_them(
    markers: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "3")
    choose(markers)
    assert os.environ[VISIBLE] == visible


@pytest.mark.parametrize(
    ("visible", "workers", "orders"),
    [
        ("0,1,2,3", 2, ["0,1,2,3", "2,3,0,1"]),
        ("0,1,2", 3, ["0,1,2", "1,2,0", "2,0,1"]),
        ("GPU-a,GPU-b", 5, ["GPU-a,GPU-b", "GPU-b,GPU-a"] * 2),
        ("7", 2, ["7", "7"]),
        ("4,5,6", 1, ["4,5,6"]),
    ],
)
def test_each_worker_begins_with_another_gpu(
    visible: str, workers: int, orders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    for worker, order in enumerate(orders):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        monkeypatch.setenv(VISIBLE, visible)
        choose("gpu")
        assert os.environ[VISIBLE] == order


GIB = 2**30


@pytest.mark.parametrize(
    ("free", "cores", "workers"),
    [
        ([78], 16, [5, 1]),  # as many as the cores take
        ([78] * 2, 32, [10, 2, 1]),
        ([78, 30, 78, 78], 64, [8, 4, 2]),  # as many as the fullest GPU holds
        ([78] * 3, 4, [3, 3, 1]),
    ],
)
def test_as_many_tests_at_a_time_as_gpus_and_cores_hold(
    free: list[int], cores: int, workers: list[int]
) -> None:
    marks = ["gpu and not gpus", "gpus(count=1)", "gpus(count=2)"]
    parts = [*suite.parts([size * GIB for size in free], cores)]
    assert parts == [*zip(marks, workers, strict=False)]


@pytest.mark.parametrize(("statuses", "status"), [((0, 1, 5), 1), ((0, 5, 0), 0), ((2, 0, 1), 2)])
def test_the_suite_runs_each_part_and_ends_with_the_first_that_failed(
    statuses: tuple[int, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A part may be without tests, where arguments choose some."""
    commands = []
    remaining = iter(statuses)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, next(remaining))

    monkeypatch.setattr(suite, "free_bytes", lambda: [78 * GIB] * 2)
    monkeypatch.setattr(subprocess, "run", run)
    assert suite.main(["-k", "vllm"]) == status
    assert all(command[-2:] == ["-k", "vllm"] for command in commands)
    assert all(str(Path(__file__).parent / "gpu/test_gpu.py") in command for command in commands)
    assert not any(str(Path(__file__).parent / "test_algo.py") in command for command in commands)
    assert capsys.readouterr().out.count("minutes") == 4
