"""Profiles a GPU run: is any NCCL kernel pending under a rollout, and does the critic's update run
under the next one?

    torchrun --nproc_per_node 4 tests/gpu/columns.py OUT.json [flags of splitppo.train]

Runs the trainer with the PyTorch profiler on in steps 9 to 11 of every rank, then rank 0 prints,
for each rank, the NCCL kernels by kind and phase, and the seconds in which both columns worked at
once. Needs `--run-dir` and 12 steps.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from splitppo import train
from splitppo.config.cli import parse
from splitppo.job.launch import Launch
from splitppo.run.metrics import ColumnLog
from splitppo.tools.runs import read_columns
from splitppo.tools.timeline import shared_work

FIRST, LAST = 9, 11


def kernels(profiler: profile, path: Path) -> list[tuple[str, float, float]]:
    """(name, start, end) of the NCCL kernels, Unix seconds."""
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    base = trace.get("baseTimeNanoseconds", 0) / 1e9
    path.unlink()
    events = [
        e for e in trace["traceEvents"] if e.get("cat") == "kernel" and "nccl" in e["name"].lower()
    ]
    return [(e["name"], base + e["ts"] / 1e6, base + (e["ts"] + e["dur"]) / 1e6) for e in events]


def main() -> None:
    out, argv = Path(sys.argv[1]), sys.argv[2:]
    launch, config = Launch.from_env(), parse(sys.argv[2:])
    profiler = profile(activities=[ProfilerActivity.CUDA])
    spans, role = [], []
    finish = ColumnLog.finish

    def profiled(self: ColumnLog, step: int, metrics: dict) -> None:
        role[:] = [self.role]
        if FIRST <= step <= LAST:
            spans.extend([step, *span] for span in self.spans)
        finish(self, step, metrics)
        if step == FIRST - 1:
            profiler.start()
        if step == LAST:
            torch.cuda.synchronize()
            profiler.stop()

    setattr(ColumnLog, "finish", profiled)  # noqa: B010
    status = train.main(argv)
    if status:
        sys.stdout.flush()
        # at once, as the trainer does: one of its threads may wait for a peer that never comes
        os._exit(status)
    part = out.with_suffix(f".{launch.rank}.json")
    found = kernels(profiler, out.with_suffix(f".trace{launch.rank}"))
    part.write_text(json.dumps({"role": role[0], "spans": spans, "kernels": found}))
    if launch.rank == 0:
        report(out, launch.world, Path(str(config.run_dir)))


def report(out: Path, world: int, run_dir: Path) -> None:
    """Waits for every rank's part and prints the table."""
    ranks = []
    for rank in range(world):
        part = out.with_suffix(f".{rank}.json")
        deadline = time.monotonic() + 120
        while not part.is_file() and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(0.5)
        ranks.append(json.loads(part.read_text()))
    for rank, seen in enumerate(ranks):
        for kind in sorted({name.split("(")[0] for name, _, _ in seen["kernels"]}):
            times = defaultdict(list)
            for name, start, end in seen["kernels"]:
                if name.split("(")[0] == kind:
                    inside = [span for _, span, a, b in seen["spans"] if a <= start < b]
                    times[inside[0] if inside else "between"].append((end - start) * 1e6)
            cells = [
                f"{p} n={len(t)} max={max(t):.0f}us sum={sum(t) / 1e3:.2f}ms"
                for p, t in times.items()
            ]
            print(f"rank {rank} {seen['role']} {kind}: {'; '.join(cells)}")
    actors, critics = read_columns(run_dir)
    both, step_time, under = 0.0, 0.0, []
    for step in range(5, max(actors) - 1):
        actor = actors[step].spans
        window = (actor[0][1], actors[step + 1].ends()[0])
        work = [s for t in (step - 1, step, step + 1) for s in critics[t].spans]
        clipped = [
            (n, max(a, window[0]), min(b, window[1]))
            for n, a, b in work
            if b > window[0] and a < window[1]
        ]
        both += sum(end - start for start, end in shared_work(actor, clipped))
        step_time += window[1] - window[0]
        rollout = next(s for s in actors[step + 1].spans if s[0] == "rollout")
        update = next(s for s in critics[step].spans if s[0] == "update")
        under.append(max(0.0, min(rollout[2], update[2]) - max(rollout[1], update[1])))
    n = len(under)
    share = both / step_time
    print(
        f"steps 5..{4 + n}: {step_time / n:.2f} s a step, both columns at work {both / n:.2f} s "
        f"({share:.0%})"
    )
    times = sum(u > 0 for u in under)
    print(
        f"critic update of t under rollout of t+1: {sum(under) / n:.3f} s a step, in {times} of "
        f"{n} steps"
    )


if __name__ == "__main__":
    main()
