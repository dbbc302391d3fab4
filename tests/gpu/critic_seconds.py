"""By seconds: a value model, whose rows may go on from step to step (windows), against the group's
mean, which needs whole rows.

    python tests/gpu/critic_seconds.py speed OUT --gpus 2 -- --policy.path SHAPE TRAINER FLAGS
    python tests/gpu/critic_seconds.py table OUT/speed.json docs/critic_block.jsonl

`speed` trains each arm for some steps on rows of given lengths, log-normal, with and without
windows, one arm after the other; OUT/speed.json gets the response tokens a second of the last
steps. An arm that fails ends no other. `table` reads the study's scores by tokens (critic_block.py)
and shows them by seconds, at the speed of each: means of the seeds with 95 % intervals. It assumes
that a token teaches as much in a partial rollout as in a whole row (docs/partial_rollouts.md).
"""

import argparse
import json
import os
import subprocess
import sys
from math import log
from pathlib import Path
from random import Random
from typing import Any

from critic_plan import ARMS
from critic_tables import difference, estimate, mean_of_curve, read_lines

LAST = 5  # steps that are timed
JOBS = {
    "V1, windows": ("V1", True),
    "B1, windows": ("B1", True),
    "V1, whole rows": ("V1", False),
    "G8, whole rows": ("G8", False),
}


def write_lengths(file: Path, mean: float, cap: int) -> None:
    """Response lengths, log-normal with a deviation of .9 of the logarithms."""
    drawn = Random(0)
    center = log(mean) - 0.9**2 / 2
    lengths = (min(cap, max(1, round(drawn.lognormvariate(center, 0.9)))) for _ in range(4096))
    file.write_text("".join(f"{length}\n" for length in lengths))


def sampled(step: dict[str, Any]) -> float:
    """Response tokens of a step's rows; with windows their number varies."""
    length = step["response_length/mean"]
    return step["tokens"] * length / (length + step["prompt_length/mean"])


def measure(options: argparse.Namespace, extra: list[str]) -> int:
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    lengths = out / "lengths.txt"
    write_lengths(lengths, options.mean, options.cap)
    speed: dict[str, float] = {}
    for number, (name, (arm, windows)) in enumerate(JOBS.items()):
        folder = out / f"{number}"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc_per_node", str(max(1, options.gpus)), "-m", "splitppo.train",
            "--steps", str(options.steps), "--rollout.lengths", str(lengths),
            "--rollout.max-new-tokens", str(options.cap), "--run-dir", str(folder),
            "--rollout.window", str(options.window if windows else 0),
            "--log.validate-every", "0", "--log.samples", "0", "--checkpoint.no-last",
            *extra, *ARMS[arm].flags,
        ]  # fmt: skip
        with (out / f"{number}.log").open("wb") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            status = subprocess.run(command, stdout=file, stderr=file, env=environment).returncode
        if status:
            print(f"{name}: status {status}, see {file.name}", flush=True)
            continue
        with (folder / "metrics" / "actor.jsonl").open() as records:
            steps = [json.loads(line) for line in records][-LAST:]
        speed[name] = sum(map(sampled, steps)) / sum(step["timing_s/step"] for step in steps)
        print(f"{name}: {speed[name]:,.0f} tokens/s", flush=True)
        (out / "speed.json").write_text(json.dumps(speed))
    return int(len(speed) < len(JOBS))


def curve(run: dict[str, Any], speed: float) -> list[tuple[float, float]]:
    """Seconds, held-out score."""
    tokens = [0.0]
    for count in run["tokens"]:
        tokens.append(tokens[-1] + count)
    return [(tokens[line[0]] / speed, line[1]) for line in run["held_out"]]


def printed(speed: dict[str, float], file: Path) -> str:
    first, runs = read_lines(file)
    fresh = [run for run in runs if run["seed"] in first["seeds"]]
    curves = {
        name: {r["seed"]: curve(r, speed[name]) for r in fresh if r["arm"] == JOBS[name][0]}
        for name in speed
    }
    curves = {name: seeds for name, seeds in curves.items() if seeds}
    budget = min(points[-1][0] for seeds in curves.values() for points in seeds.values())
    scores = {
        name: {seed: mean_of_curve(points, budget) for seed, points in seeds.items()}
        for name, seeds in curves.items()
    }
    base = next(iter(scores))
    lines = [
        ["advantages from", "tokens/s", "held-out, mean over equal seconds", f"{base} less it"]
    ]
    lines.append(["---"] * 4)
    for name, seeds in scores.items():
        less = difference(scores[base], seeds, paired=False)
        cells = [name, f"{speed[name]:,.0f}", str(estimate(list(seeds.values())))]
        lines.append([*cells, "" if name == base else str(less)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    mine, _, extra = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    run = parts.add_parser("speed")
    run.add_argument("out", type=Path)
    run.add_argument("--gpus", type=int, default=0)
    run.add_argument("--steps", type=int, default=15)
    run.add_argument("--mean", type=float, default=2000.0, help="tokens of a row")
    run.add_argument("--cap", type=int, default=8192, help="most tokens of a row")
    run.add_argument("--window", type=int, default=1024)
    table = parts.add_parser("table")
    table.add_argument("speed", type=Path)
    table.add_argument("runs", type=Path)
    options = parser.parse_args(mine.split())
    if options.part == "speed":
        return measure(options, extra.split())
    print(printed(json.loads(options.speed.read_text()), options.runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
