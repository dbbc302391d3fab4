"""Rows: from .parquet, .json and .jsonl files with verl's columns or plain ones, or generated for
first runs. A fault in a file is a UserError that names the file and the row, counted from 1 (in
.jsonl: the line)."""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from splitppo.config import DataConfig, RolloutConfig
from splitppo.config.toml import leaves
from splitppo.errors import UserError

KINDS = ".parquet, .json or .jsonl; datasets.load_from_disk(...).to_parquet(...) writes one"

_ECHO_TEXTS = ["".join(reversed(digits)) for digits in itertools.product("0123", repeat=3)]
# columns; <image> in a text stands for a picture
_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
_MAX_ROWS = 4000  # of both splits together
_HELD_OUT = 5  # one row in so many is for validation
Numbered = Iterator[tuple[int, Any]]  # (row number, row as parsed)


@dataclass(frozen=True)
class Row:
    """A row before tokenising. `where` names it in errors."""

    where: str
    prompt: str | list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def read_file(config: DataConfig, file: str, setting: str) -> Iterator[Row | UserError]:
    """The rows of a file, or the error of a row that can't be used. Raises UserError if there are
    none."""
    keys = {config.prompt_key, config.answer_key} - {""}
    used = {"data_source", "extra_info", *keys, *(key.split(".")[0] for key in keys)}
    number = 0
    for number, columns in raw_rows(file, setting, used):
        where = f"{file} row {number}"
        _refuse_media(columns if isinstance(columns, dict) else {}, used, where)
        try:
            yield _check_row(config, Path(file).stem, where, columns)
        except UserError as error:
            yield error
    if not number:
        raise UserError(f"{file} holds no rows; remove it from --{setting}")


def raw_rows(file: str, setting: str, used: set[str], kinds: str = KINDS) -> Numbered:
    """The rows of a file, of which the caller reads the columns `used`. Errors name `setting` and
    `kinds`."""
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
    numbers = itertools.count(1)
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for column in table.schema_arrow:
                # in such a column, "7" the text and 7 the number are the same bytes
                if column.name in used and "arrow.json" in str(column.type):
                    raise UserError(
                        f"{file} has a column {column.name} of JSON texts (values of mixed types), "
                        "where strings and numbers look the same; give it one type, or write the "
                        "rows as .jsonl"
                    )
            for batch in table.iter_batches(batch_size=256):
                yield from zip(numbers, batch.to_pylist(), strict=False)
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise UserError(
            f"{file} is no parquet file ({' '.join(str(error).split())}); write it again"
        ) from error


def _read_jsonl(path: Path, file: str, _used: set[str]) -> Numbered:
    with path.open("rb") as lines:  # bytes: json finds the encoding, and says where it is broken
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _parse_json(line, f"{file} row {number}")


def _read_json(path: Path, file: str, _used: set[str]) -> Numbered:
    content = path.read_bytes()
    rows = _parse_json(content, file) if content.strip() else []
    if not isinstance(rows, list):
        raise UserError(
            f"{file} holds one {type(rows).__name__}; a .json file is a list of rows: "
            "write [...], or .jsonl"
        )
    return enumerate(rows, 1)


def _parse_json(content: bytes, where: str) -> Any:
    try:
        parsed = json.loads(content)
        # may be half of a character, which no tokenizer and no file takes
        if b"\\ud" in content.lower():
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    # ValueError: JSONDecodeError, or bytes that are no text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: broken JSON ({error}); fix it") from error


def _refuse_media(columns: dict[str, Any], used: set[str], where: str) -> None:
    """Raises UserError for a row with pictures, video or sound. `used`: columns that are read."""
    text = str([columns.get(name) for name in used])
    for name in sorted(_MEDIA & columns.keys() - used):
        is_filled = bool(columns[name]) and columns[name] == columns[name]  # NaN is none
        if is_filled or f"<{name.removesuffix('s')}>" in text:
            raise UserError(
                f"{where} has a column {name}, but models of text alone are trained; "
                "use rows without it"
            )


def _check_row(config: DataConfig, file_source: str, where: str, columns: Any) -> Row:
    if not isinstance(columns, dict):
        raise UserError(
            f"{where} is a {type(columns).__name__}; a row is an object with columns: write {{...}}"
        )
    prompt = _look_up(columns, config.prompt_key, "prompt_key", where)
    _check_prompt(config, prompt, f"data.prompt_key={config.prompt_key}: {where}")
    truth = _look_up(columns, config.answer_key, "answer_key", where) if config.answer_key else None
    if config.answer_key and (truth is None or truth != truth):
        raise UserError(
            f"data.answer_key={config.answer_key}: {where} has {json.dumps(truth)} there; "
            "fill it in, or set --data.answer_key '' if the reward needs no answer"
        )
    source = columns.get("data_source")
    extra = columns.get("extra_info")
    for name, value, kind, due in (
        ("a data_source", source, str, "a string"),
        ("an extra_info", extra, dict, "an object"),
    ):
        if not isinstance(value, kind | None):
            raise UserError(
                f"{where} has {name} of type {type(value).__name__}; it must be {due}: fix the row"
            )
    # parquet fills the fields that a message lacks with null, and templates ask whether they are
    # there
    if not isinstance(prompt, str):
        prompt = [{k: v for k, v in message.items() if v is not None} for message in prompt]
    return Row(where, prompt, file_source if source is None else source, truth, extra or {})


def _look_up(columns: dict[str, Any], key: str, field: str, where: str) -> Any:
    """The value of column `key`. A dot names a field of a nested column, unless a column's own name
    has the dot."""
    if key in columns:
        return columns[key]
    value: Any = columns
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(
                f"data.{field}={key}: {where} has no such column; "
                f"columns: {', '.join(name for name, _ in leaves(columns))}; set --data.{field}"
                + (", or '' if the reward needs no answer" if field == "answer_key" else "")
            )
        value = value[part]
    return value


def _check_prompt(config: DataConfig, prompt: Any, where: str) -> None:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list):
        raise UserError(
            f"{where} has a prompt of type {type(prompt).__name__}; it must be a string or "
            "a list of {role, content} messages: choose another column or fix the row"
        )
    for number, message in enumerate(messages, 1):
        if isinstance(message, int):
            raise UserError(
                f"{where} has token ids for a prompt; set data.prompt_key to a column of text"
            )
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise UserError(
                f"{where} has a prompt whose message {number} is not "
                "{role: string, content: string}; fix the row"
            )
    if not any(message["content"].strip() for message in messages):
        raise UserError(f"{where} has an empty prompt; fill it in or drop the row")
    if messages[-1]["role"] == "assistant" and not json.loads(config.chat_kwargs).get(
        "continue_final_message"
    ):
        raise UserError(
            f"{where} has a prompt that ends with the assistant's answer; "
            "take that out or drop the row"
        )


def read_lengths(config: RolloutConfig) -> list[int]:
    """The response lengths in `rollout.lengths`, for benchmarks; [] if unset. Raises UserError if
    one is no length."""
    file = config.lengths
    if file is None:
        return []
    if not Path(file).is_file():
        raise UserError(
            f"rollout.lengths={file}: no such file (from {Path.cwd()}); "
            "name one that every rank can read"
        )
    lengths = Path(file).read_text(errors="replace").split()
    for number, length in enumerate(lengths, 1):
        if not (
            length.isascii() and length.isdecimal() and 1 <= int(length) <= config.max_new_tokens
        ):
            raise UserError(
                f"{file} number {number} is {length!r}; "
                f"use 1 to rollout.max_new_tokens={config.max_new_tokens}"
            )
    if not lengths:
        raise UserError(f"rollout.lengths={file} holds no number; write one a line")
    return [int(length) for length in lengths]


def generate(config: DataConfig, seed: int, *, held_out: bool) -> Iterator[Row]:
    """The rows of `data.task`, a pure function of task, digits and seed; no row is in both splits.
    Those of `guess` are alike: its environment has the rest.

    `echo`: "312=" asks for "312", three digits of 0 to 3. `addition`: "What is a+b?" for numbers of
    `data.digits`.
    """
    task = config.task
    digits = config.digits
    operands = range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    count = {"echo": len(_ECHO_TEXTS), "addition": len(operands) ** 2, "guess": _MAX_ROWS}[task]
    shuffled = random.Random(f"{task}/{digits}/{seed}").sample(range(count), min(count, _MAX_ROWS))
    cut = len(shuffled) // _HELD_OUT
    for index in shuffled[:cut] if held_out else shuffled[cut:]:
        text = "Guess a number.\n"
        answer = ""
        if task == "echo":
            text = f"{_ECHO_TEXTS[index]}="
            answer = _ECHO_TEXTS[index]
        elif task == "addition":
            a = operands[index // len(operands)]
            b = operands[index % len(operands)]
            text = f"What is {a}+{b}?"
            answer = str(a + b)
        yield Row(f"{task} row {index}", text, task, answer, {"index": index})
