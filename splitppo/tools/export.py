"""`splitppo export RUN [--step N] [--out DIR]`: a checkpoint's models as Hugging Face folders."""

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro
from transformers import AutoTokenizer

from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.errors import UserError, command, words
from splitppo.models import build as models
from splitppo.models.weights import materialize, read_buffers, save
from splitppo.run.checkpoint import ROLES, complete, damage, read_tensors, step_of
from splitppo.run.files import read_if_there
from splitppo.tools.timeline import read_column

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
    """Writes DIR/policy and DIR/value, which `AutoModelForCausalLM.from_pretrained` and, where the library has that
    class of the model's type, `AutoModelForTokenClassification.from_pretrained` (one label: the value of each
    position) load. `value.path` takes DIR/value of any type."""

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
    config = parse(["--config", str(options.run / "config.toml")], quiet=True)
    policy, value = config.policy.path, config.value.path or config.policy.path
    for kind, role, source in (("policy", "actor", policy), ("value", "critic", value)):
        folder = str(options.run / "tiny") if source == "tiny" else source
        card = model_card(config, options.run, step, kind)
        _write(kind, folder, found[step] / role, out / kind, getattr(torch, options.dtype), card)
    return out


def model_card(config: Config, run: Path, step: int, kind: str) -> str:
    """A README for the model hub: what it is, how it was trained, and where it stood."""
    versions = read_if_there(run / "versions.json", lambda text: dict(json.loads(text))) or {}
    base = (kind == "value" and config.value.path) or config.policy.path
    told = {
        "started from": base if base != "tiny" else "the embedded tiny model",
        "steps": f"{step} of {config.steps}, {config.rollout.batch_size} rows each",
        "data": ", ".join(config.data.files) or f"the generated task {config.data.task}",
        "reward": ", ".join([*config.reward.function, *filter(None, [config.reward.model])]),
        "seed": config.seed,
    }
    last = [read_column(run / "metrics" / f"{role}.jsonl").get(step) for role in ROLES]
    figures = {name: value for found in last if found for name, value in found.metrics.items() if name in SHOWN}
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
            (run / "config.toml").read_text(encoding="utf-8").strip(),
            "```",
            "",
        ]
    )


def _write(kind: Any, source: str, saved: Path, target: Path, dtype: torch.dtype, card: str) -> None:
    model: Any = models.build(models.read_config(source), kind)
    materialize(model, torch.device("cpu"))
    read_buffers(model, source)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of no_dist, which asks for just that
        read_tensors({"model": weights}, saved, no_dist=True)
    save(model.to(dtype), target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    generation = Path(source) / "generation_config.json"
    if kind == "policy" and generation.is_file():
        shutil.copy(generation, target)
    (target / "README.md").write_text(card, encoding="utf-8")


@command
def main() -> None:
    transformers.logging.disable_progress_bar()
    out = export(tyro.cli(Export, prog="splitppo export", args=words()))
    print(f"policy: {out / 'policy'}\nvalue: {out / 'value'}")
