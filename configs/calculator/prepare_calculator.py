"""Products of three digits: `python configs/calculator/prepare_calculator.py [--out FOLDER]`."""

import json
import random
import sys
from pathlib import Path

from splitppo.config.cli import read_call
from splitppo.errors import command, words
from splitppo.tools.prepare import write_folder

FILES = {"train.jsonl": 8000, "test.jsonl": 256}


def prepare_calculator(out: Path = Path("data/calculator")) -> None:
    """Products of numbers of three digits, in verl's schema; no product is in both files.

    A complete folder is left as it is.

    Args:
        out: Folder to write: train.jsonl (8,000 rows) and test.jsonl (256).

    Raises:
        UserError: `out` holds something else.
    """

    def build(folder: Path) -> str:
        folder.mkdir()
        pairs = [(a, b) for a in range(100, 1000) for b in range(a, 1000)]  # a*b and b*a are one
        drawn = random.Random(0).sample(pairs, sum(FILES.values()))
        for name, count in FILES.items():
            rows = [json.dumps(row(*drawn.pop())) for _ in range(count)]
            (folder / name).write_text("\n".join(rows) + "\n")
        return f"{out}: {' and '.join(f'{count} rows in {name}' for name, count in FILES.items())}"

    write_folder(out, tuple(FILES), build)


def row(a: int, b: int) -> dict[str, object]:
    return {
        "prompt": f"Call the calculator for {a}*{b}, as in the examples.",
        "data_source": "calculator",
        "reward_model": {"ground_truth": str(a * b)},
    }


@command
def main() -> None:
    read_call(prepare_calculator, "prepare_calculator.py", words())()


if __name__ == "__main__":
    sys.exit(main())
