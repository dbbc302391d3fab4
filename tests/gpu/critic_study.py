"""Which critic is worth its GPU: runs with several critics on one task, and their table.

    python tests/gpu/critic_study.py OUT [--study mixed] [--jobs 18] [--gpus 2] -- TRAINER FLAGS

Studies:

* `mixed`: SmolLM2-135M adds numbers of one to four digits, one response a prompt. The value model
  with the old settings, with a better rate, with four value epochs, bounded; the batch's mean;
  groups of 8 responses, as many rows.
* `frozen`: the same value models alone, on rollouts of a policy that is not trained.
* `guess`, `stakes`: the embedded model plays games with rewards on the way: `data.task guess`, and
  stakes.py. The value model; the batch's mean by turn; groups of 8 responses, as many rows. In
  `guess` each response has a number of its own, and in the arm `shared` a group has one; in
  `stakes` a group plays one game anyway.
* `size`: layers of the value model, and what papers add. FLAGS name preset and steps.

Every arm trains with the same FLAGS, colocated on one GPU or on the CPU, `--jobs` runs at a time;
an arm without a value model leaves out the flags of one. A run that has ended is left as it is; so
the same command makes what is missing, and prints the table. `--arms rate --seeds 0` makes one run.
A run that fails ends no other; after `--limit` seconds all end. OUT/runs.jsonl has a line for each
run that has ended, OUT/study.md the table. `splitppo report OUT/*` shows the curves.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path
from queue import Queue
from statistics import fmean
from typing import Any

from splitppo.config import OF_VALUES

STUDIES = ("mixed", "frozen", "size", "guess", "stakes")
ROWS = (1_000, 4_000, 10_000)  # after which the explained variance is told
PLACES = ("first", "token_2", "token_4", "token_8", "turn_2", "turn_3")
TRAINING, HELD_OUT = 20_000, 256  # sums in the files
PRETRAINED = ["--value.pretrain-steps", "5"]
ADAPTIVE = ["--ppo.lam", "adaptive", "--ppo.lam-value", "1.0"]
MASKED = ["--ppo.clip-mode", "mask", "--ppo.old-logprobs", "engine"]
RATE = ["--value.optim.lr", "1e-4", "--ppo.lam", "1"]
RANGE = ["--value.range", "0", "1"]


def mixed() -> dict[str, list[str]]:
    """The flags of each arm."""
    return {
        "old": ["--value.optim.lr", "2e-5", "--ppo.lam", "0.95"],
        "rate": RATE,
        "epochs": [*RATE, "--ppo.value-epochs", "4"],
        "bounded": [*RATE, "--ppo.value-epochs", "4", *RANGE],
        "batch": ["--ppo.baseline", "batch"],
        "groups": ["--ppo.baseline", "group", "--rollout.samples", "8"],
    }


def turns() -> dict[str, list[str]]:
    """The flags of each arm."""
    groups = ["--ppo.baseline", "group", "--rollout.samples", "8"]
    return {
        "value": [],
        "batch": ["--ppo.baseline", "batch"],
        "groups": groups,
        "shared": [*groups, "--env.seed", "prompt"],
    }


def frozen(steps: int) -> dict[str, list[str]]:
    """The flags of each arm; the value model alone is trained in all steps."""
    alone = ["--value.pretrain-steps", str(steps)]
    once = [*alone, "--value.pretrain-epochs", "1", "--value.optim.lr"]
    four = [*alone, "--value.pretrain-epochs", "4", "--value.optim.lr"]
    return {
        "old": [*once, "2e-5"],
        "rate": [*once, "1e-4"],
        "rate_5e-5": [*once, "5e-5"],
        "rate_3e-4": [*once, "3e-4"],
        "epochs": [*four, "1e-4"],
        "bounded_once": [*once, "1e-4", *RANGE],
        "bounded": [*four, "1e-4", *RANGE],
    }


def size(layers: int) -> dict[str, list[str]]:
    """The flags of each arm, for a value model that has so many layers."""
    half, quarter, eighth = layers // 2, max(1, round(layers / 3.75)), max(1, layers // 7)
    small = ["--value.layers", str(quarter)]
    return {
        "whole": [],
        f"layers_{half}": ["--value.layers", str(half)],
        f"layers_{quarter}": small,
        f"layers_{eighth}": ["--value.layers", str(eighth)],
        "batch": ["--ppo.baseline", "batch"],
        "whole_pretrained": PRETRAINED,
        f"layers_{quarter}_pretrained": [*small, *PRETRAINED],
        "whole_adaptive": ADAPTIVE,
        f"layers_{quarter}_adaptive": [*small, *ADAPTIVE],
        "whole_mask": MASKED,
        f"layers_{quarter}_mask": [*small, *MASKED],
    }


def write_sums(out: Path, digits: list[int]) -> list[str]:
    """Writes sums whose numbers have one of these counts of digits, as many of each; returns the
    flags that read them. No sum is in both files, in this order of its numbers."""
    drawn = random.Random(0)

    def draw(count: int) -> tuple[int, int]:
        low = 10 ** (count - 1) if count > 1 else 0
        return drawn.randrange(low, 10**count), drawn.randrange(low, 10**count)

    # one digit has 100 pairs: a quarter of them at most is held out
    quota = {count: min(HELD_OUT // len(digits), 10 ** (2 * count) // 4) for count in digits}
    held_out: set[tuple[int, int]] = set()
    for count, most in quota.items():
        mine: set[tuple[int, int]] = set()
        while len(mine) < most:
            mine.add(draw(count))
        held_out |= mine
    training = []
    while len(training) < TRAINING:
        if (pair := draw(digits[len(training) % len(digits)])) not in held_out:
            training.append(pair)
    flags = []
    for flag, name, pairs in (
        ("--data.files", "training", training),
        ("--data.validation-files", "held_out", sorted(held_out)),
    ):
        rows = [
            {
                "prompt": f"What is {a}+{b}?",
                "data_source": "addition",
                "reward_model": {"ground_truth": str(a + b)},
            }
            for a, b in pairs
        ]
        file = out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags += [flag, str(file)]
    return flags


def read(folder: Path, held_out: str = "val/score/mean") -> dict[str, Any] | None:
    """What a run gave, step by step, with this metric of held-out rows. None if it has not
    ended."""
    files = [folder / "metrics" / f"{role}.jsonl" for role in ("actor", "critic")]
    if not all(file.is_file() for file in files):
        return None
    actor, critic = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    config = tomllib.loads((folder / "config.toml").read_text())
    rows = config["rollout"]["batch_size"]
    by_step = {line["step"]: line for line in critic}
    steps = [line for line in actor if line["step"]]
    if not steps or steps[-1]["step"] != config["steps"] or config["steps"] not in by_step:
        return None
    tokens = [0.0]
    for line in steps:
        tokens.append(tokens[-1] + line["response_length/mean"] * rows)
    lines = [by_step[line["step"]] for line in steps]
    seconds = [line["timing_s/step"] for line in steps[2:] or steps]
    explained = {
        place: [line.get(f"critic/explained/{place}") for line in lines] for place in PLACES
    }
    return {
        "rows": rows,
        "tokens": tokens,
        "score": [line["critic/score/mean"] for line in lines],
        "values": [line.get("critic/values/mean") for line in lines],
        "held_out": [(line["step"], line[held_out]) for line in actor if held_out in line],
        "explained": explained,
        "step_s": fmean(seconds),
    }


def explained_at(run: dict[str, Any], place: str, rows: int) -> float | None:
    """The mean over three steps around the one that has trained on so many rows."""
    step = round(rows / run["rows"])
    found = run["explained"][place][max(0, step - 2) : step + 1]
    kept = [value for value in found if value is not None]
    return fmean(kept) if kept and step <= len(run["explained"][place]) else None


def by_tokens(run: dict[str, Any], budget: float) -> float:
    """Mean held-out score while so many tokens were sampled."""
    points = [(run["tokens"][step], score) for step, score in run["held_out"]]
    area = 0.0
    for (start, before), (end, after) in pairwise(points):
        if start < budget:
            part = (min(end, budget) - start) / (end - start)
            area += (before + (after - before) * part / 2) * (min(end, budget) - start)
    return area / budget


def trained(run: dict[str, Any], budget: float) -> float:
    """Mean score of what is trained on, while so many tokens were sampled."""
    ends = [min(count, budget) for count in run["tokens"]]
    widths = [end - start for start, end in pairwise(ends)]
    return sum(width * score for width, score in zip(widths, run["score"], strict=True)) / budget


def each_seed(values: list[float], digits: int = 3) -> str:
    """The mean, and each one behind it."""
    each = " ".join(f"{value:.{digits}f}" for value in values)
    return f"{fmean(values):.{digits}f} ({each})"


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """A line for each arm, its figures the means of its seeds."""
    heads = ["arm", "held-out, mean over equal tokens, each seed"]
    heads += ["held-out, mean over the steps", "score over training, equal tokens, each seed"]
    heads += ["score of the last 10 steps, each seed", "at the end, each seed"]
    heads += ["1,000 tokens sampled", "s a step"]
    heads += [f"explained after {rows:,} rows: {', '.join(PLACES)}" for rows in ROWS]
    lines = [heads, ["---"] * len(heads)]
    budget = min(run["tokens"][-1] for runs in found.values() for run in runs)
    for name, runs in found.items():
        cells = ["-", "-"]
        if all(len(run["held_out"]) > 1 for run in runs):
            scores = [[score for step, score in run["held_out"] if step] for run in runs]
            cells = [
                each_seed([by_tokens(run, budget) for run in runs]),
                f"{fmean(map(fmean, scores)):.3f}",
            ]
        cells += [
            each_seed([trained(run, budget) for run in runs]),
            each_seed([fmean(run["score"][-10:]) for run in runs]),
            " ".join(f"{run['held_out'][-1][1]:.2f}" for run in runs if run["held_out"]),
            f"{fmean(run['tokens'][-1] for run in runs) / 1000:,.0f}",
            f"{fmean(run['step_s'] for run in runs):.2f}",
        ]
        for rows in ROWS:
            told = [[explained_at(run, place, rows) for run in runs] for place in PLACES]
            kept = [[value for value in values if value is not None] for values in told]
            cells.append(" ".join(f"{fmean(values):.2f}" if values else "-" for values in kept))
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def flags_of(arm: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The flags of all runs and the arm's, without those of a value model where it has none."""
    if "--ppo.baseline" not in arm:
        return [*flags, *arm]
    starts = [place for place, flag in enumerate(flags) if flag.startswith("--")]
    settings = [flags[a:b] for a, b in pairwise([*starts, len(flags)])]
    kept = [
        setting
        for setting in settings
        if not setting[0].removeprefix("--").replace("-", "_").startswith(OF_VALUES)
    ]
    return [*chain.from_iterable(kept), *arm]


class Pool:
    """Runs side by side, until the time is over. A run that fails ends no other; `wrong` says what
    failed."""

    def __init__(self, out: Path, limit: float):
        self.out = out
        self.until = time.monotonic() + limit
        self.lock = threading.Lock()
        self.wrong = ""

    def train(self, name: str, flags: list[str], gpu: str | None) -> None:
        """One run, in a process of its own; its output goes to a file."""
        began = time.monotonic()
        if began > self.until:
            return
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        environ |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        log = self.out / f"{name}.log"
        command = [sys.executable, "-m", "splitppo.train", *flags]
        with log.open("ab") as file:
            run = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
            try:
                status: object = run.wait(self.until - began)
            except subprocess.TimeoutExpired:
                run.kill()  # a gentle end would write a checkpoint first
                status = "the time was over"
        with self.lock:
            if status:
                tail = log.read_text(errors="replace")[-2000:]
                self.wrong += f"{name} failed ({status}), see {log}:\n{tail}\n"
                return
            told = read(self.out / name)
            with (self.out / "runs.jsonl").open("a") as file:
                file.write(json.dumps({"run": name, "gpu": gpu} | (told or {})) + "\n")
            print(f"{name}: ended after {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    own, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--study", choices=STUDIES, default="mixed")
    parser.add_argument("--steps", type=int, help="unset: 60, or 80 of games")
    parser.add_argument("--digits", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--gpus", type=int, default=0, help="0: as the trainer finds it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--layers", type=int, default=30, help="of the value model, for size")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--limit", type=float, default=36_000.0, help="seconds for all runs")
    options = parser.parse_args(own.split())
    options.out.mkdir(parents=True, exist_ok=True)
    games = options.study in ("guess", "stakes")
    steps = options.steps or (80 if games else 60)
    arms = {"mixed": mixed(), "frozen": frozen(steps), "size": size(options.layers)}
    chosen = {
        name: extra
        for name, extra in arms.get(options.study, turns()).items()
        if name in (options.arms or [name])
    }
    common = ["--placement.mode", "colocated", "--checkpoint.no-last", "--log.samples", "0"]
    if games:
        common += ["--data.task", "guess", "--steps", str(steps)]
    if options.study == "stakes":
        game = Path(__file__).with_name("stakes.py")
        common += ["--env.path", f"{game}:Stakes", "--rollout.max-new-tokens", "9"]
    if options.study in ("mixed", "frozen"):
        preset = Path(__file__).parents[2] / "configs" / "smollm2" / "two_digits.toml"
        common += ["--config", str(preset), "--steps", str(steps)]
        common += [*write_sums(options.out, options.digits), "--rollout.samples", "1"]
        common += ["--compute.micro-batch-tokens", "8192", "--rollout.max-new-tokens", "24"]
        common += ["--engine.kind", "hf", "--compute.compile", "off"]
    free: Queue[str | None] = Queue()
    for job in range(options.jobs):
        free.put(str(job % options.gpus) if options.gpus else None)
    pool = Pool(options.out, options.limit)

    def run(name: str, arm: str, seed: int) -> None:
        if read(options.out / name):
            return
        gpu = free.get()
        own = ["--run-dir", str(options.out / name), "--seed", str(seed), "--force"]
        pool.train(name, [*flags_of(chosen[arm], [*common, *flags.split()]), *own], gpu)
        free.put(gpu)

    with ThreadPoolExecutor(options.jobs) as threads:
        made = [
            threads.submit(run, f"{arm}_{seed}", arm, seed)
            for seed in options.seeds
            for arm in chosen
        ]
    for done in made:
        done.result()
    runs = {arm: [read(options.out / f"{arm}_{seed}") for seed in options.seeds] for arm in chosen}
    found = {arm: kept for arm, each in runs.items() if (kept := [run for run in each if run])}
    if found:
        (options.out / "study.md").write_text(table(found))
        print(table(found))
    if pool.wrong:
        print(pool.wrong, file=sys.stderr)
    return 1 if pool.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
