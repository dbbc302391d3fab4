"""Which split of the GPUs is the fastest: predicted from the phases of a run (see cost.py).

    splitppo plan RUN [--gpus 8] [--nodes 2]             also while it runs

What it predicts for the placements, `splitppo bench` measures.
"""

import math
import re
from pathlib import Path
from typing import Annotated

import tyro

from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.errors import UserError, command, words
from splitppo.models import build as models
from splitppo.run.checks import MODEL_KINDS, model_folders
from splitppo.tools.cost import Split, Traffic, advice, may_move, node_lines, run_work
from splitppo.tools.timeline import read_column


def split_of(run: Path) -> Split:
    """A run's placement."""
    found = re.match(r"placement (\w+): (\d+) actor, (\d+) critic", (run / "placement.txt").read_text(errors="replace"))
    if not found:
        raise UserError(f"{run / 'placement.txt'} is broken; let the run write it anew")
    side = settings_of(run).placement.reference
    return Split(int(found[2]), 0 if found[1] == "colocated" else int(found[3]), side)


def settings_of(run: Path) -> Config:
    """A run's settings."""
    return parse(["--config", str(run / "config.toml")], quiet=True)


def plan_lines(run: Path, gpus: int | None = None) -> list[str]:
    """The advice on a run.

    Raises:
        UserError: it is no run, or too young.
    """
    files = [run / name for name in ("config.toml", "placement.txt", "metrics/actor.jsonl", "metrics/critic.jsonl")]
    for file in files:
        if not file.is_file():
            raise UserError(f"{run} is no run folder: {file.relative_to(run)} is missing; name RUN of a run that began")
    settings, split = settings_of(run), split_of(run)
    work = run_work(run, split, settings.rollout.batch_size)
    movable = may_move(settings.ppo.kl_coef, settings.ppo.kl_loss_coef)
    return advice(work, split, gpus or split.actor + split.critic, movable=movable)


def between_nodes(run: Path, nodes: int, gigabytes: float) -> list[str]:
    """What a run would move between so many nodes, for each way to place it.

    Args:
        gigabytes: that a node takes in in a second.

    Raises:
        UserError: its ranks don't cut into nodes, or it is too young.
    """
    config, split = settings_of(run), split_of(run)
    if (split.actor + split.critic) % nodes:
        told = f"--nodes {nodes} does not divide the {split.actor + split.critic} ranks of {run}"
        raise UserError(f"{told}; use a divisor, or a run of other ranks")
    if not split.critic:
        raise UserError(f"--nodes {nodes} is for two groups, and {run} is colocated; name a run of two groups")
    last = {role: read_column(run / "metrics" / f"{role}.jsonl") for role in ("actor", "critic")}
    if not all(any(column) for column in last.values()):
        raise UserError(f"{run} has no step in both columns yet; let it go on")
    figures = {role: column[max(column)].metrics for role, column in last.items()}
    tokens, ppo, folders = figures["actor"]["tokens"], config.ppo, model_folders(config)

    def traffic(name: str, ranks: int, epochs: int, mini_batches: int, forwards: int) -> Traffic:
        folder = str(run / "tiny") if folders[name] == "tiny" else folders[name]
        parameters = models.count_parameters(models.read_config(folder), MODEL_KINDS[name])
        passes = math.ceil(tokens / ranks / config.compute.micro_batch_tokens)
        each = mini_batches if config.compute.gather == "mini_batch" else max(mini_batches, passes)
        return Traffic(parameters, forwards * passes, epochs * each)

    policy = traffic("policy", split.actor, ppo.epochs, ppo.mini_batches, 1 + ("reference" in folders))
    epochs, mini_batches = ppo.value_epochs or ppo.epochs, ppo.value_mini_batches or ppo.mini_batches
    value = traffic("value", split.critic, epochs, mini_batches, 1)
    wire = 1e6 * figures["actor"].get("perf/wire_mb", 0.0) * split.actor
    return node_lines(policy, value, wire, split, nodes, gigabytes)


def main_lines(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    *,
    gpus: int | None = None,
    nodes: int = 1,
    network: float = 50.0,
) -> list[str]:
    """Predicts from a run which split is the fastest, and what would cross between nodes.

    Args:
        run: the run's folder.
        gpus: how many GPUs to place. Unset: as many as the run has.
        nodes: nodes to spread the run's own ranks over.
        network: GB that a node takes in in a second.
    """
    flags = {"gpus": gpus, "nodes": nodes, "network": network}
    if wrong := [f"--{name} {value:g}" for name, value in flags.items() if value is not None and value <= 0]:
        raise UserError(f"{' '.join(wrong)}: use a number above 0")
    between = between_nodes(run, nodes, network) if nodes > 1 else []
    return plan_lines(run, gpus) + ([f"on {nodes} nodes, two groups as they are:", *between] if between else [])


@command
def main() -> None:
    print("\n".join(tyro.cli(main_lines, prog="splitppo plan", args=words())))
