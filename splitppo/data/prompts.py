"""The prompts of a run as tokens, and the order in which steps use them."""

import difflib
import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Set
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
# the errors of the prompts that can't be scored
Check = Callable[[Mapping[int, Prompt]], Mapping[int, UserError]]

# messages -> the text of a prompt, with what the policy must know of its tools
Render = Callable[[list[dict[str, Any]]], str]

CLOCK = "strftime_now"  # the function by which a chat template reads the clock
# keep apart the random streams that are drawn from the same seed
_ORDER_STREAM = 1
_DRAW_STREAM = 5


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a split."""

    prompts: list[Prompt]  # file after file, each in its file's order
    notes: list[str]  # lines for the user about rows that were left out or cut


def check_files(config: DataConfig) -> None:
    """Raises UserError if a file or its first row is wrong, or a file is both trained on and held
    out."""
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
) -> PromptSet:
    """The prompts of a split, a pure function of the arguments and the files: those of its files,
    else those of `data.task`. Without `data.validation_files` nothing is held out of `data.files`.

    Messages go through the tokenizer's chat template. With `data.chat` and a template, strings do
    too, as one user message; a template that shows the time shows `now`. Other strings get the
    tokenizer's special tokens, but not the end of a sequence.

    A row that can't be used, or that `check` finds wrong, is a UserError or left out
    (`data.invalid`); a file of such rows alone is refused. A prompt above `max_prompt_tokens`
    (None: none is) is a UserError, left out or cut (`data.overlong`). Then `data.max_rows` draws
    training prompts at random. `data.validation_rows` takes the first held-out prompts.
    """
    setting, files = _read(config, seed, split)
    read = [row for file in files for row in file]
    file_of = [number for number, file in enumerate(files) for _ in file]
    rows = {index: row for index, row in enumerate(read) if isinstance(row, Row)}
    prompts, wrong = tokenize(config, rows, tokenizer, now, render)
    wrong |= {index: row for index, row in enumerate(read) if isinstance(row, UserError)}
    if not wrong or config.invalid == "filter":
        wrong |= {
            index: UserError(f"{rows[index].where}: {error}")
            for index, error in check(prompts).items()
        }
    usable = {index: prompt for index, prompt in prompts.items() if index not in wrong}
    left = {file_of[index] for index in usable}
    for index in sorted(wrong):
        if file_of[index] not in left:
            raise wrong[index]
        if config.invalid == "refuse":
            raise UserError(
                f"{wrong[index]}, or --data.invalid filter ({len(wrong)} of {len(read)} rows)"
            )
    fitting, notes = _fit(config, rows, usable, tokenizer, max_prompt_tokens or 2**31, setting)
    if wrong:
        notes.insert(
            0,
            f"data.invalid=filter: {len(wrong)} of {len(read)} rows of {setting} can't be used "
            f"and are left out; the first: {wrong[min(wrong)]}",
        )
    if split == "train" and CLOCK in str(tokenizer.chat_template):
        notes.append(
            "the chat template shows the time: a resume at another is refused; "
            "data.chat_kwargs may fix it"
        )
    unseen = {
        name
        for index, prompt in prompts.items()
        for name in rows[index].shown
        if prompt.messages is None or name not in str(tokenizer.chat_template)
    }
    notes += [f"{setting}: no chat template shows the column {name}" for name in sorted(unseen)]
    chosen = list(fitting)
    if split == "validation":
        chosen = chosen[: config.validation_rows]
    elif config.max_rows is not None and config.max_rows < len(chosen):
        noise = np.random.default_rng([_DRAW_STREAM, seed % 2**64])
        chosen = sorted(noise.choice(chosen, config.max_rows, replace=False).tolist())
    return PromptSet([fitting[index] for index in chosen], notes)


def _read(config: DataConfig, seed: int, split: Split) -> tuple[str, list[list[Row | UserError]]]:
    """The setting that a split's rows come from, for messages, and what each file holds."""
    held_out = split == "validation"
    setting = "data.validation_files" if held_out else "data.files"
    files = config.validation_files if held_out else config.files
    if not (files or config.files):
        return f"data.task={config.task}", [list(generate(config, seed, held_out=held_out))]
    return setting, [list(read_file(config, file, setting)) for file in files]


def tokenize(
    config: DataConfig,
    rows: Mapping[int, Row],
    tokenizer: Any,
    now: datetime | None = None,
    render: Render | None = None,
) -> tuple[dict[int, Prompt], dict[int, UserError]]:
    """The prompts by the index of their row, and the errors of rows that have none. A template that
    shows the time shows `now`, for all rows the same."""
    settings = json.loads(config.chat_kwargs)
    is_shown = any(row.shown for row in rows.values())
    reads = _check_template(config, tokenizer, now or datetime.now(), is_read=is_shown)
    prompts: dict[int, Prompt] = {}
    wrong: dict[int, UserError] = {}
    for index, row in rows.items():
        messages = _conversation(config, row, tokenizer)
        try:
            shown = {} if messages is None else _shown(row, reads, {*settings}, render)
        except UserError as error:
            wrong[index] = error
            continue
        arguments = {"add_generation_prompt": True, **settings, **shown}
        try:
            text: Any = row.prompt
            if messages is not None and render:
                text = render(messages)
            elif messages is not None:
                text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
            prompts[index] = Prompt(
                text,
                [],
                row.data_source,
                row.ground_truth,
                row.extra_info,
                messages,
                column=row.prompt,
            )
        # the last two: chat_kwargs
        except (TemplateError, UserError, ValueError, TypeError) as error:
            wrong[index] = UserError(
                f"{row.where}: the chat template refuses these messages "
                f"({' '.join(str(error).split())}); "
                "fix the row, or data.chat_kwargs or data.system if set"
            )
    # one call for plain texts, which get special tokens, and one for rendered texts, which already
    # hold them
    for plain in {prompt.messages is None for prompt in prompts.values()}:
        chosen = {
            index: prompt for index, prompt in prompts.items() if (prompt.messages is None) == plain
        }
        texts = [prompt.text for prompt in chosen.values()]
        ids = tokenizer(texts, add_special_tokens=plain, verbose=False)["input_ids"]
        # a policy has nothing to say behind the end
        end = -1 if plain and _ends_texts(tokenizer) else None
        for index, tokens in zip(chosen, ids, strict=True):
            prompts[index] = replace(prompts[index], tokens=list(tokens[:end]))
    wrong |= {
        index: UserError(
            f"{rows[index].where} has a prompt of no tokens; drop the row or fix the tokenizer"
        )
        for index, prompt in prompts.items()
        if not prompt.tokens
    }
    return {index: prompt for index, prompt in prompts.items() if index not in wrong}, wrong


def _shown(row: Row, reads: Set[str], set_by: Set[str], render: Render | None) -> dict[str, Any]:
    """What the chat template renders of a row beside its messages: those of its columns that the
    template `reads`. Raises UserError if something else says the same: a setting (`set_by`), or the
    environment, which has a `render` of its own."""
    shown = {
        name: objects
        for name in reads & row.shown.keys()
        if (objects := read_objects(row.shown[name], f"{row.where}: column {name}"))
    }
    for name in shown:
        if render or name in set_by:
            other = "the environment (env.tools, env.path)" if render else "data.chat_kwargs"
            raise UserError(
                f"{row.where} has a column {name}, and {other} says what the chat template shows "
                "there; drop one of the two"
            )
    return shown


def _check_template(
    config: DataConfig, tokenizer: Any, now: datetime, *, is_read: bool
) -> Set[str]:
    """Refuses settings for the chat template if strings do not go through one, or it never reads
    them. Its clock stands still at `now`. Returns the names of what the template reads, if there
    are such settings, or rows have columns for it (`is_read`)."""
    arguments = json.loads(config.chat_kwargs)
    settings = {"data.system": config.system is not None, "data.chat_kwargs": bool(arguments)}
    for setting in (name for name, is_set in settings.items() if is_set):
        if not tokenizer.chat_template:
            raise UserError(
                f"{setting} is for the chat template, but the tokenizer ({tokenizer.name_or_path}) "
                f"has none; use an instruct model or drop {setting}"
            )
        if not config.chat:
            raise UserError(
                f"{setting} is for the chat template, but data.chat is off; drop one of the two"
            )
    if not (
        tokenizer.chat_template and (arguments or is_read or CLOCK in str(tokenizer.chat_template))
    ):
        return frozenset()
    try:
        template = tokenizer.get_chat_template(
            arguments.get("chat_template"), arguments.get("tools", [] if is_read else None)
        )
        environment = _compile_jinja_template(template).environment
        reads = meta.find_undeclared_variables(environment.parse(template))
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(
            f"the chat template can't be read ({error}); correct it, or data.chat_kwargs"
        ) from error
    environment.globals[CLOCK] = now.strftime
    # transformers passes these two on; its other arguments mean something to itself
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    for name in arguments.keys() - reads - (parameters - {"tools", "documents"}):
        near = difflib.get_close_matches(name, reads, n=1, cutoff=0)
        raise UserError(
            f"data.chat_kwargs has {name}, which the chat template never reads; "
            + (f"did you mean {near[0]}?" if near else "drop it")
        )
    return reads


def _ends_texts(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its end-of-sequence token behind each text."""
    return tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]


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
    config: DataConfig,
    rows: Mapping[int, Row],
    prompts: dict[int, Prompt],
    tokenizer: Any,
    longest: int,
    setting: str,
) -> tuple[dict[int, Prompt], list[str]]:
    """Applies `data.overlong`: the prompts that stay, by the index of their row, and notes about
    the others."""
    over = {i: len(prompt.tokens) for i, prompt in prompts.items() if len(prompt.tokens) > longest}
    if not over:
        return prompts, []
    first = min(over)
    what = (
        f"data.overlong={config.overlong}: {len(over)} of {len(prompts)} rows of {setting} have "
        f"prompts over rollout.max_prompt_tokens={longest}"
    )
    fates = {"filter": "are left out", "cut": "lose their first tokens"}
    fitting = {index: prompt for index, prompt in prompts.items() if index not in over}
    if config.overlong == "cut":
        tails = {index: prompts[index].tokens[-longest:] for index in over}
        fitting = prompts | {
            index: replace(prompts[index], text=tokenizer.decode(ids), tokens=ids)
            for index, ids in tails.items()
        }
    if config.overlong == "refuse" or not fitting:
        raise UserError(
            f"{what}; the first is {rows[first].where} ({over[first]} tokens): "
            f"set --rollout.max-prompt-tokens {max(over.values())}, "
            "or --data.overlong to filter or cut"
        )
    return fitting, [
        f"{what} and {fates[config.overlong]}; the first is {rows[first].where} "
        f"({over[first]} tokens)"
    ]


def prompt_index(n_prompts: int, place: int, seed: int) -> int:
    """The index of the prompt at a place of the data order, from 0: every epoch is a new seeded
    permutation of all."""
    epoch, place = divmod(place, n_prompts)
    return int(_permutation(n_prompts, epoch, seed)[place])


@functools.lru_cache(maxsize=16)  # slots may be in several epochs at once
def _permutation(n_prompts: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([_ORDER_STREAM, seed % 2**64, epoch]).permutation(n_prompts)
