"""A checkpoint's models: opened, loaded, and written as Hugging Face folders. The commands import
this when they must, since torch takes seconds."""

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.config.toml import leaves, toml_value
from splitppo.errors import UserError
from splitppo.models import build, lora
from splitppo.models.hub import public_name
from splitppo.models.names import buffers_of, weights_of
from splitppo.models.tokenizer import WRITTEN
from splitppo.models.weights import assemble, fill, materialize, save, to_precision
from splitppo.run.checkpoint import complete, damage, read_tensors, step_of
from splitppo.run.models import describe
from splitppo.run.sources import model_folder, model_paths
from splitppo.tools.runs import check_folder, read_columns

PARTS = {"policy": "actor", "value": "critic"}  # of a checkpoint, by the model that they hold
TITLE = "trained with splitppo"  # in the first line of a card
# in a card
NAMES = (
    *("policy.path", "reference.path", "value.path", "teacher.path", "reward.model"),
    *("data.files", "data.validation_files"),
)
VERSIONS = ("python", "splitppo", "torch", "transformers", "safetensors", "vllm", "git")
SHOWN = ("val/score/mean", "critic/score/mean", "response_length/mean", "actor/ref_kl")


def open_run(run: Path, step: int | None) -> tuple[Config, int, Path]:
    """A run's configuration; the step and the folder of its checkpoint of that step, or of the
    newest. Raises UserError if none is there and whole."""

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
            f"step {step}: the complete checkpoints of {run} are of steps {sorted(checkpoints)}; "
            "name one of them"
        )
    if wrong := damage(checkpoints[step]):
        raise UserError(f"{checkpoints[step]} is damaged: {wrong}; name another step")
    return parse(["--config", str(run / "config.toml")], recorded=True), step, checkpoints[step]


def kinds_of(config: Config) -> list[Any]:
    """The models of a run's checkpoints."""
    return [kind for kind in PARTS if kind in model_paths(config)]


def write_models(
    run: Path, step: int | None, out: Path | None, dtype: torch.dtype, merged: bool
) -> Path:
    """The arguments and the result of `splitppo export`."""
    logging.disable_progress_bar()
    config, step, saved = open_run(run, step)
    out = out or run / "export" / f"step_{step:06d}"
    kinds = kinds_of(config)
    for kind in kinds:
        _check_replaced(out / kind)
    for kind in kinds:
        folder = out / kind
        partial = folder.with_name(f"{kind}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        adapter = [file for name in lora.FILES if (file := saved / PARTS[kind] / name).is_file()]
        for file in adapter if not merged else ():
            shutil.copyfile(file, partial / file.name)
        if merged or not adapter:
            save(
                to_precision(load_model(config, run, kind, saved), dtype),
                partial,
                model_folder(config, run, kind),
                model_folder(config, run, "policy"),
                own_code=config.policy.trust_remote_code,
            )
        (partial / "README.md").write_text(model_card(config, run, step, kind), encoding="utf-8")
        _replace(folder, partial)
        print(f"{folder.name}: {folder}")
    if config.policy.path == "tiny":
        print(f"to train it on with its settings: --config tiny --policy.path {out / 'policy'}")
    return out


def _check_replaced(folder: Path) -> None:
    """Raises a UserError if a folder to write holds files of others: an export replaces its own
    alone."""
    card = folder / "README.md"
    by_us = card.is_file() and TITLE in card.read_text(encoding="utf-8", errors="replace")
    if folder.exists() and not (by_us or (folder.is_dir() and not any(folder.iterdir()))):
        raise UserError(
            f"{folder} exists and was not written by splitppo export; name another --out"
        )


def _replace(folder: Path, written: Path) -> None:
    """Puts the files of `written` in the place of those that an earlier export left."""

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

    last = [column[step].metrics for column in read_columns(run) if step in column]
    figures = "\n".join(
        f"* `{name}`: {v:.4g}" for metrics in last for name, v in metrics.items() if name in SHOWN
    )
    what = (
        "Policy"
        if kind == "policy"
        else "Value model (one label x: the value of each position; with a value_range in "
        "config.json it is low + (high - low) * sigmoid(x))"
    )
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


def public_settings(config: Config) -> Iterator[tuple[str, Any]]:
    """The settings that are numbers or switches, and the names of models and data, without their
    folders. Texts may hold anything."""
    for name, value in leaves(asdict(config)):
        values = value if isinstance(value, list | tuple) else [value]
        if name in NAMES and value:
            yield name, [public_name(each) for each in values]
        elif values and all(isinstance(each, int | float) for each in values):
            yield name, value


def load_model(config: Config, run: Path, kind: Any, saved: Path | None) -> Any:
    """A checkpoint's policy or value model, on the CPU in float32, adapters merged. Without a
    checkpoint: the policy before training, or another model of the run. Needs no process group."""
    path = str(model_folder(config, run, kind))
    base = str(model_folder(config, run, "policy"))
    facts = describe(config, kind, model_paths(config)[kind], path, base)
    model = build.build(facts.config, facts.kind)
    held = facts.trainable
    held.add(model)
    cpu = torch.device("cpu")
    there = held.saved(model) if saved else {}
    # a checkpoint has neither buffers nor what is not trained
    if buffers_of(model) or weights_of(model).keys() - there.keys():
        drawn = facts.random_init
        holder = "policy" if facts.path == base else kind
        source = model_folder(config, run, holder, weights=not drawn)
        fill(model, str(source), cpu, random_init=drawn, seed=config.seed)
    else:
        materialize(model, cpu)
    if saved:
        # of no_dist, which asks for just that
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        weights = {name: weight.detach() for name, weight in held.saved(model).items()}
        read_tensors({"model": weights}, saved / PARTS[kind], no_dist=True)
    else:
        held.check(facts.config)
        held.read(model, config.seed)
    return assemble(facts.config, facts.kind, held.merged(model))
