"""A role's spans and metrics: RUN/metrics/{actor,critic}.jsonl, one JSON object a step
(docs/metrics.md)."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from splitppo.errors import UserError, warn
from splitppo.placement import Role
from splitppo.run.files import parse_record, read_lines, write_whole
from splitppo.run.screen import Screen


def records_until(path: Path, step: int) -> str:
    """The lines of a role's file up to a step, each step's last. Raises UserError if one before the
    last is broken. No process may be writing the file: a last line that is whole but for its end
    gets it."""
    last = path.read_bytes().rpartition(b"\n")[2] if path.is_file() else b""
    with suppress(UserError):
        parse_record(last, "")
        with path.open("ab") as file:
            file.write(b"\n")
    lines = read_lines(path, lambda line, where: (parse_record(line, where)["step"], f"{line}\n"))
    return "".join(line for number, line in dict(lines).items() if number <= step)


def alloc_retries() -> int:
    """How often PyTorch's allocator has freed its cache and asked the GPU again; 0 on the CPU."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0)


class ColumnLog:
    """The spans and metrics of one role. Only the `first` rank of the role's group writes and
    prints. `phase` is called with the name of each span as it begins. Records after `start`, where
    the run resumes, are removed from the file. `notices` is called after each of the actor's
    steps: what to warn of (notices.py)."""

    def __init__(
        self,
        role: Role,
        run_dir: Path,
        *,
        first: bool,
        phase: Callable[[str], object],
        start: int,
        steps: int,
        notices: Callable[[], Sequence[str]] = tuple,
    ):
        self.role = role
        self.phase = phase
        self.notices = notices
        self.screen = Screen(role, steps) if first else None
        self.path = run_dir / "metrics" / f"{role}.jsonl"
        self.step = start
        self.spans = []
        self.retries = 0  # of the allocator, in this step's spans
        # Unix time, so that ranks compare; it goes on by a clock that nobody sets
        self.clock = time.time() - time.monotonic()
        self.began = self.now()
        if first:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, records_until(self.path, start) if start else "")

    def now(self) -> float:
        """Unix seconds; they never run backwards."""
        return self.clock + time.monotonic()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times a part of the step. Names of waits for the other role begin with `wait_`."""
        start = self.now()
        before = alloc_retries()
        self.phase(f"{self.role} step {self.step + 1} {name}")
        yield
        self.retries += alloc_retries() - before
        if (end := self.now()) - start > 0.0005:  # leave out spans without work
            self.spans.append([name, start, end])

    def finish(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Ends the step: writes and syncs its record, since its checkpoint may be committed next;
        prints its line."""
        now = self.now()
        seconds = defaultdict[str, float](float)
        for name, start, end in self.spans:
            seconds[name] += end - start
        step_time = now - self.began
        idle = sum(value for name, value in seconds.items() if name.startswith("wait_"))
        record = {
            "step": step,
            "time": now,
            **metrics,
            **{f"timing_s/{name}": value for name, value in seconds.items()},
            "timing_s/step": step_time,
        }
        if "tokens" in metrics:  # of prompts and responses, in all groups
            record["perf/throughput"] = metrics["tokens"] / step_time
        if torch.cuda.is_initialized():
            record["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
            record["perf/alloc_retries"] = self.retries
        record |= {"perf/idle_share": idle / step_time, "spans": self.spans}
        if self.screen:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self.screen.step(step, step_time, metrics)
            for notice in self.notices() if self.role == "actor" and step else ():
                warn(notice)
        self.retries = 0
        self.step = step
        self.spans = []
        self.began = now
