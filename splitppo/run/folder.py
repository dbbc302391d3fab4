"""What a run's folder says of the run: its settings, the versions it ran with, the libraries' messages."""

import hashlib
import itertools
import json
import logging
import platform
import shutil
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from splitppo.config import Config
from splitppo.config.toml import leaves, to_toml, toml_value
from splitppo.errors import UserError
from splitppo.job.nodes import installed
from splitppo.run.files import read_file, write_whole

# What may change between the parts of a run: where and how it is computed, and what is told of it. With a dot at the
# end: all settings that begin so.
_FREE = """placement. engine. checkpoint. log. fsdp. compute.device compute.micro_batch_tokens compute.packing
    compute.compile compute.gather compute.activation_checkpointing reference.offload rollout.chunks reward.workers
    reward.timeout reward.model_offload config run_dir resume force dry_run world_size nodes timeout steps"""
FREE = tuple(_FREE.split())
# files in a model's folder, or in one that the library datasets wrote
READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors", ".arrow")
BLOCK = 2**18  # bytes read at once


def check_same_run(config: Config, folder: Path, inputs: Mapping[str, str] | None = None) -> None:
    """Refuses to go on in a run's folder with settings, or files (`inputs_of`), that would make it another run.

    Raises:
        UserError: names them.
    """
    found = []
    paced = any(optim.schedule != "constant" for optim in (config.policy.optim, config.value.optim))
    for name, was, now in changes(config, folder, inputs):
        free = any(name.startswith(part) if part.endswith(".") else name == part for part in FREE)
        if not free or (name == "steps" and paced):
            why = " and the learning rate's schedule ends with the last step" if name == "steps" else ""
            found.append(f"{name} was {was}, and is {now}{why}")
    if found:
        named = "; ".join(found[:6]) + (f"; and {len(found) - 6} more" if len(found) > 6 else "")
        raise UserError(
            f"{named}: that is another run than the one in {folder}; give the old values, another --run-dir, or "
            "--force to do it all the same"
        )


def inputs_of(config: Config, models: Mapping[str, str]) -> dict[str, str]:
    """Each file that a run reads, with its setting -> size and hash. What a reward file imports is not among them.

    Args:
        models: model -> its folder.
    """
    data, reward, found = config.data, config.reward, {}
    given = {"data.files": data.files, "data.validation_files": data.validation_files}
    given["rollout.lengths"] = (config.rollout.lengths or "",)
    for setting, functions in (("reward.function", reward.function), ("reward.validation", reward.validation)):
        given[setting] = tuple(function.rpartition(":")[0] for function in functions)
    for folder, name in {folder: name for name, folder in reversed([*models.items()])}.items():  # each folder once
        given["reward.model" if name == "reward" else f"{name}.path"] = (folder,)
    for setting, path in ((key, Path(name).expanduser()) for key in given for name in given[key] if name):
        inside = (file for file in sorted(path.glob("*")) if file.suffix in READ and file.is_file())
        found |= {f"{setting} {file}": fingerprint(file) for file in (inside if path.is_dir() else [path])}
    return found


def fingerprint(path: Path) -> str:
    """Size and BLAKE2b of a file; of weights, which may take minutes to read, the head and 63 blocks after it."""
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=16)
    every = max(BLOCK, -(-size // 64)) if path.suffix == ".safetensors" else BLOCK
    with path.open("rb") as file:
        for start in range(0, size, every):
            file.seek(start)
            digest.update(file.read(BLOCK))
    return f"{size:,} bytes, {digest.hexdigest()}"


def new_folder() -> Path:
    """A folder that no other run has: runs/DATE-TIME, with a number behind it for the second one of that time."""
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = Path("runs", name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def has_steps(folder: Path) -> bool:
    """Whether a run in this folder has come to the end of a step: its metrics have a line."""
    return any(path.stat().st_size for path in folder.glob("metrics/*.jsonl"))


def changes(config: Config, folder: Path, inputs: Mapping[str, str] | None = None) -> list[tuple[str, str, str]]:
    """(setting or file, what it was in a run's folder, what it is now) of all that differ; [] if there was no run."""
    remedy, now, before = "mend it, or delete it to go on without comparing what it holds", {}, {}
    if (path := folder / "config.toml").is_file():
        settings = read_file(path, tomllib.loads, remedy), tomllib.loads(to_toml(config))
        before, now = ({name: toml_value(value) for name, value in leaves(table)} for table in settings)
    if inputs is not None and (path := folder / "inputs.json").is_file():  # runs of earlier versions have none
        now, before = now | dict(inputs), before | read_file(path, lambda text: dict(json.loads(text)), remedy)
    names = sorted(before.keys() | now.keys())
    both = [(name, before.get(name, "unset"), now.get(name, "unset")) for name in names]
    return [(name, was, given) for name, was, given in both if was != given]


def write_run_files(config: Config, folder: Path, resumed: str, inputs: Mapping[str, str]) -> None:
    """The settings, with what changed if the run goes on, what the files are that it reads, and the versions."""
    folder.mkdir(parents=True, exist_ok=True)
    if resumed:
        print(f"going on from {resumed}", flush=True)
        for name, was, now in changes(config, folder, inputs):
            print(f"  {name}: {was} -> {now}", flush=True)
    elif has_steps(folder):
        print(f"{folder} holds steps without a checkpoint: they are written over", flush=True)
    write_whole(folder / "config.toml", to_toml(config))
    write_whole(folder / "inputs.json", json.dumps(inputs, indent=1) + "\n")
    (folder / "versions.json").write_text(json.dumps(_versions(), indent=1) + "\n")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "command": " ".join(sys.argv)}
    for package in ("splitppo", "torch", "transformers", "safetensors", "vllm"):
        found[package] = installed(package)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    revision = shutil.which("git") and subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return found | {"git": revision or "not a checkout"}


def log_to_file(path: Path) -> None:
    """Warnings and messages of the libraries, of this rank."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    logging.captureWarnings(True)
    # of the value model's output, on which nothing is done in place
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
