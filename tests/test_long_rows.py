"""Rows of thousands of tokens: memory grows with the tokens of a micro-batch, however long its
longest row is, and with the part of them that a rank has."""

from typing import Any

import pytest
import torch
from episodes import episode
from peaks import counted
from ranks import run_ranks
from torch import nn

from splitppo import algo
from splitppo.config import OptimConfig, PlacementConfig
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.learner import Learner
from splitppo.models.build import build
from splitppo.models.heads import PolicyOutputs
from splitppo.models.runner import Runner
from splitppo.models.sharding import parallelize
from splitppo.models.tiny import model_config
from splitppo.models.weights import fill
from splitppo.placement import Role, SetShape, place
from splitppo.rollout import Rollout

CPU = torch.device("cpu")
LONG, SHORT, MANY = 16_000, 100, 500
BUDGET = LONG + MANY * SHORT
OUTPUTS = PolicyOutputs(1.0, 80)


def rollout_of(*lengths: int) -> Rollout:
    return Rollout(
        episode(row, [5], [7 + row % 9] * (length - 1), [-4.0] * (length - 1), "eos")
        for row, length in enumerate(lengths)
    )


def objective(model: nn.Module, batch: Any, given: dict[str, torch.Tensor]) -> Any:
    logprobs, _ = OUTPUTS(model, batch, entropy=False)
    kinds: Any = {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "seq_mean_token_mean"}
    return algo.policy_loss(logprobs, given["old"], given["advantages"], batch.lengths, **kinds)


def make_learner(runtime: Runtime, role: Role, budget: int, width: int) -> Learner:
    config = model_config()
    config.update({"hidden_size": width, "intermediate_size": 2 * width})
    config.update({"max_position_embeddings": LONG, "num_hidden_layers": 1})
    model = build(config, "policy", packed=True)
    (ranks,) = runtime.sets[role].values()
    parallelize(
        model, runtime.shards[role], dtype=torch.float32, activation_checkpointing=True, ranks=ranks
    )
    fill(model, "", device=CPU, random_init=True, seed=3)
    runner = Runner(runtime.groups[role], CPU, budget)
    return Learner(model, runner, OptimConfig(lr=1e-6), steps=9, aggregate="seq_mean_token_mean")


def peak(learner: Learner, rollout: Rollout) -> tuple[int, float]:
    """Bytes at the peak of an update with these rows, and its FLOPs in 10^12."""
    found: list[int] = []
    fields = {name: torch.zeros(rollout.tokens) - 4 for name in ("old", "advantages")}
    with counted(found.append):
        (figures,) = learner.update(rollout, [rollout.rows], fields, objective, step=1, epochs=1)
    return found[0], figures["update_tflop"]


def test_a_long_row_among_short_ones_costs_its_tokens():
    """Padded, a tensor of the losses would have 501 x 16,000 numbers: 32 MB, and there are many.
    The model is so narrow that this is more than what it needs itself."""
    runtime = Runtime(Launch(), place(PlacementConfig(), world=1, local_world=1), CPU, 60.0)
    learner = make_learner(runtime, "actor", BUDGET, 8)
    even, _ = peak(learner, rollout_of(*[SHORT] * (BUDGET // SHORT)))
    uneven, _ = peak(learner, rollout_of(LONG, *[SHORT] * MANY))
    runtime.close()
    assert uneven == pytest.approx(even, rel=0.1)


def cut_rank(rank: int) -> list[tuple[int, float]]:
    """Peaks with a long row on the first rank alone, and with the row cut over both."""
    placement = place(PlacementConfig(mode="colocated"), world=2, local_world=2)
    shapes: Any = {"actor": [SetShape()], "critic": [SetShape(sequence=2)]}
    runtime = Runtime(Launch(rank, 2, rank, 2), placement, CPU, 60.0, set_shapes=shapes)
    found = []
    for role in ("actor", "critic"):
        learner = make_learner(runtime, role, 2048, 64)
        has_row = learner.runner.group.dp_rank == 0
        found.append(peak(learner, rollout_of(*[4096] * has_row)))
    return found


def test_a_row_too_long_for_one_rank_trains_on_two():
    ((alone, cut), (_, other)) = run_ranks(2, cut_rank)
    assert max(cut[0], other[0]) < 0.65 * alone[0]
    assert cut[1] == other[1] == alone[1], "a rank's FLOPs are half of the row's either way"
