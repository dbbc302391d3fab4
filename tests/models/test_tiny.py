"""The embedded model: its files, its tokenizer, its seed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from splitppo.models.tiny import CHARACTERS, build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny(path, seed=3)
    return path


def test_loads_as_a_hugging_face_model_and_generates(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == len(CHARACTERS) + 3
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    prompt = tokenizer("314=", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert generated.shape == (1, 8)


def test_tokenizer_is_one_id_a_character_and_reversible(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert not set(ids) & set(tokenizer.all_special_ids)
    for text in (CHARACTERS, "  What is 3 + 4 ?\n", "a , b 's"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.chat_template is None


def test_special_tokens_vanish_from_decoded_text_and_unknown_characters_do_not(
    folder: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [*tokenizer("1é2")["input_ids"], tokenizer.pad_token_id, tokenizer.eos_token_id]
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1\ufffd2"


def test_weights_follow_from_the_seed_alone(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    build_tiny(tmp_path / "same", seed=3)
    assert torch.equal(torch.rand(3), expected), "the global random state moved"
    build_tiny(tmp_path / "other", seed=4)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "same" / file.name).read_bytes(), file.name
    assert (folder / "model.safetensors").read_bytes() != (
        tmp_path / "other" / "model.safetensors"
    ).read_bytes()
