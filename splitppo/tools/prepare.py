"""`splitppo prepare`: the data of the presets, in verl's schema."""

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from splitppo.errors import UserError


def write_folder(out: Path, files: Sequence[str], build: Callable[[Path], str]) -> None:
    """Has `build` write a folder, names it `out` once it is complete, and prints what
    `build` returns. A folder that holds `files` is left as it is.

    Raises:
        UserError: `out` holds something else.
    """
    if all((out / name).is_file() for name in files):
        print(f"{out} is there already and complete: nothing to do")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"--out {out}: exists and is not complete; remove it or choose another --out"
        )
    # on the same disk, but no new folder stays if something fails
    above = next(path for path in out.absolute().parents if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=above) as scratch:
        done = build(Path(scratch, "new"))
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(scratch, "new").rename(out)
    print(done)


REPO = "openai/gsm8k"  # of the hub; also the rows' data_source
FILE = "main/{}-00000-of-00001.parquet"  # there; {} is the split
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # verl's
PAGE = "https://github.com/openai/grade-school-math (train.jsonl and test.jsonl)"


def locate_split(source: Path | None, split: str) -> str:
    """The file of a split: in the folder `source`, or else in the hub's cache, where it is
    downloaded if need be."""
    name = FILE.format(split)
    remedy = f"download it from {PAGE} and give --source FOLDER"
    if source is not None:
        names = [f"{split}.jsonl", f"{split}.parquet", name]
        if existing := [str(source / name) for name in names if (source / name).is_file()]:
            return existing[0]
        raise UserError(f"--source {source}: holds none of {', '.join(names)}; {remedy}")
    from splitppo.models.hub import find  # slow to import

    try:
        return find("data.files", f"hf://datasets/{REPO}/{name}")[1]
    except UserError as error:
        raise UserError(f"{error}, or {remedy}") from error


def verl_rows(split: str, file: str) -> list[dict[str, Any]]:
    """The rows of a file in verl's schema. The ground truth is the number after `####` at a
    solution's end, without commas."""
    from splitppo.data.raw import raw_rows  # imports pyarrow

    rows = []
    for index, (number, row) in enumerate(raw_rows(file, "source", {"question", "answer"})):
        fields = row if isinstance(row, dict) else {}
        question = fields.get("question")
        solution = fields.get("answer")
        truth = re.search(r"####\s*(-?[0-9.,]+)\s*$", str(solution))
        if not (isinstance(question, str) and truth):
            raise UserError(
                f"{file} row {number} must have a text `question`, and an `answer` that ends in "
                "#### and a number; use the original published file"
            )
        extra_info = {"answer": solution, "index": index, "question": question, "split": split}
        rows.append(
            {
                "data_source": REPO,
                "prompt": [{"content": f"{question} {INSTRUCTION}", "role": "user"}],
                "ability": "math",
                "reward_model": {"ground_truth": truth[1].replace(",", ""), "style": "rule"},
                "extra_info": extra_info,
            }
        )
    return rows


def prepare(
    name: Annotated[Literal["gsm8k"], tyro.conf.Positional],
    source: Path | None = None,
    out: Path | None = None,
) -> None:
    """Write train.parquet and test.parquet for the presets, in verl's schema. A folder that is
    already complete is not changed.

    Args:
        name: The data set.
        source: Folder with the published train and test files, .jsonl or .parquet. Unset: download
            them from the hub.
        out: Output folder. Unset: data/NAME.
    """
    from pyarrow import Table, parquet

    target = out or Path("data", name)
    splits = ("train", "test")

    def build(folder: Path) -> str:
        folder.mkdir()
        done = []
        for split in splits:
            rows = verl_rows(split, locate_split(source, split))
            parquet.write_table(Table.from_pylist(rows), folder / f"{split}.parquet")
            done.append(f"{target / split}.parquet: {len(rows):,} rows")
        return "\n".join(done)

    write_folder(target, [f"{split}.parquet" for split in splits], build)
