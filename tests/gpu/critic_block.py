"""The decisive runs of the study of critics, many at a time, and their tables. What is compared and
how it is judged stands in docs/critic_study.md ("The plan"), committed before the first run.

    python tests/gpu/critic_block.py run OUT --policy MODEL --gpus 4 --jobs 40 --plan COMMIT
    python tests/gpu/critic_block.py table OUT/runs.jsonl

`run` makes the runs that OUT/runs.jsonl lacks: every arm with each rate by two seeds, then fresh
seeds at the arm's best rate. OUT/runs.jsonl gets a line for each run that has ended. A run that
fails ends no other; it is tried once more, and its output is OUT/NAME.log. After `--seconds` all
runs end; the same command makes the others. Behind ` -- ` stand flags of the trainer for all runs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import atan, cos, isfinite, pi, sqrt
from pathlib import Path
from statistics import fmean, median, stdev, variance
from typing import Any

ROOT = Path(__file__).parents[2]
DIGITS = (1, 2, 3, 4)
TRAINING = 20_000  # sums in the file
HELD_OUT = {1: 14, 2: 328, 3: 328, 4: 328}  # of one digit there are 55, in either order
RATES = ("1e-5", "2e-5", "4e-5", "8e-5")
RATE_SEEDS = (1, 2)
SEEDS = tuple(range(11, 21))
STEPS = 50
ROWS = 256
TRIES = 2
EQUAL = 0.02  # a difference within this on either side counts as none
EXPLAINED = {"first": "the first token", "token_8": "tokens 8 to 15"}
AFTER = (1_000, 2_000, 4_000, 8_000, 12_000)  # rows, where the explained variance is read


@dataclass(frozen=True)
class Arm:
    """What gives the advantages. `like`: the arm whose policy rate it has."""

    title: str
    flags: tuple[str, ...]
    baseline: str = "none"  # of critic_arms.py
    like: str = ""


ONE = ("--rollout.samples", "1")
EIGHT = ("--rollout.samples", "8")
BATCH = ("--ppo.baseline", "batch")
GROUP = ("--ppo.baseline", "group")
ARMS = {
    "V1": Arm("value model, 1 response", ONE),
    "D1": Arm("mean by digit count, 1 response", (*ONE, *BATCH), "digits"),
    "B1": Arm("batch mean, 1 response", (*ONE, *BATCH)),
    "G8": Arm("group mean, 8 responses (RLOO)", (*EIGHT, *GROUP)),
    "V8": Arm("value model, 8 responses", EIGHT),
    "S8": Arm(
        "group mean over deviation, 8 responses (GRPO)",
        (*EIGHT, *GROUP, "--ppo.no-whiten"),
        "deviation",
    ),
}
# block two, its first part: settings of the value model; V1 has rate 1e-4, lambda 1
SETTINGS = {
    "V1old": ("rate 2e-5, lambda .95", ("--value.optim.lr", "2e-5", "--ppo.lam", "0.95")),
    "V1mid": ("rate 5e-5, lambda 1", ("--value.optim.lr", "5e-5")),
    "V1low": ("rate 2e-5, lambda 1", ("--value.optim.lr", "2e-5")),
    "V1lam": ("rate 1e-4, lambda .95", ("--ppo.lam", "0.95")),
    "V1high": ("rate 3e-4, lambda 1", ("--value.optim.lr", "3e-4")),
}
ARMS |= {
    name: Arm(f"value model, 1 response, {title}", (*ONE, *flags), like="V1")
    for name, (title, flags) in SETTINGS.items()
}
PRIMARY = ("V1", "D1")
SECONDARY = (
    ("V1", "B1"), ("V1", "G8"), ("V1", "S8"), ("V1", "V8"),
    ("V8", "G8"), ("V8", "S8"), ("D1", "B1"), ("D1", "G8"),
)  # fmt: skip


# ---- the task


def write_sums(out: Path) -> list[str]:
    """Writes the sums to train on and those held out; returns the flags that read them. No sum is
    in both files, in either order of its numbers. The data_source names the count of digits."""
    drawn = random.Random(54)

    def draw(count: int) -> tuple[int, int]:
        low = 10 ** (count - 1) if count > 1 else 0
        return drawn.randrange(low, 10**count), drawn.randrange(low, 10**count)

    held_out: dict[frozenset[int], tuple[int, int]] = {}
    for place in range(max(HELD_OUT.values())):  # in turn: the first few have all counts
        for count in (count for count, quota in HELD_OUT.items() if place < quota):
            while frozenset(pair := draw(count)) in held_out:
                pass
            held_out[frozenset(pair)] = pair
    training: list[tuple[int, int]] = []
    while len(training) < TRAINING:
        pair = draw(DIGITS[len(training) % len(DIGITS)])
        if frozenset(pair) not in held_out:
            training.append(pair)
    flags = []
    for flag, name, pairs in (
        ("--data.files", "training", training),
        ("--data.validation-files", "held_out", list(held_out.values())),
    ):
        rows = [
            {
                "prompt": f"What is {a}+{b}?",
                "data_source": f"addition_{len(str(a))}",
                "reward_model": {"ground_truth": str(a + b)},
            }
            for a, b in pairs
        ]
        file = out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags += [flag, str(file)]
    return flags


# ---- the runs


@dataclass(frozen=True)
class Job:
    arm: str
    rate: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}_{self.rate}_{self.seed}"


def read_run(folder: Path, job: Job, steps: int, rows: int) -> dict[str, Any]:
    """A line of runs.jsonl: what a run that has ended gave, step by step."""
    actor, critic = (
        [json.loads(line) for line in (folder / "metrics" / f"{role}.jsonl").open()]
        for role in ("actor", "critic")
    )
    trained = [line for line in actor if line["step"]]
    by_step = {line["step"]: line for line in critic}
    lines = [by_step[step] for step in range(1, steps + 1)]
    names = ["val/score/mean", *(f"val/score/addition_{count}/mean" for count in DIGITS)]
    places = [place for place in EXPLAINED if f"critic/explained/{place}" in lines[0]]
    return {
        "arm": job.arm,
        "rate": job.rate,
        "seed": job.seed,
        "tokens": [round(line["response_length/mean"] * rows) for line in trained],
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


def read_lines(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line, which says what was run and where; and the runs."""
    first, *runs = map(json.loads, file.read_text().splitlines())
    return first, runs


def mean_over_steps(run: dict[str, Any], column: int = 1) -> float:
    """Mean held-out score over the updates, by the trapezoid rule."""
    points = [(float(line[0]), line[column]) for line in run["held_out"]]
    return mean_of_curve(points, points[-1][0])


def mean_over_tokens(run: dict[str, Any], budget: float, column: int = 1) -> float:
    """Mean held-out score while so many tokens were sampled, by the trapezoid rule."""
    tokens = [0.0]
    for count in run["tokens"]:
        tokens.append(tokens[-1] + count)
    return mean_of_curve([(tokens[line[0]], line[column]) for line in run["held_out"]], budget)


def mean_of_curve(points: list[tuple[float, float]], end: float) -> float:
    """Mean height of a line through the points, from 0 to `end`."""
    area = 0.0
    for (x, y), (next_x, next_y) in pairwise(points):
        width = min(next_x, end) - x
        if width > 0:
            area += (y + (next_y - y) * width / (next_x - x) / 2) * width
    return area / end


def best_rate(runs: Iterable[dict[str, Any]]) -> str | None:
    """The rate with the highest mean held-out score over the updates, over the seeds that chose it;
    of equal ones the lower."""
    by_rate: dict[str, list[float]] = {}
    for run in runs:
        by_rate.setdefault(run["rate"], []).append(mean_over_steps(run))
    return max(sorted(by_rate, key=float), key=lambda rate: fmean(by_rate[rate]), default=None)


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
            if not ARMS[arm].like
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
        """The arm's best rate, once all runs that choose it have ended or failed for good."""
        arm = ARMS[arm].like or arm
        options = self.options
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
            return len(arms), sum(arm.startswith("V") for arm in arms)

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
        command = [
            sys.executable, str(Path(__file__).with_name("critic_arms.py")), arm.baseline,
            *self.flags, *arm.flags, "--policy.optim.lr", job.rate, "--seed", str(job.seed),
            "--run-dir", str(self.out / "runs" / job.name), "--resume", "never",
        ]  # fmt: skip
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
                line = read_run(folder, job, self.options.steps, self.options.rows)
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


def make_runs(options: argparse.Namespace, extra: list[str]) -> int:
    out = options.out.absolute()
    (out / "runs").mkdir(parents=True, exist_ok=True)
    flags = [
        "--config", str(ROOT / "configs" / "smollm2" / "two_digits.toml"),
        "--policy.path", str(options.policy.absolute()), "--steps", str(options.steps),
        *write_sums(out), "--data.validation-rows", str(sum(HELD_OUT.values())),
        "--reward.function", "last_number", "--rollout.batch-size", str(options.rows),
        "--rollout.max-new-tokens", "24", "--log.validate-every", str(max(1, options.steps // 10)),
        "--placement.mode", "colocated", "--checkpoint.no-last", "--log.samples", "0",
        "--engine.kind", "hf", "--engine.max-rows", "1024", "--compute.compile", "off",
        "--compute.micro-batch-tokens", "4096", *extra,
    ]  # fmt: skip
    block = Block(out, options, flags, time.time() + options.seconds)
    file = out / "runs.jsonl"
    if file.is_file():
        block.done = {Job(r["arm"], r["rate"], r["seed"]).name: r for r in read_lines(file)[1]}
    else:
        first = {
            "plan": options.plan,
            "machine": machine(options.gpus),
            "steps": options.steps,
            "rows": options.rows,
            "rate_seeds": options.rate_seeds,
            "seeds": options.seeds,
        }
        file.write_text(json.dumps(first) + "\n")
    block.work()
    left = [job.name for job in block.jobs() if job.name not in block.done]
    print(f"{len(block.done)} runs have ended; left: {' '.join(left) or 'none'}", flush=True)
    return 1 if left else 0


# ---- intervals and tests


def student_p(t: float, freedom: float) -> float:
    """Two-sided p of Student's t: with tan(x) = t / sqrt(freedom) its density is that of
    cos(x)^(freedom - 1)."""

    def area(start: float, end: float, pieces: int = 2000) -> float:
        width = (end - start) / pieces
        middles = (start + (piece + 0.5) * width for piece in range(pieces))
        return width * sum(cos(x) ** (freedom - 1) for x in middles)

    at = atan(abs(t) / sqrt(freedom))
    beyond = area(at, pi / 2)
    return beyond / (area(0.0, at) + beyond)


def student_limit(freedom: float) -> float:
    """The t whose two-sided p is .05."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, freedom) > 0.05 else (low, middle)
    return low


@dataclass(frozen=True)
class Estimate:
    """A mean with half the width of its 95 % interval. `p`: two-sided, of a mean of 0."""

    mean: float
    half: float
    p: float
    n: int

    def __str__(self) -> str:
        return f"{number(self.mean)} ± {number(self.half)}" if isfinite(self.half) else "-"


def number(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"


def estimate(values: list[float]) -> Estimate:
    """Of independent values, by Student's t."""
    n = len(values)
    if n < 2:
        return Estimate(values[0] if values else 0.0, float("inf"), 1.0, n)
    mean = fmean(values)
    error = stdev(values) / sqrt(n)
    p = student_p(mean / error, n - 1) if error else float(not mean)
    return Estimate(mean, student_limit(n - 1) * error, p, n)


def difference(first: dict[int, float], second: dict[int, float], *, paired: bool) -> Estimate:
    """Mean of the first less mean of the second, values by seed: of the seeds that both have, or by
    Welch's test."""
    if paired:
        return estimate([first[seed] - second[seed] for seed in sorted(first.keys() & second)])
    a, b = list(first.values()), list(second.values())
    if min(len(a), len(b)) < 2:
        return Estimate(0.0, float("inf"), 1.0, min(len(a), len(b)))
    parts = [variance(a) / len(a), variance(b) / len(b)]
    error = sqrt(sum(parts))
    freedom = error**4 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    mean = fmean(a) - fmean(b)
    return Estimate(
        mean, student_limit(freedom) * error, student_p(mean / error, freedom), min(len(a), len(b))
    )


def holm(ps: list[float]) -> list[float]:
    """Holm's adjusted p-values, in the same order."""
    adjusted = [0.0] * len(ps)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = highest
    return adjusted


def verdict(result: Estimate) -> str:
    """What the plan lets the primary question say."""
    low, high = result.mean - result.half, result.mean + result.half
    near = f"within {EQUAL}" if max(-low, high) < EQUAL else ""
    if low <= 0 <= high:
        return f"as good, {near}" if near else "not decided"
    return f"{'first' if low > 0 else 'second'} better" + (f", but {near}" if near else "")


# ---- the tables


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


Measure = dict[str, dict[int, float]]  # arm -> seed -> value


def tables(first: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """All tables of the page, of the lines of runs.jsonl."""
    searched = [run for run in runs if run["seed"] in first["rate_seeds"]]
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        if run["seed"] in first["seeds"]:
            by_arm.setdefault(run["arm"], {})[run["seed"]] = run
    by_arm = {arm: by_arm[arm] for arm in ARMS if arm in by_arm}
    main = {arm: seeds for arm, seeds in by_arm.items() if not ARMS[arm].like}
    parts = [
        f"Plan: commit {first['plan']}. {first['machine']}. {len(runs)} runs.",
        "## Rates: held-out score, mean over the updates, each seed",
        rate_table(searched),
    ]
    if len(main) < 2:
        return "\n\n".join(parts)
    budget = budget_of(main)
    equal = measure(main, lambda run: mean_over_tokens(run, budget))
    updates = measure(main, mean_over_steps)
    ends = measure(main, lambda run: run["held_out"][-1][1])
    parts += [
        f"## Held-out score, mean of the seeds ± 95 % interval; equal tokens: {budget:,.0f}",
        arm_table(main, [equal, updates, ends]),
        "## Held-out score by count of digits, mean over equal tokens",
        digit_table(main, lambda run, column: mean_over_tokens(run, budget, column)),
        "## Held-out score by count of digits, at the end",
        digit_table(main, lambda run, column: run["held_out"][-1][column]),
        "## Differences",
        difference_table(equal, updates, ends),
        "## Explained variance, mean of the seeds ± 95 % interval",
        explained_table(by_arm),
        "## Each seed, held-out, mean over equal tokens",
        seed_table(equal),
    ]
    settings = {arm: seeds for arm, seeds in by_arm.items() if ARMS[arm].like}
    if settings and "V1" in by_arm:
        parts += ["## Settings of the value model", setting_table(settings, by_arm["V1"])]
    return "\n\n".join(parts)


def budget_of(arms: dict[str, dict[int, dict[str, Any]]]) -> float:
    """The fewest tokens that a run of these has sampled."""
    return float(min(sum(run["tokens"]) for seeds in arms.values() for run in seeds.values()))


def measure(arms: dict[str, dict[int, dict[str, Any]]], of: Any) -> Measure:
    return {arm: {seed: of(run) for seed, run in seeds.items()} for arm, seeds in arms.items()}


def rate_table(runs: list[dict[str, Any]]) -> str:
    rows = []
    for arm in ARMS:
        mine = [run for run in runs if run["arm"] == arm]
        if not mine:
            continue
        rates = sorted({run["rate"] for run in mine}, key=float)
        cells = []
        for rate in rates:
            scores = [number(mean_over_steps(run)) for run in mine if run["rate"] == rate]
            cells.append(f"{rate}: {' '.join(scores)}")
        rows.append([ARMS[arm].title, *cells, str(best_rate(mine))])
    width = max((len(row) for row in rows), default=2)
    rows = [[*row[:-1], *["-"] * (width - len(row)), row[-1]] for row in rows]
    heads = ["advantages from", *["rate: each seed"] * (width - 2), "best rate"]
    return markdown(heads, rows)


def arm_table(arms: dict[str, dict[int, dict[str, Any]]], columns: list[Measure]) -> str:
    heads = ["advantages from", "policy rate", "seeds", "equal tokens", "equal updates"]
    heads += ["at the end", "score over training", "1,000 tokens sampled"]
    rows = []
    for arm, seeds in arms.items():
        runs = list(seeds.values())
        trained = estimate([fmean(run["score"]) for run in runs])
        tokens = fmean(sum(run["tokens"]) for run in runs) / 1000
        cells = [str(estimate(list(column[arm].values()))) for column in columns]
        rates = " ".join(sorted({run["rate"] for run in runs}))
        rows.append([ARMS[arm].title, rates, str(len(runs)), *cells, str(trained), f"{tokens:.0f}"])
    return markdown(heads, rows)


def digit_table(arms: dict[str, dict[int, dict[str, Any]]], of: Any) -> str:
    rows = [
        [
            ARMS[arm].title,
            *(str(estimate([of(run, 1 + count) for run in seeds.values()])) for count in DIGITS),
        ]
        for arm, seeds in arms.items()
    ]
    heads = [f"{count} ({HELD_OUT[count]} sums)" for count in DIGITS]
    return markdown(["advantages from", *heads], rows)


def is_paired(first: str, second: str) -> bool:
    """Whether runs of one seed have the same prompts: those with as many responses."""
    return ARMS[first].flags[:2] == ARMS[second].flags[:2]


def difference_table(equal: Measure, updates: Measure, ends: Measure) -> str:
    pairs = [pair for pair in SECONDARY if {*pair} <= equal.keys()]
    results = {
        pair: [
            difference(values[pair[0]], values[pair[1]], paired=is_paired(*pair))
            for values in (equal, updates, ends)
        ]
        for pair in (PRIMARY, *pairs)
        if {*pair} <= equal.keys()
    }
    adjusted = dict(zip(pairs, holm([results[pair][0].p for pair in pairs]), strict=True))
    rows = []
    for pair, (tokens, *others) in results.items():
        name = f"{' - '.join(pair)}" + (" (primary)" if pair == PRIMARY else "")
        p = tokens.p if pair == PRIMARY else adjusted[pair]
        said = verdict(tokens) if pair == PRIMARY else ""
        how = "paired" if is_paired(*pair) else "Welch"
        rows.append([name, how, str(tokens.n), str(tokens), f"{p:.2g}", *map(str, others), said])
    heads = ["difference", "test", "seeds", "equal tokens", "p (Holm)", "equal updates"]
    return markdown([*heads, "at the end", "verdict"], rows)


def explained_table(arms: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Means over three steps around the one after so many rows."""
    explained = {
        arm: kept
        for arm, seeds in arms.items()
        if (kept := [run["explained"] for run in seeds.values() if run["explained"]])
    }
    table = []
    for place, title in EXPLAINED.items():
        for rows in AFTER:
            step = round(rows / ROWS)
            near = slice(max(0, step - 2), step + 1)
            cells = [
                str(estimate([fmean(run[place][near]) for run in kept if run[place][near]]))
                for kept in explained.values()
            ]
            table.append([f"{title}, after {rows:,} rows", *cells])
    return markdown(["", *(ARMS[arm].title for arm in explained)], table)


def seed_table(equal: Measure) -> str:
    seeds = sorted({seed for values in equal.values() for seed in values})
    rows = [
        [arm, *(number(values[seed]) if seed in values else "-" for seed in seeds)]
        for arm, values in equal.items()
    ]
    return markdown(["", *map(str, seeds)], rows)


def setting_table(
    settings: dict[str, dict[int, dict[str, Any]]], default: dict[int, dict[str, Any]]
) -> str:
    rows = []
    results = []
    for arm, seeds in settings.items():
        budget = budget_of({"V1": default, arm: seeds})
        cells = []
        for of in (
            lambda run, budget=budget: mean_over_tokens(run, budget),
            mean_over_steps,
            lambda run: run["held_out"][-1][1],
        ):
            values = measure({"V1": default, arm: seeds}, of)
            cells.append(difference(values[arm], values["V1"], paired=True))
        results.append(cells[0].p)
        tokens = fmean(sum(run["tokens"]) for run in seeds.values()) / 1000
        rows.append([ARMS[arm].title, str(cells[0].n), *map(str, cells), f"{tokens:.0f}"])
    for row, p in zip(rows, holm(results), strict=True):
        row.insert(3, f"{p:.2g}")
    heads = ["less the value model with rate 1e-4, lambda 1", "seeds", "equal tokens", "p (Holm)"]
    return markdown([*heads, "equal updates", "at the end", "1,000 tokens sampled"], rows)


def main() -> int:
    mine, _, extra = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    run = parts.add_parser("run")
    run.add_argument("out", type=Path)
    run.add_argument("--policy", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    run.add_argument("--plan", default="none", help="the commit of the plan, for the table")
    run.add_argument("--gpus", type=int, default=0, help="0: as the trainer finds it")
    run.add_argument("--jobs", type=int, default=1, help="runs at a time")
    run.add_argument("--mps", help="folder with a pipe folder of an MPS server for each GPU")
    run.add_argument("--seconds", type=float, default=36_000.0, help="until all runs end")
    run.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    run.add_argument("--rates", nargs="+", default=list(RATES), help="of the policy")
    run.add_argument("--rate-seeds", type=int, nargs="*", default=list(RATE_SEEDS))
    run.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    run.add_argument("--steps", type=int, default=STEPS)
    run.add_argument("--rows", type=int, default=ROWS)
    table = parts.add_parser("table")
    table.add_argument("file", type=Path)
    options = parser.parse_args(mine.split())
    if options.part == "run":
        return make_runs(options, extra.split())
    print(tables(*read_lines(options.file)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
