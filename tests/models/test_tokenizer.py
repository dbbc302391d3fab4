"""The text of each token: the pieces give the whole, however the tokenizer cuts characters and
words."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from splitppo.engine.hf import HFEngine
from splitppo.models.tiny import UNKNOWN, VOCABULARY, build_tokenizer, model_config
from splitppo.models.tokenizer import TEMPLATE, eos_ids, token_texts


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


def words_tokenizer() -> Any:
    """Words with their leading space, which decoding drops at the beginning, as Llama 2 does."""
    inner: Any = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581bc": 1, "<eos>": 2}, "<eos>"))
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


SPECIAL = ("<|im_start|>", "<|im_end|>", "</answer>", "<|endoftext|>")
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"


@pytest.mark.parametrize(
    ("template", "named", "added"),
    [
        (HEAD + "{{ m.content }}<|im_end|>\n{% endfor %}", "<|endoftext|>", "<|im_end|>"),
        (
            HEAD + "{{ m.content }} <|im_end|>\n{% endfor %}<|im_start|>assistant\n",
            "<|endoftext|>",
            "<|im_end|>",
        ),
        (HEAD + "{{ m.content }}{% endfor %}{{ eos_token }}", "<|endoftext|>", None),
        (HEAD + "{{ m.content }}</answer><|im_end|>{% endfor %}", "<|im_end|>", None),
        (HEAD + "{{ m.content }}\n\n{% endfor %}", "<|endoftext|>", None),
        ("{{ messages[0].content }}<|im_end|>", "<|endoftext|>", None),
        (
            "{% if messages[1] %}{{ raise_exception('one at a time') }}{% endif %}<|im_end|>",
            "<|endoftext|>",
            None,
        ),
        ("{{ messages[0].content / 2 }}<|im_end|>", "<|endoftext|>", None),
        ("{{ oh", "<|endoftext|>", None),
        ({"rag": HEAD + "{{ m.content }}<|im_end|>{% endfor %}"}, "<|endoftext|>", None),
        (None, "<|endoftext|>", None),
    ],
)
def test_what_ends_a_turn_ends_responses(template: Any, named: str, added: str | None):
    tokenizer: Any = bytes_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.eos_token, tokenizer.chat_template = named, template
    config = model_config()
    config.vocab_size, config.eos_token_id = len(tokenizer), None
    ends = eos_ids(config, tokenizer, None)
    due = {tokenizer.convert_tokens_to_ids(named): "the tokenizer"}
    assert ends == due | ({tokenizer.convert_tokens_to_ids(added): TEMPLATE} if added else {})
    engine = HFEngine(
        config, tokenizer, device=torch.device("cpu"), dtype=torch.float32, max_rows=1
    )
    assert engine.decoder.eos == set(ends)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", ["a", "b"]),
        ("é1", ["", "é", "1"]),
        ("x🙂é", ["x", "", "", "", "🙂", "", "é"]),
        ("é<eos>", ["", "é", ""]),
        ("", []),
    ],
)
def test_a_character_of_several_tokens_belongs_to_the_last(text: str, pieces: list[str]):
    tokenizer = bytes_tokenizer()
    found = token_texts(
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True), tokenizer(text).input_ids
    )
    assert found == pieces


def test_bytes_that_are_no_character_stay_in_the_whole():
    tokenizer = bytes_tokenizer()
    ids = tokenizer("aé🙂").input_ids
    for cut in (ids[:2], ids[:5], [*ids[:2], *ids[:2]]):
        pieces = token_texts(tokenizer.decode, cut)
        assert len(pieces) == len(cut)
        assert "".join(pieces) == tokenizer.decode(cut)


def test_a_text_that_depends_on_its_neighbours():
    tokenizer = words_tokenizer()
    assert token_texts(tokenizer.decode, [0, 1, 0, 1]) == ["a", " bc", " a", " bc"]


def test_the_unknown_character_has_a_token_of_its_own():
    ids = [VOCABULARY[UNKNOWN], VOCABULARY["7"], VOCABULARY["<eos>"]]
    tokenizer: Any = build_tokenizer()
    assert token_texts(lambda ids: tokenizer.decode(ids, skip_special_tokens=True), ids) == [
        UNKNOWN,
        "7",
        "",
    ]


def test_the_work_grows_with_the_length_of_the_text():
    tokenizer, decoded = words_tokenizer(), []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    assert len(token_texts(decode, [0, 1] * 500)) == 1000
    assert sum(decoded) < 10_000


@pytest.mark.parametrize("tail", ["a byte that is no character", "what is left out"])
def test_it_grows_no_faster_where_no_text_comes(tail: str):
    tokenizer, decoded = bytes_tokenizer(), []
    head = tokenizer("é").input_ids
    repeated = head[1:] if tail == "a byte that is no character" else tokenizer("<eos>").input_ids

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return tokenizer.decode(ids, skip_special_tokens=True)

    ids = [*head, *repeated * 500, *tokenizer("1").input_ids]
    pieces = token_texts(decode, ids)
    assert sum(decoded) < 20_000
    assert pieces[-1].endswith("1")
    assert "".join(pieces) == decode(ids)
