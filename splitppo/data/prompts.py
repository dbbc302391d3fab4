"""The prompts of a run as tokens, and the order in which steps use them."""

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError, meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from splitppo.config import DataConfig
from splitppo.data.files import Row, generate, read_file, read_objects
from splitppo.errors import UserError
from splitppo.rollout import Prompt

Split = Literal["train", "validation"]
# the errors of the prompts that can't be scored, by their place
Check = Callable[[Mapping[int, Prompt]], Mapping[int, UserError]]

# messages, and by name the row's tools or documents -> the text of a prompt
Render = Callable[..., str]

CLOCK = "strftime_now"  # the function by which a chat template reads the clock
SHOWS_TIME = (
    "the chat template shows the current time, so a later resume is refused; "
    "data.chat_kwargs may fix it"
)
# keep apart the random streams that are drawn from the same seed
_ORDER_STREAM = 1
_DRAW_STREAM = 5


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a split."""

    prompts: list[Prompt]  # file after file, each in its file's order
    notes: list[str]  # lines for the user about rows that were left out or cut


def check_files(config: DataConfig, seed: int = 0) -> None:
    """Raises UserError if a file or its first row is wrong, a file is both trained on and held out,
    or `data.task` makes no rows."""
    if not config.files:
        next(generate(config, seed, held_out=False))
    trained = {os.path.realpath(file) for file in config.files}
    for file in config.validation_files:
        if os.path.realpath(file) in trained:
            raise UserError(
                f"data.validation_files={file} is one of data.files, too; "
                "held-out rows must not be trained on: split the file in two, or name another"
            )
    for setting, files in (
        ("data.files", config.files),
        ("data.validation_files", config.validation_files),
    ):
        for file in files:
            first = next(read_file(config, file, setting))
            if isinstance(first, UserError) and config.invalid == "refuse":
                raise first


def load_prompts(
    config: DataConfig,
    tokenizer: Any,
    *,
    max_prompt_tokens: int | None,
    seed: int,
    split: Split,
    check: Check = lambda _: {},
    now: datetime | None = None,
    render: Render | None = None,
    teacher_key: str | None = None,
    teacher_most: int = 2**31,
) -> PromptSet:
    """The prompts of a split, a pure function of the arguments and the files: those of its files,
    else those of `data.task`. Without `data.validation_files` nothing is held out of `data.files`.

    Messages go through `render`, or the tokenizer's chat template. With `data.chat` and a template,
    strings do too, as one user message; a template that shows the time shows `now`. Other strings
    get the tokenizer's special tokens, but not the end of a sequence. A row that can't be used, or
    that `check` finds wrong, is a UserError or left out (`data.invalid`); a file of such rows alone
    is refused. So is, or left out, a prompt above `max_prompt_tokens` (None: none is) as
    `data.overlong` says. Then `data.max_rows` draws training prompts at random.
    `data.validation_rows` takes the first held-out prompts. `teacher_key`: column of the prompt
    that a teacher reads, of at most `teacher_most` tokens; a row without it can't be used.
    """
    setting, files = _read(config, seed, split)
    as_taught = replace(config, prompt_key=teacher_key or config.prompt_key)
    taught = _read(as_taught, seed, split)[1] if teacher_key else files
    kept: list[tuple[Row, Prompt]] = []
    wrong: list[UserError] = []
    for read, others in zip(files, taught, strict=True):
        made = tokenize(config, read, tokenizer, now, render)
        if teacher_key:
            other = tokenize(as_taught, others, tokenizer, now)
            triples = zip(made, other, read, strict=True)
            made = [_with_teachers(*triple, teacher_key, teacher_most) for triple in triples]
        usable = {i: prompt for i, prompt in enumerate(made) if isinstance(prompt, Prompt)}
        is_checked = len(usable) == len(made) or config.invalid == "filter"
        for place, error in (check(usable) if is_checked else {}).items():
            made[place] = UserError(f"{read[place].where}: {error}")
        bad = [error for error in made if isinstance(error, UserError)]
        if len(bad) == len(read):  # a setting is wrong
            raise bad[0]
        if bad and config.invalid == "refuse":
            count = f"{len(bad)} such rows of {len(read)}"
            raise UserError(f"{bad[0]}, or --data.invalid filter ({count})")
        wrong += bad
        pairs = zip(read, made, strict=True)
        kept += [(row, prompt) for row, prompt in pairs if isinstance(prompt, Prompt)]
    fitting, notes = _fit(config, kept, max_prompt_tokens or 2**31, setting)
    if wrong:
        notes.insert(
            0,
            f"data.invalid=filter: {len(wrong)} of {len(wrong) + len(kept)} rows of {setting} "
            f"can't be used and are left out; the first: {wrong[0]}",
        )
    template = str(tokenizer.chat_template)
    if split == "train" and CLOCK in template:
        notes.append(SHOWS_TIME)
    notes += _unseen(kept, template, setting)
    if split == "validation":
        fitting = fitting[: config.validation_rows]
    elif config.max_rows is not None and config.max_rows < len(fitting):
        noise = np.random.default_rng([_DRAW_STREAM, seed % 2**64])
        chosen = sorted(noise.choice(len(fitting), config.max_rows, replace=False).tolist())
        fitting = [fitting[place] for place in chosen]
    return PromptSet(fitting, notes)


def _read(config: DataConfig, seed: int, split: Split) -> tuple[str, list[list[Any]]]:
    """The setting that a split's rows come from, for messages, and what each file holds: rows, and
    errors of those that can't be used."""
    held_out = split == "validation"
    setting = "data.validation_files" if held_out else "data.files"
    files = config.validation_files if held_out else config.files
    if not (files or config.files):
        return f"data.task={config.task}", [list(generate(config, seed, held_out=held_out))]
    return setting, [list(read_file(config, file, setting)) for file in files]


def _with_teachers(
    prompt: Prompt | UserError, taught: Prompt | UserError, row: Any, key: str, most: int
) -> Prompt | UserError:
    """A prompt with the one that a teacher reads, of column `key` and at most `most` tokens; or
    what is wrong with one of them."""
    if isinstance(prompt, UserError):
        return prompt
    if isinstance(taught, Prompt) and len(taught.tokens) > most:
        taught = UserError(
            f"data.prompt_key={key}: {row.where} has {len(taught.tokens)} tokens there; "
            f"the teacher can read at most {most} prompt tokens plus rollout.max_new_tokens; "
            "shorten it, or drop the row"
        )
    if isinstance(taught, UserError):
        return UserError(re.sub(r"\bdata\.prompt(?=[-_]key)", "teacher.prompt", str(taught)))
    return replace(prompt, teacher=taught)


def _unseen(rows: Iterable[tuple[Row, Prompt]], template: str, setting: str) -> list[str]:
    """Lines about the columns that the chat template could show, and does not."""
    unseen = {
        name
        for row, prompt in rows
        for name in row.shown
        if prompt.messages is None or name not in template
    }
    return [
        f"{setting}: the chat template does not use the column {name}" for name in sorted(unseen)
    ]


def tokenize(
    config: DataConfig,
    rows: Sequence[Row | UserError],
    tokenizer: Any,
    now: datetime | None = None,
    render: Render | None = None,
) -> list[Prompt | UserError]:
    """The prompts of the rows, or the errors of those that have none, with the errors among
    `rows`. A template that shows the time shows `now`, for all rows the same."""
    read = {place: row for place, row in enumerate(rows) if isinstance(row, Row)}
    is_shown = any(row.shown for row in read.values())
    reads = _check_template(config, tokenizer, now or datetime.now(), is_read=is_shown)
    chats = {place: _conversation(config, row, tokenizer) for place, row in read.items()}
    settings = {"add_generation_prompt": True, **json.loads(config.chat_kwargs)}
    render = render or (
        lambda messages, **columns: tokenizer.apply_chat_template(
            messages, tokenize=False, **settings, **columns
        )
    )
    set_by = json.loads(config.chat_kwargs).keys()
    texts = {i: _text(read[i], messages, reads, set_by, render) for i, messages in chats.items()}
    usable = {place: text for place, text in texts.items() if isinstance(text, str)}
    made: list[Any] = [texts.get(place, row) for place, row in enumerate(rows)]
    # one call for plain texts, which get special tokens, and one for rendered texts, which already
    # hold them
    for plain in {chats[place] is None for place in usable}:
        chosen = {i: text for i, text in usable.items() if (chats[i] is None) == plain}
        ids = tokenizer([*chosen.values()], add_special_tokens=plain, verbose=False)["input_ids"]
        # a policy has nothing to say behind the end
        ends = plain and tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
        end = -1 if ends else None
        for (place, text), part in zip(chosen.items(), ids, strict=True):
            row = read[place]
            made[place] = Prompt(
                text,
                list(part[:end]),
                row.data_source,
                row.ground_truth,
                row.extra_info,
                chats[place],
                column=row.prompt,
            )
            if not part[:end]:
                made[place] = UserError(
                    f"{row.where} has a prompt without tokens; drop the row or fix the tokenizer"
                )
    return made


def _text(
    row: Row, messages: Any, reads: Set[str], set_by: Set[str], render: Render
) -> str | UserError:
    """The text of a row's prompt, or why it has none. `messages`: None of plain text. `reads`: what
    else the template reads. `set_by`: names in data.chat_kwargs."""
    try:
        names = () if messages is None else reads & {*row.shown}
        columns = {name: read_objects(row.shown[name], name) for name in names}
        columns = {name: objects for name, objects in columns.items() if objects}
        if twice := sorted(columns.keys() & set_by):
            raise UserError(
                f"column {twice[0]} and data.chat_kwargs set the same variable of the chat "
                "template; drop one of the two"
            )
        text: Any = row.prompt if messages is None else render(messages, **columns)
        text.encode()  # or it holds half a character, which is a ValueError
        return text
    except UserError as error:
        return UserError(f"{row.where}: {error}")
    # the last three: chat_kwargs, and objects that are nested too deep
    except (TemplateError, ValueError, TypeError, RecursionError) as error:
        return UserError(
            f"{row.where}: the chat template refuses these messages "
            f"({' '.join(str(error).split())}); "
            "fix the row, or data.chat_kwargs or data.system if set"
        )


def _check_template(
    config: DataConfig, tokenizer: Any, now: datetime, *, is_read: bool
) -> Set[str]:
    """Refuses settings for the chat template if strings do not go through one, or it never reads
    them. Its clock stands still at `now`. Returns the names of what the template reads; `is_read`:
    rows have columns for it."""
    arguments = json.loads(config.chat_kwargs)
    settings = {"data.system": config.system is not None, "data.chat_kwargs": bool(arguments)}
    for setting in (name for name, is_set in settings.items() if is_set):
        if not (tokenizer.chat_template and config.chat):
            lacks = f"the tokenizer ({tokenizer.name_or_path}) has none; use an instruct model"
            lacks = "data.chat is off; turn it on" if tokenizer.chat_template else lacks
            raise UserError(
                f"{setting} only affects the chat template, but {lacks} or drop {setting}"
            )
    if not tokenizer.chat_template:
        return frozenset()
    try:
        template = tokenizer.get_chat_template(
            arguments.get("chat_template"), arguments.get("tools", [] if is_read else None)
        )
        environment = _compile_jinja_template(template).environment
        reads = meta.find_undeclared_variables(environment.parse(template))
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(
            f"the chat template can't be read ({error}); correct the template or data.chat_kwargs"
        ) from error
    environment.globals[CLOCK] = now.strftime
    # transformers passes these two on; its other arguments mean something to itself
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    for name in arguments.keys() - reads - (parameters - {"tools", "documents"}):
        raise UserError(
            f"data.chat_kwargs has {name}, which the chat template never reads; drop it, or name "
            f"what it reads: {', '.join(sorted(reads))}"
        )
    return reads


def _conversation(config: DataConfig, row: Row, tokenizer: Any) -> list[dict[str, Any]] | None:
    """A row's prompt as messages, or None for plain text."""
    messages = row.prompt
    if isinstance(messages, str):
        if not (config.chat and tokenizer.chat_template):
            return None
        messages = [{"role": "user", "content": messages}]
    elif not tokenizer.chat_template:
        raise UserError(
            f"{row.where} has a prompt of chat messages, but the tokenizer "
            f"({tokenizer.name_or_path}) has no chat template; "
            "use an instruct model or string prompts"
        )
    if config.system is None or any(
        message["role"] in ("system", "developer") for message in messages
    ):
        return messages
    return [{"role": "system", "content": config.system}, *messages]


def _fit(
    config: DataConfig, rows: Sequence[tuple[Row, Prompt]], longest: int, setting: str
) -> tuple[list[Prompt], list[str]]:
    """Applies `data.overlong`: the prompts that stay, and notes about the others."""
    fitting = [prompt for _, prompt in rows if len(prompt.tokens) <= longest]
    over = [(row.where, n) for row, prompt in rows if (n := len(prompt.tokens)) > longest]
    if not over:
        return fitting, []
    which = "the first is {} ({} tokens)".format(*over[0])
    what = (
        f"data.overlong={config.overlong}: {len(over)} of {len(rows)} rows of {setting} have "
        f"prompts over rollout.max_prompt_tokens={longest}"
    )
    if config.overlong == "refuse" or not fitting:
        raise UserError(
            f"{what}; {which}: set --rollout.max-prompt-tokens {max(n for _, n in over)}, "
            "or --data.overlong filter"
        )
    return fitting, [f"{what} and are left out; {which}"]


def prompt_index(n_prompts: int, place: int, seed: int) -> int:
    """The index of the prompt at a place of the data order, from 0: every epoch is a new seeded
    permutation of all."""
    epoch, place = divmod(place, n_prompts)
    return int(_permutation(n_prompts, epoch, seed)[place])


@functools.lru_cache(maxsize=16)  # slots may be in several epochs at once
def _permutation(n_prompts: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([_ORDER_STREAM, seed % 2**64, epoch]).permutation(n_prompts)
