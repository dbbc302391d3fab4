"""Prompts: read from files (verl's schema as it is, or plain columns) or generated, and the order they are used in.

Whatever is wrong in a file is an error that names the file and the row, counting from 1 (in .jsonl: the line).
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet
from jinja2 import TemplateError

from splitppo.config import DataConfig
from splitppo.errors import UserError
from splitppo.rollout import Prompt

TASKS = ("echo", "addition")
"""The generated tasks."""

_ECHO_ALPHABET = "0123"
_ECHO_LENGTH = 3
_MAX_GENERATED = 4000  # rows of a generated task, both splits together
_HELD_OUT = 5  # one row in so many of a generated task is for validation
_ORDER_STREAM = 1  # keeps the order's random stream apart from others that are drawn from the same seed


@dataclass(frozen=True)
class _Row:
    """A row before tokenising; `where` names it in errors, `prompt` is a string or a list of messages."""

    where: str
    prompt: str | list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def check_files(config: DataConfig) -> None:
    """Check that every file of `config` can be read and that its first row has what is asked for. Needs no tokenizer.

    Raises:
        UserError: a file is missing, empty, broken or of an unknown kind, or its first row lacks a column.
    """
    for file in (*config.files, *config.validation_files):
        next(_read_file(config, file))


def load_prompts(config: DataConfig, files: Sequence[str], tokenizer: Any, *, max_prompt_tokens: int) -> list[Prompt]:
    """Read and tokenise `files`, one after the other, as one data set.

    Args:
        config: names of the columns; whether string prompts go through the chat template.
        files: .parquet, .json (a list of rows) or .jsonl.
        tokenizer: of the policy. Messages need its chat template; a string prompt without one gets its special tokens.
        max_prompt_tokens: the longest prompt allowed.

    Raises:
        UserError: anything wrong in a file, or a prompt that is too long.
    """
    rows = [row for file in files for row in _read_file(config, file)]
    prompts = _tokenize(config, rows, tokenizer)
    lengths = [len(prompt.tokens) for prompt in prompts]
    too_long = [index for index, length in enumerate(lengths) if length > max_prompt_tokens]
    if too_long:
        first = too_long[0]
        raise UserError(
            f"rollout.max_prompt_tokens={max_prompt_tokens}: {rows[first].where} has a prompt of {lengths[first]} "
            f"tokens ({len(too_long)} of {len(rows)} rows are too long); set --rollout.max_prompt_tokens "
            f"{max(lengths)} or drop such rows"
        )
    return prompts


def check_task(name: str) -> None:
    """Check `data.task`.

    Raises:
        UserError: there is no such generated task.
    """
    if name not in TASKS:
        raise UserError(f"data.task={name}: no such generated task; use {' or '.join(TASKS)}, or give --data.files")


def generated_prompts(
    config: DataConfig, tokenizer: Any, *, seed: int, split: Literal["train", "validation"]
) -> list[Prompt]:
    """The rows of the generated task `data.task`: a pure function of task, digits and seed.

    `echo`: say three digits of 0 to 3 again ("312=" asks for "312"): 64 rows. `addition`: "What is a+b?" over pairs of
    numbers of `data.digits` digits. At most 4,000 rows, of which a fifth is held out: no row is in both splits (though
    "3+4" may be in one and "4+3" in the other).

    Raises:
        UserError: unknown task, or digits outside 1 to 9.
    """
    check_task(config.task)
    make = _echo_row if config.task == "echo" else _addition_row
    count = len(_ECHO_ALPHABET) ** _ECHO_LENGTH if config.task == "echo" else _operand_count(config.digits) ** 2
    shuffled = random.Random(f"{config.task}/{config.digits}/{seed}").sample(range(count), min(count, _MAX_GENERATED))
    cut = len(shuffled) // _HELD_OUT
    chosen = shuffled[:cut] if split == "validation" else shuffled[cut:]
    return _tokenize(config, [make(index, config.digits) for index in chosen], tokenizer)


def batch_indices(n_prompts: int, per_step: int, step: int, seed: int) -> list[int]:
    """Which prompts step `step` (counting from 1) uses: `per_step` indices below `n_prompts`, from these four alone.

    Every epoch is a fresh seeded permutation of all prompts; the epochs one after the other are cut into steps, so
    that a step may reach from one epoch into the next.
    """
    start = (step - 1) * per_step
    first, last = start // n_prompts, (start + per_step - 1) // n_prompts
    # numpy takes no negative seed
    epochs = [
        np.random.default_rng([_ORDER_STREAM, seed % 2**64, e]).permutation(n_prompts) for e in range(first, last + 1)
    ]
    offset = start - first * n_prompts
    return np.concatenate(epochs)[offset : offset + per_step].tolist()


def _echo_row(index: int, digits: int) -> _Row:
    base = len(_ECHO_ALPHABET)
    text = "".join(_ECHO_ALPHABET[index // base**place % base] for place in range(_ECHO_LENGTH))
    return _Row(f"echo row {index}", f"{text}=", "echo", text, {"index": index})


def _addition_row(index: int, digits: int) -> _Row:
    count = _operand_count(digits)
    least = 10 ** (digits - 1) if digits > 1 else 0
    a, b = least + index // count, least + index % count
    return _Row(f"addition row {index}", f"What is {a}+{b}?", "addition", str(a + b), {"index": index})


def _operand_count(digits: int) -> int:
    """How many numbers have `digits` digits; 0 counts as one of the one-digit numbers."""
    if not 1 <= digits <= 9:
        raise UserError(f"data.digits={digits}: operands have 1 to 9 digits; set --data.digits to one of these")
    return 10 if digits == 1 else 9 * 10 ** (digits - 1)


def _tokenize(config: DataConfig, rows: list[_Row], tokenizer: Any) -> list[Prompt]:
    texts: list[str] = []
    templated: list[bool] = []
    for row in rows:
        prompt = row.prompt
        if isinstance(prompt, str) and config.chat and tokenizer.chat_template:
            prompt = [{"role": "user", "content": prompt}]
        templated.append(not isinstance(prompt, str))
        texts.append(prompt if isinstance(prompt, str) else _apply_template(tokenizer, prompt, row.where))
    tokens: list[list[int]] = [[] for _ in rows]
    # A template writes the special tokens itself; plain text gets the tokenizer's own. One call for each kind.
    for kind in set(templated):
        indices = [index for index, is_templated in enumerate(templated) if is_templated == kind]
        ids = tokenizer([texts[index] for index in indices], add_special_tokens=not kind, verbose=False)["input_ids"]
        for index, row_ids in zip(indices, ids, strict=True):
            tokens[index] = list(row_ids)
    empty = next((row.where for row, row_ids in zip(rows, tokens, strict=True) if not row_ids), None)
    if empty is not None:
        raise UserError(f"{empty} has a prompt of no tokens; drop the row or mend the tokenizer")
    return [
        Prompt(text, row_ids, row.data_source, row.ground_truth, row.extra_info)
        for row, text, row_ids in zip(rows, texts, tokens, strict=True)
    ]


def _apply_template(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            f"{where} has a prompt of chat messages, but the tokenizer ({tokenizer.name_or_path}) has no chat "
            "template; use an instruct model or string prompts"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise UserError(f"{where}: the chat template refuses these messages ({error}); mend the row") from error


def _read_file(config: DataConfig, file: str) -> Iterator[_Row]:
    """The rows of one file, checked as they come. At least one, or an error."""
    empty = True
    for number, columns in _read_columns(config, file):
        empty = False
        yield _check_row(config, file, f"{file} row {number}", columns)
    if empty:
        raise UserError(f"{file} holds no rows; remove it from --{_setting(config, file)}")


def _setting(config: DataConfig, file: str) -> str:
    return "data.validation_files" if file in config.validation_files else "data.files"


def _read_columns(config: DataConfig, file: str) -> Iterator[tuple[int, Any]]:
    """(row number, row as parsed) for each row of a file."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(
            f"{_setting(config, file)}={file}: no such file (from {Path.cwd()}); give a path that every rank can read"
        )
    if path.suffix == ".parquet":
        return _read_parquet(path, file)
    if path.suffix == ".jsonl":
        return _read_jsonl(path, file)
    if path.suffix == ".json":
        return _read_json(path, file)
    raise UserError(f"{_setting(config, file)}={file}: unknown kind of file; use .parquet, .json or .jsonl")


def _read_parquet(path: Path, file: str) -> Iterator[tuple[int, Any]]:
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file} is no parquet file ({' '.join(str(error).split())}); write it again") from error
    number = 0
    for batch in table.iter_batches(batch_size=256):
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _read_jsonl(path: Path, file: str) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:  # bytes: json finds the encoding, and says where it is broken
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _parse_json(line, f"{file} row {number}")


def _read_json(path: Path, file: str) -> Iterator[tuple[int, Any]]:
    content = path.read_bytes()
    rows = _parse_json(content, file) if content.strip() else []
    if not isinstance(rows, list):
        raise UserError(
            f"{file} holds one {type(rows).__name__}; a .json file is a list of rows: write [...], or .jsonl"
        )
    yield from enumerate(rows, 1)


def _parse_json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:  # JSONDecodeError, or bytes that are no text
        raise UserError(f"{where}: broken JSON ({error}); mend it") from error


def _check_row(config: DataConfig, file: str, where: str, columns: Any) -> _Row:
    if not isinstance(columns, dict):
        raise UserError(f"{where} is a {type(columns).__name__}; a row is an object with columns: write {{...}}")
    prompt = _look_up(columns, config.prompt_key, "prompt_key", where)
    _check_prompt(prompt, f"data.prompt_key={config.prompt_key}: {where}")
    truth = _look_up(columns, config.answer_key, "answer_key", where) if config.answer_key else None
    if config.answer_key and truth is None:
        raise UserError(
            f"data.answer_key={config.answer_key}: {where} has null there; fill it in, or set --data.answer_key '' if "
            "the reward needs no answer"
        )
    source = columns.get("data_source")
    extra = columns.get("extra_info")
    if not isinstance(source, str | None):
        raise UserError(f"{where} has a data_source of type {type(source).__name__}; it must be a string: mend the row")
    if not isinstance(extra, dict | None):
        raise UserError(f"{where} has an extra_info of type {type(extra).__name__}; it must be an object: mend the row")
    if not isinstance(prompt, str):
        # parquet fills the fields that a message lacks with null, and templates ask whether they are there
        prompt = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    return _Row(where, prompt, Path(file).stem if source is None else source, truth, extra or {})


def _look_up(columns: dict[str, Any], key: str, field: str, where: str) -> Any:
    """The value of column `key`; a dot goes into a nested column, unless the name with its dot is a column itself."""
    if key in columns:
        return columns[key]
    value: Any = columns
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            known = ", ".join(_column_names(columns))
            raise UserError(f"data.{field}={key}: {where} has no such column; columns: {known}; set --data.{field}")
        value = value[part]
    return value


def _column_names(columns: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in columns.items():
        if isinstance(value, dict) and value:
            yield from _column_names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError(f"{where} has an empty prompt; fill it in or drop the row")
        return
    if not isinstance(prompt, list):
        raise UserError(
            f"{where} has a prompt of type {type(prompt).__name__}; it must be a string or a list of "
            "{role, content} messages: choose another column or mend the row"
        )
    for number, message in enumerate(prompt, 1):
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise UserError(
                f"{where} has a prompt whose message {number} is not {{role: string, content: string}}; mend the row"
            )
    if not any(message["content"].strip() for message in prompt):
        raise UserError(f"{where} has an empty prompt; fill it in or drop the row")
