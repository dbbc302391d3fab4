"""Tokenizers for tests of texts."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def bytes_tokenizer() -> Any:
    """A token for each byte, as GPT-2 writes it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner: Any = Tokenizer(
        models.BPE({"<eos>": 0} | {char: i for i, char in enumerate(alphabet, 1)}, [])
    )
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
