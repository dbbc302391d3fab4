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

    from splitppo.tools.saved import write_models

    return write_models(run, step, out, getattr(torch, dtype), merged)
