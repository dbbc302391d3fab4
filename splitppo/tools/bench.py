"""Placements compared on the same GPUs: the same rows through the same models, one job after the other.

    splitppo bench --gpus 4 --lengths lognormal:240:1024 --config my.toml [any flag of the trainer]

The jobs are (a) `colocated`, (b) `2+2/barrier`, a split whose groups wait for each other after the updates, as verl's
split_placement did, and (c) `2+2`, `2+2/critic`, ...: splits as they are, the reference with the actor or the critic.
Responses have given lengths, so that all jobs do the same work. Prints a table and writes OUT/bench.json, OUT/bench.png
and each job's run folder and log.
"""

import json
import math
import random
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from splitppo.config import RolloutConfig
from splitppo.config.cli import parse
from splitppo.data.files import read_lengths
from splitppo.errors import UserError, command, words
from splitppo.run.files import write_whole
from splitppo.tools.bench_results import Result, draw, ratios, table
from splitppo.tools.cost import WARM_UP, Split, Work, may_move, measured, predict
from splitppo.tools.timeline import Column, Step, read_column

# dense bfloat16, without sparsity, of the makers' data sheets
PEAK_TFLOPS = {"H200": 989, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362}
DRAWN = 16384  # lengths in a file


@dataclass(frozen=True)
class Bench:
    """What is compared. Flags that are not listed here are the trainer's, and go to every job."""

    gpus: Annotated[int, tyro.conf.arg(help="ranks of each job")]
    jobs: tuple[str, ...] = ()
    """Placements, as colocated, 3+1, 2+2/critic (the reference with the critic), 2+2/barrier. Unset: colocated, the
    even split with and without a barrier, and the critic with one rank less and with a quarter of all, with the
    reference on either side."""
    lengths: str | None = None
    """Response lengths: fixed:512, lognormal:MEAN:CAP (seeded; sigma 0.8), or a file with one a line."""
    warmup: int = 10
    """Steps that are not measured."""
    steps: int = 5
    """Steps that are measured."""
    limit: float = 1800.0
    """Seconds after which a job is given up."""
    out: str = "bench"
    """Folder for everything; must not exist."""


def parse_job(job: str, gpus: int) -> tuple[Split, list[str]]:
    """A job's split and its flags.

    Raises:
        UserError: it isn't written so, or its ranks aren't `gpus`.
    """
    if job == "colocated":
        unset = ["--placement.actor", "None", "--placement.critic", "None", "--placement.reference", "actor"]
        return Split(gpus, 0), ["--placement.mode", "colocated", *unset, "--placement.no-barrier"]
    found = re.fullmatch(r"(\d+)\+(\d+)(/critic)?(/barrier)?", job)
    if not found:
        raise UserError(f"--jobs {job}: write colocated, 3+1, 3+1/critic, 3+1/barrier or 3+1/critic/barrier")
    actor, critic = int(found[1]), int(found[2])
    if not actor or not critic or actor + critic != gpus:
        raise UserError(f"--jobs {job}: two groups of at least one rank each must add up to --gpus {gpus}")
    side = "critic" if found[3] else "actor"
    # all of them, since a preset may set others
    sizes = ["--placement.actor", str(actor), "--placement.critic", str(critic), "--placement.reference", side]
    barrier = "--placement.barrier" if found[4] else "--placement.no-barrier"
    return Split(actor, critic, side), ["--placement.mode", "per_node", *sizes, barrier]


def default_jobs(gpus: int, *, movable: bool) -> tuple[str, ...]:
    """The jobs that make sense where nothing is known; `movable`: whether the reference can be with the critic."""
    if gpus == 1:
        return ("colocated",)
    even = gpus // 2
    # the critic's ranks: half, one less, a quarter
    sizes = sorted({even, max(1, even - 1), max(1, gpus // 4)}, reverse=True)
    free = [f"{gpus - size}+{size}" for size in sizes]
    moved = [f"{job}/critic" for job in free] if movable else []
    return ("colocated", f"{free[0]}/barrier", *free, *moved)


def lengths_of(given: str, seed: int = 0) -> list[int]:
    """The lengths that `--lengths` stands for.

    Raises:
        UserError: it isn't written so.
    """
    if found := re.fullmatch(r"fixed:(\d+)", given):
        return [int(found[1])]
    if found := re.fullmatch(r"lognormal:(\d+):(\d+)", given):
        mean, cap, sigma, draw = max(1, int(found[1])), int(found[2]), 0.8, random.Random(seed)
        mu = math.log(mean) - sigma**2 / 2
        return [min(cap, max(1, round(draw.lognormvariate(mu, sigma)))) for _ in range(DRAWN)]
    if not Path(given).is_file():
        raise UserError(f"--lengths {given}: write fixed:512, lognormal:240:1024, or name a file with one a line")
    return read_lengths(RolloutConfig(lengths=given, max_new_tokens=sys.maxsize))


def job_flags(bench: Bench, extra: list[str], lengths: list[int], out: Path) -> list[str]:
    """The trainer's flags that are alike in all jobs; writes the file of lengths."""
    flags = [*extra, "--steps", str(bench.warmup + bench.steps), "--log.validate-every", "0"]
    flags += ["--checkpoint.every", "0", "--log.trackers"]  # of a preset: neither is to be measured, nor kept
    if lengths:
        (out / "lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
        most = re.fullmatch(r"lognormal:\d+:(\d+)", bench.lengths or "")
        cap = int(most[1]) if most else max(lengths)
        flags += ["--rollout.lengths", str(out / "lengths.txt"), "--rollout.max-new-tokens", str(cap)]
    return flags


def run_job(job: str, bench: Bench, flags: list[str], out: Path) -> None:
    """Runs a job to its end.

    Raises:
        UserError: it failed, or took too long.
    """
    folder, log = out / job.replace("/", "_"), out / f"{job.replace('/', '_')}.log"
    # standalone: a port of its own, so that other jobs may run on the node
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(bench.gpus)]
    command = [*torchrun, "-m", "splitppo.train", *flags, *parse_job(job, bench.gpus)[1], "--run-dir", str(folder)]
    (out / f"{folder.name}.began").write_text(str(time.time()))
    with log.open("w") as file:
        file.write(" ".join(command) + "\n")
        file.flush()
        with subprocess.Popen(command, stdout=file, stderr=file) as running:
            try:
                status = running.wait(bench.limit)
            except BaseException as error:
                running.terminate()  # torchrun hands it on to its ranks, which a kill would leave behind
                running.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise UserError(f"took more than --limit {bench.limit:g} s; see {log}") from error
                raise
    if status:
        told = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error:")]
        raise UserError(f"exit {status}: {told[0] if told else f'see {log}'}")


def result_of(job: str, bench: Bench, out: Path, gpu: str | None) -> tuple[Result, Work]:
    """The figures of a job that has run."""
    folder, (split, _) = out / job.replace("/", "_"), parse_job(job, bench.gpus)
    columns = {role: read_column(folder / "metrics" / f"{role}.jsonl") for role in ("actor", "critic")}
    last = {role: list(column.values())[bench.warmup :] for role, column in columns.items()}
    settings = tomllib.loads((folder / "config.toml").read_text())
    actors, critics = ([s.metrics for s in columns[r].values()][bench.warmup - WARM_UP :] for r in columns)
    work = measured(actors, critics, split, rows(settings))
    tokens = mean(last["actor"], "tokens")
    step_s = mean(last["actor"], "timing_s/step")
    tflops = {role: mean(steps, "perf/update_tflop") / mean(steps, "timing_s/update") for role, steps in last.items()}
    peak = next((value for name, value in PEAK_TFLOPS.items() if gpu and name in gpu), None)

    def by_role(name: str) -> dict[str, float]:
        return {role: mean(last[role], name) for role in last}

    result = Result(
        job=job,
        tokens_s=tokens / step_s,
        step_s=step_s,
        steps_s=[step.metrics["timing_s/step"] for step in last["actor"]],
        predicted_s=None,
        phases={role: phases(steps) for role, steps in last.items()},
        idle=by_role("perf/idle_share"),
        tflops=tflops,
        mfu={role: value / peak for role, value in tflops.items()} if peak else {},
        memory_gib=by_role("perf/max_memory_allocated_gb"),
        wire_mb=by_role("perf/wire_mb"),
        wire_s=by_role("perf/wire_s"),
        padding=by_role("perf/padding"),
        imbalance=by_role("perf/imbalance"),
        mismatch=mean(last["actor"], "actor/mismatch_mean"),
        start_s=first_rollout(columns["actor"]) - float((out / f"{folder.name}.began").read_text()),
    )
    return result, work


def first_rollout(column: Column) -> float:
    """When it began."""
    return min(start for step in column.values() for name, start, _ in step.spans if name == "rollout")


def rows(settings: dict[str, Any]) -> int:
    """Rows of a step."""
    return settings["rollout"]["batch_size"]


def mean(steps: list[Step], name: str) -> float:
    """Of a metric, 0 where it isn't there."""
    return sum(step.metrics.get(name, 0.0) for step in steps) / max(1, len(steps))


def phases(steps: list[Step]) -> dict[str, float]:
    """Seconds of each span."""
    names = dict.fromkeys(name for step in steps for name in step.metrics if name.startswith("timing_s/"))
    return {name.removeprefix("timing_s/"): mean(steps, name) for name in names}


def gpu_name() -> str | None:
    """Of the first GPU, asked without touching it."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return found.stdout.splitlines()[0] if found.returncode == 0 and found.stdout else None


def compare(bench: Bench, extra: list[str]) -> int:
    """Runs all jobs and prints what came out; returns the exit status."""
    ppo, out, gpu = parse(extra).ppo, Path(bench.out), gpu_name()
    jobs = bench.jobs or default_jobs(bench.gpus, movable=may_move(ppo.kl_coef, ppo.kl_loss_coef))
    for job in jobs:
        parse_job(job, bench.gpus)
    if bench.warmup < WARM_UP or bench.steps < 1:
        raise UserError(f"--warmup {bench.warmup} --steps {bench.steps}: use at least 2 and 1; the first steps compile")
    if out.exists():
        raise UserError(f"--out {out}: it exists; name a new folder")
    lengths = lengths_of(bench.lengths) if bench.lengths else []
    out.mkdir(parents=True)
    flags, done = job_flags(bench, extra, lengths, out), []
    for job in jobs:
        print(f"{job} ...", flush=True)
        try:
            run_job(job, bench, flags, out)
            done.append(result_of(job, bench, out, gpu))
        except UserError as error:
            print(f"  failed: {error}", flush=True)
            continue
        print(f"  {done[-1][0].tokens_s:,.0f} tokens/s, {done[-1][0].step_s:.2f} s a step", flush=True)
        record(bench, predicted(done, bench), flags, gpu, out)  # after each job: the last one may never end
    if done:
        tell(bench, predicted(done, bench), gpu, out)
    return 0 if len(done) == len(jobs) else 1


def predicted(done: list[tuple[Result, Work]], bench: Bench) -> list[Result]:
    """The results with what the cost model gives for them from the colocated job's work."""
    work = next((work for result, work in done if result.job == "colocated"), None)
    return [
        replace(result, predicted_s=predict(work, parse_job(result.job, bench.gpus)[0]))
        if work and not result.job.endswith("/barrier")
        else result
        for result, _ in done
    ]


def tell(bench: Bench, results: list[Result], gpu: str | None, out: Path) -> None:
    """Prints and draws the comparison."""
    print(f"\n{bench.gpus} x {gpu or 'CPU ranks'}, {bench.steps} steps after {bench.warmup}\n{table(results)}")
    print("\n".join(ratios(results)))
    draw(results, out / "bench.png")


def record(bench: Bench, results: list[Result], flags: list[str], gpu: str | None, out: Path) -> None:
    """Writes bench.json."""
    figures = {"bench": asdict(bench), "flags": flags, "gpu": gpu, "results": [asdict(result) for result in results]}
    write_whole(out / "bench.json", json.dumps(figures, indent=1) + "\n")


@command
def main() -> int:
    return compare(*tyro.cli(Bench, prog="splitppo bench", args=words(), return_unknown_args=True))
