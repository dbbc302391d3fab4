"""`splitppo export RUN [--step N] [--out DIR]`: a checkpoint's models as Hugging Face folders."""

# torch, transformers and the modules that import them are imported in the functions: --help must
# not wait for them
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.config.toml import toml_value
from splitppo.errors import UserError
from splitppo.tools.runs import check_folder, read_columns

PARTS = {"policy": "actor", "value": "critic"}  # of a checkpoint, by the model that they hold
TITLE = "trained with splitppo"  # in the first line of a card
# in a card
NAMES = (
    *("policy.path", "reference.path", "value.path", "reward.model"),
    *("data.files", "data.validation_files"),
)
VERSIONS = ("python", "splitppo", "torch", "transformers", "safetensors", "vllm", "git")
SHOWN = (
    "val/score/mean",
    "val/best_so_far",
    "critic/score/mean",
    "response_length/mean",
    "actor/ref_kl",
)


def export(
    run: Annotated[Path, tyro.conf.Positional],
    step: int | None = None,
    out: Path | None = None,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    merged: bool = False,
) -> Path:
    """Write DIR/policy and, if the run has a value model, DIR/value as Hugging Face folders.
    `AutoModelForCausalLM.from_pretrained` loads the policy;
    `AutoModelForTokenClassification.from_pretrained`, where the library has that class of the
    model's type, the value model (one label: the value of each position, or with `value.range` its
    logit, and config.json has `value_range`). `value.path` takes DIR/value of any type.
    What training did not change is as in the folder that it started from; transformers 4.57 reads
    both if it reads that folder.

    Args:
        run: The run's folder.
        step: The checkpoint's step. Unset: the newest.
        out: DIR. Unset: RUN/export/step_N.
        dtype: Precision of the written weights.
        merged: Of a run with LoRA, write whole models, adapters merged into their base. Unset: the
            adapters alone, as peft reads them, with a value model's head.
    """
    import torch
    from transformers import logging

    from splitppo.models import lora
    from splitppo.models.weights import save
    from splitppo.run.sources import model_folder

    logging.disable_progress_bar()
    config, step, saved = open_run(run, step)
    out = out or run / "export" / f"step_{step:06d}"
    kinds = ("policy", *["value"] * config.has_value)
    for folder in (out / kind for kind in kinds):
        _check_replaced(folder)
    for kind in kinds:
        folder = out / kind
        partial = folder.with_name(f"{kind}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if not merged and getattr(config, kind).lora.rank:
            for file in lora.FILES:
                shutil.copyfile(saved / PARTS[kind] / file, partial / file)
        else:
            model = load_model(config, run, kind, saved).to(getattr(torch, dtype))
            save(
                model,
                partial,
                model_folder(config, run, kind),
                model_folder(config, run, "policy"),
                own_code=config.policy.trust_remote_code,
            )
        (partial / "README.md").write_text(model_card(config, run, step, kind), encoding="utf-8")
        _replace(folder, partial)
        print(f"{folder.name}: {folder}")
    if not config.has_value:
        print(f"the run has no value model: ppo.baseline={config.ppo.baseline}")
    return out


def open_run(run: Path, step: int | None) -> tuple[Config, int, Path]:
    """A run's configuration; the step and the folder of its checkpoint of that step, or of the
    newest. Raises UserError if none is there and whole."""
    from splitppo.run.checkpoint import complete, damage, step_of

    check_folder(run, file="config.toml")
    checkpoints = {step_of(folder): folder for folder in complete(run)}
    if not checkpoints:
        raise UserError(
            f"{run}: no complete checkpoint there; "
            "let the run end, or train with --checkpoint.every"
        )
    step = max(checkpoints) if step is None else step
    if step not in checkpoints:
        raise UserError(
            f"--step {step}: the complete checkpoints of {run} are of steps {sorted(checkpoints)}"
        )
    if wrong := damage(checkpoints[step]):
        raise UserError(f"{checkpoints[step]} is damaged: {wrong}; name another --step")
    return parse(["--config", str(run / "config.toml")], recorded=True), step, checkpoints[step]


def _check_replaced(folder: Path) -> None:
    """Raises a UserError if a folder to write holds files of others: an export replaces its own
    alone."""
    card = folder / "README.md"
    by_us = card.is_file() and TITLE in card.read_text(encoding="utf-8", errors="replace")
    if folder.exists() and not (by_us or (folder.is_dir() and not any(folder.iterdir()))):
        raise UserError(f"{folder} is there, and not of splitppo export; name another --out")


def _replace(folder: Path, written: Path) -> None:
    """Puts the files of `written` in the place of those that an earlier export left."""
    from splitppo.models.tokenizer import WRITTEN

    folder.mkdir(exist_ok=True)
    for earlier in {file for pattern in WRITTEN for file in folder.glob(pattern)}:
        if earlier.is_file():
            earlier.unlink()
    for file in written.iterdir():
        file.replace(folder / file.name)
    written.rmdir()


def model_card(config: Config, run: Path, step: int, kind: str) -> str:
    """A README for the model hub: what the model is, its figures, settings and versions. Nothing of
    the machine is in it, and no text that somebody wrote but the names of models and data."""
    from splitppo.models.hub import public_name
    from splitppo.run.sources import model_paths

    last = [column[step].metrics for column in read_columns(run) if step in column]
    figures = "\n".join(
        f"* `{name}`: {v:.4g}" for metrics in last for name, v in metrics.items() if name in SHOWN
    )
    logit = "the logit x of each position's value, low + (high - low) * sigmoid(x) of value_range"
    label = logit if config.value.range else "the value of each position"
    what = "Policy" if kind == "policy" else f"Value model (one label: {label})"
    settings = "\n".join(f"{name} = {toml_value(value)}" for name, value in public_settings(config))
    versions = json.loads((run / "versions.json").read_text(encoding="utf-8"))
    shown = {name: version for name, version in versions.items() if name in VERSIONS}
    return f"""\
---
library_name: transformers
tags: [ppo, splitppo]
---
# {what} {TITLE}

Started from {public_name(model_paths(config)[kind])}, {step} of {config.steps} steps. \
Figures of step {step}:

{figures}

Settings and versions:

```toml
{settings}
```

```json
{json.dumps(shown, indent=1)}
```
"""


def public_settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings that are numbers, switches, or one of some words; and the names of models and
    data, without their folders. Other texts may hold anything."""
    from splitppo.models.hub import public_name

    hints = get_type_hints(type(config))
    for field in fields(config):
        name = prefix + field.name
        value = getattr(config, field.name)
        values = [*value] if isinstance(value, list | tuple) else [value]
        if is_dataclass(value):
            yield from public_settings(value, f"{name}.")
        elif name in NAMES and value:
            public = [public_name(each) for each in values]
            yield name, public[0] if isinstance(value, str) else public
        elif value is not None and (
            "Literal" in str(hints[field.name])
            or all(isinstance(each, int | float) for each in values)
        ):
            yield name, value


def load_model(config: Config, run: Path, kind: Any, saved: Path | None) -> Any:
    """A checkpoint's policy or value model, on the CPU in float32, adapters merged. Without a
    checkpoint: the policy before training, or its base. Needs no process group."""
    import torch

    from splitppo.models import build as models
    from splitppo.models import lora
    from splitppo.models.names import buffers_of, weights_of
    from splitppo.models.stored import StoredWeights
    from splitppo.models.weights import fill, materialize
    from splitppo.run.checkpoint import read_tensors
    from splitppo.run.models import is_drawn
    from splitppo.run.sources import model_folder

    source = str(model_folder(config, run, kind))
    cpu = torch.device("cpu")
    model_config = models.read_config(source, own_code=config.policy.trust_remote_code)
    if kind == "value":
        model_config = models.shorten(model_config, config.value.layers, source)
        model_config = models.bound(model_config, config.value.range, source)
    model: Any = models.build(model_config, kind)
    adapted = getattr(config, kind).lora.rank > 0
    if saved is None or adapted:
        drawn = is_drawn(config, kind)
        base = model_folder(config, run, kind, weights=not drawn)
        fill(model, str(base), cpu, random_init=drawn, seed=config.seed)
        if saved and adapted:
            lora.merge_into(model, saved / PARTS[kind])
        return model
    materialize(model, cpu)
    if buffers_of(model) and not is_drawn(config, kind):  # checkpoints don't hold them
        StoredWeights(str(model_folder(config, run, kind, weights=True)), model).read_buffers()
    weights = {name: weight.detach() for name, weight in weights_of(model).items()}
    # of no_dist, which asks for just that
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    read_tensors({"model": weights}, saved / PARTS[kind], no_dist=True)
    return model
