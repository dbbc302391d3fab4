"""The tests for GPUs on all GPUs of this machine, as many at a time as fit.

    python tests/gpu/suite.py [pytest's arguments]

First those that share GPUs, then those that need a whole one, then those that need two (the mark
`gpus`). Each worker begins with another GPU (devices.choose). Prints the minutes of each part; ends
with the first status that is not 0.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
# what a test that shares its GPU may take of it, and how many processes of it work at once
JOB_BYTES = 12 * 2**30
JOB_CORES = 3
MARKED = re.compile(r"mark\.(gpu|vllm)|needs_gpus|whole_gpus")
FREE = """
import torch
print(*[torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())])
"""


def free_bytes() -> list[int]:
    """Free memory of each GPU. Another process asks: a context in this one would stay."""
    asked = subprocess.run([sys.executable, "-c", FREE], stdout=subprocess.PIPE, check=True)
    return [int(size) for size in asked.stdout.split()]


def workers_a_gpu(free: list[int], cores: int) -> int:
    """How many tests fit on each of these GPUs at once, by its memory and the machine's cores."""
    return max(1, min(min(free) // JOB_BYTES, cores // len(free) // JOB_CORES))


def parts(free: list[int], cores: int) -> Iterator[tuple[str, int]]:
    """Which tests run together: the expression for `-m`, and the number of workers."""
    gpus = len(free)
    yield "gpu and not gpus", gpus * workers_a_gpu(free, cores)
    for count in (1, 2):
        if gpus >= count:
            yield f"gpus(count={count})", gpus // count


def main(arguments: list[str]) -> int:
    free = free_bytes()
    if not free:
        sys.exit("no GPU: torch sees none; see CUDA_VISIBLE_DEVICES")
    files = [str(file) for file in TESTS.rglob("test_*.py") if MARKED.search(file.read_text())]
    status = 0
    begin = time.monotonic()
    for marks, workers in parts(free, len(os.sched_getaffinity(0))):
        start = time.monotonic()
        options = ["-m", marks, "-n", str(workers), "--dist", "loadgroup", *arguments]
        command = [sys.executable, "-m", "pytest", *files, *options]
        ended = subprocess.run(command, cwd=TESTS.parent, check=False).returncode
        status = status or (ended if ended != 5 else 0)  # 5: the arguments leave none of these
        tell(f"{marks}: status {ended}, {workers} workers", start)
    tell(f"{len(free)} GPUs: status {status}", begin)
    return status


def tell(what: str, start: float) -> None:
    print(f"SUITE {what}, {(time.monotonic() - start) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
