"""The prompts of a run: read from files (reading.py) or generated, as tokens, and the order they are used in."""

import itertools
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from splitppo.config import DataConfig
from splitppo.data.files import Row, read_file
from splitppo.errors import UserError
from splitppo.rollout import Prompt

TASKS = ("echo", "addition")  # that can be generated
Split = Literal["train", "validation"]

_ECHO_TEXTS = ["".join(reversed(characters)) for characters in itertools.product("0123", repeat=3)]
_MAX_GENERATED = 4000  # rows of a generated task, both splits together
_HELD_OUT = 5  # one row in so many of a generated task is for validation
# keep the random streams apart that are drawn from the same seed
_ORDER_STREAM, _FILE_STREAM, _OFFSET_STREAM, _STEP_STREAM, _DRAW_STREAM = range(1, 6)


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a split.

    Attributes:
        prompts: those of the first file, then those of the second, and so on, each in its file's order.
        sizes: how many of them each file has.
        told: what became of rows that were too long, for the user: a line, or none.
    """

    prompts: list[Prompt]
    sizes: list[int]
    told: list[str]


def check_files(config: DataConfig) -> None:
    """Check that every file of `config` can be read, its first row has what is asked for, and that no file is both
    trained on and held out. Needs no tokenizer. A file may stand twice in one of the two settings."""
    trained = {os.path.realpath(file) for file in config.files}
    for file in config.validation_files:
        if os.path.realpath(file) in trained:
            raise UserError(
                f"data.validation_files={file} is one of data.files, too; held-out rows must not be trained on: "
                "split the file in two, or name another"
            )
    for setting, files in (("data.files", config.files), ("data.validation_files", config.validation_files)):
        for file in files:
            next(read_file(config, file, setting))


def check_task(name: str) -> None:
    """Check `data.task`: an unknown one is a UserError."""
    if name not in TASKS:
        raise UserError(f"data.task={name}: no such generated task; use {' or '.join(TASKS)}, or give --data.files")


def load_prompts(config: DataConfig, tokenizer: Any, *, max_prompt_tokens: int, seed: int, split: Split) -> PromptSet:
    """The prompts of a split as tokens, a pure function of the arguments and the files.

    Training reads `data.files`, or generates `data.task` if there are none; the held-out prompts are those of
    `data.validation_files`, else the generated task's held-out part, else none.

    Messages go through the tokenizer's chat template, and so do strings if there is one and `data.chat` is on, as one
    user message; other strings get the tokenizer's special tokens. `data.system` and `data.chat_kwargs` are part of
    what the template gets, and a UserError where strings don't go through it.

    A prompt above `max_prompt_tokens` is a UserError (`data.overlong=refuse`), left out (`filter`), or loses its first
    tokens (`cut`): with a chat template that is its head, so the system message goes first and what is left begins
    inside a message. `messages` of a cut prompt are whole. Behind that, `data.max_rows` draws training prompts from
    all of them, so many of each file as is its share of them; `data.validation_rows` takes the first.

    Raises:
        UserError: a wrong row or setting; no row is left, or none of a file that has a weight.
    """
    setting, groups = _read(config, seed, split)
    rows = [row for group in groups for row in group]
    if not rows:
        return PromptSet([], [], [])
    prompts = _tokenize(config, rows, tokenizer)
    kept, told = _fit(config, rows, prompts, tokenizer, max_prompt_tokens, setting)
    file_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    chosen = list(kept)
    if split == "validation":
        chosen = chosen[: config.validation_rows]
    elif config.max_rows is not None and config.max_rows < len(chosen):
        sizes = np.bincount(file_of[chosen], minlength=len(groups)).tolist()
        chosen = [chosen[index] for index in _draw(sizes, config.max_rows, seed)]
    sizes = np.bincount(file_of[chosen], minlength=len(groups)).tolist()
    if split == "train" and config.weights and 0 in sizes:
        file = config.files[sizes.index(0)]
        raise UserError(
            f"data.weights: no row of {file} is left to take its share; drop the file, or mend data.max_rows="
            f"{config.max_rows} and data.overlong={config.overlong}, which leave rows out"
        )
    return PromptSet([kept[index] for index in chosen], sizes, told)


def batch_indices(n_prompts: int, per_step: int, step: int, seed: int) -> list[int]:
    """Which prompts step `step` (counting from 1) uses: `per_step` indices below `n_prompts`, from these four alone.

    Every epoch is a fresh seeded permutation of all prompts; the epochs one after the other are cut into steps, so
    that a step may reach from one epoch into the next.
    """
    return _stretch(n_prompts, (step - 1) * per_step, per_step, [_ORDER_STREAM, seed % 2**64])


def mixed_indices(sizes: Sequence[int], weights: Sequence[float], per_step: int, step: int, seed: int) -> list[int]:
    """As `batch_indices`, over files of `sizes` prompts one after the other, each with its share of every step.

    File f, of share w_f (its weight over the sum of weights), takes its turns at the times (j + u_f) / w_f, j = 0, 1,
    ...; u_f in [0, 1) comes from the seed. The run takes all turns in the order of their times, so that of any n turns
    in a row f has w_f * n, give or take less than 1 + w_f * len(sizes). A step's prompts are then shuffled. Each file
    has epochs of its own, each a fresh permutation of it. What a step costs does not depend on its number.
    """
    seed %= 2**64  # numpy takes no negative seed
    shares = np.asarray(weights, dtype=float) / np.sum(weights)
    offsets = np.random.default_rng([_OFFSET_STREAM, seed]).random(len(sizes))
    start = (step - 1) * per_step
    # Before time T there are T turns, give or take len(sizes): these bounds enclose the step's.
    margin = len(sizes) + 1
    begin = np.maximum(np.ceil((start - margin) * shares - offsets), 0).astype(int).tolist()
    end = np.ceil((start + per_step + margin) * shares - offsets).astype(int).tolist()
    turns = sorted(
        ((j + offset) / share, file, j)
        for file, (offset, share) in enumerate(zip(offsets.tolist(), shares.tolist(), strict=True))
        for j in range(begin[file], end[file])
    )
    skip = start - sum(begin)
    mine: dict[int, list[int]] = {}
    for _, file, j in turns[skip : skip + per_step]:
        mine.setdefault(file, []).append(j)
    chosen: list[int] = []
    for file, turn in sorted(mine.items()):
        first = sum(sizes[:file])
        chosen += [first + i for i in _stretch(sizes[file], turn[0], len(turn), [_FILE_STREAM, seed, file])]
    return np.random.default_rng([_STEP_STREAM, seed, step]).permutation(chosen).tolist()


def _stretch(size: int, start: int, count: int, stream: list[int]) -> list[int]:
    """`count` indices from `start` on of: permutations of range(size), one epoch after the other, without end."""
    first, offset = divmod(start, size)
    epochs = range(first, first + (offset + count - 1) // size + 1)
    orders = [np.random.default_rng([*stream, epoch]).permutation(size) for epoch in epochs]
    return np.concatenate(orders)[offset : offset + count].tolist()


def _draw(sizes: Sequence[int], count: int, seed: int) -> list[int]:
    """`count` of sum(sizes) indices, ascending: at random of each part, and of each its share, to one more or less."""
    rng = np.random.default_rng([_DRAW_STREAM, seed % 2**64])
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    shuffled = np.concatenate([start + rng.permutation(size) for start, size in zip(starts, sizes, strict=True)])
    # equal strides over the parts, each in random order
    phase = int(rng.integers(len(shuffled)))
    return sorted(int(shuffled[(i * len(shuffled) + phase) // count]) for i in range(count))


def _read(config: DataConfig, seed: int, split: Split) -> tuple[str, list[list[Row]]]:
    """The setting that a split's rows come from, as it is told, and the rows of each file."""
    files = config.files if split == "train" else config.validation_files
    if not files and (split == "train" or not config.files):
        return f"data.task={config.task}", [_generate(config, seed, split)]
    setting = "data.files" if split == "train" else "data.validation_files"
    return setting, [list(read_file(config, file, setting)) for file in files]


def _generate(config: DataConfig, seed: int, split: Split) -> list[Row]:
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
        rows.append(Row(f"{task} row {index}", text, task, answer, {"index": index}))
    return rows


def _tokenize(config: DataConfig, rows: list[Row], tokenizer: Any) -> list[Prompt]:
    _check_template(config, tokenizer)
    arguments = {"add_generation_prompt": True, **json.loads(config.chat_kwargs)}
    conversations = [_conversation(config, row, tokenizer) for row in rows]
    texts = [
        str(row.prompt) if messages is None else _render(row, messages, tokenizer, arguments)
        for row, messages in zip(rows, conversations, strict=True)
    ]
    tokens: dict[int, list[int]] = {}
    # A template writes the special tokens itself; plain text gets the tokenizer's own. One call for each kind.
    for plain in {messages is None for messages in conversations}:
        chosen = [index for index, messages in enumerate(conversations) if (messages is None) == plain]
        ids = tokenizer([texts[index] for index in chosen], add_special_tokens=plain, verbose=False)["input_ids"]
        tokens.update(zip(chosen, ids, strict=True))
    prompts = []
    for index, row in enumerate(rows):
        if not tokens[index]:
            raise UserError(f"{row.where} has a prompt of no tokens; drop the row or mend the tokenizer")
        text, ids, messages = texts[index], list(tokens[index]), conversations[index]
        prompts.append(Prompt(text, ids, row.data_source, row.ground_truth, row.extra_info, messages))
    return prompts


def _check_template(config: DataConfig, tokenizer: Any) -> None:
    """What is handed to the chat template needs one that strings go through, or it would be lost on them."""
    given = {"data.system": config.system is not None, "data.chat_kwargs": bool(json.loads(config.chat_kwargs))}
    for setting in (name for name, is_set in given.items() if is_set):
        if not tokenizer.chat_template:
            raise UserError(
                f"{setting} is for the chat template, but the tokenizer ({tokenizer.name_or_path}) has none; "
                f"use an instruct model or drop {setting}"
            )
        if not config.chat:
            raise UserError(f"{setting} is for the chat template, but data.chat is off; drop one of the two")


def _conversation(config: DataConfig, row: Row, tokenizer: Any) -> list[dict[str, Any]] | None:
    """A row's prompt as messages; None if it stays plain text."""
    messages = row.prompt
    if isinstance(messages, str):
        if not (config.chat and tokenizer.chat_template):
            return None
        messages = [{"role": "user", "content": messages}]
    elif not tokenizer.chat_template:
        raise UserError(
            f"{row.where} has a prompt of chat messages, but the tokenizer ({tokenizer.name_or_path}) has no chat "
            "template; use an instruct model or string prompts"
        )
    if config.system is None or any(message["role"] in ("system", "developer") for message in messages):
        return messages
    return [{"role": "system", "content": config.system}, *messages]


def _render(row: Row, messages: list[dict[str, Any]], tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except (TemplateError, ValueError, TypeError) as error:  # the latter two: data.chat_kwargs that it can't take
        told = " ".join(str(error).split())
        raise UserError(
            f"{row.where}: the chat template refuses these messages ({told}); mend the row, or data.chat_kwargs or "
            "data.system if set"
        ) from error


def _fit(
    config: DataConfig, rows: list[Row], prompts: list[Prompt], tokenizer: Any, longest: int, setting: str
) -> tuple[dict[int, Prompt], list[str]]:
    """`data.overlong`: the prompts that stay, by the index of their row, and what is told of the others."""
    lengths = [len(prompt.tokens) for prompt in prompts]
    over = [index for index, length in enumerate(lengths) if length > longest]
    kept = dict(enumerate(prompts))
    if not over:
        return kept, []
    limit, first = f"rollout.max_prompt_tokens={longest}", rows[over[0]].where
    if config.overlong == "refuse":
        raise UserError(
            f"{limit}: {first} has a prompt of {lengths[over[0]]} tokens ({len(over)} of {len(rows)} rows are too "
            f"long); set --rollout.max_prompt_tokens {max(lengths)}, or --data.overlong to filter or cut"
        )
    if config.overlong == "filter" and len(over) == len(rows):
        raise UserError(
            f"data.overlong=filter: all {len(rows)} rows of {setting} have prompts over {limit}; the shortest has "
            f"{min(lengths)} tokens: raise the limit, or set --data.overlong cut"
        )
    for index in over:
        if config.overlong == "filter":
            del kept[index]
        else:
            tokens = prompts[index].tokens[-longest:]
            kept[index] = replace(prompts[index], text=tokenizer.decode(tokens), tokens=tokens)
    fate = "are left out" if config.overlong == "filter" else "lose their first tokens"
    return kept, [
        f"data.overlong={config.overlong}: {len(over)} of {len(rows)} rows of {setting} have prompts over {limit} and "
        f"{fate}; the first is {first} ({lengths[over[0]]} tokens)"
    ]
