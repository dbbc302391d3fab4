"""The text of each token: the pieces give the whole, however the tokenizer cuts characters and
words."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from texts import bytes_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from splitppo.engine.hf import HFEngine
from splitppo.models.tiny import UNKNOWN, VOCABULARY, build_tokenizer, model_config
from splitppo.models.tokenizer import TEMPLATE, eos_ids, token_ends, token_texts


def pieces_tokenizer(size: int) -> Any:
    """Byte pairs of multilingual text: tokens end and begin inside characters."""
    inner: Any = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer: Any = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    inner.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def fallback_tokenizer() -> Any:
    """Bytes for characters that are no token, as Llama 2 and Gemma have them: a run of bytes that
    is no text becomes as many unknown characters as bytes. A leading space is dropped."""
    names = ["<unk>", "<eos>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *"ab12", "\u2581a"]
    vocab = {name: i for i, name in enumerate(names)}
    inner: Any = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


def words_tokenizer() -> Any:
    """Words with their leading space, which decoding drops at the beginning, as Llama 2 does."""
    inner: Any = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581bc": 1, "<eos>": 2}, "<eos>"))
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


TEXTS = [
    "Grüße, ça va? Ñandú – “quoted” …",
    "Привет, как дела? Ёлка",
    "你好,世界!今天天气很好。",
    "こんにちは、世界。カタカナ",
    "안녕하세요 세계",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "שלום עולם",
    "👩\u200d👩\u200d👧\u200d👦 👍🏽 🇩🇪 🙂🙃",
    "x🙂é ∑∫ √2 ≤ 3",
    "plain text 12 + 3 = 15\n\n\ttabs",
]
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
    assert engine.eos == set(ends)


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


# the byte that each character of a ByteLevel token stands for (GPT-2's table)
SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in SHOWN]
BYTES = {chr(byte): byte for byte in SHOWN} | {chr(256 + i): b for i, b in enumerate(HIDDEN)}

TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": bytes_tokenizer,
    "300": partial(pieces_tokenizer, 300),
    "600": partial(pieces_tokenizer, 600),
    "fallback": fallback_tokenizer,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_is_held_by_the_token_with_its_last_byte(name: str):
    """Of any text, with tokens between that are left out."""
    tokenizer = TOKENIZERS[name]()
    eos = tokenizer.eos_token_id
    draw = random.Random(name)
    for _ in range(60):
        parts = [draw.choice(TEXTS) for _ in range(draw.randint(1, 4))]
        text = "".join(part[: draw.randint(1, 12)] for part in parts)
        ids = [
            one
            for token in tokenizer(text).input_ids
            for one in [eos] * draw.choice([*[0] * 8, 1, 2, 12]) + [token]
        ]
        sizes = [0 if token == eos else len(bytes_of(tokenizer, token)) for token in ids]
        if name == "fallback":
            sizes[next(i for i, size in enumerate(sizes) if size)] -= 1  # the space that is dropped
        characters = [*accumulate(len(character.encode()) for character in text)]
        due = [sum(last <= size for last in characters) for size in accumulate(sizes)]
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        assert token_ends(decode, ids) == due, (text, ids)


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """The bytes that a token stands for."""
    name = tokenizer.convert_ids_to_tokens(token)
    if name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    if "<0x00>" in tokenizer.get_vocab():
        return name.replace("\u2581", " ").encode()
    return bytes(BYTES[character] for character in name)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ends_of_any_ids_ascend_to_the_whole(name: str):
    tokenizer = TOKENIZERS[name]()
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    draw = random.Random(name)
    for _ in range(200):
        ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 30))]
        ends = token_ends(decode, ids)
        assert ends == sorted(ends), ids
        assert (ends[0] >= 0, ends[-1]) == (True, len(decode(ids))), ids
        assert "".join(token_texts(decode, ids)) == decode(ids)


def test_an_unknown_character_ends_with_the_token_behind_it():
    tokenizer = bytes_tokenizer()
    ids = tokenizer("🙂").input_ids[:3] + tokenizer("ab").input_ids
    assert token_ends(tokenizer.decode, ids) == [0, 0, 0, 2, 3]
    tokenizer = fallback_tokenizer()
    assert token_ends(tokenizer.decode, tokenizer(f"{UNKNOWN}a").input_ids) == [0, 0, 0, 0, 2]
