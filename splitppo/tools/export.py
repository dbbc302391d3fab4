"""`splitppo export RUN [--step N] [--out DIR]`: a checkpoint's models as Hugging Face folders."""

# torch, transformers and the modules that import them are imported in the functions: --help must
# not wait for them
import os
import shutil
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from splitppo.config import Config
from splitppo.config.cli import map_paths, parse
from splitppo.config.toml import to_toml
from splitppo.errors import UserError
from splitppo.tools.runs import check_folder, read_columns

PARTS = {"policy": "actor", "value": "critic"}  # of a checkpoint, by the model that they hold
# in a card
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
    Transformers 4.57 reads both, too, if it has models of the type. What training did not change is
    as in the folder that it started from.

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
    for kind in ("policy", *["value"] * config.has_value):
        folder = out / kind
        if not merged and getattr(config, kind).lora.rank:
            folder.mkdir(parents=True, exist_ok=True)
            for file in lora.FILES:
                shutil.copyfile(saved / PARTS[kind] / file, folder / file)
        else:
            model = load_model(config, run, kind, saved).to(getattr(torch, dtype))
            save(
                model,
                folder,
                model_folder(config, run, kind),
                model_folder(config, run, "policy"),
                own_code=config.policy.trust_remote_code,
            )
        (folder / "README.md").write_text(model_card(config, run, step, kind), encoding="utf-8")
        print(f"{folder.name}: {folder}")
    if not config.has_value:
        print(f"the run has no value model: ppo.baseline={config.ppo.baseline}")
    return out


def open_run(run: Path, step: int | None) -> tuple[Config, int, Path]:
    """A run's configuration; the step and the folder of its checkpoint of that step, or of the
    newest. Raises UserError if none is there and whole."""
    from splitppo.run.checkpoint import complete, damage, step_of

    check_folder(run, file="config.toml")
    found = {step_of(folder): folder for folder in complete(run)}
    if not found:
        raise UserError(
            f"{run}: no complete checkpoint there; "
            "let the run end, or train with --checkpoint.every"
        )
    step = max(found) if step is None else step
    if step not in found:
        raise UserError(
            f"--step {step}: the complete checkpoints of {run} are of steps {sorted(found)}"
        )
    if wrong := damage(found[step]):
        raise UserError(f"{found[step]} is damaged: {wrong}; name another --step")
    return parse(["--config", str(run / "config.toml")], recorded=True), step, found[step]


def model_card(config: Config, run: Path, step: int, kind: str) -> str:
    """A README for the model hub: what the model is, its figures, and all settings."""
    from splitppo.run.sources import model_paths

    # the folders of this machine are nobody's business
    config = map_paths(
        config, lambda _, path: os.path.basename(path) if os.path.isabs(path) else path
    )
    last = [column[step].metrics for column in read_columns(run) if step in column]
    figures = "\n".join(
        f"* `{name}`: {v:.4g}" for metrics in last for name, v in metrics.items() if name in SHOWN
    )
    logit = "the logit x of each position's value, low + (high - low) * sigmoid(x) of value_range"
    label = logit if config.value.range else "the value of each position"
    what = "Policy" if kind == "policy" else f"Value model (one label: {label})"
    return f"""\
---
library_name: transformers
tags: [ppo, splitppo]
---
# {what} trained with splitppo

Started from {model_paths(config)[kind]}, {step} of {config.steps} steps. Figures of step {step}:

{figures}

Settings and versions:

```toml
{to_toml(config).strip()}
```

```json
{(run / "versions.json").read_text(encoding="utf-8").strip()}
```
"""


def load_model(config: Config, run: Path, kind: Any, saved: Path | None) -> Any:
    """A checkpoint's policy or value model, on the CPU in float32, adapters merged. Without a
    checkpoint: the policy before training, or its base. Needs no process group."""
    import torch

    from splitppo.models import build as models
    from splitppo.models import lora
    from splitppo.models.names import buffers_of, weights_of
    from splitppo.models.weights import fill, materialize, read_buffers
    from splitppo.run.checkpoint import read_tensors
    from splitppo.run.models import is_drawn
    from splitppo.run.sources import model_folder

    source = str(model_folder(config, run, kind))
    cpu = torch.device("cpu")
    found = models.read_config(source, own_code=config.policy.trust_remote_code)
    if kind == "value":
        found = models.shorten(found, config.value.layers, source)
        found = models.bound(found, config.value.range, source)
    model: Any = models.build(found, kind)
    adapted = getattr(config, kind).lora.rank > 0
    if saved is None or adapted:
        drawn = is_drawn(config, kind)
        base = model_folder(config, run, kind, weights=not drawn)
        fill(model, str(base), cpu, random_init=drawn, seed=config.seed)
        if saved and adapted:
            lora.merge_into(model, saved / PARTS[kind])
        return model
    materialize(model, cpu)
    if buffers_of(model):  # checkpoints don't hold them
        read_buffers(model, str(model_folder(config, run, kind, weights=True)))
    weights = {name: weight.detach() for name, weight in weights_of(model).items()}
    # of no_dist, which asks for just that
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    read_tensors({"model": weights}, saved / PARTS[kind], no_dist=True)
    return model
