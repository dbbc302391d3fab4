"""What checkpointing groups of layers would save: of each group the first layer's input is kept in
place of each layer's, and a group's own inputs while its backward pass runs.

    PYTHONPATH=tests/helpers:tests/run python tests/bench/checkpoint_groups.py

First the bytes of inputs at the peak, counted on the CPU for a stack of layers that keep nothing
else; then estimates for models on GPUs: what the policy's update needs with checkpointed layers, as
splitppo has them, what groups would save of it, and the highest phase of the whole run.
"""

import torch
from peaks import counted
from test_memory import resolved_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config

from splitppo.run import memory

TOKENS, WIDTH = 4096, 64
OFFLOADED = ("--policy.offload=all", "--value.offload=all", "--reference.offload")
SHAPES = {
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "32B": {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
# model, GPUs, sequence parallelism, tokens of a rank
CASES = [
    ("1.5B", 2, 1, 16384), ("1.5B", 2, 2, 32768), ("1.5B", 2, 2, 65536), ("1.5B", 4, 4, 32768),
    ("7B", 8, 4, 16384), ("7B", 8, 4, 32768), ("7B", 8, 2, 65536),
    ("32B", 8, 8, 16384), ("32B", 8, 4, 32768), ("32B", 8, 2, 65536),
]  # fmt: skip


def kept(layers: int, size: int) -> int:
    """Inputs at the peak, in groups of this size."""
    return -(-layers // size) + size


def peak(layers: int, size: int) -> float:
    """What one forward and backward pass adds at most, in inputs of a layer; size 1: no groups."""

    def layer(states: Tensor) -> Tensor:
        return checkpoint(torch.sin, states, use_reentrant=False)

    def group(states: Tensor, count: int) -> Tensor:
        for _ in range(count):
            states = layer(states)
        return states

    states = torch.zeros(TOKENS, WIDTH, requires_grad=True)
    found: list[int] = []
    with counted(found.append):
        out = states
        for first in range(0, layers, size):
            count = min(size, layers - first)
            out = layer(out) if size == 1 else checkpoint(group, out, count, use_reentrant=False)
        out.sum().backward()
    return found[0] / states.nbytes


def main() -> None:
    for layers, size in ((28, 4), (64, 8)):
        counts = [peak(layers, groups) for groups in (1, size)]
        print(f"{layers} layers: {counts[0]:.0f} inputs, {counts[1]:.0f} in groups of {size}")
    for name, gpus, sequence, tokens in CASES:
        shape = Qwen2Config(**SHAPES[name])
        layers = shape.num_hidden_layers
        size = min(range(1, layers + 1), key=lambda size: kept(layers, size))
        saved = tokens * 2 * shape.hidden_size * (layers - kept(layers, size))
        for flags in ((), OFFLOADED):
            resolved = resolved_of(
                "--placement.mode=colocated", "--compute.activation-checkpointing",
                "--rollout.batch-size=64", "--ppo.mini-batches=2",
                "--rollout.max-prompt-tokens=1024",
                f"--rollout.max-new-tokens={tokens * sequence - 1024}",
                f"--fsdp.sequence-parallel={sequence}", f"--compute.micro-batch-tokens={tokens}",
                *flags, gpus=gpus, shape=shape,
            )  # fmt: skip
            update = memory.needed(memory.phases(resolved)["actor update"])
            most, phase, _ = memory.highest(resolved, memory.GPU)
            print(
                f"{name}, {gpus} GPUs, sequence {sequence}, {tokens:,} tokens a rank"
                f"{', all offloaded' * bool(flags)}: update {update / 2**30:.1f} GiB, groups of "
                f"{size} save {saved / 2**30:.1f} ({saved / update:.1%}); run {most / 2**30:.0f} "
                f"({phase})",
                flush=True,
            )


if __name__ == "__main__":
    main()
