"""Which critic is worth its GPU: sizes of the value model, and what the papers add to it, on one
task at equal GPUs.

    python tests/gpu/critic_study.py OUT [--jobs 4] [--gpus 2] [--layers 30] -- FLAGS OF THE TRAINER

Every arm trains with the same FLAGS, colocated on one GPU or on the CPU, `--jobs` runs at a time. A
run that has ended is left as it is. One that was stopped goes on from its checkpoint, or begins
again. So the same command resumes the study. Prints the table and writes OUT/study.md,
OUT/study.json and OUT/study.png.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from statistics import mean

PRETRAINED = ["--value.pretrain-steps", "5"]
ADAPTIVE = ["--ppo.lam", "adaptive", "--ppo.lam-value", "1.0"]
MASKED = ["--ppo.clip-mode", "mask", "--ppo.old-logprobs", "engine"]


def arms(layers: int) -> dict[str, list[str]]:
    """The flags of each arm, for a value model that has so many layers."""
    half, quarter, eighth = layers // 2, max(1, round(layers / 3.75)), max(1, layers // 7)
    small = ["--value.layers", str(quarter)]
    return {
        "whole": [],
        f"layers_{half}": ["--value.layers", str(half)],
        f"layers_{quarter}": small,
        f"layers_{eighth}": ["--value.layers", str(eighth)],
        f"two_of_{quarter}": [*small, "--value.ensemble", "2"],
        "none": ["--ppo.baseline", "batch"],
        "whole_pretrained": PRETRAINED,
        f"layers_{quarter}_pretrained": [*small, *PRETRAINED],
        "whole_adaptive": ADAPTIVE,
        f"layers_{quarter}_adaptive": [*small, *ADAPTIVE],
        "whole_mask": MASKED,
        f"layers_{quarter}_mask": [*small, *MASKED],
    }


def train(out: Path, name: str, flags: list[str], seed: int, gpu: str | None) -> None:
    """One run, in a process of its own; its output goes to a file."""
    folder = out / f"{name}_{seed}"
    if read(folder):
        return
    own = [
        "--run-dir",
        str(folder),
        "--seed",
        str(seed),
        "--placement.mode",
        "colocated",
        "--checkpoint.keep",
        "1",
    ]
    own += [] if any(folder.glob("checkpoints/step_*")) else ["--force"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    with (out / f"{name}_{seed}.log").open("ab") as log:
        command = [sys.executable, "-m", "splitppo.train", *flags, *own]
        done = subprocess.run(command, env=environ, stdout=log, stderr=subprocess.STDOUT).returncode
    print(
        f"{name}, seed {seed}: {'ended' if done == 0 else f'failed ({done}), see {log.name}'}",
        flush=True,
    )


def read(folder: Path) -> list[dict] | None:
    """A run's lines, one a step: the actor's with the critic's figures. None if it has not
    ended."""
    files = [folder / "metrics" / f"{role}.jsonl" for role in ("actor", "critic")]
    if not all(file.is_file() for file in files):
        return None
    actor, critic = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    by_step = {line["step"]: line for line in critic}
    steps = tomllib.loads((folder / "config.toml").read_text())["steps"]
    lines = [by_step.get(line["step"], {}) | line for line in actor]
    return lines if steps in by_step and lines[-1]["step"] == steps else None


def summary(runs: list[list[dict]]) -> dict:
    """Means over the seeds: held-out score by step and by second, explained variance at two places,
    time of a step."""
    curves = [
        {line["step"]: line["val/score/mean"] for line in run if "val/score/mean" in line}
        for run in runs
    ]
    steps = sorted(set.intersection(*map(set, curves)))
    scores = [mean(curve[step] for curve in curves) for step in steps]
    seconds = [mean(line["timing_s/step"] for line in run if line["step"] > 2) for run in runs]
    late = [line for run in runs for line in run[-10:] if "critic/explained/first" in line]
    places = ("first", "third_1", "third_2", "third_3")
    return {
        "seeds": len(runs),
        "steps": steps,
        "score": scores,
        "last": [curve[steps[-1]] for curve in curves],
        "area": mean(scores[1:]) if len(scores) > 1 else scores[0],
        "step_s": mean(seconds),
        "explained": {
            place: mean(line[f"critic/explained/{place}"] for line in late) for place in places
        },
    }


def table(found: dict[str, dict]) -> str:
    heads = [
        "critic",
        "held-out score, mean over the run",
        "at the end, each seed",
        "s a step",
        "relative",
    ]
    heads += ["explained: first token", "thirds of the row"]
    lines = [heads, ["---"] * len(heads)]
    base = next(iter(found.values()))["step_s"]
    for name, arm in found.items():
        thirds = " ".join(f"{arm['explained'][f'third_{i}']:.2f}" for i in (1, 2, 3))
        ends = " ".join(f"{score:.2f}" for score in arm["last"])
        times = [f"{arm['step_s']:.2f}", f"{arm['step_s'] / base:.2f}x"]
        lines.append(
            [name, f"{arm['area']:.3f}", ends, *times, f"{arm['explained']['first']:.2f}", thirds]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw(found: dict[str, dict], path: Path) -> None:
    """Held-out score by step, and by seconds of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_second) = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True)
    for number, (name, arm) in enumerate(found.items()):
        look = {"color": f"C{number % 10}", "ls": "-" if number < 6 else "--", "label": name}
        by_step.plot(arm["steps"], arm["score"], **look)
        by_second.plot([step * arm["step_s"] for step in arm["steps"]], arm["score"], **look)
    by_step.set(xlabel="step", ylabel="held-out score")
    by_second.set(xlabel="seconds of training")
    by_second.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    own, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--gpus", type=int, default=0, help="GPUs to spread them over; 0: as the trainer finds it"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layers", type=int, default=30, help="layers of the value model")
    parser.add_argument("--arms", nargs="+", help="only these")
    options = parser.parse_args(own.split())
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = {
        name: extra
        for name, extra in arms(options.layers).items()
        if name in (options.arms or [name])
    }
    free: Queue[str | None] = Queue()
    for job in range(options.jobs):
        free.put(str(job % options.gpus) if options.gpus else None)

    def run(name: str, seed: int) -> None:
        gpu = free.get()
        train(options.out, name, [*flags.split(), *chosen[name]], seed, gpu)
        free.put(gpu)

    with ThreadPoolExecutor(options.jobs) as pool:
        for seed in options.seeds:
            for name in chosen:
                pool.submit(run, name, seed)
    runs = {
        name: [read(options.out / f"{name}_{seed}") for seed in options.seeds] for name in chosen
    }
    found = {name: summary([run for run in arm if run]) for name, arm in runs.items() if any(arm)}
    (options.out / "study.json").write_text(json.dumps(found, indent=1))
    (options.out / "study.md").write_text(table(found))
    print(table(found))
    draw(found, options.out / "study.png")


if __name__ == "__main__":
    main()
