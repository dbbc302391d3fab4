"""The embedded model: a two-layer character-level Llama drawn from the seed, for runs that need no download."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "\ufffd"
CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-*/=#$.,:?!'\"()"
"""What the tokenizer reads; any other is U+FFFD, the replacement character."""
POSITIONS = 1024  # tokens that it can read
VOCABULARY = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, *CHARACTERS))}


def build_tiny(folder: Path, *, seed: int) -> None:
    """Write the model to `folder` as Hugging Face does: config, fp32 safetensors, tokenizer, generation config.

    Two layers, hidden size 64, two heads, tied embeddings, 83 token ids, 1,024 positions; no chat template. The files
    are the same for the same seed. The global random state is left as it was.
    """
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.05,  # 0.02 is for wide models: with it this one learns markedly slower
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY[EOS],
        pad_token_id=VOCABULARY[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs, too
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The character-level tokenizer: one id a character, no special tokens added to a text, no chat template."""
    # Byte pairs without a merge: each character is its own token.
    backend = Tokenizer(BPE(vocab=VOCABULARY, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()  # else decoding puts a space between tokens
    # The unknown character is no special token: those are left out of decoded text, so a policy could say as many of
    # them as it likes without any reward function seeing it.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
    )
