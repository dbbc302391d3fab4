"""The embedded model: a two-layer character-level Llama drawn from the seed, for runs that need no
download."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD = "<pad>"
EOS = "<eos>"
UNKNOWN = "\ufffd"
# the tokenizer's characters; all others become U+FFFD, the replacement character
CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-*/=#$.,:?!'\"()"
POSITIONS = 1024
VOCABULARY = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, *CHARACTERS))}


def build_tiny(folder: Path, *, seed: int) -> None:
    """Writes the model and its tokenizer as Hugging Face does. The same seed gives the same
    files."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        LlamaForCausalLM(model_config()).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def model_config() -> LlamaConfig:
    """Two layers, hidden size 64, two heads, tied embeddings, 83 token ids, 1,024 positions."""
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.05,  # 0.02 is for wide models; a narrow one learns more slowly with it
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
        dtype="float32",
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The character-level tokenizer: one id a character, no special tokens added to a text, no chat
    template."""
    # byte pairs without merges: each character is a token
    backend = Tokenizer(BPE(vocab=VOCABULARY, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()  # else decoding puts a space between tokens
    # The unknown character is no special token: decoding drops these, so reward functions would not
    # see them.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
    )
