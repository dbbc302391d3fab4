"""What a run's folder says of the run: its settings, the versions it ran with, the libraries' messages."""

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
from splitppo.presets import leaves, to_toml, toml_value

# What may change between the parts of a run: where and how it is computed, and what is told of it. With a dot at the
# end: all settings that begin so.
_FREE = """placement. engine. checkpoint. log. fsdp. compute.device compute.micro_batch_tokens compute.packing
    compute.compile compute.gather compute.activation_checkpointing reference.offload rollout.chunks reward.workers
    reward.timeout reward.model_offload config run_dir resume force dry_run world_size nodes timeout steps"""
FREE = tuple(_FREE.split())


def check_same_run(config: Config, folder: Path) -> None:
    """Refuses to go on in a run's folder with settings that would make it another run.

    Raises:
        UserError: names them.
    """
    found = []
    paced = any(optim.schedule != "constant" for optim in (config.policy.optim, config.value.optim))
    for name, was, now in changes(config, folder):
        free = any(name.startswith(part) if part.endswith(".") else name == part for part in FREE)
        if not free or (name == "steps" and paced):
            why = " and the learning rate's schedule ends with the last step" if name == "steps" else ""
            found.append(f"{name} was {was}, and is {now}{why}")
    if found:
        raise UserError(
            f"{'; '.join(found)}: that is another run than the one in {folder}; give the old values, another "
            "--run-dir, or --force to do it all the same"
        )


def has_steps(folder: Path) -> bool:
    """Whether a run in this folder has come to the end of a step: its metrics have a line."""
    return any(path.stat().st_size for path in folder.glob("metrics/*.jsonl"))


def changes(config: Config, folder: Path) -> list[tuple[str, str, str]]:
    """(setting, what it was in a run's folder, what it is now) of all that differ; [] if there was no run."""
    path = folder / "config.toml"
    if not path.is_file():
        return []
    texts = path.read_text(encoding="utf-8"), to_toml(config)
    before, now = ({name: toml_value(value) for name, value in leaves(tomllib.loads(text))} for text in texts)
    names = sorted(before.keys() | now.keys())
    both = [(name, before.get(name, "unset"), now.get(name, "unset")) for name in names]
    return [(name, was, given) for name, was, given in both if was != given]


def write_run_files(config: Config, folder: Path, resumed: str) -> None:
    """The settings, with what changed if the run goes on, and the versions."""
    folder.mkdir(parents=True, exist_ok=True)
    if resumed:
        print(f"going on from {resumed}", flush=True)
        for name, was, now in changes(config, folder):
            print(f"  {name}: {was} -> {now}", flush=True)
    elif has_steps(folder):
        print(f"{folder} holds steps without a checkpoint: they are written over", flush=True)
    write_whole(folder / "config.toml", to_toml(config))
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
