"""Estimated and measured memory, and speed, of runs of mixtures of experts: jobs as memory.py runs
them.

    python tests/gpu/experts.py [--only JOB ...] [--limit SECONDS] [--out FOLDER]

Weights are drawn at random by shape: OLMoE's (7.3B, of which a token meets 1.7B) with a dense
critic of 0.5B on two GPUs of 80 GB, one for each role (`1+1`) or both for both roles, and
Qwen3-30B-A3B's with LoRA on four. The engine is vLLM, with and without routing replay. `tokens/s`
are of the updates; `perf/update_tflop` of a run's metrics counts the parameters that a token meets.
The mismatch of engine and trainer after each sync shows whether the engine has the weights; with
replay it is that of tokens that meet the same experts in both, and `actor/routes_differ` says how
many would not.
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
COMMON = [f"--value.path={DENSE}", "--compute.activation-checkpointing", "--engine.kind=vllm"]
WHOLE = [*COMMON, "--policy.offload=optimizer"]
SPLIT = [*WHOLE, "--placement.mode=per_node", "--placement.actor=1", "--reference.offload"]
OFF, ON = "--policy.replay-routing=off", "--policy.replay-routing=on"
LORA = [*COMMON, "--policy.lora.rank=32", "--engine.tensor-parallel=4"]
JOBS = {
    "olmoe-1+1": ("OLMoE", 2, [*SPLIT, OFF]),
    "olmoe-1+1-replay": ("OLMoE", 2, [*SPLIT, ON]),
    "olmoe": ("OLMoE", 2, [*WHOLE, OFF]),
    "olmoe-replay": ("OLMoE", 2, [*WHOLE, ON]),
    "30B-lora": ("30B", 4, [*LORA, OFF]),
    "30B-lora-replay": ("30B", 4, [*LORA, ON]),
}

if __name__ == "__main__":
    memory.RESPONSE = 512
    memory.SHAPES.update(SHAPES)
    memory.JOBS.clear()
    memory.JOBS.update(JOBS)
    if not DENSE.is_dir():
        memory.write_inputs(DENSE, HALF)
    memory.main()
