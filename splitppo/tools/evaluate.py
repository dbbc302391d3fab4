"""`splitppo eval MODEL|RUN`: held-out rows of a model's folder, an adapter, a run or one of its
checkpoints, through the rewards or the environment."""

import argparse
from pathlib import Path

from splitppo.errors import words


def main() -> int:
    """Evaluates what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        "splitppo eval",
        usage="%(prog)s MODEL|RUN [--out DIR] [the trainer's flags]",
        description="Score a policy on held-out rows, as a validation does. Flags override a run's "
        "settings. --log.validate-samples sets the number of responses per prompt, and "
        "--log.validate-temperature how they are sampled.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", help="a model's folder or hub name, an adapter, a run or a checkpoint"
    )
    parser.add_argument("--out", type=Path, help="output folder. Unset: eval/DATE-TIME")
    chosen, flags = parser.parse_known_args(words())
    from splitppo.tools.held_out import evaluate  # imports torch, and --help must not wait for it

    evaluate(chosen.model, flags, chosen.out)
    return 0
