"""A model folder's tokenizer, and what a person sees of tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from splitppo.models.build import folder_error
from splitppo.rollout import Rollout

# without one of these files, transformers returns an empty tokenizer and no error
FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def read_tokenizer(folder: str, *, own_code: bool = False) -> Any:
    """Raises a UserError if the folder has none, or if it can't be read. With `own_code` its Python code may run."""
    if not any(file for pattern in FILES for file in Path(folder).glob(pattern)):
        raise folder_error(folder, "no tokenizer there", "save one beside the model (tokenizer.json)")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=own_code)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise folder_error(folder, f"its tokenizer can't be read: {error}", "save it again") from error


def vocabulary_size(tokenizer: Any) -> int:
    """The tokenizer's largest id, plus one. Ids beyond, with which models are often padded, are never sampled."""
    return max(tokenizer.get_vocab().values()) + 1


def token_texts(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """The text of each token; joined they are `decode(ids)`. A character of several tokens belongs to the last of them.
    A token that `decode` leaves out has ""."""
    whole = decode(list(ids))
    alone = {token: decode([token]) for token in set(ids)}
    if "".join(texts := [alone[token] for token in ids]) == whole:
        return texts
    # a token's text depends on its neighbours: the text of a window grows with each token, until its bytes are whole
    ends, start, known = [0], 0, 0
    for k in range(1, len(ids) + 1):
        before, now = decode(list(ids[start:known])), decode(list(ids[start:k]))
        grown = 0 if now.endswith("\ufffd") else len(now) - len(before)
        ends.append(min(ends[-1] + max(grown, 0), len(whole)))
        start, known = (known, k) if grown > 0 else (start, known)
    ends[-1] = len(whole)
    return [whole[a:b] for a, b in pairwise(ends)]


def token_figures(
    rollout: Rollout, figures: Mapping[str, Tensor], decode: Callable[[list[int]], str]
) -> Iterator[dict[str, list[Any]]]:
    """For each row of a rollout: the `text` of each token of `response`, and its figures to four digits, None where the
    policy did not sample the token. `figures` are `[N]` by name."""
    parts = {name: rollout.split(packed) for name, packed in figures.items()}
    for i, sample in enumerate(rollout.samples):
        lines: dict[str, list[Any]] = {"text": token_texts(decode, sample.response)}
        for name, rows in parts.items():
            found = {at: round(x, 4) for at, x in zip(sample.places.tolist(), rows[i].tolist(), strict=True)}
            lines[name] = [found.get(at) for at in range(len(sample.response))]
        yield lines
