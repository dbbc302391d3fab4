"""A model folder's tokenizer."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from splitppo.models.build import folder_error

# without one of these files, transformers returns an empty tokenizer and no error
FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def read_tokenizer(folder: str) -> Any:
    """Raises a UserError if the folder has none, or if it can't be read."""
    if not any(file for pattern in FILES for file in Path(folder).glob(pattern)):
        raise folder_error(folder, "no tokenizer there", "save one beside the model (tokenizer.json)")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise folder_error(folder, f"its tokenizer can't be read: {error}", "save it again") from error


def vocabulary_size(tokenizer: Any) -> int:
    """The tokenizer's largest id, plus one. A model's vocabulary is often padded beyond it. The padding is never
    sampled: these ids have no text, and another model may not have them."""
    return max(tokenizer.get_vocab().values()) + 1
