"""`splitppo push RUN OWNER/NAME`: uploads a checkpoint's models to the Hugging Face hub."""

import re
import tempfile
from contextlib import redirect_stdout
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from huggingface_hub import HfApi, ModelCard, ModelCardData

from splitppo import __version__
from splitppo.errors import UserError
from splitppo.models.hub import FAILURES, MODEL, REPO
from splitppo.tools.export import export

# written by the library: what the model is, and no text that somebody typed
CARD = f"""\
---
{{{{ card_data }}}}
---

# Trained with splitppo {__version__}
"""


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
    from splitppo.run.sources import model_paths
    from splitppo.tools.saved import open_run

    if not re.fullmatch(REPO, repo, re.ASCII):
        raise UserError(f"{repo}: no name of a repository on the hub; write OWNER/NAME")
    bases = model_paths(open_run(run, step)[0])
    if value and "value" not in bases:
        raise UserError("--value: the run has no value model; leave --value out")
    repos = {"policy": repo} | ({"value": f"{repo}-value"} if value else {})
    with tempfile.TemporaryDirectory(prefix=".push-", dir=run) as scratch:
        with redirect_stdout(None):  # its folder does not stay
            export(run, step, Path(scratch), dtype, merged)
        for kind, name in repos.items():
            card_of(bases[kind]).save(Path(scratch, kind, "README.md"))
            print(f"{kind}: {upload(Path(scratch, kind), name, public=public)}")


def card_of(base: str) -> Any:
    """A model's card. `base`: what it started from, of which the card has a hub name alone."""
    name = MODEL.fullmatch(base)  # None: a folder
    about = ModelCardData(
        base_model=name and name[1], library_name="transformers", tags=["ppo", "splitppo"]
    )
    return ModelCard.from_template(about, template_str=CARD)


def upload(folder: Path, repo: str, *, public: bool) -> str:
    """Uploads a folder's files into a model repository, which is made if there is none: a private
    one, unless it may be `public`. Files of an earlier upload are deleted. Returns its address.
    Raises UserError if the hub refuses, or the repository is public and may not be."""
    from splitppo.models.tokenizer import TOKENIZER_FILES

    hub = HfApi()
    url = f"{hub.endpoint}/{repo}"
    written = (*TOKENIZER_FILES, "*.json", "*.safetensors", "*.py")
    try:
        hub.create_repo(repo, private=not public, exist_ok=True)
        if not public and not hub.repo_info(repo).private:
            raise UserError(
                f"{url} is public; give --public if everyone may read these models, or name "
                "another repository"
            )
        there = [file for file in hub.list_repo_files(repo) if "/" not in file]
        earlier = [escape(f) for f in there if any(fnmatch(f, pattern) for pattern in written)]
        hub.upload_folder(repo_id=repo, folder_path=folder, delete_patterns=earlier)
    except FAILURES as error:
        cause = str(error).strip().partition("\n")[0]
        raise UserError(
            f"uploading to {url} failed ({type(error).__name__}: {cause}); set HF_TOKEN to a token "
            "that may write there (or run hf auth login), check OWNER/NAME and the network"
        ) from error
    return url
