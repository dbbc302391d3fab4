"""Value epochs against the critic's idle time: seconds a step and idle share, a job at a time.

    python tests/gpu/value_epochs.py OUT [--gpus 2] [--job 1+1/critic] [--epochs 1 2 4]
        [--lengths fixed:128 lognormal:1000:4096] [--steps 5] [--warmup 4] -- FLAGS OF THE TRAINER

For each kind of lengths `splitppo bench` runs the job with each number of `ppo.value_epochs`.
Prints a table and writes OUT/epochs.jsonl, a line for each job. When a job fails, all ends. With
the reference at the critic, FLAGS need `--ppo.kl-coef`. For four GPUs: `--gpus 4 --job 3+1/critic`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any


def bench(out: Path, options: argparse.Namespace, lengths: str, epochs: int, flags: str) -> Any:
    """A job's figures."""
    folder = out / f"{lengths.replace(':', '_')}_{epochs}"
    if not (folder / "bench.json").is_file():
        command = [sys.executable, "-m", "splitppo", "bench", "--gpus", str(options.gpus)]
        command += ["--jobs", options.job, "--lengths", lengths, "--out", str(folder)]
        command += ["--warmup", str(options.warmup), "--steps", str(options.steps)]
        command += [*flags.split(), "--ppo.value-epochs", str(epochs)]
        subprocess.run(command, check=True)
    (result,) = json.loads((folder / "bench.json").read_text())["results"]
    critic = result["metrics"]["critic"]
    return {
        "lengths": lengths,
        "value_epochs": epochs,
        "step_s": fmean(result["steps_s"]),
        "steps_s": result["steps_s"],
        "idle": critic["perf/idle_share"],
        "value_update_s": critic["timing_s/update"],
        "rollout_s": result["metrics"]["actor"]["timing_s/rollout"],
    }


def main() -> None:
    own, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--job", default="1+1/critic")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", nargs="+", default=["fixed:128", "lognormal:1000:4096"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args(own.split())
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [["lengths", "value epochs", "s a step", "longer", "critic idle", "value update, s"]]
    lines.append(["---"] * len(lines[0]))
    for lengths in options.lengths:
        first = bench(options.out, options, lengths, options.epochs[0], flags)
        for epochs in sorted(options.epochs):
            found = bench(options.out, options, lengths, epochs, flags)
            with (options.out / "epochs.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")
            longer = f"{found['step_s'] / first['step_s'] - 1:+.1%}"
            cells = [lengths, str(epochs), f"{found['step_s']:.2f}", longer, f"{found['idle']:.0%}"]
            lines.append([*cells, f"{found['value_update_s']:.2f}"])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    (options.out / "epochs.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
