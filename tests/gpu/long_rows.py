"""Rows of 32k tokens and more on two GPUs: FSDP alone, rows cut over both, layers cut over both.

    PYTHONPATH=. python tests/gpu/long_rows.py [--shapes 1.5B 7B] [--checkpointing]

Weights are drawn from the seed, by shape; nothing is read or fetched. Each case is a job of two
ranks: the policy's log-probs and updates of two rows. A line, as soon as the case has ended, says
tokens a second of both, and the most memory that PyTorch allocated. First all cases run at
--tokens. Then, for each, the longest row that should fit by what it took; if that is too long, one
halfway. 7B runs with recomputed layers: without, no such row fits. All ends within --limit seconds:
what is left out has a line, too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
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
from splitppo.models.batching import MicroBatch
from splitppo.models.build import build
from splitppo.models.heads import PolicyOutputs
from splitppo.models.learner import Learner
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
UNIT = 2048  # rows have a multiple of so many tokens
FILLED = 0.94  # of a GPU's memory, at the peak of the longest row
REPEATS = 2
PATIENCE = 180  # seconds that a case may take
LEAST = 40  # seconds without which none begins
TOO_LONG = "out of memory"


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
    torch.manual_seed(1)  # the ranks of a set have the same rows
    config = Qwen2Config(**SHAPES[options.shapes[0]], max_position_embeddings=MOST)
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
        "log-probs": lambda: learner.forward(rollout, partial(outputs, entropy=True)),
        "update": lambda: learner.update(
            rollout,
            [rollout.places(rollout.rows)],
            fields,
            partial(objective, outputs),
            step=1,
            epochs=1,
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
            runtime.all_gather(f"{name} {repeat}", "")
        found[name] = 2 * options.tokens * REPEATS / (time.monotonic() - began)
    if on_gpu:
        found["peak"] = torch.cuda.max_memory_allocated() / 2**30
        found["held"] = torch.cuda.memory_allocated() / 2**30
        found["total"] = torch.cuda.get_device_properties(device).total_memory / 2**30
    if launch.rank == 0:
        print("RESULT " + json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)


def start(
    options: argparse.Namespace, shape: str, case: str, tokens: int, patience: float
) -> dict[str, float] | str:
    """Runs this file again in two processes. Returns what the case found, or why it failed."""
    recomputed = options.checkpointing or shape == "7B"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *(__file__, "--case", case, "--tokens", str(tokens), "--shapes", shape),
        *("--device", options.device, *["--checkpointing"] * recomputed),
    ]
    environ = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "4",
        "PYTHONPATH": str(ROOT),
    }
    # a file: what a case that is killed has said is not lost
    with tempfile.TemporaryFile("w+") as out:
        running = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, text=True,
            env=os.environ | environ, start_new_session=True,
        )  # fmt: skip
        late = ""
        try:
            running.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # torchrun's ranks, too
            running.wait()
            late = f"took more than {patience:.0f} s; "
        out.seek(0)
        said = out.read()
    if any(words in said for words in ("OutOfMemoryError", "out of memory", "allocate memory")):
        return TOO_LONG
    found = [line for line in said.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[0][7:]) if found else f"{late}failed:\n{said[-2000:]}"


def longest(found: dict[str, float], tokens: int) -> int:
    """Tokens of the row that should fill a GPU, given what one of `tokens` took: all but what is
    held between two steps grows with it. 0: no GPU."""
    if "peak" not in found:
        return 0
    room = (FILLED * found["total"] - found["held"]) / (found["peak"] - found["held"])
    return min(int(tokens * room) // UNIT * UNIT, MOST)


class Cases:
    """Runs cases, and prints a line for each, until the time is over."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.began = time.monotonic()

    def run(self, shape: str, case: str, tokens: int) -> dict[str, float] | str:
        """What `start` returns; "" if there was no time."""
        left = self.options.limit - (time.monotonic() - self.began)
        head = f"{shape:5} {case:9} {tokens:7}"
        if left < LEAST:
            print(f"{head} left out: no time left", flush=True)
            return ""
        found = start(self.options, shape, case, tokens, min(PATIENCE, left))
        if isinstance(found, str):
            print(f"{head} {found}", flush=True)
        else:
            rates = f"{found['log-probs']:10.0f} {found['update']:8.0f}"
            print(f"{head} {rates}  {found.get('peak', 0.0):.1f}", flush=True)
        return found

    def grow(self, shape: str, case: str, tokens: int, found: dict[str, float]) -> None:
        """The longest row of a case of which one of `tokens` has run."""
        tried = longest(found, tokens)
        if tried < 1.1 * tokens:
            return
        if self.run(shape, case, tried) == TOO_LONG:
            self.run(shape, case, (tokens + tried) // 2 // UNIT * UNIT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["1.5B", "7B"], choices=list(SHAPES))
    parser.add_argument("--only", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--tokens", type=int, default=FIRST, help="of the first rows")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds, for all of it")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run_case(options)
    cases = Cases(options)
    print(f"two rows; torch {torch.__version__}", flush=True)
    print(f"{'case':15} {'tokens':>7} {'log-probs':>10} {'update':>8}  tokens/s; peak GiB")
    for shape in options.shapes:
        ran = {case: cases.run(shape, case, options.tokens) for case in options.only}
        # cut rows first: theirs is the question
        for case in sorted(ran, key=lambda case: case != "sequence"):
            found = ran[case]
            if isinstance(found, dict):
                cases.grow(shape, case, options.tokens, found)
    print(f"{time.monotonic() - cases.began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
