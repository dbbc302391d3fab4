"""Rows of 32k tokens and more on two GPUs: FSDP alone, rows cut over both, layers cut over both.

    PYTHONPATH=. python tests/gpu/long_rows.py [--shape 1.5B] [--checkpointing]

Weights are drawn from the seed, by shape; nothing is read or fetched. Each case is a job of two
ranks: the policy's log-probs and updates of two rows. A line says tokens a second of both, and the
most memory that PyTorch allocated. Rows grow by half until memory runs out, which is the result:
the last line that ran is what fits. Cases that would begin after --limit seconds are left out.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config

from splitppo import algo
from splitppo.config import OptimConfig, PlacementConfig
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.learner import Learner
from splitppo.models.batching import MicroBatch
from splitppo.models.build import build
from splitppo.models.heads import PolicyOutputs
from splitppo.models.runner import Runner
from splitppo.models.sharding import parallelize
from splitppo.models.weights import fill
from splitppo.placement import SetShape, place
from splitppo.rollout import Rollout, episode_of

ROOT = Path(__file__).resolve().parents[2]

SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip
SETS = {"fsdp": SetShape(), "sequence": SetShape(sequence=2), "tensor": SetShape(tensor=2)}
FIRST = 32768
MOST = 8 * FIRST
REPEATS = 2
PATIENCE = 240  # seconds that a case may take


def objective(
    outputs: PolicyOutputs, model: nn.Module, batch: MicroBatch, fields: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs, _ = outputs(model, batch, entropy=False)
    return algo.policy_loss(
        logprobs, fields["old"], fields["advantages"], batch.lengths,
        clip_low=0.2, clip_high=0.2, aggregate="token_mean",
    )  # fmt: skip


def run_case(options: argparse.Namespace) -> None:
    """Under torchrun: one case."""
    launch = Launch.from_env()
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", launch.local_rank) if on_gpu else torch.device("cpu")
    shape = SETS[options.case]
    placement = place(PlacementConfig(mode="colocated"), world=2, local_world=2)
    runtime = Runtime(launch, placement, device, 200.0, set_shapes={"actor": [shape]})
    config = Qwen2Config(**SHAPES[options.shape], max_position_embeddings=MOST)
    model = build(config, "policy", packed=True)
    parallelize(
        model,
        runtime.shards["actor"],
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        activation_checkpointing=options.checkpointing,
        compiled=on_gpu,
        ranks=runtime.sets["actor"][shape],
    )
    fill(model, "", device=device, random_init=True, seed=3)
    group = runtime.groups["actor"]
    runner = Runner(group, device, options.tokens // shape.sequence)
    learner = Learner(model, runner, OptimConfig(lr=1e-6), steps=100, aggregate="token_mean")
    outputs = PolicyOutputs(1.0, config.vocab_size, compiled=on_gpu)
    ids = torch.randint(2, config.vocab_size, (2, options.tokens)).tolist()
    rollout = Rollout(
        episode_of(row, ids[row][:1024], ids[row][1024:])
        for row in range(2)
        if group.dp_size == 1 or row == group.dp_rank
    )
    fields = {name: torch.full((rollout.tokens,), -11.9) for name in ("old", "advantages")}
    works = {
        "log-probs": lambda: learner.forward(rollout, partial(outputs, entropy=True), fields=2),
        "update": lambda: learner.update(
            rollout, [rollout.rows], fields, partial(objective, outputs), step=1, epochs=1
        ),
    }
    found: dict[str, float] = {}
    for name, work in works.items():
        for repeat in range(1 + REPEATS):
            if repeat == 1:
                began = time.monotonic()
            work()
            if on_gpu:
                torch.cuda.synchronize()
            runtime.barrier(f"{name} {repeat}")
        found[name] = 2 * options.tokens * REPEATS / (time.monotonic() - began)
    found["peak"] = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    if launch.rank == 0:
        print("RESULT " + json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)


def start(options: argparse.Namespace, case: str, tokens: int) -> dict[str, float] | str:
    """Runs this file again in two processes. Returns what the case found, or why it failed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *(__file__, "--case", case, "--tokens", str(tokens), "--shape", options.shape),
        *("--device", options.device, *["--checkpointing"] * options.checkpointing),
    ]
    environ = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "4",
        "PYTHONPATH": str(ROOT),
    }
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | environ, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = running.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # torchrun's ranks, too
        return f"took more than {PATIENCE} s"
    if "OutOfMemoryError" in said or "out of memory" in said:
        return "out of memory"
    found = [line for line in said.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[0][7:]) if found else "failed:\n" + said[-3000:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="1.5B", choices=list(SHAPES))
    parser.add_argument("--only", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--tokens", type=int, default=FIRST, help="of the shortest rows")
    parser.add_argument("--limit", type=float, default=540.0)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run_case(options)
    began = time.monotonic()
    how = "recomputed layers" if options.checkpointing else "no recomputation"
    print(f"{options.shape}, two rows, {how}; torch {torch.__version__}", flush=True)
    print(f"{'case':10} {'tokens':>7} {'log-probs':>10} {'update':>8}  tokens/s; peak GiB")
    tokens = options.tokens
    growing = list(options.only)
    # all cases at one length before the next: what time leaves out is the longest
    while growing and tokens <= MOST:
        for case in list(growing):
            if time.monotonic() - began > options.limit:
                print(f"{case:10} {tokens:7} left out: no time left", flush=True)
                growing.remove(case)
                continue
            found = start(options, case, tokens)
            if isinstance(found, str):
                growing.remove(case)
                print(f"{case:10} {tokens:7} {found}", flush=True)
            else:
                rates = f"{found['log-probs']:10.0f} {found['update']:8.0f}"
                print(f"{case:10} {tokens:7} {rates}  {found['peak']:.1f}", flush=True)
        tokens += tokens // 2
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
