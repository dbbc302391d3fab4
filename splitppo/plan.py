"""Which split of the GPUs is the fastest: predicted from the phases of a run, or of a short probe (see cost.py).

    python -m splitppo.plan RUN [--gpus 8]                         from a run's metrics, also while it runs
    python -m splitppo.plan --gpus 8 --config mine.toml [...]      from a probe of five steps with the trainer's flags

What it predicts for the placements, `python -m splitppo.bench` measures.
"""

import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Annotated

import tyro

from splitppo.bench import Bench, job_flags, run_job
from splitppo.cost import Side, Split, advice, may_move, run_work
from splitppo.errors import UserError

PROBE_STEPS = 5


def plan_lines(run: Path, gpus: int | None = None) -> list[str]:
    """The advice on a run.

    Raises:
        UserError: it is no run, or too young.
    """
    files = [run / name for name in ("config.toml", "placement.txt", "metrics/actor.jsonl", "metrics/critic.jsonl")]
    for file in files:
        if not file.is_file():
            raise UserError(f"{run} is no run folder: {file.relative_to(run)} is missing; name RUN of a run that began")
    settings = tomllib.loads(files[0].read_text())
    found = re.match(r"placement (\w+): (\d+) actor, (\d+) critic", files[1].read_text())
    if not found:
        raise UserError(f"{files[1]} is broken; let the run write it anew")
    actor, critic = int(found[2]), 0 if found[1] == "colocated" else int(found[3])
    side: Side = settings["placement"].get("reference", "actor")
    split = Split(actor, critic, side)
    work = run_work(run, split, settings["rollout"]["batch_size"])
    ppo = settings["ppo"]
    movable = may_move(ppo["kl_coef"], ppo["kl_loss_coef"])
    return advice(work, split, gpus or actor + critic, movable=movable)


def run_probe(gpus: int, flags: list[str], out: Path) -> Path:
    """Runs a few steps on so many ranks, in two groups if there are two; returns the run's folder.

    Raises:
        UserError: it failed.
    """
    job = "colocated" if gpus == 1 else f"{gpus - gpus // 2}+{gpus // 2}"
    bench = Bench(gpus=gpus, warmup=2, steps=PROBE_STEPS - 2, out=str(out))
    print(f"probe: {job}, {PROBE_STEPS} steps ...", flush=True)
    try:
        run_job(job, bench, job_flags(bench, flags, [], out), out)
    except UserError as error:
        print((out / f"{job}.log").read_text(errors="replace")[-3000:], file=sys.stderr)
        raise UserError(f"the probe failed: {str(error).partition('; see')[0]}; its end is above") from error
    return out / job


def of_run(run: Annotated[Path, tyro.conf.Positional], *, gpus: int | None = None) -> list[str]:
    """Predicts from a run which split is the fastest.

    Args:
        run: the run's folder.
        gpus: how many GPUs to place. Unset: as many as the run has.
    """
    return plan_lines(run, gpus)


def of_probe(*, gpus: int, ranks: int | None = None) -> tuple[int, int]:
    """Predicts from a probe of a few steps which split is the fastest; further flags are the trainer's.

    Args:
        gpus: how many GPUs to place.
        ranks: of the probe. Unset: `gpus`.
    """
    return gpus, ranks or gpus


def main() -> int:
    prog = "python -m splitppo.plan"
    try:
        if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
            print("\n".join(tyro.cli(of_run, prog=prog)))
            return 0
        (gpus, ranks), flags = tyro.cli(of_probe, prog=f"{prog} [RUN]", return_unknown_args=True)
        with tempfile.TemporaryDirectory() as out:
            print("\n".join(plan_lines(run_probe(ranks, flags, Path(out)), gpus)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
