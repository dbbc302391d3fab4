"""A teacher beside a student, 1+1 against colocated, on two GPUs: what a step costs, and how much
of the teacher's time is hidden behind the rollout.

    PYTHONPATH=. python tests/gpu/teacher.py OUT [--student 0.5B] [--teacher 7B] -- TRAINER FLAGS

Weights are drawn by shape, nothing is read or fetched. Rows are rewarded by nothing and follow the
teacher's log-probs of sampled tokens. Response lengths are log-normal. `splitppo bench` makes the
runs; the last lines are a table of its figures, means of the measured steps.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from memory import SHAPES, write_inputs

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
ALL_SHAPES = SHAPES | {"tiny": TINY}


def write_lengths(file: Path, average: int, most: int) -> None:
    """Log-normal lengths with sigma .8, seeded."""
    draw = random.Random(0)
    shift = 0.8**2 / 2
    drawn = (round(average * draw.lognormvariate(-shift, 0.8)) for _ in range(4096))
    file.write_text("".join(f"{min(most, max(1, length))}\n" for length in drawn))


def shown(result: dict[str, Any]) -> str:
    """A job's figures. What the actor waits for its advantages is what the teacher's forward passes
    take beyond the rollout and the policy's log-probs."""
    actor, critic = (result["metrics"][role] for role in ("actor", "critic"))
    memory = (line.get("perf/max_memory_allocated_gb", 0.0) for line in (actor, critic))
    parts = [
        f"{result['job']:9}",
        f"{actor['timing_s/step']:.2f} s a step",
        f"{result['tokens_s']:,.0f} tokens/s",
        f"idle {actor['perf/idle_share']:.1%} {critic['perf/idle_share']:.1%}",
        "GiB " + " ".join(f"{peak:.1f}" for peak in memory),
        f"rollout {actor['timing_s/rollout']:.2f}",
        f"update {actor['timing_s/update']:.2f}",
        f"teacher {critic['timing_s/score']:.2f}",
    ]
    if "timing_s/wait_advantages" in actor:
        waited = actor["timing_s/wait_advantages"]
        parts.append(
            f"waited for it {waited:.2f}: {1 - waited / critic['timing_s/score']:.0%} hidden"
        )
    return " | ".join(parts)


def main() -> int:
    mine, _, extra = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--student", choices=list(ALL_SHAPES), default="0.5B")
    parser.add_argument("--teacher", choices=list(ALL_SHAPES), default="7B")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--mean", type=int, default=600, help="of the response lengths")
    parser.add_argument("--most", type=int, default=2048)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", default=["colocated", "1+1"])
    options = parser.parse_args(mine.split())
    folders = {name: options.out / name for name in ("student", "teacher")}
    inputs = write_inputs(folders["student"], ALL_SHAPES[options.student])[:2]
    write_inputs(folders["teacher"], ALL_SHAPES[options.teacher])
    lengths = options.out / "lengths"
    write_lengths(lengths, options.mean, options.most)
    command = [
        sys.executable, "-m", "splitppo", "bench", "--gpus", "2", "--jobs", *options.jobs,
        "--warmup", str(options.warmup), "--steps", str(options.steps),
        "--out", str(options.out / "bench"), *inputs, "--policy.random-init",
        "--teacher.path", str(folders["teacher"]), "--reward.function", "none",
        "--rollout.lengths", str(lengths), "--rollout.max-new-tokens", str(options.most),
        "--rollout.max-prompt-tokens", "384", "--rollout.batch-size", str(options.rows),
        "--ppo.mini-batches", "2", "--data.answer-key=", "--log.samples", "0",
        *extra.split(),
    ]  # fmt: skip
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        report = json.loads((options.out / "bench" / "bench.json").read_text())
        print(*map(shown, report["results"]), sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
