"""`splitppo eval MODEL|RUN`: held-out rows of a model's folder, an adapter, a run or one of its
checkpoints, through the rewards or the environment."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitppo.config import Config, LoraConfig
from splitppo.config.cli import parse
from splitppo.errors import UserError, words

Weights = Callable[[], Mapping[str, Any]]


def main() -> int:
    """Evaluates what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        "splitppo eval",
        usage="%(prog)s MODEL|RUN [--out DIR] [the trainer's flags]",
        description="Score the held-out rows of a policy as a validation does. A run's settings "
        "hold where no flag is given. --log.validate-samples and --log.validate-temperature say "
        "how many responses a prompt has, and how they are sampled.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a model's folder or hub name, an adapter, RUN, a checkpoint")
    parser.add_argument("--out", default="eval", type=Path, help="the folder to write")
    chosen, flags = parser.parse_known_args(words())
    from splitppo.run.evaluate import evaluate  # imports torch, and --help must not wait for it

    evaluate(*(_of_run(Path(chosen.model), flags) or _of_model(chosen.model, flags)), chosen.out)
    return 0


def _of_run(folder: Path, flags: Sequence[str]) -> tuple[Config, Weights] | None:
    """Of a run or one of its checkpoints; None if the folder is neither."""
    from splitppo.run.checkpoint import is_complete, step_of
    from splitppo.run.sources import model_folder
    from splitppo.tools.saved import load_model, open_run

    folder = folder if is_complete(folder) else folder.resolve()
    is_checkpoint = is_complete(folder) and folder.absolute().parent.name == "checkpoints"
    if step_of(folder) and not is_checkpoint:
        raise UserError(
            f"{folder}: no complete checkpoint of a run; name RUN, or RUN/checkpoints/step_*"
        )
    run = folder.absolute().parents[1] if is_checkpoint else folder
    if not (run / "config.toml").is_file():
        return None
    before, _, saved = open_run(run, step_of(folder) or None)
    config = parse(["--config", str(run / "config.toml"), *flags], recorded=True)
    source = str(model_folder(before, run, "policy"))
    # the checkpoint has the weights
    policy = replace(config.policy, path=source, random_init=True, lora=LoraConfig())
    return (
        replace(config, policy=policy),
        lambda: load_model(before, run, "policy", saved).state_dict(),
    )


def _of_model(name: str, flags: Sequence[str]) -> tuple[Config, Weights]:
    """Of a model or an adapter."""
    import torch

    from splitppo.models import build, hub, lora
    from splitppo.models.weights import fill
    from splitppo.run.models import describe

    is_adapter = Path(name, lora.SETTINGS).is_file()
    base = lora.base_of(Path(name)) if is_adapter else name
    config = parse(["--policy.path", base, *flags])
    if base == "tiny":
        raise UserError("tiny is drawn anew in each run; name a run, or a model's folder")
    base = config.policy.path

    def weights() -> Mapping[str, Any]:
        folder = hub.find("policy.path", base, own_code=config.policy.trust_remote_code)[1]
        # frozen, as a teacher is
        facts = describe(config, "teacher", base, name if is_adapter else folder, folder)
        facts.trainable.check(facts.config)
        model = build.build(facts.config, facts.kind)
        facts.trainable.add(model)
        fill(model, folder, torch.device("cpu"))
        facts.trainable.read(model, config.seed)
        return facts.trainable.merged(model)

    return config, weights
