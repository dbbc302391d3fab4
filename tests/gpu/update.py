"""Updates on two GPUs: how fast a group of two is, and whether two groups of one get in each
other's way.

    torchrun --nproc_per_node 2 tests/gpu/update.py SHAPE [flags below]

SHAPE is a folder with a config.json; weights are drawn.

`group`: seconds and share of PEAK of the policy's forward passes (2 N a token) and update (6 N) on
a group of both. `overlap`: policy on one GPU, value model on the other: seconds of each update
alone and of both at once.
"""

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from episodes import episode
from torch import Tensor, nn
from transformers import AutoConfig

from splitppo import algo
from splitppo.config import OptimConfig, PlacementConfig
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models.batching import MicroBatch
from splitppo.models.build import build
from splitppo.models.heads import PolicyOutputs, value_outputs
from splitppo.models.learner import Learner
from splitppo.models.runner import Runner
from splitppo.models.sharding import parallelize
from splitppo.models.trainable import count
from splitppo.models.weights import fill
from splitppo.placement import Role, place
from splitppo.rollout import Rollout

PEAK = 989e12  # of an H100 or H200 in dense bfloat16


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape")
    parser.add_argument("--measure", choices=("group", "overlap"), default="group")
    parser.add_argument("--rows", type=int, default=170, help="of each rank")
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32768, help="of a micro-batch at most")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def made_rollout(rows: int, vocabulary: int, seed: int) -> Rollout:
    """Prompts of 128 tokens, responses log-normal with a mean of about 240, at most 1,024."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, vocabulary) for _ in range(count)]

    lengths = [min(1024, max(1, round(draw.lognormvariate(5.16, 0.8)))) for _ in range(rows)]
    return Rollout(
        [
            episode(seed * rows + i, tokens(128), tokens(n), [-1.0] * n, "eos")
            for i, n in enumerate(lengths)
        ]
    )


def policy_objective(
    outputs: PolicyOutputs, model: nn.Module, batch: MicroBatch, fields: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs, _ = outputs(model, batch, entropy=False)
    return algo.policy_loss(
        logprobs, fields["old"], fields["advantages"], batch.lengths,
        clip_low=0.2, clip_high=0.2, dual_clip=None, aggregate="token_mean",
    )  # fmt: skip


def value_objective(
    model: nn.Module, batch: MicroBatch, fields: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    values = value_outputs(model, batch)
    return algo.value_loss(
        values, fields["old"], fields["returns"], batch.lengths, clip=0.2, aggregate="token_mean"
    )


def make(
    options: argparse.Namespace, runtime: Runtime, role: Role
) -> tuple[Learner, PolicyOutputs]:
    config: Any = AutoConfig.from_pretrained(options.shape)
    model = build(config, "policy" if role == "actor" else "value", torch.float32, packed=True)
    group = runtime.groups[role]
    how: Any = {
        "dtype": torch.bfloat16,
        "activation_checkpointing": options.checkpointing,
        "compiled": True,
    }
    parallelize(model, group.mesh, **how)
    fill(model, "", device=runtime.device, random_init=True, seed=3)
    runner = Runner(group, runtime.device, options.tokens)
    learner = Learner(model, runner, OptimConfig(lr=1e-6), steps=100, aggregate="token_mean")
    return learner, PolicyOutputs(1.0, config.vocab_size, compiled=True)


def seconds(
    runtime: Runtime, options: argparse.Namespace, work: Callable[[], Any], name: str
) -> float:
    """Of one `work`, after two to warm up."""
    for repeat in range(2 + options.repeats):
        if repeat == 2:
            torch.cuda.synchronize()
            runtime.all_gather(name, "")
            began = time.monotonic()
        work()
        torch.cuda.synchronize()
    return (time.monotonic() - began) / options.repeats


def update_of(
    options: argparse.Namespace,
    role: Role,
    learner: Learner,
    outputs: PolicyOutputs,
    rollout: Rollout,
) -> Any:
    noise = torch.randn(rollout.tokens, generator=torch.Generator().manual_seed(0))
    fields = {"old": torch.full((rollout.tokens,), -11.9), "advantages": noise, "returns": noise}
    objective: Any = partial(policy_objective, outputs) if role == "actor" else value_objective
    if role == "actor":
        del fields["returns"]
    rows = [rollout.rows[i :: options.mini_batches] for i in range(options.mini_batches)]
    return lambda: learner.update(
        rollout, [*map(rollout.places, rows)], fields, objective, step=1, epochs=1
    )


def group(options: argparse.Namespace, launch: Launch, device: torch.device) -> None:
    runtime = Runtime(
        launch, place(PlacementConfig(mode="colocated"), world=2, local_world=2), device, 100.0
    )
    learner, outputs = make(options, runtime, "actor")
    vocabulary: int = cast(Any, learner.model).config.vocab_size
    rollouts = [made_rollout(options.rows, vocabulary, seed) for seed in range(launch.world)]
    tokens = sum(sum(rollout.totals) for rollout in rollouts)
    rollout, parameters = (
        rollouts[launch.rank],
        count(cast(Any, learner.model).config, learner.trainable).parameters,
    )
    update = seconds(
        runtime, options, update_of(options, "actor", learner, outputs, rollout), "update"
    )
    entropies = partial(outputs, entropy=True)
    forward = seconds(
        runtime,
        options,
        lambda: learner.runner.forward(learner.model, rollout, entropies),
        "forward",
    )
    if launch.rank == 0:
        rates = [
            n * parameters * tokens / s / launch.world / PEAK
            for n, s in ((2, forward), (6, update))
        ]
        how = f"checkpointing {options.checkpointing}, {options.mini_batches} mini-batches"
        print(
            f"{parameters / 1e9:.2f}B, {tokens} tokens, {how}: log-probs {forward:.3f} s "
            f"({rates[0]:.1%}), "
            f"update {update:.3f} s ({rates[1]:.1%}), "
            f"{torch.cuda.max_memory_allocated() / 2**30:.0f} GiB",
            flush=True,
        )
    runtime.close()


def overlap(options: argparse.Namespace, launch: Launch, device: torch.device) -> None:
    placement = place(PlacementConfig(actor=1, critic=1), world=2, local_world=2)
    runtime = Runtime(launch, placement, device, 100.0)
    role: Role = "actor" if launch.rank == 0 else "critic"
    learner, outputs = make(options, runtime, role)
    rollout = made_rollout(options.rows, cast(Any, learner.model).config.vocab_size, 0)
    update = update_of(options, role, learner, outputs, rollout)
    nothing: Callable[[], Any] = lambda: None  # noqa: E731
    for turn in ("warm", "actor", "critic", "both"):
        took = seconds(
            runtime, options, update if turn in ("both", "warm", role) else nothing, turn
        )
        told = runtime.all_gather(f"took/{turn}", f"{took:.4f}")
        runtime.all_gather(f"after {turn}", "")
        if turn == "actor":
            alone = float(told[0])
        elif turn == "critic":
            alone += float(told[1])
        elif turn == "both" and launch.rank == 0:
            both = max(map(float, told))
            print(
                f"updates: both alone {alone:.3f} s in all, at once {both:.3f} s: "
                f"{alone / both:.2f}x",
                flush=True,
            )
    runtime.close()


def main() -> None:
    options, launch = parse(), Launch.from_env()
    {"group": group, "overlap": overlap}[options.measure](
        options, launch, torch.device("cuda", launch.local_rank)
    )


if __name__ == "__main__":
    main()
