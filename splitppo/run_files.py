"""What a run's folder says of the run: its settings, the versions it ran with, the libraries' messages."""

import difflib
import json
import logging
import platform
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

from splitppo.config import Config
from splitppo.errors import UserError
from splitppo.files import write_whole
from splitppo.nodes import installed
from splitppo.presets import leaves, to_toml

# What may change between the parts of a run: where and how it is computed, and what is told of it. With a dot at the
# end: all settings that begin so.
_FREE = """placement. engine. checkpoint. log. fsdp. compute.device compute.micro_batch_tokens compute.packing
    compute.compile compute.gather compute.activation_checkpointing reference.offload rollout.chunks reward.workers
    reward.timeout reward.model_offload config run_dir resume force dry_run world_size nodes timeout steps"""
FREE = tuple(_FREE.split())


def check_same_run(config: Config, folder: Path) -> None:
    """Refuses to go on in a run's folder with settings that would make it another run.

    Raises:
        UserError: names the first of them.
    """
    path = folder / "config.toml"
    if not path.is_file():
        return
    before, now = (dict(leaves(tomllib.loads(text))) for text in (path.read_text(encoding="utf-8"), to_toml(config)))
    paced = any(now.get(f"{model}.optim.schedule", "constant") != "constant" for model in ("policy", "value"))
    for name in sorted(before.keys() | now.keys()):
        free = any(name.startswith(part) if part.endswith(".") else name == part for part in FREE)
        if before.get(name) != now.get(name) and (not free or (name == "steps" and paced)):
            was, given = (shown.get(name, "unset") for shown in (before, now))
            why = " and the learning rate's schedule ends with the last step" if name == "steps" else ""
            raise UserError(
                f"{name} was {was} in {folder}, and is {given}{why}: that is another run; give the old value, another "
                "--run-dir, or --force to go on all the same"
            )


def write_run_files(config: Config, folder: Path, resumed: str) -> None:
    """The settings, with what changed if the run goes on, and the versions."""
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / "config.toml", to_toml(config)
    if resumed:
        print(f"going on from {resumed}", flush=True)
        before = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for change in difflib.ndiff(before, text.splitlines()):
            if change[0] in "+-":
                print(f"  {'now' if change[0] == '+' else 'was'} {change[2:]}", flush=True)
    write_whole(path, text)
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
