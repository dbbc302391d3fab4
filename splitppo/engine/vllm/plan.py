"""What a vLLM engine's process must build, and the size of its KV cache."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from splitppo.config import Config
from splitppo.errors import UserError

# GPU memory beside weights and KV cache: context, CUDA graphs, activations of a prefill
RESERVE = 3 * 2**30
BLOCK = 128  # tokens; vLLM's KV blocks have 16 to 128


@dataclass(frozen=True)
class Plan:
    """The engine that a process must build.

    Attributes:
        config: the run's.
        folder: of the policy's config and tokenizer. log: file for the process's output.
        max_rows: rows generated at once. max_tokens: length limit of a row, prompt and response.
        kv_bytes: size of the KV cache on each GPU.
        eos: ids that end a response. vocabulary: size of the vocabulary to draw from.
        routes: whether it tells each token's experts.
        device: `cuda` or `cpu`. threads: of an engine on the CPU.
        address: path of the Unix socket, for `config.engine.tensor_parallel` ranks; its process
            sets it.
    """

    config: Config
    folder: str
    log: str
    dtype: str
    max_rows: int
    max_tokens: int
    kv_bytes: int
    eos: tuple[int, ...]
    vocabulary: int
    routes: bool
    device: str
    threads: int
    address: str = ""


def kv_bytes_per_token(
    config: PretrainedConfig, dtype: torch.dtype, tensor_parallel: int = 1
) -> int:
    """Bytes of a token's keys and values on each GPU, over all layers."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    named = getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None)
    size = named or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * -(-heads // tensor_parallel) * size * dtype.itemsize


def kv_cache_bytes(
    per_token: int,
    *,
    rows: int,
    tokens: int,
    weights: int,
    total: int,
    fraction: float,
    reserve: int = RESERVE,
) -> int:
    """Bytes of the KV cache: enough for `rows` rows of `tokens` tokens, at most what the weights'
    bytes leave of the `fraction` that the engine may use of the device's `total`. Raises UserError
    if that does not hold one row."""
    row = (-(-tokens // BLOCK) + 1) * BLOCK * per_token
    room = int(total * fraction) - weights - reserve
    if room < row:
        needed = (weights + reserve + row) / total
        enough = f"{needed + 0.005:.2f} or more" if needed < 0.99 else "more engine.tensor_parallel"
        raise UserError(
            f"engine.memory_fraction={fraction:g} of {total / 2**30:.1f} GiB is too small for the "
            f"engine's weights ({weights / 2**30:.1f} GiB), {reserve / 2**30:.0f} GiB of working "
            f"memory and one row; use {enough}"
        )
    return min(room, max(rows, 2) * row)
