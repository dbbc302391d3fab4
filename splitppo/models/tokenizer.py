"""A model folder's tokenizer, and what a person sees of tokens."""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from splitppo.models.build import check_ids, folder_error

TEMPLATE = "the chat template"
# without one of these files, transformers returns an empty tokenizer and no error
FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
TOKENIZER_FILES = (*FILES, "merges.txt", "*_tokens*.json", "chat_template*")
UNKNOWN = "\ufffd"  # what bytes that are no character decode to
LONGEST_CHARACTER = 8  # tokens; one of UTF-8 has four bytes at most


def read_tokenizer(folder: str, *, own_code: bool = False) -> Any:
    """Raises a UserError if the folder has none, or if it can't be read. With `own_code` its Python
    code may run."""
    if not has_tokenizer(folder):
        raise folder_error(
            folder, "no tokenizer there", "save one in the model's folder (tokenizer.json)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=own_code)
        tokenizer("a")  # where some wrong fields show
        return tokenizer
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise folder_error(
            folder, f"its tokenizer can't be read: {error}", "save it again"
        ) from error


def has_tokenizer(folder: str) -> bool:
    return any(file for pattern in FILES for file in Path(folder).glob(pattern))


def find_differences(other: Any, policy: Any) -> dict[int, tuple[str | None, str]]:
    """The policy's ids that stand for another token in another tokenizer: id -> its token there,
    None if it has none, and the policy's. Each model that reads the policy's ids is held against
    them."""
    # sorted: of two tokens with one id, the same counts on both sides
    there = {i: token for token, i in sorted(other.get_vocab().items())}
    here = {i: token for token, i in sorted(policy.get_vocab().items())}
    return {i: (there.get(i), token) for i, token in here.items() if there.get(i) != token}


def vocabulary_size(tokenizer: Any) -> int:
    """The tokenizer's largest id, plus one. Ids beyond, with which models are often padded, are
    never sampled."""
    return max(tokenizer.get_vocab().values()) + 1


def eos_ids(config: PretrainedConfig, tokenizer: Any, folder: Path | None) -> dict[int, str]:
    """All ids that end a response, and what says so: the model config, the tokenizer,
    `folder`/generation_config.json, or the chat template, whose turns may end in none of theirs. Of
    chat models one is the end of a turn, another the end of a text. Raises UserError if that file
    is broken."""
    text: Any = config.get_text_config(decoder=True)
    ids_by_source = {
        "config.json": getattr(text, "eos_token_id", None),
        "the tokenizer": getattr(tokenizer, "eos_token_id", None),
    }
    if folder is not None and (file := folder / "generation_config.json").is_file():
        try:
            stored = dict(json.loads(file.read_text()))
        except (ValueError, TypeError, RecursionError) as error:
            raise folder_error(
                folder, f"{file.name} is not a JSON object ({error})", "fix or remove it"
            ) from error
        check_ids(folder, file.name, stored, text.vocab_size)
        ids_by_source[file.name] = stored.get("eos_token_id")
    named = [
        (i, source)
        for source, ids in ids_by_source.items()
        for i in ([ids] if isinstance(ids, int) else ids or [])
    ]
    ends = {token: source for token, source in named if 0 <= token < text.vocab_size}
    turn = turn_end(tokenizer)
    return {turn[0]: TEMPLATE, **ends} if turn and ends.keys().isdisjoint(turn) else ends


def turn_end(tokenizer: Any) -> list[int]:
    """The control tokens behind the answer of a dialogue in the chat template; the first of them
    ends the turn."""
    answer = "Yes, of course."
    dialogue = [
        {"role": "user", "content": "Are you there?"},
        {"role": "assistant", "content": answer},
    ]
    try:
        text = tokenizer.apply_chat_template(dialogue, tokenize=False)
    except Exception:  # no template, or its code refuses this dialogue, by an error of any kind
        return []
    _, shown, tail = text.rpartition(answer)
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if shown else []
    return [token for token in ids if token in tokenizer.added_tokens_decoder]


def token_ends(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[int]:
    """For each token the number of characters of `decode(ids)` that are whole with it. So the first
    token with an end of n or more holds character n: of a character of several tokens the last,
    and none that `decode` leaves out."""
    whole = decode(list(ids))
    alone = {token: decode([token]) for token in set(ids)}
    texts = [alone[token] for token in ids]
    if "".join(texts) == whole:
        return list(accumulate(map(len, texts)))
    # twice: alone, some tokenizers leave out a space
    left_out = {token for token in alone if not alone[token] and not decode([token, token])}
    # a token's text depends on its neighbours: it is decoded behind those that came before it
    ends = []
    start = end = 0  # of the window's text in the whole
    context: list[int] = []
    window: list[int] = []
    for token in ids:
        if token not in left_out:
            window.append(token)
            text = decode([*context, *window])
            # its last character may lack a byte, but is not of so many tokens
            part = text if len(window) > LONGEST_CHARACTER else text.rstrip(UNKNOWN)
            end = max(end, start + len(part) - len(decode(context)))
            if part == text:
                start = end
                context = window
                window = []
        ends.append(min(end, len(whole)))
    return [*ends[:-1], len(whole)]


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text of each token; joined they are `decode(ids)`. A character of several tokens belongs
    to the last of them. A token that `decode` leaves out has ""."""
    whole = decode(list(ids))
    ends = token_ends(decode, ids)
    return [whole[begin:end] for begin, end in pairwise([0, *ends])]
