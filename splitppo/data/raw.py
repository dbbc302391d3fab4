"""What a file of rows holds, as Python values: .parquet, .json and .jsonl. A fault is a UserError
that names the file and the row, counted from 1 (in .jsonl: the line)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from splitppo.errors import UserError, unique_names

KINDS = ".parquet, .json or .jsonl; datasets.load_from_disk(...).to_parquet(...) writes one"

Numbered = Iterator[tuple[int, Any]]  # (row number, row as parsed)


def raw_rows(file: str, setting: str, used: set[str]) -> Numbered:
    """The rows of a file, of which the caller reads the columns `used` (`a.b` is the field b of
    column a). Other columns are None where to read them would cost time, or could fail. Errors name
    `setting`."""
    path = Path(file)
    if not (path.is_file() or path.is_dir()):  # a pipe could be read once only, and might block
        raise UserError(
            f"{setting}={file}: no such file (from {Path.cwd()}); give a path that every rank can "
            "read; the presets' data come from splitppo prepare gsm8k"
        )
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}
    if path.suffix not in readers or path.is_dir():
        raise UserError(f"{setting}={file}: unknown kind of file; use {KINDS}")
    return readers[path.suffix](path, file, used)


def _read_parquet(path: Path, file: str, used: set[str]) -> Numbered:
    done = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            _check_schema(table.schema_arrow, used, file)
            unread = dict.fromkeys(table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=256, columns=sorted(used)):
                for at in range(batch.num_rows):
                    done += 1
                    yield (
                        done,
                        unread
                        | {
                            name: _to_python(column[at], f"{file} row {done}: column {name}")
                            for name, column in zip(batch.schema.names, batch.columns, strict=True)
                        },
                    )
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise UserError(
            f"{file} can't be read as parquet ({' '.join(str(error).split())}); write it again"
        ) from error


def _check_schema(schema: pyarrow.Schema, used: set[str], file: str) -> None:
    """Refuses columns that are used and of which a value would not be what was written."""
    heads = {name.split(".")[0] for name in used}
    for column in (column for column in schema if column.name in used | heads):
        # in such a column, "7" the text and 7 the number are the same bytes
        if "arrow.json" in str(column.type):
            raise UserError(
                f"{file} has a column {column.name} of mixed types, stored as JSON text, so "
                '"7" and 7 can\'t be told apart; give it one type, or write the rows as .jsonl'
            )
        if schema.names.count(column.name) > 1:
            raise UserError(f"{file} has the column {column.name} twice; drop one of the two")


def _to_python(value: pyarrow.Scalar, where: str) -> Any:
    """A value of a row. Raises UserError, which begins with `where`, if Python has none that is
    the same, or an object in it has a field twice."""
    try:
        return value.as_py()
    except Exception as error:  # pyarrow's errors are of many types
        raise UserError(
            f"{where} holds a value that can't be read ({value.type}: "
            f"{' '.join(str(error).split())}); write it as text, or drop the column"
        ) from error


def _read_jsonl(path: Path, file: str, _: set[str]) -> Numbered:
    with path.open("rb") as lines:  # bytes: json finds the encoding, and says where it is broken
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, parse_json(line, f"{file} row {number}")


def _read_json(path: Path, file: str, _: set[str]) -> Numbered:
    content = path.read_bytes()
    rows = parse_json(content, file) if content.strip() else []
    if not isinstance(rows, list):
        raise UserError(
            f"{file} contains a {type(rows).__name__}; a .json file must be a list of rows: "
            "write [...], or .jsonl"
        )
    return enumerate(rows, 1)


def parse_json(content: bytes, where: str) -> Any:
    """What JSON text says. Raises UserError if it is broken, or an object has a name twice."""
    try:
        text = content.decode(json.detect_encoding(content))
        return json.loads(text, object_pairs_hook=unique_names)
    # ValueError: JSONDecodeError, or bytes that are no text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: JSON can't be read ({error}); correct it") from error
