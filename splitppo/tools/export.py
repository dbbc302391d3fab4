"""`splitppo export RUN [--step N] [--out DIR]`: a checkpoint's models as Hugging Face folders."""

# torch, transformers and the modules that import them are imported in the functions: --help must not wait for them
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.errors import UserError, command, words
from splitppo.run.files import read_if_there
from splitppo.tools.timeline import read_columns

# what a model card shows
SHOWN = ("val/score/mean", "val/best_so_far", "critic/score/mean", "response_length/mean", "actor/ref_kl")
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
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the written weights."""


def export(options: Export) -> Path:
    """Writes both models; returns the folder. A missing or damaged checkpoint is a UserError."""
    from splitppo.run.checkpoint import complete, damage, step_of

    run = options.run
    found = {step_of(folder): folder for folder in complete(run)}
    if not found:
        raise UserError(f"{run}: no complete checkpoint there; train with --checkpoint.every")
    step = max(found) if options.step is None else options.step
    if step not in found:
        raise UserError(f"--step {step}: the complete checkpoints of {run} are of steps {sorted(found)}")
    if wrong := damage(found[step]):
        raise UserError(f"{found[step]} is damaged: {wrong}; name another --step")
    out = options.out or run / "export" / f"step_{step:06d}"
    config = parse(["--config", str(run / "config.toml")], quiet=True)
    policy, value = config.policy.path, config.value.path or config.policy.path
    for kind, role, source in (("policy", "actor", policy), ("value", "critic", value)):
        folder = run / "tiny" if source == "tiny" else Path(source)
        write_model(kind, folder, found[step] / role, out / kind, options.dtype)
        (out / kind / "README.md").write_text(model_card(config, run, step, kind, source), encoding="utf-8")
    return out


def model_card(config: Config, run: Path, step: int, kind: str, source: str) -> str:
    """A README for the model hub: what the model is, how it was trained, and its figures."""
    versions = read_if_there(run / "versions.json", lambda text: dict(json.loads(text))) or {}
    last = [column[step].metrics for column in read_columns(run) if step in column]
    figures = "\n".join(f"* `{name}`: {v:.4g}" for metrics in last for name, v in metrics.items() if name in SHOWN)
    return f"""\
---
library_name: transformers
tags: [ppo, splitppo]
---
# {"Policy" if kind == "policy" else "Value model (one label: the value of each position)"} trained with splitppo

* started from: {source if source != "tiny" else "the embedded tiny model"}
* steps: {step} of {config.steps}, {config.rollout.batch_size} rows each
* data: {", ".join(config.data.files) or f"the generated task {config.data.task}"}
* reward: {", ".join([*config.reward.function, *filter(None, [config.reward.model])])}
* seed: {config.seed}
* versions: {", ".join(f"{name} {version}" for name, version in versions.items() if name in VERSIONS)}

Figures of step {step}:

{figures}

All settings:

```toml
{(run / "config.toml").read_text(encoding="utf-8").strip()}
```
"""


def write_model(kind: Any, source: Path, saved: Path, target: Path, dtype: str) -> None:
    """Writes a model: its weights from `saved`, a role's part of a checkpoint, the rest from `source`."""
    import torch
    from transformers import AutoTokenizer

    from splitppo.models import build as models
    from splitppo.models.weights import materialize, read_buffers, save
    from splitppo.run.checkpoint import read_tensors

    model: Any = models.build(models.read_config(str(source)), kind)
    materialize(model, torch.device("cpu"))
    read_buffers(model, str(source))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of no_dist, which asks for just that
        read_tensors({"model": weights}, saved, no_dist=True)
    save(model.to(getattr(torch, dtype)), target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    if kind == "policy" and (source / "generation_config.json").is_file():
        shutil.copy(source / "generation_config.json", target)


@command
def main() -> None:
    options = tyro.cli(Export, prog="splitppo export", args=words())
    import transformers

    transformers.logging.disable_progress_bar()
    out = export(options)
    print(f"policy: {out / 'policy'}\nvalue: {out / 'value'}")
