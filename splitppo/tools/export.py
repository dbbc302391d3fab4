"""`splitppo export RUN [--step N] [--out DIR]`: a checkpoint's models as Hugging Face folders."""

# torch and what imports it is imported in the function: --help must not wait for it
from pathlib import Path
from typing import Annotated, Literal

import tyro


def export(
    run: Annotated[Path, tyro.conf.Positional],
    step: int | None = None,
    out: Path | None = None,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    merged: bool = False,
) -> Path:
    """Write DIR/policy and, if the run has a value model, DIR/value as Hugging Face folders.
    `AutoModelForCausalLM.from_pretrained` loads the policy;
    `AutoModelForTokenClassification.from_pretrained` loads the value model, if transformers has
    that class for the model type. Its one label is the value of each position; with `value.range`
    it is the logit, and config.json has `value_range`. `value.path` accepts DIR/value of any type.
    Everything that training did not change is as in the original folder. transformers 4.57 reads
    both folders if it reads the original one.

    Args:
        run: The run's folder.
        step: The checkpoint's step. Unset: the newest.
        out: DIR. Unset: RUN/export/step_N.
        dtype: Precision of the written weights.
        merged: For a run with LoRA: write whole models, with the adapters merged. Unset: write the
            adapters in peft's format, and the value model's head.
    """
    import torch

    from splitppo.tools.saved import write_models

    return write_models(run, step, out, getattr(torch, dtype), merged)
