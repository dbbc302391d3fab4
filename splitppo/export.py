"""`python -m splitppo.export RUN [--step N] [--out DIR]`: a checkpoint's models as Hugging Face folders."""

import json
import shutil
import sys
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro
from transformers import AutoTokenizer

from splitppo import models
from splitppo.checkpoint import ROLES, complete, damage, read_tensors, step_of
from splitppo.errors import UserError

# what a model card shows
SHOWN = (
    "val/score/mean",
    "critic/score/mean",
    "response_length/mean",
    "actor/ref_kl",
    "actor/entropy",
    "val/best_so_far",
)
VERSIONS = ("splitppo", "torch", "transformers", "git")


@dataclass(frozen=True)
class Export:
    """Writes DIR/policy and DIR/value, which `AutoModelForCausalLM.from_pretrained` and
    `AutoModelForTokenClassification.from_pretrained` (one label: the value of each position) load."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    step: int | None = None
    """The checkpoint's step. Unset: the newest."""
    out: Path | None = None
    """Where to write. Unset: RUN/export/step_N."""
    dtype: str = "bfloat16"
    """Precision of the written weights: bfloat16, float16 or float32."""


def export(options: Export) -> Path:
    """Writes both models; returns the folder.

    Raises:
        UserError: no such checkpoint, or it is damaged.
    """
    if options.dtype not in ("bfloat16", "float16", "float32"):
        raise UserError(f"--dtype {options.dtype} is not one of bfloat16, float16, float32")
    found = {step_of(folder): folder for folder in complete(options.run)}
    if not found:
        raise UserError(f"{options.run}: no complete checkpoint there; train with --checkpoint.every")
    step = max(found) if options.step is None else options.step
    if step not in found:
        raise UserError(f"--step {step}: the complete checkpoints of {options.run} are of steps {sorted(found)}")
    if wrong := damage(found[step]):
        raise UserError(f"{found[step]} is damaged: {wrong}; name another --step")
    out = options.out or options.run / "export" / f"step_{step:06d}"
    config = tomllib.loads((options.run / "config.toml").read_text())
    policy = str(config["policy"]["path"])
    value = str(config["value"].get("path", policy))
    for kind, role, source in (("policy", "actor", policy), ("value", "critic", value)):
        folder = str(options.run / "tiny") if source == "tiny" else source
        card = model_card(options.run, step, kind)
        _write(kind, folder, found[step] / role, out / kind, getattr(torch, options.dtype), card)
    return out


def model_card(run: Path, step: int, kind: str) -> str:
    """A README for the model hub: what it is, how it was trained, and where it stood."""
    config, versions = tomllib.loads((run / "config.toml").read_text()), json.loads((run / "versions.json").read_text())
    policy = config["policy"]["path"]
    base = config["value"].get("path", policy) if kind == "value" else policy
    told = {
        "started from": base if base != "tiny" else "the embedded tiny model",
        "steps": f"{step} of {config['steps']}, {config['rollout']['batch_size']} rows each",
        "data": ", ".join(map(str, config["data"]["files"])) or f"the generated task {config['data']['task']}",
        "reward": ", ".join([*config["reward"]["function"], *filter(None, [config["reward"].get("model")])]),
        "seed": config["seed"],
    }
    figures = {name: value for role in ROLES for name, value in last_figures(run, role, step).items() if name in SHOWN}
    what = "Policy" if kind == "policy" else "Value model (one label: the value of each position)"
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "tags: [ppo, splitppo]",
            "---",
            f"# {what} trained with splitppo",
            "",
            *(f"* {name}: {value}" for name, value in told.items()),
            f"* versions: {', '.join(f'{name} {version}' for name, version in versions.items() if name in VERSIONS)}",
            "",
            f"Figures of step {step}:",
            "",
            *(f"* `{name}`: {value:.4g}" for name, value in figures.items()),
            "",
            "All settings:",
            "",
            "```toml",
            (run / "config.toml").read_text().strip(),
            "```",
            "",
        ]
    )


def last_figures(run: Path, role: str, step: int) -> dict[str, float]:
    """A role's metrics of a step; {} if its file is gone."""
    path = run / "metrics" / f"{role}.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((record for record in map(json.loads, lines) if record["step"] == step), {})


def _write(kind: Any, source: str, saved: Path, target: Path, dtype: torch.dtype, card: str) -> None:
    model: Any = models.build(models.read_config(source), kind)
    model.to_empty(device="cpu")
    # to_empty gives tied weights memory of their own
    model.tie_weights()
    # in place; tied ones have one name here, as in training
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of no_dist, which asks for just that
        read_tensors({"model": weights}, saved, no_dist=True)
    model.to(dtype).save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    generation = Path(source) / "generation_config.json"
    if kind == "policy" and generation.is_file():
        shutil.copy(generation, target)
    (target / "README.md").write_text(card)


def main() -> int:
    transformers.logging.disable_progress_bar()
    try:
        out = export(tyro.cli(Export, prog="splitppo.export"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"policy: {out / 'policy'}\nvalue: {out / 'value'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
