"""Placements compared on the same GPUs: the same rows through the same models, one job after the other.

    python -m splitppo.bench --gpus 4 --lengths lognormal:240:1024 --config my.toml [any flag of the trainer]

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
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from splitppo import models
from splitppo.cost import WARM_UP, Split, Work, measured, predict
from splitppo.errors import UserError
from splitppo.preflight import MODEL_KINDS
from splitppo.timeline import Column, Step, read_column, span_colours

# dense bfloat16, without sparsity, of the makers' data sheets
PEAK_TFLOPS = {"H200": 989, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362}
DRAWN = 16384  # lengths in a file


@dataclass(frozen=True)
class Bench:
    """What is compared. Flags that are not listed here are the trainer's, and go to every job."""

    gpus: Annotated[int, tyro.conf.arg(help="ranks of each job")]
    jobs: tuple[str, ...] = ()
    """Placements, as colocated, 3+1, 2+2/critic (the reference with the critic), 2+2/barrier. Unset: colocated, the
    even split with and without a barrier, and one more rank for the actor, with the reference on either side."""
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


@dataclass(frozen=True)
class Result:
    """A job's figures, means of its measured steps.

    Attributes:
        tokens_s: tokens of prompts and responses a second, of the whole job. step_s: seconds a step.
        predicted_s: a step's seconds by the cost model, from the colocated job's phases.
        phases: seconds of each span, by role. idle: share of the time in which a group waited, by role.
        tflops: model FLOPs (6 N a token) of the update, in 10^12 a second and rank, by role; mfu: of the GPU's peak.
        memory_gib: most memory allocated on the first rank of a group, by role.
        wire_mb, wire_s: what crossed at the first rank of a group, by role.
        padding: share of the update's tokens that are padding; imbalance: by how much the rank with the most tokens has
            more than the mean, by role. mismatch: of the engine's and the trainer's log-probs, mean.
        start_s: from the command to the first rollout.
    """

    job: str
    tokens_s: float
    step_s: float
    predicted_s: float | None
    phases: dict[str, dict[str, float]]
    idle: dict[str, float]
    tflops: dict[str, float]
    mfu: dict[str, float]
    memory_gib: dict[str, float]
    wire_mb: dict[str, float]
    wire_s: dict[str, float]
    padding: dict[str, float]
    imbalance: dict[str, float]
    mismatch: float
    start_s: float


def parse_job(job: str, gpus: int) -> tuple[Split, list[str]]:
    """A job's split and its flags.

    Raises:
        UserError: it isn't written so, or its ranks aren't `gpus`.
    """
    if job == "colocated":
        return Split(gpus, 0), ["--placement.mode", "colocated"]
    found = re.fullmatch(r"(\d+)\+(\d+)(/critic)?(/barrier)?", job)
    if not found:
        raise UserError(f"--jobs {job}: write colocated, 3+1, 3+1/critic, 3+1/barrier or 3+1/critic/barrier")
    actor, critic = int(found[1]), int(found[2])
    if not actor or not critic or actor + critic != gpus:
        raise UserError(f"--jobs {job}: two groups of at least one rank each must add up to --gpus {gpus}")
    side = "critic" if found[3] else "actor"
    flags = ["--placement.mode", "per_node", "--placement.actor", str(actor), "--placement.reference", side]
    return Split(actor, critic, side), flags + (["--placement.barrier"] if found[4] else [])


def default_jobs(gpus: int) -> tuple[str, ...]:
    """The jobs that make sense where nothing is known."""
    if gpus == 1:
        return ("colocated",)
    even = f"{gpus - gpus // 2}+{gpus // 2}"
    jobs = ["colocated", f"{even}/barrier", even, f"{even}/critic"]
    if gpus > 2:
        more = gpus - gpus // 2 + 1
        jobs += [f"{more}+{gpus - more}", f"{more}+{gpus - more}/critic"]
    return tuple(jobs)


def lengths_of(given: str, seed: int = 0) -> list[int]:
    """The lengths that `--lengths` stands for.

    Raises:
        UserError: it isn't written so.
    """
    if found := re.fullmatch(r"fixed:(\d+)", given):
        return [int(found[1])]
    if found := re.fullmatch(r"lognormal:(\d+):(\d+)", given):
        mean, cap, sigma, draw = int(found[1]), int(found[2]), 0.8, random.Random(seed)
        mu = math.log(mean) - sigma**2 / 2
        return [min(cap, max(1, round(draw.lognormvariate(mu, sigma)))) for _ in range(DRAWN)]
    if not Path(given).is_file():
        raise UserError(f"--lengths {given}: write fixed:512, lognormal:240:1024, or name a file with one a line")
    return [int(word) for word in Path(given).read_text().split()]


def job_flags(bench: Bench, extra: list[str], out: Path) -> list[str]:
    """The trainer's flags that are alike in all jobs; writes the file of lengths."""
    flags = [*extra, "--steps", str(bench.warmup + bench.steps), "--log.validate-every", "0"]
    if bench.lengths:
        lengths = lengths_of(bench.lengths)
        (out / "lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
        most = re.fullmatch(r"lognormal:\d+:(\d+)", bench.lengths)
        cap = int(most[1]) if most else max(lengths)
        flags += ["--rollout.lengths", str(out / "lengths.txt"), "--rollout.max-new-tokens", str(cap)]
    return flags


def run_job(job: str, bench: Bench, flags: list[str], out: Path) -> str | None:
    """Runs a job to its end; returns what went wrong, if it did."""
    folder, log = out / job.replace("/", "_"), out / f"{job.replace('/', '_')}.log"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(bench.gpus), "-m"]
    command = [*torchrun, "splitppo.train", *flags, *parse_job(job, bench.gpus)[1], "--run-dir", str(folder)]
    (out / f"{folder.name}.began").write_text(str(time.time()))
    with log.open("w") as file:
        file.write(" ".join(command) + "\n")
        file.flush()
        try:
            status = subprocess.run(command, stdout=file, stderr=file, timeout=bench.limit, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"took more than --limit {bench.limit:g} s; see {log}"
    if status:
        told = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error:")]
        return f"exit {status}: {told[0] if told else f'see {log}'}"
    return None


def result_of(job: str, bench: Bench, out: Path, gpu: str | None) -> tuple[Result, Work]:
    """The figures of a job that has run."""
    folder, (split, _) = out / job.replace("/", "_"), parse_job(job, bench.gpus)
    columns = {role: read_column(folder / "metrics" / f"{role}.jsonl") for role in ("actor", "critic")}
    last = {role: list(column.values())[bench.warmup :] for role, column in columns.items()}
    ranks = {"actor": split.actor, "critic": split.critic or split.actor}
    settings = tomllib.loads((folder / "config.toml").read_text())
    parameters, ppo = count(settings, folder), settings["ppo"]
    epochs = {"actor": ppo["epochs"], "critic": ppo.get("value_epochs") or ppo["epochs"]}
    tokens = mean(last["actor"], "tokens")
    step_s = mean(last["actor"], "timing_s/step")
    tflops = {
        role: 6 * parameters[name] * tokens * epochs[role] / mean(last[role], "timing_s/update") / ranks[role] / 1e12
        for role, name in (("actor", "policy"), ("critic", "value"))
    }
    peak = next((value for name, value in PEAK_TFLOPS.items() if gpu and name in gpu), None)
    actors, critics = ([s.metrics for s in columns[r].values()][bench.warmup - WARM_UP :] for r in columns)
    work = measured(actors, critics, split, rows(settings))

    def by_role(name: str, *, prefixed: bool = False) -> dict[str, float]:
        return {role: mean(last[role], f"{role}/{name}" if prefixed else name) for role in last}

    result = Result(
        job=job,
        tokens_s=tokens / step_s,
        step_s=step_s,
        predicted_s=None,
        phases={role: phases(steps) for role, steps in last.items()},
        idle=by_role("perf/idle_share"),
        tflops=tflops,
        mfu={role: value / peak for role, value in tflops.items()} if peak else {},
        memory_gib=by_role("perf/max_memory_allocated_gb"),
        wire_mb=by_role("perf/wire_mb"),
        wire_s=by_role("perf/wire_s"),
        padding=by_role("padding", prefixed=True),
        imbalance=by_role("imbalance", prefixed=True),
        mismatch=mean(last["actor"], "actor/mismatch_mean"),
        start_s=first_rollout(columns["actor"]) - float((out / f"{folder.name}.began").read_text()),
    )
    return result, work


def count(settings: dict[str, Any], folder: Path) -> dict[str, int]:
    """Parameters of the policy and of the value model."""
    policy = settings["policy"]["path"]
    paths = {"policy": policy, "value": settings["value"].get("path", policy)}
    return {
        name: models.count_parameters(models.read_config(str(folder / "tiny") if path == "tiny" else path), kind)
        for name, path in paths.items()
        for kind in (MODEL_KINDS[name],)
    }


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


def table(results: list[Result]) -> str:
    """The comparison as it is printed."""
    head = ("job", "tokens/s", "s/step", "model", "rollout", "update", "value upd.", "idle a/c", "MFU a/c", "ratio")
    base = next((result for result in results if result.job == "colocated"), results[0])
    lines: list[tuple[str, ...]] = [head]
    for result in results:
        mfu = "/".join(f"{result.mfu[role]:.0%}" for role in ("actor", "critic")) if result.mfu else "-"
        lines.append(
            (
                result.job,
                f"{result.tokens_s:,.0f}",
                f"{result.step_s:.2f}",
                f"{result.predicted_s:.2f}" if result.predicted_s else "-",
                f"{result.phases['actor'].get('rollout', 0.0):.2f}",
                f"{result.phases['actor'].get('update', 0.0):.2f}",
                f"{result.phases['critic'].get('update', 0.0):.2f}",
                "/".join(f"{result.idle[role]:.0%}" for role in ("actor", "critic")),
                mfu,
                f"{result.tokens_s / base.tokens_s:.2f}x",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def ratios(results: list[Result]) -> list[str]:
    """The best split against the colocated job and against the split with a barrier."""
    free = [r for r in results if r.job != "colocated" and not r.job.endswith("/barrier")]
    if not free:
        return []
    best = max(free, key=lambda result: result.tokens_s)
    told = []
    for other in results:
        if other.job == "colocated" or other.job.endswith("/barrier"):
            told.append(f"{best.job} against {other.job}: {best.tokens_s / other.tokens_s:.2f}x tokens/s")
    return told


def draw(results: list[Result], path: Path) -> None:
    """A bar for each job's columns, its phases end to end."""
    figure = Figure(figsize=(9, 0.6 + 0.7 * len(results)))
    ax = figure.subplots()
    names = list(dict.fromkeys(n for r in results for part in r.phases.values() for n in part if n != "step"))
    colours = span_colours(name for name in names if not name.startswith("wait_"))
    for i, result in enumerate(results):
        for offset, role in ((0.2, "actor"), (-0.2, "critic")):
            at = 0.0
            for name, value in result.phases.get(role, {}).items():
                if name != "step":
                    look: Any = {"color": colours[name]} if name in colours else {"color": "#eceef1", "hatch": "///"}
                    ax.barh(len(results) - i + offset, value, left=at, height=0.36, **look)
                    at += value
    ax.set_yticks([len(results) - i for i in range(len(results))], [result.job for result in results])
    ax.set_xlabel("seconds of a step; above the actor's column, below the critic's; hatched: waits")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    ax.legend(handles=handles, ncols=4, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


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
    jobs, out, gpu = bench.jobs or default_jobs(bench.gpus), Path(bench.out), gpu_name()
    for job in jobs:
        parse_job(job, bench.gpus)
    if bench.warmup < 2 or bench.steps < 1:
        raise UserError(f"--warmup {bench.warmup} --steps {bench.steps}: use at least 2 and 1; the first steps compile")
    if out.exists():
        raise UserError(f"--out {out}: it exists; name a new folder")
    out.mkdir(parents=True)
    flags, results, base, failed = job_flags(bench, extra, out), [], None, False
    for job in jobs:
        print(f"{job} ...", flush=True)
        if wrong := run_job(job, bench, flags, out):
            print(f"  failed: {wrong}", flush=True)
            failed = True
            continue
        result, work = result_of(job, bench, out, gpu)
        base = work if job == "colocated" else base
        predicted = predict(base, parse_job(job, bench.gpus)[0]) if base and not job.endswith("/barrier") else None
        results.append(replace(result, predicted_s=predicted))
        print(f"  {result.tokens_s:,.0f} tokens/s, {result.step_s:.2f} s a step", flush=True)
    if results:
        print(f"\n{bench.gpus} x {gpu or 'CPU ranks'}, {bench.steps} steps after {bench.warmup}\n{table(results)}")
        print("\n".join(ratios(results)))
        record = {"bench": asdict(bench), "flags": flags, "gpu": gpu, "results": [asdict(result) for result in results]}
        (out / "bench.json").write_text(json.dumps(record, indent=1) + "\n")
        draw(results, out / "bench.png")
    return 1 if failed else 0


def main() -> int:
    bench, extra = tyro.cli(Bench, prog="python -m splitppo.bench", return_unknown_args=True)
    try:
        return compare(bench, extra)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
