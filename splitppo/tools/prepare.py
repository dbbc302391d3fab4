"""`splitppo prepare`: the data of the presets, in verl's schema."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import regex
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


# the number after "####" at the end; what a pair of braces holds, or without braces the rest of the
# formula; an escaped brace is part of the answer, and one that is not closed leaves none
ANSWER = regex.compile(
    r"####\s*(-?[0-9.,]+)\s*$"
    r"|\\(?:boxed|fbox)(?![a-zA-Z])\s*+"
    r"(?:\{((?:[^{}\\]|\\.|\{(?2)\})*+)\}|((?!\{).*?)(?=\$|\\[])]|\n|$)|)",
    regex.DOTALL,
)


def answer_of(solution: str) -> str:
    r"""The answer in a published solution, or "": the number after `####` at its end, without
    commas, or what the last `\boxed` or `\fbox` holds."""
    *_, (number, braced, bare) = [("", "", ""), *ANSWER.findall(solution, overlapped=True)]
    return number.replace(",", "") or (braced or bare).strip()


@dataclass(frozen=True)
class Published:
    """A data set as it is published."""

    repo: str  # of the hub; also the rows' data_source
    file: str  # there; {} is the split
    columns: tuple[str, ...]  # question, solution, and what verl's files keep
    instruction: str  # verl's, to the letter
    page: str


DATA = {
    "gsm8k": Published(
        repo="openai/gsm8k",
        file="main/{}-00000-of-00001.parquet",
        columns=("question", "answer"),
        instruction='Let\'s think step by step and output the final answer after "####".',
        page="https://github.com/openai/grade-school-math (train.jsonl and test.jsonl)",
    ),
    "math": Published(
        repo="DigitalLearningGmbH/MATH-lighteval",
        file="data/{}-00000-of-00001.parquet",
        columns=("problem", "solution", "level", "type"),
        instruction="Let's think step by step and output the final answer within \\boxed{}.",
        page="https://huggingface.co/datasets/DigitalLearningGmbH/MATH-lighteval (the folder data)",
    ),
}


def locate_split(data: Published, source: Path | None, split: str) -> str:
    """The file of a split: in the folder `source`, or else in the hub's cache, where it is
    downloaded if need be."""
    name = data.file.format(split)
    remedy = f"download it from {data.page} and give --source FOLDER"
    if source is not None:
        names = [f"{split}.jsonl", f"{split}.parquet", name]
        if existing := [str(source / name) for name in names if (source / name).is_file()]:
            return existing[0]
        raise UserError(f"--source {source}: holds none of {', '.join(names)}; {remedy}")
    from splitppo.models.hub import find  # slow to import

    try:
        return find("data.files", f"hf://datasets/{data.repo}/{name}")[1]
    except UserError as error:
        raise UserError(f"{error}, or {remedy}") from error


def verl_rows(data: Published, split: str, file: str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file in verl's schema, and a note about those without an answer, which are left
    out."""
    from splitppo.data.raw import raw_rows  # imports pyarrow

    rows = []
    left_out = []
    for index, (number, row) in enumerate(raw_rows(file, "source", set(data.columns))):
        fields = row if isinstance(row, dict) else {}
        texts: dict[str, Any] = {name: fields.get(name) for name in data.columns}
        if not all(isinstance(text, str) for text in texts.values()):
            raise UserError(
                f"{file} row {number} must have text in columns {' and '.join(data.columns)}; "
                "use the original published file"
            )
        question, solution = (texts.pop(name) for name in data.columns[:2])
        if not (truth := answer_of(solution)):
            left_out.append(number)
            continue
        extra_info = {"answer": solution, "index": index, "question": question, "split": split}
        rows.append(
            {
                **texts,
                "data_source": data.repo,
                "prompt": [{"content": f"{question} {data.instruction}", "role": "user"}],
                "ability": "math",
                "reward_model": {"ground_truth": truth, "style": "rule"},
                "extra_info": extra_info,
            }
        )
    if not rows:
        raise UserError(f"{file} holds no row with an answer; use the original published file")
    lacking = f"; {len(left_out)} without an answer are left out, as row {min(left_out, default=0)}"
    return rows, lacking if left_out else ""


def prepare(
    name: Annotated[Literal["gsm8k", "math"], tyro.conf.Positional],
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
            rows, note = verl_rows(DATA[name], split, locate_split(DATA[name], source, split))
            parquet.write_table(Table.from_pylist(rows), folder / f"{split}.parquet")
            done.append(f"{target / split}.parquet: {len(rows):,} rows{note}")
        return "\n".join(done)

    write_folder(target, [f"{split}.parquet" for split in splits], build)
