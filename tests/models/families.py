"""Writes docs/families.md: python tests/models/families.py > docs/families.md

For each configuration of test_families.py, the trial that every run makes of its models: with
random weights it must give transformers' own outputs, on packed rows or on padded ones.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import transformers

from splitppo.models.build import Kind
from splitppo.models.probe import find_mismatch

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from test_families import PLAIN, configured

HEAD = f"""# Which model types train

Made by `python tests/models/families.py > docs/families.md`, with transformers \
{transformers.__version__}. Version 5.17, which
requirements.txt pins for GPUs, gives the same table, except that GPT-J is padded. \
Small models with random weights must give \
the outputs of transformers.
`python -m pytest -m families` also trains each of them.

* **packed**: the rows of a batch are stored one after another, without padding.
* **padded**: the rows are stored side by side, filled to equal length.
* **Other types** are tested when a run starts, and in a dry run. If a test fails, the type is \
refused with the reason.
* **Refused without a test**: encoders, encoder-decoder models, models with pictures or sound.

| model | type | as policy | as critic |
|---|---|---|---|"""


def found(config: Any, kind: Kind) -> str:
    """`packed`, `padded`, or why neither runs."""
    if not find_mismatch(config, kind, packed=True):
        return "packed"
    why = find_mismatch(config, kind, packed=False)
    return f"no: {why}" if why else "padded"


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(HEAD)
    for name, (kind, settings, _) in PLAIN.items():
        config = configured(kind, settings)
        print(
            f"| {name} | `{kind}` | {found(config, 'policy')} | {found(config, 'value')} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
