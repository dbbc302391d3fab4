"""Estimated and measured memory, and speed, of runs of mixtures of experts: jobs as memory.py runs
them.

    python tests/gpu/experts.py [--only JOB ...] [--limit SECONDS] [--out FOLDER]

Weights are drawn at random by shape: OLMoE's (6.9B, of which a token meets 1.3B) on two GPUs of
80 GB with a dense critic, Qwen3-30B-A3B's with LoRA on four. `tokens/s` are of the updates; their
`perf/update_tflop` counts the parameters that a token meets. The mismatch of a `vllm` job shows
whether the engine has the weights after each sync; the `replay` job's is of tokens that meet the
same experts in engine and trainer, and its `actor/routes_differ` says how many would not.
"""

from pathlib import Path
from typing import Any

import memory

DENSE = Path("/tmp/splitppo-experts-critic")
HALF = memory.SHAPES["0.5B"]
SHAPES: dict[str, dict[str, Any]] = {
    "OLMoE": {
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 151936,
    },
    "30B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
}  # fmt: skip
CRITIC = [f"--value.path={DENSE}", "--compute.activation-checkpointing"]
WHOLE = [*CRITIC, "--policy.offload=optimizer"]
VLLM = ["--engine.kind=vllm"]
LORA = [*CRITIC, "--policy.lora.rank=32"]
JOBS = {
    "olmoe": ("OLMoE", 2, WHOLE),
    "olmoe-vllm": ("OLMoE", 2, [*WHOLE, *VLLM, "--policy.replay-routing=off"]),
    "olmoe-vllm-replay": ("OLMoE", 2, [*WHOLE, *VLLM, "--policy.replay-routing=on"]),
    "30B-lora": ("30B", 4, LORA),
    "30B-lora-vllm": ("30B", 4, [*LORA, *VLLM, "--engine.tensor-parallel=4"]),
}

if __name__ == "__main__":
    memory.SHAPES.update(SHAPES)
    memory.JOBS.clear()
    memory.JOBS.update(JOBS)
    if not DENSE.is_dir():
        memory.write_inputs(DENSE, HALF)
    memory.main()
