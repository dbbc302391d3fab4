"""Estimated and measured memory, and speed, of runs with LoRA: jobs as memory.py runs them.

    python tests/gpu/lora.py [--only JOB ...] [--limit SECONDS] [--out FOLDER] [--model FOLDER]

Weights are drawn at random by shape, or read from the folder of `--model`. `7B` is colocated on one
GPU of 80 GB, `7B-1+1` is on two GPUs; `1.5B-full` and `1.5B-lora` compare updates, sync and step.
For each phase stand the estimate, the peak of the last step, and their ratio; of jobs on two GPUs
those of the first one. Jobs that end in `vllm` need vLLM.
"""

import memory

ADAPTERS = ["--policy.lora.rank=32", "--value.lora.rank=32"]
SHARED = [*ADAPTERS, "--value.share-base"]
LARGE = ["--compute.activation-checkpointing", "--compute.micro-batch-tokens=16384"]
SMALL = ["--compute.micro-batch-tokens=8192"]
VLLM = ["--engine.kind=vllm"]
JOBS = {
    "7B": ("7B", 1, [*SHARED, *LARGE]),
    "1.5B-full": ("1.5B", 1, SMALL),
    "1.5B-lora": ("1.5B", 1, [*SHARED, *SMALL]),
    "7B-1+1": ("7B", 2, [*ADAPTERS, *LARGE, "--placement.mode=per_node"]),
    "7B-vllm": ("7B", 1, [*SHARED, *LARGE, *VLLM]),
    "1.5B-full-vllm": ("1.5B", 1, [*SMALL, *VLLM]),
    "1.5B-lora-vllm": ("1.5B", 1, [*SHARED, *SMALL, *VLLM]),
}

if __name__ == "__main__":
    memory.JOBS.clear()
    memory.JOBS.update(JOBS)
    memory.main()
