"""`splitppo bench`: compares placements on the same GPUs, one job after another, with the same rows
and models.

A job is `colocated`, `2+2` (a split with the reference on the actor) or `2+2/critic` (on the
critic). Prints a table, and writes OUT/bench.json and each job's run folder and log."""

import json
import math
import random
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from splitppo.config.cli import parse, read_flags
from splitppo.errors import UserError, command, words
from splitppo.placement import ROLES
from splitppo.run.files import write_whole
from splitppo.tools.cost import WARM_UP, Split, mean
from splitppo.tools.runs import Rows, as_text, read_columns

DRAWN = 16384  # lengths of a distribution


@dataclass(frozen=True)
class Bench:
    """Compare placements and settings. Flags that are not listed here are the trainer's and go to
    every job.

    Args:
        gpus: Ranks of each job.
        jobs: Placements: colocated, 3+1, 2+2/critic (the reference on the critic).
        lengths: Response lengths: fixed:512, or lognormal:MEAN:CAP (seeded; sigma 0.8). The
            trainer's --rollout.lengths takes a file.
        warmup: First steps, which are not measured.
        steps: Steps that are measured.
        out: Folder for all results. It must not exist.
    """

    gpus: int
    jobs: tuple[str, ...]
    lengths: str | None = None
    warmup: int = 10
    steps: int = 5
    out: str = "bench"


def parse_job(job: str, gpus: int) -> tuple[Split, list[str]]:
    """A job's split and its flags: all of them, since a preset may set others. A wrong job is a
    UserError."""
    groups = re.fullmatch(r"colocated|(\d+)\+(\d+)(/critic)?", job)
    if not groups:
        raise UserError(
            f"--jobs {job}: not a placement; write colocated, or ranks of actor+critic, such as "
            "3+1 (3+1/critic: the reference is on the critic)"
        )
    split = Split(gpus, 0)
    if groups[1]:
        split = Split(int(groups[1]), int(groups[2]), "critic" if groups[3] else "actor")
        if not split.actor or not split.critic or split.actor + split.critic != gpus:
            raise UserError(
                f"--jobs {job}: two groups of at least one rank each must add up to --gpus {gpus}"
            )
    return split, (
        f"--placement.mode {'per_node' if split.critic else 'colocated'} "
        f"--placement.actor {groups[1]} --placement.critic {groups[2]} "
        f"--placement.reference {split.reference}"
    ).split()


def lengths_of(distribution: str) -> list[int]:
    """The response lengths that `--lengths` names. What is no distribution is a UserError."""
    if parts := re.fullmatch(r"fixed:(\d+)", distribution):
        return [int(parts[1])]
    if parts := re.fullmatch(r"lognormal:(\d+):(\d+)", distribution):
        sigma = 0.8
        mu = math.log(max(1, int(parts[1]))) - sigma**2 / 2
        draw = random.Random(0)
        drawn = (round(draw.lognormvariate(mu, sigma)) for _ in range(DRAWN))
        return [min(int(parts[2]), max(1, length)) for length in drawn]
    raise UserError(
        f"--lengths {distribution}: write fixed:512 or lognormal:240:1024, "
        "or name a file by --rollout.lengths"
    )


def job_flags(bench: Bench, extra: list[str], lengths: list[int], out: Path) -> list[str]:
    """The trainer's flags that are alike in all jobs; writes the file of lengths."""
    common = (
        f"--steps {bench.warmup + bench.steps} --log.validate-every 0 "
        "--checkpoint.every 0 --checkpoint.no-last --log.trackers"  # a preset may have set them
    )
    flags = [*extra, *common.split()]
    if lengths:
        file = out / "lengths.txt"
        file.write_text("".join(f"{length}\n" for length in lengths))
        flags += ["--rollout.lengths", str(file), "--rollout.max-new-tokens", str(max(lengths))]
    return flags


def run_job(job: str, bench: Bench, flags: list[str], out: Path) -> dict[str, Any]:
    """Runs a job to its end, in the folder OUT/JOB, and returns its figures. A job that fails is a
    UserError."""
    _, placement = parse_job(job, bench.gpus)
    folder = out / job.replace("/", "_")
    log = folder.with_name(f"{folder.name}.log")
    # standalone: a port of its own, so that other jobs may run on the node
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node {bench.gpus}".split()
    train = ["-m", "splitppo.train", *flags, *placement, "--run-dir", str(folder)]
    line = [sys.executable, *torchrun, *train]
    with log.open("w") as file:
        print(*line, file=file, flush=True)
        with subprocess.Popen(line, stdout=file, stderr=file) as running:
            try:
                status = running.wait()
            finally:
                # torchrun passes it on to its ranks; a kill would leave them running
                running.terminate()
                running.wait()
    if status:
        error = re.search(r"^error:.*", log.read_text(errors="replace"), re.MULTILINE)
        raise UserError(f"exit {status}: {error[0] if error else f'see {log}'}")
    return result_of(job, folder, bench.warmup)


def result_of(job: str, folder: Path, warmup: int) -> dict[str, Any]:
    """The figures of a job's run, without its first `warmup` steps: prompt and response tokens a
    second of all ranks, the seconds of each step, and each role's metrics, means on the group's
    first rank."""
    last = [[step.metrics for step in column.values()][warmup:] for column in read_columns(folder)]
    metrics = [{name: mean(lines, name) for step in lines for name in step} for lines in last]
    actor = metrics[0]
    return {
        "job": job,
        "tokens_s": actor["tokens"] / actor["timing_s/step"],
        "steps_s": [step["timing_s/step"] for step in last[0]],
        "metrics": dict(zip(ROLES, metrics, strict=True)),
    }


def table(results: list[dict[str, Any]]) -> str:
    """The comparison as it is printed."""
    base = next((result for result in results if result["job"] == "colocated"), results[0])
    heads = ("job", "tokens/s", "ratio", "s/step", "from-to", "rollout", "update", "value upd.")
    rows: Rows = [(*heads, "idle a/c")]
    for result in results:
        actor, critic = (result["metrics"][role] for role in ROLES)
        steps = result["steps_s"]
        rollout = actor.get("timing_s/rollout", 0.0) + actor.get("timing_s/barrier_wait", 0.0)
        rows.append(
            (
                result["job"],
                f"{result['tokens_s']:,.0f}",
                f"{result['tokens_s'] / base['tokens_s']:.2f}x",
                f"{actor['timing_s/step']:.2f}",
                f"{min(steps):.2f}-{max(steps):.2f}",
                f"{rollout:.2f}",
                f"{actor.get('timing_s/update', 0.0):.2f}",
                f"{critic.get('timing_s/update', 0.0):.2f}",
                f"{actor['perf/idle_share']:.0%}/{critic['perf/idle_share']:.0%}",
            )
        )
    return "\n".join(as_text(rows))


@command
def main() -> int:
    """Runs all jobs and prints their table; returns the exit status."""
    bench, extra = read_flags(Bench, "splitppo bench", words(), return_unknown_args=True)
    parse(extra)  # refuses a wrong flag before the first job
    out = Path(bench.out)
    for job in bench.jobs:
        parse_job(job, bench.gpus)
    if bench.warmup < WARM_UP or bench.steps < 1:
        raise UserError(
            f"--warmup {bench.warmup} --steps {bench.steps}: use at least 2 and 1; "
            "the first steps compile"
        )
    if out.exists():
        raise UserError(f"--out {out}: it exists; name a new folder")
    lengths = lengths_of(bench.lengths) if bench.lengths else []
    out.mkdir(parents=True)
    flags = job_flags(bench, extra, lengths, out)
    results = []
    for job in bench.jobs:
        print(f"{job} ...", flush=True)
        try:
            results.append(run_job(job, bench, flags, out))
        except UserError as error:
            print(f"  failed: {error}", flush=True)
            continue
        print(f"  {results[-1]['tokens_s']:,.0f} tokens/s", flush=True)
        report = {"bench": asdict(bench), "flags": flags, "results": results}
        # after each job: the next may never end
        write_whole(out / "bench.json", json.dumps(report, indent=1) + "\n")
    if results:
        print(
            f"\n{bench.gpus} ranks, {bench.steps} steps after {bench.warmup}",
            table(results),
            sep="\n",
        )
    return 0 if len(results) == len(bench.jobs) else 1
