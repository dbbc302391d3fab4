"""What transformers 4 needs in a folder that transformers 5 has written, and what stays as it
was."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from splitppo.models.build import read_config
from splitppo.models.tokenizer import FILES

TOKENIZER = (*FILES, "merges.txt", "*_tokens*.json", "chat_template*")
# all that is written into a model's folder or repository; the next export or push replaces it
WRITTEN = (*TOKENIZER, "*.json", "*.safetensors", "*.py", "README.md")
# kinds of rotary positions that transformers 4.57 computes
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# what config.json called their base, and the share of a head that has them
NAMES = {f"gpt_neox{suffix}": ("rotary_emb_base", "rotary_pct") for suffix in ("", "_japanese")}
# never as before: the precision; code and quantization, which are not read; `id2label` counts; the
# folder of somebody's machine
CHANGED = (
    *("dtype", "torch_dtype", "auto_map", "quantization_config", "num_labels"),
    "_name_or_path",
)


def complete(folder: Path, source: Path, tokenizer: Path, *, own_code: bool, policy: bool) -> None:
    """Completes the folder of a model that was written after training.

    config.json gets the values of the folder `source`, in its words, where both models agree, and
    for the others the names of transformers 4, too. The tokenizer's files are those of the folder
    `tokenizer`, with a class and a setting that transformers 4 knows. A policy's
    generation_config.json is that of `source`. With `own_code` Python code comes along.
    """
    file = folder / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    source_config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    before = json.loads(read_config(str(source), own_code=own_code).to_json_string())
    same = {
        name: value
        for name, value in source_config.items()
        if name not in CHANGED and before.get(name) == written.get(name)
    }
    written.pop("_name_or_path", None)
    file.write_text(json.dumps(written | older_names(written) | same, indent=2), encoding="utf-8")
    code = ["*.py"] * own_code
    copies = (
        *(source.glob(pattern) for pattern in [*code, *["generation_config.json"] * policy]),
        *(tokenizer.glob(pattern) for pattern in [*code, *TOKENIZER]),
    )
    for copied in filter(Path.is_file, (file for files in copies for file in files)):
        shutil.copyfile(copied, folder / copied.name)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        text = settings.read_text(encoding="utf-8")
        if "name_or_path" in (fields := json.loads(text)):
            del fields["name_or_path"]
            text = json.dumps(fields, indent=2, ensure_ascii=False)
        text = text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
        settings.write_text(
            re.sub(r'"extra_special_tokens"(?=\s*:\s*\[)', '"additional_special_tokens"', text),
            encoding="utf-8",
        )


def older_names(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 5 has renamed in a config.json, as transformers 4 calls it: the precision,
    and rotary positions (`rope_parameters`), unless it does not know this kind of them."""
    rope = config.get("rope_parameters") or {}
    scaling = {"rope_type": "default"} | (rope.get("full_attention") or rope)
    kind = scaling.pop("rope_type")
    if kind not in ROPES:
        return {"torch_dtype": config["dtype"]}
    base, share = NAMES.get(config["model_type"], ("rope_theta", "partial_rotary_factor"))
    long = kind == "longrope"
    names = {
        "torch_dtype": config["dtype"],
        base: scaling.pop("rope_theta", None),
        share: scaling.pop("partial_rotary_factor", None),
        "rope_local_base_freq": (rope.get("sliding_attention") or {}).get("rope_theta"),
        "original_max_position_embeddings": long
        and scaling.pop("original_max_position_embeddings"),
        # what is left; Phi 3 takes no other dictionary
        "rope_scaling": kind != "default" and scaling | {"type" if long else "rope_type": kind},
    }
    return {name: value for name, value in names.items() if value}
