"""A role's spans and metrics: RUN/metrics/{actor,critic}.jsonl, one JSON object a step (docs/metrics.md)."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from splitppo.placement import Role
from splitppo.run.files import parse_record, read_lines, write_whole
from splitppo.run.screen import Screen


def records_until(path: Path, step: int) -> str:
    """The lines of a role's file up to a step, each step's last. Raises UserError if one before the last is broken."""
    lines = read_lines(path, lambda line, where: (parse_record(line, where)["step"], f"{line}\n"))
    return "".join(line for number, line in dict(lines if path.is_file() else ()).items() if number <= step)


class ColumnLog:
    """The spans and metrics of one role. Only the `first` rank of the role's group writes and prints. `phase` is called
    with the name of each span as it begins. Records after `start`, where the run resumes, are removed from the file."""

    def __init__(self, role: Role, run_dir: Path, *, first: bool, phase: Any, start: int, steps: int):
        self.role, self.phase = role, phase
        self.screen = Screen(role, start, steps) if first else None
        self.path = run_dir / "metrics" / f"{role}.jsonl"
        self.step, self.spans = start, []
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
        self.phase(f"{self.role} step {self.step + 1} {name}")
        yield
        if (end := self.now()) - start > 0.0005:  # leave out spans without work
            self.spans.append([name, start, end])

    def finish(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Ends the step: writes and syncs its record, since its checkpoint may be committed next; prints its line."""
        now, seconds = self.now(), defaultdict[str, float](float)
        for name, start, end in self.spans:
            seconds[name] += end - start
        step_time, idle = now - self.began, sum(value for name, value in seconds.items() if name.startswith("wait_"))
        record = {"step": step, "time": now, **metrics}
        record |= {f"timing_s/{name}": value for name, value in seconds.items()} | {"timing_s/step": step_time}
        if "tokens" in metrics:  # of prompts and responses, in all groups
            record["perf/throughput"] = metrics["tokens"] / step_time
        if torch.cuda.is_initialized():
            record["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        record |= {"perf/idle_share": idle / step_time, "spans": self.spans}
        if self.screen:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self.screen.step(step, step_time, seconds, metrics)
        self.step, self.spans, self.began = step, [], now
