"""`splitppo push RUN OWNER/NAME`: uploads a checkpoint's models to the Hugging Face hub."""

import re
from pathlib import Path
from typing import Annotated, Literal

import tyro

from splitppo.errors import UserError
from splitppo.tools.export import export


def push(
    run: Annotated[Path, tyro.conf.Positional],
    repo: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OWNER/NAME")],
    step: int | None = None,
    value: bool = False,
    public: bool = False,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    merged: bool = False,
) -> None:
    """Export a checkpoint's models as `splitppo export` does, and upload the policy to the Hugging
    Face hub, with HF_TOKEN or the token of `hf auth login`.

    Args:
        run: The run's folder.
        repo: The repository, OWNER/NAME. It is created if it does not exist.
        step: The checkpoint's step. Unset: the newest.
        value: Also upload the value model, to OWNER/NAME-value.
        public: Make the repositories public. Unset: they are private.
        dtype: Precision of the uploaded weights.
        merged: For a run with LoRA: upload whole models, not adapters.
    """
    # these take seconds, and --help must not wait for them
    from splitppo.models.hub import REPO, upload
    from splitppo.tools.saved import kinds_of, open_run

    if not re.fullmatch(REPO, repo, re.ASCII):
        raise UserError(f"{repo}: no name of a repository on the hub; write OWNER/NAME")
    repos = {"policy": repo} | ({"value": f"{repo}-value"} if value else {})
    if missing := {*repos} - {*kinds_of(open_run(run, step)[0])}:
        raise UserError(f"--value: the run has no {missing.pop()} model; leave --value out")
    out = export(run, step, dtype=dtype, merged=merged)
    for kind, name in repos.items():
        print(f"{kind}: {upload(out / kind, name, public=public)}")
