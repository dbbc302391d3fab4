"""SmolLM2-135M learns to call the calculator: several seeds at a time on one GPU.

    python configs/smollm2/prepare_smollm2.py && python configs/calculator/prepare_calculator.py
    python tests/gpu/calculator.py OUT [--arm preset] [--seeds 0 1 2] [--jobs 3] -- TRAINER FLAGS

Arms, in the order in which to try them:

* `preset`: configs/calculator/calculator.toml as it is.
* `cool`: sampled at temperature 0.7, at which the first calls are right four times as often.
* `slow`: half the policy's learning rate, for runs that rise and fall.
* `fast`: twice the rates, for runs that rise slowly.

Each run is a process of its own, colocated. A run that has ended is left as it is. Prints the
held-out curves, and returns 1 if one ends below 0.8. `splitppo report OUT/*` shows them.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from critic_study import Pool, read

PRESET = Path(__file__).parents[2] / "configs" / "calculator" / "calculator.toml"
ARMS = {
    "preset": [],
    "cool": ["--rollout.temperature", "0.7", "--log.validate-temperature", "0.7"],
    "slow": ["--policy.optim.lr", "5e-6"],
    "fast": ["--policy.optim.lr", "2e-5", "--value.optim.lr", "2e-4"],
}
DUE = 0.8
RIGHT = "val/reward/right/mean"  # without the rewards of turns


def main() -> int:
    own, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--arm", choices=list(ARMS), default="preset")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time")
    parser.add_argument("--limit", type=float, default=3_600.0, help="seconds for all runs")
    options = parser.parse_args(own.split())
    options.out.mkdir(parents=True, exist_ok=True)
    pool = Pool(options.out, options.limit)
    # three processes share a card: none may take half of it, and the engine is in the rank itself
    common = ["--config", str(PRESET), "--placement.mode", "colocated", "--engine.kind", "hf"]
    common += ["--compute.compile", "off", "--checkpoint.no-last"]
    names = {f"{options.arm}_{seed}": seed for seed in options.seeds}

    def run(name: str) -> dict[str, Any] | None:
        if read(options.out / name, RIGHT) is None:
            own = ["--run-dir", str(options.out / name), "--seed", str(names[name]), "--force"]
            pool.train(name, [*common, *ARMS[options.arm], *flags.split(), *own], None)
        return read(options.out / name, RIGHT)

    with ThreadPoolExecutor(options.jobs) as threads:
        found = dict(zip(names, threads.map(run, names), strict=True))
    curves = {name: told["held_out"] for name, told in found.items() if told}
    for name, curve in curves.items():
        print(name, *(f"{step}:{score:.3f}" for step, score in curve))
    if pool.wrong:
        print(pool.wrong, file=sys.stderr)
    below = [name for name, curve in curves.items() if curve[-1][1] < DUE]
    if below:
        print(f"below {DUE}: {', '.join(below)}")
    return int(bool(pool.wrong or below or len(curves) < len(names)))


if __name__ == "__main__":
    sys.exit(main())
