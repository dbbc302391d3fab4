"""What the tests' processes see of the machine: no GPU, however they are started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
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
    asks = (
        "import os, torch; print(os.environ['CUDA_VISIBLE_DEVICES'], torch.cuda.device_count(), "
        "sep=',')"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        == ",0\n"
    )


@pytest.mark.parametrize(
    ("markers", "visible"),
    [("", ""), ("vllm and not gpu", ""), ("gpu", "3"), ("gpu and not vllm", "3")],
)
def test_only_the_tests_of_gpus_see_them(
    markers: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "3")
    choose(markers)
    assert os.environ[VISIBLE] == visible
