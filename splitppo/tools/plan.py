"""Which split of the GPUs is the fastest: predicted from the phases of a run (see cost.py).

    splitppo plan RUN [--gpus 8] [--nodes 2]             also while it runs

`splitppo bench` measures what this command predicts.
"""

import math
import re
from pathlib import Path
from typing import Annotated

import tyro

from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.errors import UserError, command, words
from splitppo.tools.cost import Split, Traffic, advice, may_move, node_lines, run_work
from splitppo.tools.timeline import read_columns


def read_run(run: Path) -> tuple[Config, Split]:
    """A run's settings and placement. A folder of no run is a UserError."""
    for name in ("config.toml", "placement.txt", "metrics/actor.jsonl", "metrics/critic.jsonl"):
        if not (run / name).is_file():
            raise UserError(f"{run} is no run folder: {name} is missing; name RUN of a run that began")
    config, file = parse(["--config", str(run / "config.toml")], quiet=True), run / "placement.txt"
    found = re.match(r"placement (\w+): (\d+) actor, (\d+) critic", file.read_text(errors="replace"))
    if not found:
        raise UserError(f"{file} does not begin with the placement; resume the run, which writes the file again")
    critics = 0 if found[1] == "colocated" else int(found[3])
    return config, Split(int(found[2]), critics, config.placement.reference)


def between_nodes(run: Path, config: Config, split: Split, nodes: int) -> list[str]:
    """What the run would move between so many nodes, for each way to place it. The run must have two groups, and its
    ranks must divide into the nodes, else a UserError."""
    # imported here: they import torch, which takes seconds, and --help must not wait for it
    from splitppo.models.build import count_parameters, read_config
    from splitppo.run.resolve import KINDS, model_paths

    ranks, ppo, folders = split.actor + split.critic, config.ppo, model_paths(config)
    if ranks % nodes:
        remedy = "use a divisor, or a run of other ranks"
        raise UserError(f"--nodes {nodes} does not divide the {ranks} ranks of {run}; {remedy}")
    if not split.critic:
        raise UserError(f"--nodes {nodes} is for two groups, and {run} is colocated; name a run of two groups")
    steps, _ = read_columns(run)
    last = steps[max(steps)].metrics

    def traffic(name: str, ranks: int, epochs: int, mini_batches: int, forwards: int) -> Traffic:
        folder = str(run / "tiny") if folders[name] == "tiny" else folders[name]
        parameters = count_parameters(read_config(folder), KINDS[name])
        passes = math.ceil(last["tokens"] / ranks / config.compute.micro_batch_tokens)
        each = mini_batches if config.compute.gather == "mini_batch" else max(mini_batches, passes)
        return Traffic(parameters, forwards * passes, epochs * each)

    policy = traffic("policy", split.actor, ppo.epochs, ppo.mini_batches, 1 + ("reference" in folders))
    epochs, mini_batches = ppo.value_epochs or ppo.epochs, ppo.value_mini_batches or ppo.mini_batches
    value = traffic("value", split.critic, epochs, mini_batches, 1)
    wire = 1e6 * last.get("perf/wire_mb", 0.0) * split.actor
    return [f"on {nodes} nodes, two groups as they are:", *node_lines(policy, value, wire, split, nodes)]


def plan(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")], *, gpus: int | None = None, nodes: int = 1
) -> list[str]:
    """Predicts from a run which split is the fastest, and what would cross between nodes.

    Args:
        run: the run's folder.
        gpus: how many GPUs to place. Unset: as many as the run has.
        nodes: nodes to spread the run's own ranks over.
    """
    for name, value in (("gpus", gpus), ("nodes", nodes)):
        if value is not None and value <= 0:
            raise UserError(f"--{name} {value}: use a number above 0")
    config, split = read_run(run)
    work = run_work(run, split, config.rollout.batch_size)
    movable = may_move(config.ppo.kl_coef, config.ppo.kl_loss_coef)
    lines = advice(work, split, gpus or split.actor + split.critic, movable=movable)
    return lines + (between_nodes(run, config, split, nodes) if nodes > 1 else [])


@command
def main() -> None:
    print("\n".join(tyro.cli(plan, prog="splitppo plan", args=words())))
