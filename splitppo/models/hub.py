"""Names on the Hugging Face hub (docs/models.md) become paths in the local cache. What the cache
lacks is fetched by huggingface_hub, which reads HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and
HF_TOKEN."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors, hf_hub_download, snapshot_download
from huggingface_hub.utils import disable_progress_bars

from splitppo.errors import FULL, UserError

# of a model: the files beside config.json, and only one format of the weights
FILES = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"),
    *("model*.safetensors", "adapter_model.safetensors"),
)
REPO = r"([A-Za-z0-9][\w.-]*/[\w.-]+)"
MODEL = re.compile(rf"{REPO}(?:@(\S+))?()", re.ASCII)
DATA = re.compile(rf"hf://datasets/{REPO}(?:@(refs/(?:convert|pr)/[\w-]+|[^/\s]+))?/(.+)", re.ASCII)
COMMIT = "([0-9a-f]{40})"
# begins an error: the name of a model may have been meant as a folder's
NO_FOLDER = {"model": "no such folder, and ", "dataset": ""}
# of huggingface_hub and of its transport in Rust
FAILURES = (errors.HTTPError, OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class HubName:
    """A repository at a revision, in a data set also a file; and the setting that names it."""

    setting: str
    repo: str
    revision: str
    file: str

    def __str__(self) -> str:
        at = "" if self.revision == constants.DEFAULT_REVISION else f"@{self.revision}"
        return f"hf://datasets/{self.repo}{at}/{self.file}" if self.file else f"{self.repo}{at}"

    @property
    def kind(self) -> str:
        return "dataset" if self.file else "model"


def find(
    setting: str,
    named: str,
    *,
    own_code: bool = False,
    before: str = "",
    fetch: bool = True,
    files: Sequence[str] = FILES,
) -> tuple[str, str]:
    """Of a hub name: the same with the commit that is used, and its local path. Of another name:
    itself, twice. Raises UserError if there is no such folder, nor such a name on the hub, or it
    can't be fetched. Settings of `data.` name files, others models; with `own_code` the model's
    Python files are fetched, too. `before`: settings (TOML) of the run that goes on; a name without
    a revision keeps the commit that it has there. Without `fetch`, only the cache is searched.
    `files`: patterns of what is fetched of a model."""
    is_data = setting.startswith("data.")
    if not named.startswith("hf://") if is_data else named == "tiny" or Path(named).is_dir():
        return named, named
    if not (match := (DATA if is_data else MODEL).fullmatch(named)):
        form = "hf://datasets/OWNER/NAME[@REVISION]/FILE" if is_data else "OWNER/NAME[@REVISION]"
        raise UserError(
            f"{setting}={named}: no such folder or file (from {Path.cwd()}), and no hub name; "
            f"use a path, or {form}"
        )
    name = HubName(setting, match[1], match[2] or constants.DEFAULT_REVISION, match[3])
    pinned = re.escape(f'"{replace(name, revision="COMMIT")}"').replace("COMMIT", COMMIT)
    if not match[2] and (of_run := re.search(pinned, before)):
        name = replace(name, revision=of_run[1])
    if int(os.environ.get("LOCAL_RANK", "0")):
        disable_progress_bars()  # one rank of a node shows them; all wait for each other's files
    offline = constants.HF_HUB_OFFLINE or not fetch
    where: Any = {"revision": name.revision, "local_files_only": offline}
    try:
        if name.file:
            path = hf_hub_download(name.repo, name.file, repo_type=name.kind, **where)
        else:
            patterns = [*files, *["*.py"] * own_code]
            path = snapshot_download(
                name.repo, allow_patterns=patterns, ignore_patterns="*/*", **where
            )
    except FAILURES as error:
        raise _explain(name, error, offline=offline) from error
    (commit,) = re.findall(f".*/snapshots/{COMMIT}", path)
    return str(replace(name, revision=commit)), path


def _explain(name: HubName, error: BaseException, *, offline: bool) -> UserError:
    """What huggingface_hub's error means for the user; `offline`: only the cache was searched."""
    if isinstance(error.__cause__, errors.HTTPError) and not isinstance(error, errors.HTTPError):
        error = error.__cause__  # of a request that failed
    hub = constants.ENDPOINT
    login = "set HF_TOKEN or run hf auth login"
    url = f"{hub}/{'datasets/' if name.file else ''}{name.repo}"
    cause = str(error).strip().partition("\n")[0]
    full = any(f"(os error {number})" in str(error) for number in FULL)
    where = f"--repo-type {name.kind} --revision {name.revision} {name.file}".strip()
    meanings = (
        (
            offline,
            f"{NO_FOLDER[name.kind]}not in the cache {constants.HF_HUB_CACHE}",
            f"fetch it where there is a network (hf download {name.repo} {where})"
            + ", or unset HF_HUB_OFFLINE" * constants.HF_HUB_OFFLINE,
        ),
        (
            isinstance(error, errors.GatedRepoError),
            "gated",
            f"ask for access at {url}, then {login}",
        ),
        (
            isinstance(error, errors.RevisionNotFoundError | errors.RemoteEntryNotFoundError),
            "no such revision or file there",
            f"look at {url}/tree/main",
        ),
        (
            isinstance(error, errors.RepositoryNotFoundError),
            f"{NO_FOLDER[name.kind]}no such {name.kind} at {hub}, or a private one",
            f"check the name, or {login}",
        ),
        (
            isinstance(error, errors.HTTPError),
            f"{NO_FOLDER[name.kind]}{hub} does not return it ({type(error).__name__}: {cause})",
            "check the network, HF_ENDPOINT and HF_TOKEN, "
            "or set HF_HUB_OFFLINE=1 where the cache has it",
        ),
        (
            full or getattr(error, "errno", None),
            f"{constants.HF_HUB_CACHE} can't be written to ({cause})",
            "free space there, or set HF_HOME to another folder",
        ),
        (
            True,
            f"fetching it failed ({cause})",
            "start again: files that are whole are not fetched twice",
        ),
    )
    problem, remedy = next(meaning for applies, *meaning in meanings if applies)
    return UserError(f"{name.setting}={name}: {problem}; {remedy}")
