"""SmolLM2-135M-Instruct follows a SmolLM2 that PPO has taught sums, beside PPO itself: held-out
score by steps and sampled tokens (docs/distillation.md).

    python configs/smollm2/prepare_smollm2.py
    python tests/gpu/distill_study.py run OUT --digits 2 --gpus 1 --jobs 6
    python tests/gpu/distill_study.py table OUT/runs.jsonl

The sums to train on and those held out are the same for all seeds, and no sum is in both. The
teacher is the PPO run of the first seed at its end. A run that has ended is not made again; one
that fails ends no other. Behind ` -- ` stand flags of the trainer for all runs.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from critic_tasks import write_sums

ROOT = Path(__file__).parents[2]
ALONE = ("--reward.function", "none", "--reward.validation", "last_number")
SCORED = ("--reward.function", "last_number")
STUDENTS = {"tokens": ALONE, "top8": (*ALONE, "--distill.top-k", "8"), "rewards_tokens": SCORED}
TITLES = {
    "ppo": "PPO without a teacher",
    "rewards_tokens": "rewards and sampled tokens",
    "tokens": "sampled tokens alone",
    "top8": "the eight most likely tokens alone",
}
CONFIGS = {1: "addition", 2: "two_digits"}


def environment(options: argparse.Namespace, place: int) -> dict[str, str]:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if options.mps:  # its server of this GPU shows that one alone
        pipes = f"{options.mps}/{place % options.gpus}"
        return variables | {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_VISIBLE_DEVICES": "0"}
    if options.gpus:
        return variables | {"CUDA_VISIBLE_DEVICES": str(place % options.gpus)}
    return variables


def read_run(folder: Path, arm: str, seed: int, rows: int) -> dict[str, Any]:
    """A line of runs.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics" / "actor.jsonl").open()]
    trained = [line for line in lines if line["step"]]
    return {
        "arm": arm,
        "seed": seed,
        "tokens": [round(line["response_length/mean"] * rows) for line in trained],
        "seconds": [round(line["timing_s/step"], 2) for line in trained],
        "held_out": [
            [line["step"], round(line["val/score/mean"], 4)]
            for line in lines
            if "val/score/mean" in line
        ],
    }


def make_runs(arms: Sequence[str], options: argparse.Namespace, flags: list[str]) -> None:
    """Runs each arm with each seed, `--jobs` at a time, and writes a line for each that ends."""
    done = {
        (line["arm"], line["seed"])
        for line in map(json.loads, (options.out / "runs.jsonl").read_text().splitlines())
    }
    left = [(arm, seed) for arm in arms for seed in options.seeds if (arm, seed) not in done]
    running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    places = iter(range(10_000))
    while left or running:
        while left and len(running) < options.jobs:
            arm, seed = left.pop(0)
            folder = options.out / "runs" / f"{arm}_{seed}"
            teacher = options.out / "runs" / f"ppo_{options.seeds[0]}" / "export"
            steps = options.steps if arm == "ppo" else options.student_steps
            reward = SCORED if arm == "ppo" else STUDENTS[arm]
            path = [] if arm == "ppo" else ["--teacher.path", str(next(teacher.glob("*/policy")))]
            command = [
                sys.executable, "-m", "splitppo.train", *flags, *reward, *path, "--seed", str(seed),
                "--steps", str(steps), "--run-dir", str(folder), "--checkpoint.every", "0",
                "--checkpoint.keep", "1",
                "--checkpoint.last" if arm == "ppo" else "--checkpoint.no-last",
            ]  # fmt: skip
            with (options.out / f"{arm}_{seed}.log").open("ab") as log:
                running[arm, seed] = subprocess.Popen(
                    command, env=environment(options, next(places)), stdout=log, stderr=log
                )
        time.sleep(0.5)
        for (arm, seed), process in list(running.items()):
            if process.poll() is None:
                continue
            del running[arm, seed]
            if process.returncode:
                print(f"{arm}_{seed}: status {process.returncode}", flush=True)
                continue
            line = read_run(options.out / "runs" / f"{arm}_{seed}", arm, seed, options.rows)
            with (options.out / "runs.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{arm}_{seed}: {line['held_out'][-1][1]} at the end", flush=True)


def run(options: argparse.Namespace, extra: list[str]) -> None:
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "runs.jsonl").touch()
    write_sums(options.out, (options.digits,))
    config = ROOT / "configs" / "smollm2" / f"{CONFIGS[options.digits]}.toml"
    flags = [
        "--config", str(config), "--policy.path", str(options.policy.absolute()),
        "--data.files", str(options.out / "training.jsonl"),
        "--data.validation-files", str(options.out / "held_out.jsonl"),
        "--data.validation-rows", "500",
        "--rollout.batch-size", str(options.rows), "--log.validate-every", "1",
        "--log.samples", "0", "--placement.mode", "colocated", "--engine.kind", "hf",
        "--engine.max-rows", "1024", "--compute.compile", "off", *extra,
    ]  # fmt: skip
    make_runs(["ppo"], options, flags)
    teacher = options.out / "runs" / f"ppo_{options.seeds[0]}"
    export = [sys.executable, "-m", "splitppo", "export", str(teacher)]
    subprocess.run(export, env=environment(options, 0), check=True)
    make_runs(options.arms, options, flags)


def reached(line: dict[str, Any], score: float) -> tuple[int, int, float] | None:
    """The steps, sampled tokens and seconds after which a run's held-out score is at least
    `score`."""
    steps = next((step for step, value in line["held_out"] if value >= score), None)
    if steps is None:
        return None
    return steps, sum(line["tokens"][:steps]), sum(line["seconds"][:steps])


def table(file: Path) -> str:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines.sort(key=lambda line: line["seed"])
    teacher = next(line for line in lines if line["arm"] == "ppo")["held_out"][-1][1]
    goal = 0.95 * teacher
    rows = [
        f"The teacher has {teacher:.3f} held-out; 95 % of it are {goal:.3f}.\n",
        "| | steps, by seed | sampled tokens, by seed | seconds, by seed | held-out at the end |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm, title in TITLES.items():
        runs = [line for line in lines if line["arm"] == arm]
        places = [reached(line, goal) for line in runs]
        ends = ", ".join(f"{line['held_out'][-1][1]:.3f}" for line in runs)
        columns = (
            ", ".join("never" if place is None else f"{place[i]:,.0f}" for place in places)
            for i in range(3)
        )
        if runs:
            rows.append(f"| {title} | {' | '.join(columns)} | {ends} |")
    return "\n".join(rows)


def main() -> int:
    mine, _, extra = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    runs = parts.add_parser("run")
    runs.add_argument("out", type=Path)
    runs.add_argument("--policy", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    runs.add_argument("--digits", type=int, choices=list(CONFIGS), default=2)
    runs.add_argument("--arms", nargs="+", choices=list(STUDENTS), default=list(STUDENTS))
    runs.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    runs.add_argument("--steps", type=int, default=60, help="of PPO")
    runs.add_argument("--student-steps", type=int, default=30)
    runs.add_argument("--rows", type=int, default=256)
    runs.add_argument("--gpus", type=int, default=0, help="0: as the trainer finds it")
    runs.add_argument("--jobs", type=int, default=1, help="runs at a time")
    runs.add_argument("--mps", help="folder with a pipe folder of an MPS server for each GPU")
    parts.add_parser("table").add_argument("file", type=Path)
    options = parser.parse_args(mine.split())
    if options.part == "run":
        run(options, extra.split())
        options.file = options.out / "runs.jsonl"
    print(table(options.file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
