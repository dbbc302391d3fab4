"""What a file of rows holds, as Python values: .parquet, .json and .jsonl. A fault is a UserError
that names the file and the row, counted from 1 (in .jsonl: the line)."""

import json
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from splitppo.errors import UserError, unique_names

KINDS = ".parquet, .json or .jsonl; datasets.load_from_disk(...).to_parquet(...) writes one"

Numbered = Iterator[tuple[int, Any]]  # (row number, row as parsed)


def raw_rows(file: str, setting: str, used: set[str], kinds: str = KINDS) -> Numbered:
    """The rows of a file, of which the caller reads the columns `used` (`a.b` is the field b of
    column a). Other columns are None where to read them would cost time, or could fail. Errors name
    `setting` and `kinds`."""
    path = Path(file)
    if not (path.is_file() or path.is_dir()):  # a pipe could be read once only, and might block
        raise UserError(
            f"{setting}={file}: no such file (from {Path.cwd()}); give a path that every rank can "
            "read; the presets' data come from splitppo prepare gsm8k"
        )
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}
    if path.suffix not in readers or path.is_dir():
        raise UserError(f"{setting}={file}: unknown kind of file; use {kinds}")
    return readers[path.suffix](path, file, used)


def _read_parquet(path: Path, file: str, used: set[str]) -> Numbered:
    done = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            _check_schema(table.schema_arrow, used, file)
            unread = {column.name: _hollow(column.type) for column in table.schema_arrow}
            for batch in table.iter_batches(batch_size=256, columns=sorted(used)):
                columns = {
                    name: _to_python(column, f"{file} row {{}}: column {name}", done)
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
                for at in range(batch.num_rows):
                    done += 1
                    yield done, unread | {name: values[at] for name, values in columns.items()}
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise UserError(
            f"{file} is no parquet file ({' '.join(str(error).split())}); write it again"
        ) from error


def _check_schema(schema: pyarrow.Schema, used: set[str], file: str) -> None:
    """Refuses columns that are used and of which a value would not be what was written."""
    heads = {name.split(".")[0] for name in used}
    for column in (column for column in schema if column.name in used | heads):
        # in such a column, "7" the text and 7 the number are the same bytes
        if "arrow.json" in str(column.type):
            raise UserError(
                f"{file} has a column {column.name} of JSON texts (values of mixed types), "
                "where strings and numbers look the same; give it one type, or write the "
                "rows as .jsonl"
            )
        if schema.names.count(column.name) > 1 or _has_twins(column.type):
            raise UserError(
                f"{file} has the column {column.name}, or a field of it, twice; drop one of the two"
            )


def _parts(kind: pyarrow.DataType) -> list[pyarrow.Field]:
    """The fields of a nested type."""
    return [kind.field(at) for at in range(kind.num_fields)]


def _has_twins(kind: pyarrow.DataType) -> bool:
    parts = _parts(kind)
    return len({part.name for part in parts}) < len(parts) or any(
        _has_twins(part.type) for part in parts
    )


def _hollow(kind: pyarrow.DataType) -> Any:
    """A value of a column that is not read: None, and of an object its fields' names with such."""
    is_object = pyarrow.types.is_struct(kind)
    return {part.name: _hollow(part.type) for part in _parts(kind)} if is_object else None


def _to_python(column: pyarrow.Array, where: str, done: int) -> list[Any]:
    """The values of a column. `done`: rows of the file before them. Raises UserError, which begins
    with `where`, if one can't be converted: pyarrow's errors are of many types."""
    with suppress(Exception):
        return column.to_pylist()
    for row, value in enumerate(column, done + 1):
        if fault := _fault(value):
            raise UserError(
                f"{where.format(row)}{fault[0]} holds a value that can't be read ({fault[1]}); "
                "write it as text, or drop the column"
            )
    return [value.as_py() for value in column]


def _fault(value: pyarrow.Scalar) -> tuple[str, str] | None:
    """Of a value that can't be converted the part that is to blame, as `.field[0]`, and why."""
    try:
        value.as_py()
        return None
    except Exception as error:
        parts = {}
        if pyarrow.types.is_struct(value.type):
            parts = {f".{part.name}": value[part.name] for part in _parts(value.type)}
        elif isinstance(value, pyarrow.ListScalar | pyarrow.LargeListScalar):
            parts = {f"[{at}]": part for at, part in enumerate(value.values)}
        for name, part in parts.items():
            if inner := _fault(part):
                return name + inner[0], inner[1]
        text = ""
        with suppress(Exception):  # of an unknown time zone not even this
            text = f"{value!r:.80}: "
        return "", f"{value.type}: {text}{' '.join(str(error).split())}"


def _read_jsonl(path: Path, file: str, used: set[str]) -> Numbered:
    with path.open("rb") as lines:  # bytes: json finds the encoding, and says where it is broken
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, parse_json(line, f"{file} row {number}", used)


def _read_json(path: Path, file: str, used: set[str]) -> Numbered:
    content = path.read_bytes()
    rows = parse_json(content, file, used) if content.strip() else []
    if not isinstance(rows, list):
        raise UserError(
            f"{file} holds one {type(rows).__name__}; a .json file is a list of rows: "
            "write [...], or .jsonl"
        )
    return enumerate(rows, 1)


def parse_json(content: bytes, where: str, used: Set[str] = frozenset()) -> Any:
    """What JSON text says. Raises UserError if it is broken, an object has a name twice, or what is
    `used` of its rows (nothing: all) holds half a character."""
    try:
        text = content.decode(json.detect_encoding(content))
        parsed = json.loads(text, object_pairs_hook=unique_names)
        # may be half of a character, which no tokenizer and no file takes
        if "\\ud" in text.lower():
            heads = {name.split(".")[0] for name in used} | used
            for row in parsed if isinstance(parsed, list) else [parsed]:
                unread = {*row} - heads if isinstance(row, dict) and used else ()
                read = {name: row[name] for name in row if name not in unread} if unread else row
                json.dumps(read, ensure_ascii=False).encode()
        return parsed
    # ValueError: JSONDecodeError, or bytes that are no text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: broken JSON ({error}); fix it") from error
