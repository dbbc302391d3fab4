"""A checkpoint's models: opened, loaded, and written as Hugging Face folders. The commands import
this when they must, since torch takes seconds."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.models import build, lora
from splitppo.models.names import buffers_of, weights_of
from splitppo.models.weights import assemble, fill, materialize, save, to_precision
from splitppo.run.checkpoint import complete, damage, read_tensors, step_of
from splitppo.run.models import describe
from splitppo.run.sources import model_folder, model_paths
from splitppo.tools.runs import check_folder

PARTS = {"policy": "actor", "value": "critic"}  # of a checkpoint, by the model that they hold


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
    for folder in (out / kind for kind in kinds):
        if folder.exists():
            raise UserError(f"{folder} exists; remove it, or name another --out")
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
        partial.rename(folder)
        print(f"{folder.name}: {folder}")
    if config.policy.path == "tiny":
        print(f"to train it on with its settings: --config tiny --policy.path {out / 'policy'}")
    return out


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
