"""Prompts: read from files (verl's schema as it is, or plain columns) or generated, and the order they are used in.

Whatever is wrong in a file is a UserError that names the file and the row, counting from 1 (in .jsonl: the line).
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet
from jinja2 import TemplateError

from splitppo.config import DataConfig
from splitppo.errors import UserError
from splitppo.rollout import Prompt

TASKS = ("echo", "addition")  # that can be generated

_ECHO_TEXTS = ["".join(reversed(characters)) for characters in itertools.product("0123", repeat=3)]
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
    """Check that every file of `config` can be read and its first row has what is asked for. Needs no tokenizer."""
    for file in (*config.files, *config.validation_files):
        next(_read_file(config, file))


def load_prompts(config: DataConfig, files: Sequence[str], tokenizer: Any, *, max_prompt_tokens: int) -> list[Prompt]:
    """Read and tokenise `files` (.parquet, .jsonl, or .json: a list of rows), one after the other, as one data set.

    `config` names the columns and says whether string prompts go through the chat template. Messages need the template;
    a string without it gets the tokenizer's special tokens. A prompt above `max_prompt_tokens` is a UserError.
    """
    rows = [row for file in files for row in _read_file(config, file)]
    prompts = _tokenize(config, rows, tokenizer)
    lengths = [len(prompt.tokens) for prompt in prompts]
    if too_long := [index for index, length in enumerate(lengths) if length > max_prompt_tokens]:
        raise UserError(
            f"rollout.max_prompt_tokens={max_prompt_tokens}: {rows[too_long[0]].where} has a prompt of "
            f"{lengths[too_long[0]]} tokens ({len(too_long)} of {len(rows)} rows are too long); "
            f"set --rollout.max_prompt_tokens {max(lengths)} or drop such rows"
        )
    return prompts


def check_task(name: str) -> None:
    """Check `data.task`: an unknown one is a UserError."""
    if name not in TASKS:
        raise UserError(f"data.task={name}: no such generated task; use {' or '.join(TASKS)}, or give --data.files")


def generated_prompts(
    config: DataConfig, tokenizer: Any, *, seed: int, split: Literal["train", "validation"]
) -> list[Prompt]:
    """The rows of the generated task `data.task`: a pure function of task, digits and seed.

    `echo`: say three digits of 0 to 3 again ("312=" asks for "312"): 64 rows. `addition`: "What is a+b?" over pairs of
    numbers of `data.digits` digits. At most 4,000 rows, of which a fifth is held out: no row is in both splits (though
    "3+4" may be in one and "4+3" in the other). An unknown task, or digits outside 1 to 9, is a UserError.
    """
    task, digits = config.task, config.digits
    check_task(task)
    if not 1 <= digits <= 9:
        raise UserError(f"data.digits={digits}: operands have 1 to 9 digits; set --data.digits to one of these")
    operands = range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    count = len(_ECHO_TEXTS) if task == "echo" else len(operands) ** 2
    shuffled = random.Random(f"{task}/{digits}/{seed}").sample(range(count), min(count, _MAX_GENERATED))
    cut = len(shuffled) // _HELD_OUT
    rows = []
    for index in shuffled[:cut] if split == "validation" else shuffled[cut:]:
        if task == "echo":
            text, answer = f"{_ECHO_TEXTS[index]}=", _ECHO_TEXTS[index]
        else:
            a, b = operands[index // len(operands)], operands[index % len(operands)]
            text, answer = f"What is {a}+{b}?", str(a + b)
        rows.append(_Row(f"{task} row {index}", text, task, answer, {"index": index}))
    return _tokenize(config, rows, tokenizer)


def batch_indices(n_prompts: int, per_step: int, step: int, seed: int) -> list[int]:
    """Which prompts step `step` (counting from 1) uses: `per_step` indices below `n_prompts`, from these four alone.

    Every epoch is a fresh seeded permutation of all prompts; the epochs one after the other are cut into steps, so
    that a step may reach from one epoch into the next.
    """
    first, offset = divmod((step - 1) * per_step, n_prompts)
    epochs = range(first, first + (offset + per_step - 1) // n_prompts + 1)
    seed %= 2**64  # numpy takes no negative seed
    orders = [np.random.default_rng([_ORDER_STREAM, seed, epoch]).permutation(n_prompts) for epoch in epochs]
    return np.concatenate(orders)[offset : offset + per_step].tolist()


def _tokenize(config: DataConfig, rows: list[_Row], tokenizer: Any) -> list[Prompt]:
    texts = [_to_text(config, row, tokenizer) for row in rows]
    tokens: dict[int, list[int]] = {}
    # A template writes the special tokens itself; plain text gets the tokenizer's own. One call for each kind.
    for kind in {templated for _, templated in texts}:
        chosen = {index: text for index, (text, templated) in enumerate(texts) if templated == kind}
        ids = tokenizer(list(chosen.values()), add_special_tokens=not kind, verbose=False)["input_ids"]
        tokens.update(zip(chosen, ids, strict=True))
    prompts = []
    for index, row in enumerate(rows):
        if not tokens[index]:
            raise UserError(f"{row.where} has a prompt of no tokens; drop the row or mend the tokenizer")
        text, row_ids = texts[index][0], list(tokens[index])
        prompts.append(Prompt(text, row_ids, row.data_source, row.ground_truth, row.extra_info))
    return prompts


def _to_text(config: DataConfig, row: _Row, tokenizer: Any) -> tuple[str, bool]:
    """A row's prompt as text, and whether the chat template wrote it."""
    messages = row.prompt
    if isinstance(messages, str):
        if not (config.chat and tokenizer.chat_template):
            return messages, False
        messages = [{"role": "user", "content": messages}]
    elif not tokenizer.chat_template:
        raise UserError(
            f"{row.where} has a prompt of chat messages, but the tokenizer ({tokenizer.name_or_path}) has no chat "
            "template; use an instruct model or string prompts"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), True
    except TemplateError as error:
        raise UserError(f"{row.where}: the chat template refuses these messages ({error}); mend the row") from error


def _read_file(config: DataConfig, file: str) -> Iterator[_Row]:
    """The rows of one file, checked as they come. At least one, or an error."""
    setting = "data.validation_files" if file in config.validation_files else "data.files"
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"{setting}={file}: no such file (from {Path.cwd()}); give a path that every rank can read")
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}
    if path.suffix not in readers:
        raise UserError(f"{setting}={file}: unknown kind of file; use .parquet, .json or .jsonl")
    number = 0
    for number, columns in readers[path.suffix](path, file):
        yield _check_row(config, file, f"{file} row {number}", columns)
    if not number:
        raise UserError(f"{file} holds no rows; remove it from --{setting}")


# The readers give (row number, row as parsed) for each row of a file.
def _read_parquet(path: Path, file: str) -> Iterator[tuple[int, Any]]:
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file} is no parquet file ({' '.join(str(error).split())}); write it again") from error
    return enumerate((row for batch in table.iter_batches(batch_size=256) for row in batch.to_pylist()), 1)


def _read_jsonl(path: Path, file: str) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:  # bytes: json finds the encoding, and says where it is broken
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _parse_json(line, f"{file} row {number}")


def _read_json(path: Path, file: str) -> Iterator[tuple[int, Any]]:
    content = path.read_bytes()
    rows = _parse_json(content, file) if content.strip() else []
    if not isinstance(rows, list):
        kind = type(rows).__name__
        raise UserError(f"{file} holds one {kind}; a .json file is a list of rows: write [...], or .jsonl")
    return enumerate(rows, 1)


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
        remedy = "fill it in, or set --data.answer_key '' if the reward needs no answer"
        raise UserError(f"data.answer_key={config.answer_key}: {where} has null there; {remedy}")
    source, extra = columns.get("data_source"), columns.get("extra_info")
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
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list):
        wanted = "it must be a string or a list of {role, content} messages: choose another column or mend the row"
        raise UserError(f"{where} has a prompt of type {type(prompt).__name__}; {wanted}")
    for number, message in enumerate(messages, 1):
        fields = message if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            wanted = "{role: string, content: string}"
            raise UserError(f"{where} has a prompt whose message {number} is not {wanted}; mend the row")
    if not any(message["content"].strip() for message in messages):
        raise UserError(f"{where} has an empty prompt; fill it in or drop the row")
