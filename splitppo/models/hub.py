"""Names on the Hugging Face hub (docs/models.md) become paths in the local cache. What the cache
lacks is fetched by huggingface_hub, which reads HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and
HF_TOKEN."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from glob import escape
from pathlib import Path

from huggingface_hub import (
    HfApi,
    RepoFile,
    constants,
    errors,
    hf_hub_download,
    try_to_load_from_cache,
)
from huggingface_hub.utils import WeakFileLock, enable_progress_bars

from splitppo.errors import FULL, UserError
from splitppo.job.launch import ERROR_FILE
from splitppo.models.older import WRITTEN

# of a model: the files beside config.json, and only one format of the weights
FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "model*.safetensors")
REPO = r"([A-Za-z0-9][\w.-]*/[\w.-]+)"
MODEL = re.compile(rf"{REPO}(?:@(\S+))?()", re.ASCII)
DATA = re.compile(rf"hf://datasets/{REPO}(?:@(refs/(?:convert|pr)/[\w-]+|[^/\s]+))?/(.+)", re.ASCII)
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

    @property
    def folder(self) -> Path:
        """The repository's in the cache."""
        return Path(constants.HF_HUB_CACHE) / f"{self.kind}s--{self.repo.replace('/', '--')}"

    def cached(self) -> str:
        """The revision's commit in the cache, or ""."""
        cached_file = try_to_load_from_cache(
            self.repo, self.file or "config.json", revision=self.revision, repo_type=self.kind
        )
        return (
            Path(cached_file).relative_to(self.folder / "snapshots").parts[0]
            if isinstance(cached_file, str)
            else ""
        )

    def error(self, problem: str, remedy: str) -> UserError:
        return UserError(f"{self.setting}={self}: {problem}; {remedy}")


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
        raise UserError(
            f"{setting}={named}: no such folder or file (from {Path.cwd()}), and no hub name; use "
            + (
                "FILE, or hf://datasets/OWNER/NAME[@REVISION]/FILE"
                if is_data
                else "FOLDER, or OWNER/NAME[@REVISION]"
            )
        )
    name = HubName(setting, match[1], match[2] or constants.DEFAULT_REVISION, match[3])
    with_commit = re.escape(f'"{replace(name, revision="COMMIT")}"')
    commit = re.search(with_commit.replace("COMMIT", "([0-9a-f]{40})"), before)
    if commit and not match[2]:
        name = replace(name, revision=commit[1])
    if fetch and not constants.HF_HUB_OFFLINE:
        # one rank of a node fetches first; lock files lie in the folder that torchrun makes at each
        # start
        started = os.environ.get(ERROR_FILE)
        with WeakFileLock(Path(started).parents[1] / "hub.lock") if started else nullcontext():
            commit = _fetch(name, [*files, *["*.py"] * own_code])
    elif not (commit := name.cached()):
        at = f"--repo-type {name.kind} --revision {name.revision} {name.file}".strip()
        raise name.error(
            f"{NO_FOLDER[name.kind]}not in the cache {constants.HF_HUB_CACHE}",
            f"fetch it where there is a network (hf download {name.repo} {at})"
            + ", or unset HF_HUB_OFFLINE" * constants.HF_HUB_OFFLINE,
        )
    return str(replace(name, revision=commit)), str(name.folder / "snapshots" / commit / name.file)


def _fetch(name: HubName, patterns: Sequence[str]) -> str:
    """Fetches what the cache lacks of a data set's file, or of a model's files by these patterns;
    returns the commit. If the hub doesn't answer, the cache's
    commit will do."""
    hub = HfApi()
    wanted = (escape(name.file),) if name.file else patterns
    try:
        info = hub.repo_info(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        commit = info.sha or ""
        tree = list(
            hub.list_repo_tree(
                name.repo, os.path.dirname(name.file) or None, repo_type=name.kind, revision=commit
            )
        )
    except FAILURES as error:
        if not (commit := name.cached()):
            raise _explain(name, error) from error
        print(
            f"{_explain(name, error)}. Going on with the cache's commit {commit}",
            file=sys.stderr,
            flush=True,
        )
        return commit
    files = [file for file in tree if any(fnmatch(file.path, pattern) for pattern in wanted)]
    if name.file and not files:
        raise name.error(
            "no such file there", f"it has {', '.join(file.path for file in tree[:9])}"
        )
    snapshot = name.folder / "snapshots" / commit
    if missing := [
        file
        for file in files
        if isinstance(file, RepoFile) and not (snapshot / file.path).is_file()
    ]:
        _download(name, snapshot, missing)
    if name.revision != commit:
        ref = name.folder / "refs" / name.revision
        with suppress(OSError):  # a cache for reading only
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)
    return commit


def _download(name: HubName, snapshot: Path, files: Sequence[RepoFile]) -> None:
    """Fetches files into the folder of their commit. After a failure only the blobs of whole files
    stay."""
    cache = Path(constants.HF_HUB_CACHE)
    blobs = name.folder / "blobs"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        size = sum(
            f.size for f in files if not (blobs / (f.lfs.sha256 if f.lfs else f.blob_id)).is_file()
        )
        if size > (free := shutil.disk_usage(cache).free):
            raise name.error(
                f"{size / 1e9:.1f} GB to fetch, and {cache} has room for {free / 1e9:.1f} GB",
                "free some there, or set HF_HOME to another disk",
            )
        print(
            f"fetching {name} (commit {snapshot.name[:8]}): {size / 1e6:,.1f} MB "
            f"in {len(files)} files, to {cache}",
            file=sys.stderr,
            flush=True,
        )
        if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
            # main disabled those of transformers, and these with them; only terminals show them
            enable_progress_bars()
        with ThreadPoolExecutor(8) as pool:
            get = partial(hf_hub_download, name.repo, repo_type=name.kind, revision=snapshot.name)
            list(pool.map(get, (file.path for file in files)))
    except BaseException as error:
        for path in (snapshot / file.path for file in files):
            with suppress(OSError):
                path.unlink(missing_ok=True)
                os.removedirs(path.parent)  # and those above, up to one that isn't empty
        if isinstance(error, FAILURES):
            raise _explain(name, error) from error
        raise


def public_name(name: str) -> str:
    """The name of a model or a data file without the folders of this machine: one of the hub as a
    run records it, with its commit; the last part of a path."""
    match = MODEL.fullmatch(name)
    on_hub = name.startswith("hf://") or (match and re.fullmatch("[0-9a-f]{40}", match[2] or ""))
    return name if on_hub else os.path.basename(os.path.abspath(name))


def upload(folder: Path, repo: str, *, public: bool) -> str:
    """Uploads a folder's files into a model repository, which is made if there is none: a private
    one, unless it may be `public`. Files of an earlier upload are deleted. Returns its address.
    Raises UserError if the hub refuses, or the repository is public and may not be."""
    hub = HfApi()
    url = f"{hub.endpoint}/{repo}"
    try:
        hub.create_repo(repo, private=not public, exist_ok=True)
        if not public and not hub.repo_info(repo).private:
            raise UserError(
                f"{url} is public; say --public if all may read these models, or name another"
            )
        earlier = [
            file
            for file in hub.list_repo_files(repo)
            if "/" not in file and any(fnmatch(file, pattern) for pattern in WRITTEN)
        ]
        hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Models trained with splitppo",
            delete_patterns=[escape(file) for file in earlier],
        )
    except FAILURES as error:
        cause = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{url} takes no files ({type(error).__name__}: {cause}); set HF_TOKEN to a token that "
            "may write there (or run hf auth login), check OWNER/NAME and the network"
        ) from error
    return url


def _explain(name: HubName, error: BaseException) -> UserError:
    """What huggingface_hub's error means for the user."""
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        return _explain(name, error.__cause__)  # of a request that failed
    hub = constants.ENDPOINT
    login = "set HF_TOKEN or run hf auth login"
    url = f"{hub}/{'datasets/' if name.file else ''}{name.repo}"
    cause = str(error).strip().partition("\n")[0]
    of_hub = (
        (errors.GatedRepoError, "gated", f"ask for access at {url}, then {login}"),
        (
            errors.RevisionNotFoundError | errors.RemoteEntryNotFoundError,
            "no such revision or folder there",
            f"look at {url}/tree/main",
        ),
        (
            errors.RepositoryNotFoundError,
            f"{NO_FOLDER[name.kind]}no such {name.kind} at {hub}, or a private one",
            f"check the name, or {login}",
        ),
        (
            errors.HTTPError,
            f"{NO_FOLDER[name.kind]}{hub} doesn't give it ({type(error).__name__}: {cause})",
            "check the network, HF_ENDPOINT and HF_TOKEN, "
            "or set HF_HUB_OFFLINE=1 where the cache has it",
        ),
    )
    for kind, problem, remedy in of_hub:
        if isinstance(error, kind):
            return name.error(problem, remedy)
    if getattr(error, "errno", None) or any(
        f"(os error {number})" in str(error) for number in FULL
    ):
        return name.error(
            f"{constants.HF_HUB_CACHE} can't be written to ({cause})",
            "free space there, or set HF_HOME to another folder",
        )
    return name.error(
        f"fetching it failed ({cause})", "start again: files that are whole are not fetched twice"
    )
