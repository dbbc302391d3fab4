"""Each model family of test_families.py whose layers are let in to be cut over two ranks computes
the same."""

import re
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_families import CPU, PLAIN, VOCABULARY, configured, rows

from splitppo.config import PlacementConfig
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models.batching import micro_batch
from splitppo.models.build import build
from splitppo.models.heads import PolicyOutputs
from splitppo.models.sharding import gradient_norm, parallelize
from splitppo.models.tensor import check_plan
from splitppo.models.weights import fill
from splitppo.placement import SetShape, place

TWO = SetShape(tensor=2)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("hrm_text", {}), ("gemma3n_text", {"num_kv_shared_layers": 0, "num_hidden_layers": 2})],
)
def test_layers_in_several_lists_are_refused_by_name(kind, settings):
    with pytest.raises(
        UserError,
        match=f"policy.path=it .*: the tensor-parallel plan of .*{kind}.* outside its layers",
    ):
        check_plan(configured(kind, settings), "policy", 2, "policy.path=it")


@pytest.mark.families
def test_every_family_that_is_let_in_is_the_same_in_a_set():
    """Outputs and gradient norm of small copies with random weights; the others are refused by
    name."""
    found = run_ranks(2, family_rank)[0]
    for name, numbers in found.items():
        if isinstance(numbers, str):
            assert re.search(
                r"no tensor-parallel plan|not supported|not split|does not cover", numbers
            ), name
        else:
            (outs, norm), (due, due_norm) = numbers
            torch.testing.assert_close(outs, due, rtol=0, atol=1e-5, msg=name)
            assert norm == pytest.approx(due_norm, rel=1e-5), name
    assert isinstance(found["apertus, with buffers"], str), (
        "its MLP has weights that the plan does not name"
    )
    assert sum(not isinstance(numbers, str) for numbers in found.values()) >= 24


def family_rank(rank):
    placement = place(PlacementConfig(mode="colocated"), world=2, local_world=2)
    runtime = Runtime(Launch(rank, 2, rank, 2), placement, CPU, 60.0, set_shapes={"actor": [TWO]})
    found: dict[str, Any] = {}
    for name, (kind, settings, _) in PLAIN.items():
        config, numbers = configured(kind, settings), []
        try:
            check_plan(config, "policy", 2, name)
        except UserError as error:
            found[name] = str(error)
            continue
        for ranks in (runtime.sets["actor"][TWO], None):
            model = build(config, "policy")
            how: Any = {"activation_checkpointing": False, "ranks": ranks}
            parallelize(model, runtime.shards["actor"], dtype=torch.float32, **how)
            fill(model, "", device=CPU, random_init=True, seed=1)
            out, _ = PolicyOutputs(1.0, VOCABULARY)(model, micro_batch(rows(), CPU), entropy=False)
            (out * torch.arange(len(out))).sum().backward()
            # without a set both ranks have the same rows, and their gradients are summed
            numbers.append((out.detach(), float(gradient_norm(model)) / (1 if ranks else 2)))
        found[name] = numbers
    return found
