"""`splitppo plan`: the fastest split of the GPUs, predicted from a run (cost.py) or from a model's
shape (fit.py)."""

import json
from pathlib import Path
from typing import Annotated

import tyro

from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.run.files import read_file
from splitppo.tools.cost import Split, advice, measured, splits
from splitppo.tools.runs import check_folder, read_columns


def plan(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|MODEL")],
    *,
    gpus: int | None = None,
    length: int | None = None,
    memory: float = 80.0,
) -> list[str]:
    """Predict from a run which placement is the fastest, or from a model's configuration which
    placements fit.

    Args:
        run: A run's folder, a model's folder, or a model's hub name.
        gpus: Number of GPUs. Unset: as many as the run has.
        length: For a model: the longest row in tokens, prompt and response.
        memory: For a model: the GB in the GPU's name. A GPU of 80 GB has 79.2 GiB, of which
            fragmentation leaves 72.9; one of 141 GB has 139.6 GiB, which leaves 128.4.
    """
    for flag, value in (("gpus", gpus), ("length", length), ("memory", memory)):
        if value is not None and value <= 0:
            raise UserError(f"--{flag} {value:g}: use a number above 0")
    if (run / "config.json").is_file() or (not run.is_dir() and len(run.parts) == 2):
        if not gpus or not length:
            what = (
                "is a model"
                if run.is_dir()
                else "is not a folder, so it is read as a model's hub name"
            )
            raise UserError(f"{run} {what}; give --gpus and --length, its longest row in tokens")
        from splitppo.tools.fit import fit  # imports torch, and --help must not wait for it

        lines = fit(str(run), gpus, length, memory)
    else:
        lines = from_run(run, gpus)
    print(*lines, sep="\n")
    return lines


def from_run(run: Path, gpus: int | None) -> list[str]:
    """What a run's phases predict. A folder of no run is a UserError."""
    check_folder(run, file="config.toml")
    config = parse(["--config", str(run / "config.toml")], recorded=True)
    if config.rollout.window:
        raise UserError(
            f"{run} has rollout.window={config.rollout.window}; "
            "name a run of the same model with window 0"
        )
    facts = read_file(run / "resolved.json", json.loads, "resume the run, which writes it again")
    critics = 0 if facts["placement"] == "colocated" else facts["critic"]
    split = Split(facts["actor"], critics, config.placement.reference)
    actor, critic = ([step.metrics for step in column.values()] for column in read_columns(run))
    work = measured(actor, critic, split, config.rollout.batch_size)
    choices = splits(
        gpus or split.actor + split.critic,
        # there only the KL in the reward can use the reference
        movable=config.ppo.kl_coef > 0 and config.ppo.kl_loss_coef == 0,
        sets=(config.set_shape("policy").size, config.set_shape("value").size),
    )
    # the critic group would hold no model
    if not (config.has_value or config.reward.model or config.has_teacher):
        choices = [split for split in choices if not split.critic or split.reference == "critic"]
    return advice(work, split, choices)
