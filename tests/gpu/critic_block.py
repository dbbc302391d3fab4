"""The decisive runs of the study of critics, many at a time, and their tables. What is compared and
how it is judged stands in critic_plan.py, committed before the first run.

    python tests/gpu/critic_block.py run OUT --policy MODEL --gpus 4 --jobs 32 --plan COMMIT
    python tests/gpu/critic_block.py table OUT/runs.jsonl

Tasks (`--task`, critic_plan.py): `sums` of one to four digits, mixed; `papers`, the same with arms
that papers propose; `alike`, two digits; `mixture`, ten tasks of reasoning-gym (`data OUT --task
mixture` writes its files where that is installed; `run` takes them as they are); `written`, the
embedded model on the CPU, with rewards on the way.

`run` makes the runs that OUT/runs.jsonl lacks: every arm with each rate by two seeds, then fresh
seeds at the arm's best rate. OUT/runs.jsonl gets a line for each run that has ended. A run that
fails ends no other; it is tried once more, and its output is OUT/NAME.log. After `--seconds` all
runs end; the same command makes the others. Behind ` -- ` stand flags of the trainer for all runs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from critic_plan import ARMS, RATE_SEEDS, SEEDS, TASKS, Task
from critic_tables import best_rate, printed, read_all, read_lines

ROOT = Path(__file__).parents[2]
TRIES = 2


@dataclass(frozen=True)
class Job:
    arm: str
    rate: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}_{self.rate}_{self.seed}"


def read_run(folder: Path, job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """A line of runs.jsonl: what a run that has ended gave, step by step."""
    actor, critic = (
        [json.loads(line) for line in (folder / "metrics" / f"{role}.jsonl").open()]
        for role in ("actor", "critic")
    )
    sources = options.held_out
    trained = [line for line in actor if line["step"]]
    by_step = {line["step"]: line for line in critic}
    lines = [by_step[step] for step in range(1, options.steps + 1)]
    names = ["val/score/mean"]
    if len(sources) > 1:
        names += [f"val/score/{source}/mean" for source in sources]
    places = [
        place for place in TASKS[options.task].explained if f"critic/explained/{place}" in lines[0]
    ]
    return {
        "arm": job.arm,
        "rate": job.rate,
        "seed": job.seed,
        "tokens": [round(line["response_length/mean"] * options.rows) for line in trained],
        "score": [round(line["critic/score/mean"], 4) for line in lines],
        "held_out": [
            [line["step"], *(round(line[name], 4) for name in names)]
            for line in actor
            if names[0] in line
        ],
        "explained": {
            place: [round(line.get(f"critic/explained/{place}", 0.0), 3) for line in lines]
            for place in places
        },
        "entropy": [round(line["actor/entropy"], 3) for line in trained],
        "step_s": round(median(line["timing_s/step"] for line in trained), 2),
        "gb": round(max(line.get("perf/max_memory_allocated_gb", 0.0) for line in trained), 2),
    }


@dataclass
class Block:
    """Which runs are left, and those that run now."""

    out: Path
    options: argparse.Namespace
    flags: list[str]  # of the trainer, for all runs
    until: float
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    running: dict[str, tuple[Job, subprocess.Popen[bytes], int, float]] = field(
        default_factory=dict
    )
    seconds: list[float] = field(default_factory=list)  # that runs took

    def jobs(self) -> list[Job]:
        """All runs that can be named now, the most important first."""
        options = self.options
        found = [
            Job(arm, rate, seed)
            for arm in options.arms
            if not ARMS[arm].like and len(options.rates) > 1
            for seed in options.rate_seeds
            for rate in options.rates
        ]
        chosen = {arm: self.rate_of(arm) for arm in options.arms}
        main = [arm for arm in options.arms if not ARMS[arm].like]
        for part in (main[:2], main[2:4], main[4:], [a for a in options.arms if ARMS[a].like]):
            found += [
                Job(arm, rate, seed)
                for seed in options.seeds
                for arm in part
                if (rate := chosen[arm])
            ]
        return found

    def rate_of(self, arm: str) -> str | None:
        """The arm's best rate, once all runs that choose it have ended or failed for good; the only
        one if there is no choice."""
        arm = ARMS[arm].like or arm
        options = self.options
        if len(options.rates) == 1:
            return options.rates[0]
        names = [Job(arm, rate, seed).name for rate in options.rates for seed in options.rate_seeds]
        open_ones = [n for n in names if n not in self.done and self.failures.get(n, 0) < TRIES]
        return None if open_ones else best_rate(self.done[n] for n in names if n in self.done)

    def next(self) -> Job | None:
        """The first run that neither runs nor has ended, those that failed last. None if there is
        none now, or it could not end in time."""
        if time.time() + (0.9 * median(self.seconds) if self.seconds else 0) > self.until:
            return None
        left = [
            job
            for job in self.jobs()
            if job.name not in self.done
            and job.name not in self.running
            and self.failures.get(job.name, 0) < TRIES
        ]
        return min(left, key=lambda job: self.failures.get(job.name, 0), default=None)

    def free_gpu(self) -> int:
        """Of the GPUs with fewest runs, the one with fewest value models, which take memory."""

        def load(gpu: int) -> tuple[int, int]:
            arms = [job.arm for job, _, at, _ in self.running.values() if at == gpu]
            return len(arms), sum("--ppo.baseline" not in ARMS[arm].flags for arm in arms)

        return min(range(max(1, self.options.gpus)), key=load)

    def start(self, job: Job) -> None:
        options = self.options
        gpu = self.free_gpu()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
        if options.mps:  # its server of this GPU shows that one alone
            environment |= {
                "CUDA_MPS_PIPE_DIRECTORY": f"{options.mps}/{gpu}",
                "CUDA_VISIBLE_DEVICES": "0",
            }
        elif options.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        arm = ARMS[job.arm]
        folder = self.out / "runs" / job.name
        command = [
            sys.executable, str(Path(__file__).with_name("critic_arms.py")), arm.baseline,
            *self.flags, *arm.flags, "--policy.optim.lr", job.rate, "--seed", str(job.seed),
            "--run-dir", str(folder),
        ]  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)  # what a run that was cut off has left
        with (self.out / f"{job.name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.running[job.name] = job, process, gpu, time.time()

    def collect(self) -> None:
        """Takes in the runs that have ended since."""
        for name, (job, process, gpu, began) in list(self.running.items()):
            status = process.poll()
            if status is None:
                continue
            del self.running[name]
            took = time.time() - began
            folder = self.out / "runs" / name
            try:
                if status:
                    raise ValueError(f"status {status}")
                line = read_run(folder, job, self.options)
            except (OSError, ValueError, KeyError, IndexError) as error:
                self.failures[name] = self.failures.get(name, 0) + 1
                tail = (self.out / f"{name}.log").read_text(errors="replace")[-1500:]
                with (self.out / "failures.txt").open("a") as file:
                    file.write(f"{name} on {gpu} after {took:.0f} s: {error!r}\n{tail}\n\n")
                print(f"{name}: failed after {took:.0f} s, {error!r}", flush=True)
                continue
            self.done[name] = line
            self.seconds = [*self.seconds, took][-40:]
            with (self.out / "runs.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            end = line["held_out"][-1][1]
            print(
                f"{name}: {took:.0f} s, {line['step_s']} s a step, {line['gb']} GB, {end}",
                flush=True,
            )

    def work(self) -> None:
        """Runs all, `--jobs` at a time, until nothing is left or the time is over."""
        while time.time() < self.until:
            self.collect()
            while len(self.running) < self.options.jobs and (job := self.next()):
                self.start(job)
            if not self.running:
                break
            time.sleep(0.5)
        for _, process, _, _ in self.running.values():
            process.kill()


def machine(gpus: int) -> str:
    import torch

    name = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else f"{os.cpu_count()} CPU cores"
    return f"{name}, torch {torch.__version__}"


def write_data(out: Path, task: Task) -> dict[str, int]:
    """Writes the task's files into the folder, or takes those that are there; returns how many
    held-out rows each data_source has."""
    out.mkdir(parents=True, exist_ok=True)
    sizes = out / "held_out.json"
    if not sizes.is_file():
        sizes.write_text(json.dumps(task.write(out)))
    return json.loads(sizes.read_text())


def flags_of(options: argparse.Namespace, out: Path) -> list[str]:
    """Of the trainer, for all runs."""
    flags = [
        *TASKS[options.task].flags,
        "--data.files", str(out / "training.jsonl"),
        "--data.validation-files", str(out / "held_out.jsonl"),
        "--data.validation-rows", str(sum(options.held_out.values())),
        "--steps", str(options.steps), "--rollout.batch-size", str(options.rows),
        "--log.validate-every", str(max(1, options.steps // 10)), "--log.samples", "0",
        "--placement.mode", "colocated", "--checkpoint.no-last",
    ]  # fmt: skip
    if TASKS[options.task].embedded:
        return flags
    return [
        "--config", str(ROOT / "configs" / "smollm2" / "two_digits.toml"),
        "--policy.path", str(options.policy.absolute()), *flags,
        "--engine.kind", "hf", "--engine.max-rows", "1024", "--compute.compile", "off",
        "--compute.micro-batch-tokens", "4096",
    ]  # fmt: skip


def make_runs(options: argparse.Namespace, extra: list[str]) -> int:
    out = options.out.absolute()
    task = TASKS[options.task]
    options.held_out = write_data(out, task)
    for name in ("arms", "rates", "steps", "rows"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(task, name))
    (out / "runs").mkdir(exist_ok=True)
    flags = [*flags_of(options, out), *extra]
    block = Block(out, options, flags, time.time() + options.seconds)
    file = out / "runs.jsonl"
    if file.is_file():
        block.done = {Job(r["arm"], r["rate"], r["seed"]).name: r for r in read_lines(file)[1]}
    else:
        names = ("task", "plan", "steps", "rows", "held_out", "rate_seeds", "seeds")
        first = {name: getattr(options, name) for name in names}
        file.write_text(json.dumps(first | {"machine": machine(options.gpus)}) + "\n")
    block.work()
    left = [job.name for job in block.jobs() if job.name not in block.done]
    print(f"{len(block.done)} runs have ended; left: {' '.join(left) or 'none'}", flush=True)
    return 1 if left else 0


def main() -> int:
    mine, _, extra = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    data = parts.add_parser("data")
    run = parts.add_parser("run")
    for part in (data, run):
        part.add_argument("out", type=Path)
        part.add_argument("--task", choices=list(TASKS), default="sums")
    run.add_argument("--policy", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    run.add_argument("--plan", default="none", help="the commit of the plan, for the table")
    run.add_argument("--gpus", type=int, default=0, help="0: as the trainer finds it")
    run.add_argument("--jobs", type=int, default=1, help="runs at a time")
    run.add_argument("--mps", help="folder with a pipe folder of an MPS server for each GPU")
    run.add_argument("--seconds", type=float, default=36_000.0, help="until all runs end")
    run.add_argument("--arms", nargs="+", choices=list(ARMS), help="unset: the task's")
    run.add_argument("--rates", nargs="+", help="of the policy; a single one has no --rate-seeds")
    run.add_argument("--rate-seeds", type=int, nargs="*", default=list(RATE_SEEDS))
    run.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    run.add_argument("--steps", type=int, help="unset: the task's")
    run.add_argument("--rows", type=int, help="unset: the task's")
    table = parts.add_parser("table")
    table.add_argument("files", type=Path, nargs="+", help="the first one's plan; runs of all")
    table.add_argument("--arms", nargs="+", choices=list(ARMS), help="unset: the first file's")
    options = parser.parse_args(mine.split())
    if options.part == "run":
        return make_runs(options, extra.split())
    if options.part == "data":
        print(write_data(options.out, TASKS[options.task]))
    else:
        print(printed(*read_all(options.files, options.arms)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
