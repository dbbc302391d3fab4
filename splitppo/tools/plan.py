"""`splitppo plan`: the fastest split of the GPUs, predicted from a run (cost.py) or from a model's shape (fit.py)."""

import json
from pathlib import Path
from typing import Annotated

import tyro

from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.run.files import read_file
from splitppo.tools.cost import Split, advice, may_move, measured, row_lengths, window_advice
from splitppo.tools.runs import read_columns


def read_run(run: Path) -> tuple[Config, Split]:
    """A run's settings and placement. A folder of no run is a UserError."""
    for name in ("config.toml", "resolved.json", "metrics/actor.jsonl", "metrics/critic.jsonl"):
        if not (run / name).is_file():
            raise UserError(f"{run} is no run folder: {name} is missing; name RUN of a run that began")
    config = parse(["--config", str(run / "config.toml")])
    found = read_file(run / "resolved.json", json.loads, "resume the run, which writes it again")
    critics = 0 if found["placement"] == "colocated" else found["critic"]
    return config, Split(found["actor"], critics, config.placement.reference)


def plan(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|MODEL")],
    *,
    gpus: int | None = None,
    length: int | None = None,
    memory: float = 80.0,
) -> list[str]:
    """Predicts from a run which split is the fastest and what rollout.window would give, or from a model's
    configuration which placements fit. Prints its lines, and returns them.

    Args:
        run: a run's folder; or a model's, or its hub name.
        gpus: how many GPUs to place. Unset: as many as the run has.
        length: of a model: the longest row in tokens, prompt and response.
        memory: of a model: GiB of a GPU.
    """
    for flag, value in (("gpus", gpus), ("length", length), ("memory", memory)):
        if value is not None and value <= 0:
            raise UserError(f"--{flag} {value:g}: use a number above 0")
    if (run / "config.json").is_file() or (not run.is_dir() and len(run.parts) == 2):
        if not gpus or not length:
            what = "is a model" if run.is_dir() else "is no folder, so it is read as a model's hub name"
            raise UserError(f"{run} {what}; give --gpus and --length, its longest row in tokens")
        from splitppo.tools.fit import fit  # imports torch, and --help must not wait for it

        lines = fit(str(run), gpus, length, memory)
    else:
        lines = from_run(run, gpus)
    print(*lines, sep="\n")
    return lines


def from_run(run: Path, gpus: int | None) -> list[str]:
    """What a run's phases predict."""
    config, split = read_run(run)
    if config.rollout.window:
        raise UserError(f"{run} has rollout.window={config.rollout.window}; name a run of the same model with window 0")
    actor, critic = ([step.metrics for step in column.values()] for column in read_columns(run))
    work = measured(actor, critic, split, config.rollout.batch_size)
    movable = may_move(config.ppo.kl_coef, config.ppo.kl_loss_coef)
    size, lengths = gpus or split.actor + split.critic, row_lengths(run)
    sets = config.tensor_parallel("policy"), config.tensor_parallel("value")
    found = advice(work, split, size, movable=movable, sets=sets)
    return found + (window_advice(work, split, lengths, size, movable=movable) if lengths else [])
