"""Packed against padded rows on one GPU: that they agree, and how fast each is.

    python tests/gpu/packed.py SHAPE     (a folder with a config.json; its weights are drawn)

Prints the largest difference of log-probs and the largest relative one of gradients in four layers, then seconds and
share of PEAK (6 N a token for training, 2 N for a forward pass) of the whole model.
"""

import random
import sys
import time
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from splitppo.config import PlacementConfig
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models.batching import micro_batch
from splitppo.models.build import build, hf_name
from splitppo.models.heads import PolicyOutputs
from splitppo.models.sharding import parallelize
from splitppo.models.weights import fill
from splitppo.placement import place
from splitppo.rollout import Sample

PEAK = 989e12  # of an H100 or H200 in dense bfloat16
GPU = torch.device("cuda", 0)
DRAW = random.Random(0)


def rows(count: int, low: int, high: int, vocabulary: int) -> list[Sample]:
    def tokens(n: int) -> list[int]:
        return [DRAW.randrange(2, vocabulary) for _ in range(n)]

    return [Sample(row, tokens(128), tokens(DRAW.randint(low, high)), [], "eos") for row in range(count)]


def make(runtime: Runtime, config: Any, dtype: torch.dtype, *, packed: bool, compiled: bool) -> nn.Module:
    model = build(config, "policy", torch.float32, packed=packed)
    parallelize(model, runtime.groups["actor"].mesh, dtype=dtype, activation_checkpointing=False, compiled=compiled)
    fill(model, "", device=GPU, random_init=True, seed=3)
    return model


def outcome(runtime: Runtime, config: Any, samples: list[Sample], *, packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradients of their sum and the entropies', in float32."""
    model = make(runtime, config, torch.float32, packed=packed, compiled=False)
    batch = micro_batch(samples, GPU, packed=packed)
    logprobs, entropy = PolicyOutputs(1.0, config.vocab_size)(model, batch, entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    gradients = {hf_name(name): cast(Any, p.grad).full_tensor() for name, p in model.named_parameters()}
    return logprobs.detach(), gradients


def compare(runtime: Runtime, config: Any) -> None:
    """Prints how far packed rows are from padded ones."""
    samples = rows(7, 1, 60, config.vocab_size)
    (due, gradients), (got, found) = (outcome(runtime, config, samples, packed=packed) for packed in (False, True))
    worst = max(float((found[name] - due_g).norm() / due_g.norm()) for name, due_g in gradients.items())
    print(f"float32: log-probs {float((got - due).abs().max()):.1e}, gradients {worst:.1e}", flush=True)


def measure(runtime: Runtime, config: Any, *, packed: bool, compiled: bool) -> None:
    """Prints the rate for micro-batches of about 16,000 and 31,000 tokens."""
    model = make(runtime, config, torch.bfloat16, packed=packed, compiled=compiled)
    outputs = PolicyOutputs(1.0, config.vocab_size, compiled=compiled)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for count in (44, 88):
        samples = rows(count, 100, 380, config.vocab_size)
        tokens = sum(len(sample.prompt) + len(sample.response) for sample in samples)
        batch, began = micro_batch(samples, GPU, packed=packed), 0.0
        for number in range(6):
            if number == 2:
                torch.cuda.synchronize()
                began = time.monotonic()
            outputs(model, batch, entropy=False)[0].sum().backward()
        torch.cuda.synchronize()
        seconds = (time.monotonic() - began) / 4
        share = 6 * parameters * tokens / seconds / PEAK
        print(f"packed {packed}, compiled {compiled}, {tokens} tokens: {seconds:.3f} s, {share:.1%}", flush=True)


def main(folder: str) -> None:
    config: Any = AutoConfig.from_pretrained(folder)
    short: Any = AutoConfig.from_pretrained(folder)
    short.num_hidden_layers, short.layer_types = 4, short.layer_types[:4]
    runtime = Runtime(Launch(), place(PlacementConfig(), world=1, local_world=1), GPU, 60.0)
    compare(runtime, short)
    for packed, compiled in ((True, False), (True, True), (False, True)):
        measure(runtime, config, packed=packed, compiled=compiled)
    runtime.close()


if __name__ == "__main__":
    main(sys.argv[1])
