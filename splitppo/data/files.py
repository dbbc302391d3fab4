"""Rows: from .parquet, .json and .jsonl files with verl's columns or plain ones, or generated for
first runs. A fault in a file is a UserError that names the file and the row, counted from 1 (in
.jsonl: the line)."""

import functools
import importlib
import itertools
import json
import operator
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from splitppo.config import DataConfig, RolloutConfig
from splitppo.config.toml import flag, leaves
from splitppo.data.raw import parse_json, raw_rows
from splitppo.errors import UserError, need, need_known, one_line

_ECHO_TEXTS = ["".join(reversed(digits)) for digits in itertools.product("0123", repeat=3)]
RENDERED = ("tools", "documents")  # columns that a chat template may read beside the messages
# columns; <image> in a text stands for a picture
_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
_MAX_ROWS = 4000  # of both splits together
# what a message as text holds, in any notation
_MESSAGE = (
    re.compile(r"\b(role|from)\W{0,9}[:=]\W{0,9}(system|developer|user|human|assistant|gpt)\b"),
    re.compile(r"\b(content|value)\W{0,9}[:=]"),
)
_HELD_OUT = 5  # one row in so many is for validation


@dataclass(frozen=True)
class Row:
    """A row before tokenising. `where` names it in errors. `shown`: columns of `RENDERED`, as the
    file has them."""

    where: str
    prompt: str | list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    shown: dict[str, Any] = field(default_factory=dict)


def read_file(config: DataConfig, file: str, setting: str) -> Iterator[Row | UserError]:
    """The rows of a file, or the error of a row that can't be used. Raises UserError if there are
    none."""
    keys = {config.prompt_key, config.answer_key} - {""}
    used = {"data_source", "extra_info", *RENDERED, *keys}
    number = 0
    for number, columns in raw_rows(file, setting, used | _MEDIA):
        where = f"{file} row {number}"
        heads = used | {key.split(".")[0] for key in keys}
        _refuse_media(columns if isinstance(columns, dict) else {}, heads, where)
        try:
            row = _check_row(config, Path(file), where, columns)
            _check_texts(config, row)
            yield row
        except UserError as error:
            yield error
        except RecursionError:
            yield UserError(f"{where} is nested too deep; flatten it")
    if not number:
        raise UserError(f"{file} holds no rows; remove it from {flag(setting)}")


def _check_texts(config: DataConfig, row: Row) -> None:
    """Raises UserError for half a character, which no tokenizer and no file takes."""
    columns = {
        config.prompt_key: row.prompt,
        "data_source": row.data_source,
        config.answer_key: row.ground_truth,
        "extra_info": row.extra_info,
        **row.shown,
    }
    for column, value in columns.items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{row.where}: column {column} has an invalid Unicode character, half of a "
                f"surrogate pair ({error}); replace or delete it"
            ) from error


def _refuse_media(columns: dict[str, Any], used: set[str], where: str) -> None:
    """Raises UserError for a row with pictures, video or sound. `used`: columns that are read."""
    text = str([columns.get(name) for name in used])
    for name in sorted(_MEDIA & columns.keys() - used):
        is_filled = bool(columns[name]) and columns[name] == columns[name]  # NaN is none
        if is_filled or f"<{name.removesuffix('s')}>" in text:
            raise UserError(
                f"{where} has a column {name}, but only text models are supported; "
                "use rows without it"
            )


def _check_row(config: DataConfig, file: Path, where: str, columns: Any) -> Row:
    if not isinstance(columns, dict):
        raise UserError(
            f"{where} is a {type(columns).__name__}; a row is an object with columns: write {{...}}"
        )
    prompt = _look_up(columns, config.prompt_key, "prompt_key", where)
    prompt = _read_messages(prompt, f"data.prompt_key={config.prompt_key}: {where}")
    _check_prompt(config, prompt, f"data.prompt_key={config.prompt_key}: {where}")
    truth = _look_up(columns, config.answer_key, "answer_key", where) if config.answer_key else None
    if config.answer_key and (truth is None or truth != truth):
        raise UserError(
            f"data.answer_key={config.answer_key}: {where} has {json.dumps(truth)} there; "
            "fill it in, or set --data.answer-key '' if the reward needs no answer"
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
    deep = file.suffix == ".parquet"
    if not isinstance(prompt, str):
        prompt = [_without_nulls(message, deep) for message in prompt]
    shown = {
        name: _without_nulls(columns[name], deep)
        for name in RENDERED
        if columns.get(name) not in (None, "") and columns[name] == columns[name]
    }
    return Row(where, prompt, file.stem if source is None else source, truth, extra or {}, shown)


def _without_nulls(value: Any, deep: bool) -> Any:
    """An object without its fields of null; `deep`: nor those of what is in it. Parquet fills the
    fields that an object of a list lacks with null, and templates ask whether they are there."""
    if isinstance(value, dict):
        return {
            name: _without_nulls(part, deep) if deep else part
            for name, part in value.items()
            if part is not None
        }
    return [_without_nulls(part, deep) for part in value] if isinstance(value, list) else value


def _read_messages(prompt: Any, where: str) -> Any:
    """A prompt of JSON text that is a list of messages, as that list; any other as it is. Raises
    UserError if messages stand in a text that is no JSON, such as Python's."""
    text = prompt.strip() if isinstance(prompt, str) else ""
    if not (text[:1] in '[{"a' and text[-1:] in ']}")' and all(p.search(text) for p in _MESSAGE)):
        return prompt
    try:
        messages = _read_messages(parse_json(text.encode(), where), where)
    except UserError as error:
        if text.startswith(("[", "{", "array(")):
            raise UserError(
                f"{error}: messages given as text must be a JSON list of {{role, content}}"
            ) from error
        return prompt
    return prompt if isinstance(messages, str) else messages


def read_objects(value: Any, column: str) -> list[dict[str, Any]]:
    """The objects of a list that a template renders, such as tools: the list itself, its JSON text,
    or a list of JSON texts. Raises UserError for anything else."""
    objects = parse_json(value.encode(), column) if isinstance(value, str) else value
    objects = [] if objects is None else objects
    if isinstance(objects, list):
        objects = [parse_json(x.encode(), column) if isinstance(x, str) else x for x in objects]
    if not isinstance(objects, list) or not all(isinstance(part, dict) for part in objects):
        raise UserError(f"the column {column} is not a list of objects; write one, or drop it")
    return objects


def _look_up(columns: dict[str, Any], key: str, field: str, where: str) -> Any:
    """The value of column `key`. A dot names a field of a nested column, unless a column's own name
    has the dot."""
    parts = [key] if key in columns else key.split(".")
    try:
        return functools.reduce(operator.getitem, parts, cast(Any, columns))
    except (KeyError, TypeError) as error:
        raise UserError(
            f"data.{field}={key}: {where} has no such column; "
            f"columns: {', '.join(name for name, _ in leaves(columns))}; "
            f"set {flag(f'data.{field}')}"
            + (", or '' if the reward needs no answer" if field == "answer_key" else "")
        ) from error


def _check_prompt(config: DataConfig, prompt: Any, where: str) -> None:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list):
        raise UserError(
            f"{where} has a prompt of type {type(prompt).__name__}; it must be a string or "
            "a list of {role, content} messages: choose another column or fix the row"
        )
    for number, message in enumerate(messages, 1):
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
            "remove that message or drop the row"
        )


def read_lengths(config: RolloutConfig) -> list[int]:
    """The response lengths in `rollout.lengths`, for benchmarks; [] if unset. Raises UserError if
    one is no length."""
    if config.lengths is None:
        return []
    most = config.max_new_tokens
    try:
        words = Path(config.lengths).read_text(encoding="utf-8-sig", errors="replace").split()
        lengths = [int(word) for word in words]
    except (OSError, ValueError) as error:
        raise UserError(
            f"rollout.lengths={config.lengths}: {error}; name a file of whole numbers, one a line"
        ) from error
    if not (lengths and min(lengths) >= 1 and max(lengths) <= most):
        raise UserError(
            f"rollout.lengths={config.lengths} holds {len(lengths)} numbers; write some from 1 to "
            f"rollout.max_new_tokens={most}, one a line"
        )
    return lengths


def generate(config: DataConfig, seed: int, *, held_out: bool) -> Iterator[Row]:
    """The rows of `data.task`, a pure function of task, its settings and seed; no row is in both
    splits. Those of a game are alike: its environment has the rest.

    `echo`: "312=" asks for "312", three digits of 0 to 3. `addition`: "What is a+b?" for numbers of
    `data.digits`.
    """
    task, _, name = config.task.partition(":")
    if task == "reasoning_gym":
        rows = _make_gym(name, config.task_settings, seed)
        chosen = [
            row
            for row in rows
            # a question's hash chooses its split: tasks may ask the same twice
            if held_out == (zlib.crc32(str(row.prompt).encode()) % _HELD_OUT == 0)
        ]
        if not chosen:
            raise UserError(
                f"data.task={config.task}: none of its {len(rows)} rows is "
                f"{'held out' if held_out else 'trained on'}; raise size in data.task_settings"
            )
        yield from chosen
        return
    digits = config.digits
    operands = range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    count = {"echo": len(_ECHO_TEXTS), "addition": len(operands) ** 2}.get(task, _MAX_ROWS)
    shuffled = random.Random(f"{task}/{digits}/{seed}").sample(range(count), min(count, _MAX_ROWS))
    cut = len(shuffled) // _HELD_OUT
    for index in shuffled[:cut] if held_out else shuffled[cut:]:
        answer = ""
        text = "Guess a number.\n" if task == "guess" else f"{config.task}\n"
        if task == "echo":
            answer = _ECHO_TEXTS[index]
            text = f"{answer}="
        elif task == "addition":
            a, b = (operands[place] for place in divmod(index, len(operands)))
            answer = str(a + b)
            text = f"What is {a}+{b}?"
        yield Row(f"{task} row {index}", text, task, answer, {"index": index})


@functools.cache
def _make_gym(name: str, settings: str, seed: int) -> list[Row]:
    """All rows of a task of reasoning_gym, by number. With `composite` they are of several tasks.
    Raises UserError if the package is missing, there is no such task or setting, or reasoning_gym
    refuses a value or can't make a row."""
    where = f"data.task=reasoning_gym:{name}"
    need("reasoning_gym", where, "'splitppo[reasoning-gym]'")
    gym = importlib.import_module("reasoning_gym.composite")
    need_known(name, importlib.import_module("reasoning_gym.factory").DATASETS, where)
    random.seed(seed)  # some tasks draw from this generator
    # neighbouring seeds of a task share all rows but one
    table = {"seed": random.getrandbits(32), "size": _MAX_ROWS}
    # reasoning_gym would draw a seed of null anew on each rank
    table |= json.loads(
        settings, object_hook=lambda x: {k: v for k, v in x.items() if (k, v) != ("seed", None)}
    )
    try:
        parts = [gym.DatasetSpec(**part) for part in table.get("datasets", ())]
        rows = [*gym.create_dataset(name, **table | ({"datasets": parts} if parts else {}))]
    except Exception as error:  # it checks by assertions, and by what comes
        raise UserError(
            f"{where}: reasoning_gym refuses data.task_settings={settings}, or can't make a row "
            f"({one_line(repr(error))[:300]}); change them"
        ) from error
    mixed_settings = {part.name: part.config for part in parts}
    sources = [row["metadata"]["source_dataset"] for row in rows]
    return [
        Row(
            f"{where} row {number}", row["question"], f"reasoning_gym:{source}", row["answer"],
            {"index": number, "settings": mixed_settings.get(source, table), "entry": row},
        )
        for number, (source, row) in enumerate(zip(sources, rows, strict=True))
    ]  # fmt: skip
