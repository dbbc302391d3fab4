"""Records the figures of 21 healthy runs: `python tests/helpers/healthy.py`, some 10 minutes on two
cores.

They are in tests/run/healthy.json: a list of runs, each with its flags and, by role, the values of
each metric that the notices read: a list with a value a step, or one for all.
tests/run/test_notices.py plays them again.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "run" / "healthy.json"
METRICS = {
    "actor": (
        "step", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/lr",
        "response_length/clip_ratio", "response_length/mean", "prompt_length/mean", "tokens",
        "val/score/mean", "val/rows",
    ),
    "critic": (
        "step", "critic/score/mean", "critic/score/min", "critic/score/max", "critic/vf_loss",
        "critic/grad_norm", "critic/vf_explained_var", "critic/kl_row", "critic/reward_failures",
    ),
}  # fmt: skip
ADDITION = (
    "--data.task=addition --rollout.max-new-tokens=4 --reward.missing-eos-penalty=0.5 --steps=40"
)
RUNS = [  # ranks and flags
    (2, ""),
    (2, "--seed=1"),
    (2, "--seed=2"),
    (1, "--seed=3"),
    (1, "--seed=4 --rollout.batch-size=64 --ppo.value-epochs=4"),
    (1, "--seed=5 --rollout.batch-size=16 --steps=60 --ppo.mini-batches=1 --log.validate-every=5"),
    (1, "--seed=6 --rollout.batch-size=256 --ppo.mini-batches=4"),
    (1, "--seed=7 --rollout.samples=4"),
    (1, "--seed=8 --rollout.window=3 --ppo.epochs=1"),
    (1, "--seed=9 --rollout.window=2 --rollout.batch-size=256"),
    (1, "--seed=10 --ppo.epochs=4"),
    (1, "--seed=11 --ppo.entropy-coef=0.1 --ppo.clip-high=0.3"),
    (1, "--seed=12 --value.pretrain-steps=10"),
    (1, "--seed=13 --value.pretrain-steps=5 --value.head=normal"),
    (1, "--seed=15 --ppo.kl-coef=0.01 --placement.mode=colocated"),
    (1, "--seed=16 --ppo.lam=1.0 --ppo.value-epochs=4"),
    (1, f"--seed=17 {ADDITION}"),
    (1, f"--seed=18 {ADDITION} --log.validate-every=5 --rollout.batch-size=64"),
    (1, "--seed=19 --reward.normalize=running --ppo.epochs=3 --steps=40"),
    # after `python configs/smollm2/prepare_smollm2.py`; two minutes a step where the cores are
    # shared
    (2, "--config=configs/smollm2/addition.toml --steps=10"),
]


def record(ranks: int, flags: str) -> dict[str, Any]:
    """Trains, and returns the flags and the figures; None where a step has none."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
        ]
        command += ["-m", "splitppo.train", f"--run-dir={folder}/run", *flags.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = {"ranks": ranks, "flags": flags}
        for role, names in METRICS.items():
            lines = (Path(folder) / "run" / "metrics" / f"{role}.jsonl").read_text().splitlines()
            steps = [json.loads(line) for line in lines]
            found[role] = {name: [step.get(name) for step in steps] for name in names}
    return found


def short(value: float | None) -> float | None:
    """Three digits; a whole number without its point."""
    rounded = None if value is None else float(f"{value:.3g}")
    return int(rounded) if rounded is not None and rounded.is_integer() else rounded


def column(values: Any) -> Any:
    """The values of a metric, or one for all steps."""
    if not isinstance(values, list):
        return values
    found = [*map(short, values)]
    return found[0] if len({*found}) == 1 else found


def table(runs: list[dict[str, Any]]) -> str:
    """JSON, a line for each run."""
    for run in runs:
        run |= {
            role: {name: column(values) for name, values in run[role].items()} for role in METRICS
        }
    return "[\n" + ",\n".join(json.dumps(run, separators=(",", ":")) for run in runs) + "\n]\n"


def main() -> None:
    known = (
        {(run["ranks"], run["flags"]): run for run in json.loads(PATH.read_text())}
        if PATH.exists()
        else {}
    )
    for number, run in enumerate(RUNS, 1):
        if run not in known:
            print(f"run {number} of {len(RUNS)}: {run}", flush=True)
            known[run] = record(*run)
            PATH.write_text(table([known[run] for run in RUNS if run in known]))


if __name__ == "__main__":
    main()
