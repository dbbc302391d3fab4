"""`python -m splitppo.export RUN [--step N] [--out DIR]`: a checkpoint's models as Hugging Face folders."""

import re
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
import tyro
from transformers import AutoTokenizer

from splitppo import models
from splitppo.checkpoint import TensorReader, complete
from splitppo.errors import UserError


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
        UserError: no such checkpoint.
    """
    if options.dtype not in ("bfloat16", "float16", "float32"):
        raise UserError(f"--dtype {options.dtype} is not one of bfloat16, float16, float32")
    found = {int(re.sub(r"\D", "", folder.name)): folder for folder in complete(options.run)}
    if not found:
        raise UserError(f"{options.run}: no complete checkpoint there; train with --checkpoint.every")
    step = max(found) if options.step is None else options.step
    if step not in found:
        raise UserError(f"--step {step}: the complete checkpoints of {options.run} are of steps {sorted(found)}")
    out = options.out or options.run / "export" / f"step_{step:06d}"
    config = tomllib.loads((options.run / "config.toml").read_text())
    policy = str(config["policy"]["path"])
    value = str(config["value"].get("path", policy))
    for kind, role, source in (("policy", "actor", policy), ("value", "critic", value)):
        folder = str(options.run / "tiny") if source == "tiny" else source
        _write(kind, folder, found[step] / role, out / kind, getattr(torch, options.dtype))
    return out


def _write(kind: Any, source: str, saved: Path, target: Path, dtype: torch.dtype) -> None:
    model: Any = models.build(models.read_config(source), kind)
    model.to_empty(device="cpu")
    # to_empty gives tied weights memory of their own
    model.tie_weights()
    # in place; tied ones have one name here, as in training
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    dcp.load({"model": weights}, storage_reader=TensorReader(saved), no_dist=True)
    model.to(dtype).save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    generation = Path(source) / "generation_config.json"
    if kind == "policy" and generation.is_file():
        shutil.copy(generation, target)


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
