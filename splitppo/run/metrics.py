"""What a column tells about itself: spans, one line a step, RUN/metrics/{actor,critic}.jsonl.

Each line of a file is one JSON object, `step` first, then `time` (Unix seconds at the step's end), the metrics,
`timing_s/NAME` (seconds in each span), `timing_s/step`, `optimizer_steps` (loss and gradient norm of each) and
`spans` ([name, start, end], Unix seconds). Names are those of the README's glossary.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch.profiler import record_function

from splitppo.errors import UserError
from splitppo.placement import Role
from splitppo.run.files import BROKEN, write_whole

# what a console line shows beside the seconds of the spans
SHOWN = {
    "val/score/mean": "held-out",
    "response_length/mean": "len",
    "response_length/clip_ratio": "cut",
    "actor/pg_loss": "loss",
    "actor/ppo_kl": "ppo_kl",
    "actor/ref_kl": "ref_kl",
    "actor/entropy": "entropy",
    "actor/mismatch_mean": "mismatch",
    "actor/grad_norm": "grad",
    "critic/score/mean": "score",
    "critic/values/mean": "value",
    "critic/vf_loss": "loss",
    "critic/vf_explained_var": "ev",
    "critic/grad_norm": "grad",
}


def read_records(path: Path, start: int) -> tuple[str, str]:
    """The lines of a role's file up to step `start`, and what is wrong with them, "" if nothing. The last line of the
    file may be torn: those up to a checkpoint are on the disk before it counts."""
    found, wrong = {}, ""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            found[int(json.loads(line.decode())["step"])] = line.decode() + "\n"
        except BROKEN as error:
            wrong = wrong or (f"line {number} is no record ({error})" if number < len(lines) else "")
    lost = [step for step in range(min(found, default=start), start + 1) if step not in found]
    wrong = wrong or (f"the record of step {lost[0]} is missing" if lost else "")
    return "".join(line for step, line in found.items() if step <= start), f"{path}: {wrong}" if wrong else ""


def check_records(folder: Path, start: int, *, force: bool) -> None:
    """Raises UserError where a record up to step `start` is broken or missing; with `force` only says so."""
    for role in get_args(Role):
        if wrong := read_records(folder / f"{role}.jsonl", start)[1]:
            if not force:
                raise UserError(f"{wrong}; mend it, or --force to go on without such records")
            print(f"warning: {wrong}", flush=True)


class ColumnLog:
    """The spans and metrics of one role; only the `first` rank of its group writes and prints.

    `phase` is told each span as it begins; what an earlier run wrote of steps after `start` is dropped.
    """

    def __init__(self, role: Role, run_dir: Path, *, first: bool, phase: Any, start: int):
        self.role: Role = role
        self.first, self.phase = first, phase
        self.path = run_dir / "metrics" / f"{role}.jsonl"
        self.step, self.spans = start, []
        # Unix time, so that ranks compare; on from here by a clock that nobody sets
        self.clock = time.time() - time.monotonic()
        self.began = self.now()
        if first:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, read_records(self.path, start)[0] if start else "")

    def now(self) -> float:
        """Unix seconds that never run backwards."""
        return self.clock + time.monotonic()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A stretch of the step's time; names that begin with `wait_` are waits for the other column."""
        start = self.now()
        self.phase(f"{self.role} step {self.step + 1} {name}")
        with record_function(name):  # a block of that name in the torch profiler's trace
            yield
        if (end := self.now()) - start > 0.0005:  # else there was nothing to do
            self.spans.append([name, start, end])

    def finish(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Ends the step: writes its record, for good, since its checkpoint may count from here on; prints its line."""
        now = self.now()
        seconds: dict[str, float] = {}
        for name, start, end in self.spans:
            seconds[name] = seconds.get(name, 0.0) + end - start
        timing = {f"timing_s/{name}": value for name, value in seconds.items()} | {"timing_s/step": now - self.began}
        idle = sum(value for name, value in seconds.items() if name.startswith("wait_")) / (now - self.began)
        performance = _performance(metrics, now - self.began) | {"perf/idle_share": idle}
        record = {"step": step, "time": now, **metrics, **timing, **performance}
        record["spans"] = self.spans
        if self.first:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
            print(self._line(step, seconds, metrics), flush=True)
        self.step, self.spans, self.began = step, [], now

    def _line(self, step: int, seconds: Mapping[str, float], metrics: Mapping[str, Any]) -> str:
        spent = "  ".join(f"{name} {value:.2f} s" for name, value in seconds.items() if value >= 0.005)
        shown = "  ".join(f"{short} {metrics[name]:.4g}" for name, short in SHOWN.items() if name in metrics)
        if skipped := metrics.get(f"{self.role}/skipped"):
            shown += f"  SKIPPED {skipped:g} updates: gradient not finite"
        return f"{f'[{self.role}]':<8} step {step:>4}  {shown}  |  {spent}"


def _performance(metrics: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Tokens a second (prompts and responses, the whole job), and the GPU memory that this rank had at most."""
    figures = {"perf/throughput": metrics["tokens"] / seconds} if "tokens" in metrics else {}
    if torch.cuda.is_initialized():
        figures["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return figures
