"""`splitppo bench`: placements compared on the same GPUs, one job after the other, with the same
rows and models.

A job is `colocated`; or `2+2`, `2+2/critic`: a split, the reference with the actor or the critic.
Prints a table, and writes OUT/bench.json and each job's run folder and log.
"""

import json
import math
import random
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from splitppo.config import RolloutConfig
from splitppo.config.cli import parse, read_flags
from splitppo.errors import UserError, command, words
from splitppo.placement import ROLES
from splitppo.run.files import write_whole
from splitppo.run.idle import WARM_UP
from splitppo.tools.cost import Split, may_move, mean
from splitppo.tools.runs import as_text, read_columns

DRAWN = 16384  # lengths in a file


@dataclass(frozen=True)
class Bench:
    """What is compared. Flags that are not listed here are the trainer's, and go to every job.

    Args:
        gpus: ranks of each job
        jobs: Placements, as colocated, 3+1, 2+2/critic (the reference with the critic). Unset:
            colocated, the even split, and the critic with one rank less and with a quarter of all,
            with the reference on either side.
        lengths: Response lengths: fixed:512, lognormal:MEAN:CAP (seeded; sigma 0.8), or a file
            with one a line.
        warmup: Steps that are not measured.
        steps: Steps that are measured.
        limit: Seconds after which a job is given up.
        out: Folder for everything; must not exist.
    """

    gpus: int
    jobs: tuple[str, ...] = ()
    lengths: str | None = None
    warmup: int = 10
    steps: int = 5
    limit: float = 1800.0
    out: str = "bench"


@dataclass
class Result:
    """What a job measured."""

    job: str
    # role -> metric -> mean over the measured steps, on the group's first rank
    metrics: dict[str, dict[str, float]]
    tokens_s: float  # prompt and response tokens a second, all ranks
    steps_s: list[float]  # seconds of each step

    def seconds(self, role: str, *spans: str) -> float:
        """Seconds of a step in these spans."""
        return sum(self.metrics[role].get(f"timing_s/{span}", 0.0) for span in spans)


def parse_job(job: str, gpus: int) -> tuple[Split, list[str]]:
    """A job's split and its flags: all of them, since a preset may set others. A wrong job is a
    UserError."""
    groups = re.fullmatch(r"colocated|(\d+)\+(\d+)(/critic)?", job)
    if not groups:
        raise UserError(f"--jobs {job}: write colocated, 3+1 or 3+1/critic")
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


def default_jobs(gpus: int, *, movable: bool) -> tuple[str, ...]:
    """The jobs to compare where nothing is known; `movable`: whether the reference can be with the
    critic."""
    if gpus == 1:
        return ("colocated",)
    # the critic's ranks: half, one less, a quarter
    sizes = sorted({gpus // 2, max(1, gpus // 2 - 1), max(1, gpus // 4)}, reverse=True)
    free = [f"{gpus - size}+{size}" for size in sizes]
    return ("colocated", *free, *(f"{job}/critic" for job in free if movable))


def lengths_of(distribution: str) -> list[int]:
    """The response lengths that `--lengths` names. What is no distribution and no file is a
    UserError."""
    if parts := re.fullmatch(r"fixed:(\d+)", distribution):
        return [int(parts[1])]
    if parts := re.fullmatch(r"lognormal:(\d+):(\d+)", distribution):
        sigma = 0.8
        mu = math.log(max(1, int(parts[1]))) - sigma**2 / 2
        draw = random.Random(0)
        drawn = (round(draw.lognormvariate(mu, sigma)) for _ in range(DRAWN))
        return [min(int(parts[2]), max(1, length)) for length in drawn]
    if not Path(distribution).is_file():
        raise UserError(
            f"--lengths {distribution}: write fixed:512, lognormal:240:1024, "
            "or name a file with one a line"
        )
    from splitppo.data import read_lengths  # imports torch, and --help must not wait for it

    return read_lengths(RolloutConfig(lengths=distribution, max_new_tokens=sys.maxsize))


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


def run_job(job: str, bench: Bench, flags: list[str], out: Path) -> Result:
    """Runs a job to its end, in the folder OUT/JOB. A job that fails or takes too long is a
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
                status = running.wait(bench.limit)
            except subprocess.TimeoutExpired as error:
                raise UserError(f"took more than --limit {bench.limit:g} s; see {log}") from error
            finally:
                # torchrun passes it on to its ranks; a kill would leave them running
                running.terminate()
                running.wait()
    if status:
        error = re.search(r"^error:.*", log.read_text(errors="replace"), re.MULTILINE)
        raise UserError(f"exit {status}: {error[0] if error else f'see {log}'}")
    return result_of(job, folder, bench.warmup)


def result_of(job: str, folder: Path, warmup: int) -> Result:
    """The figures of a job's run, without its first `warmup` steps."""
    steps = {
        role: [step.metrics for step in column.values()]
        for role, column in zip(ROLES, read_columns(folder), strict=True)
    }
    last = {role: lines[warmup:] for role, lines in steps.items()}
    metrics = {
        role: {n: mean(lines, n) for step in lines for n in step} for role, lines in last.items()
    }
    return Result(
        job,
        metrics,
        tokens_s=metrics["actor"]["tokens"] / metrics["actor"]["timing_s/step"],
        steps_s=[step["timing_s/step"] for step in last["actor"]],
    )


def gpu_name() -> str | None:
    """Of the first GPU, asked without touching it; None without one."""
    try:
        return subprocess.check_output(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            stderr=subprocess.PIPE,
            text=True,
        ).splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def table(results: list[Result]) -> str:
    """The comparison as it is printed."""
    base = next((result for result in results if result.job == "colocated"), results[0])
    lines = [
        {
            "job": r.job,
            "tokens/s": f"{r.tokens_s:,.0f}",
            "s/step": f"{r.seconds('actor', 'step'):.2f}",
            "from-to": f"{min(r.steps_s):.2f}-{max(r.steps_s):.2f}",
            "rollout": f"{r.seconds('actor', 'rollout', 'barrier_wait'):.2f}",
            "update": f"{r.seconds('actor', 'update'):.2f}",
            "value upd.": f"{r.seconds('critic', 'update'):.2f}",
            "idle a/c": "/".join(f"{r.metrics[role]['perf/idle_share']:.0%}" for role in ROLES),
            # 10^12 model FLOPs (6 for each token and parameter) a second of a rank's update
            "update TFLOP/s a/c": "/".join(
                f"{r.metrics[role]['perf/update_tflop'] / r.seconds(role, 'update'):.0f}"
                for role in ROLES
            ),
            "ratio": f"{r.tokens_s / base.tokens_s:.2f}x",
        }
        for r in results
    ]
    return "\n".join(as_text([tuple(lines[0]), *(tuple(line.values()) for line in lines)]))


@command
def main() -> int:
    """Runs all jobs and prints their table; returns the exit status."""
    bench, extra = read_flags(Bench, "splitppo bench", words(), return_unknown_args=True)
    ppo = parse(extra).ppo
    out = Path(bench.out)
    gpu = gpu_name()
    jobs = bench.jobs or default_jobs(bench.gpus, movable=may_move(ppo.kl_coef, ppo.kl_loss_coef))
    for job in jobs:
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
    for job in jobs:
        print(f"{job} ...", flush=True)
        try:
            results.append(run_job(job, bench, flags, out))
        except UserError as error:
            print(f"  failed: {error}", flush=True)
            continue
        speed = f"{results[-1].tokens_s:,.0f} tokens/s"
        print(f"  {speed}, {results[-1].seconds('actor', 'step'):.2f} s a step", flush=True)
        report = {
            "bench": asdict(bench),
            "flags": flags,
            "gpu": gpu,
            "results": [asdict(result) for result in results],
        }
        # after each job: the next may never end
        write_whole(out / "bench.json", json.dumps(report, indent=1) + "\n")
    if results:
        print(
            f"\n{bench.gpus} x {gpu or 'CPU ranks'}, {bench.steps} steps after {bench.warmup}",
            table(results),
            sep="\n",
        )
    return 0 if len(results) == len(jobs) else 1
