"""Offloading changes no bit of any result, and gives back the memory that it should."""

from pathlib import Path
from typing import Any

import torch
from episodes import episode
from ranks import run_ranks

from splitppo import algo
from splitppo.config import OptimConfig, PlacementConfig
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models import offload
from splitppo.models.build import build
from splitppo.models.heads import value_outputs
from splitppo.models.learner import Learner
from splitppo.models.runner import Frozen, Runner
from splitppo.models.sharding import local, parallelize
from splitppo.models.tiny import model_config
from splitppo.models.weights import fill
from splitppo.placement import place
from splitppo.rollout import Rollout
from splitppo.run import saver

CPU = torch.device("cpu")
KINDS = ("none", "optimizer", "all")


def objective(model: Any, batch: Any, given: Any) -> Any:
    values = value_outputs(model, batch)
    return algo.value_loss(
        values, given["old"], given["returns"], batch.lengths, clip=None, aggregate="token_mean"
    )


def outputs(model: Any, batch: Any) -> list:
    return [value_outputs(model, batch)]


def make(group: Any, mesh: Any) -> Any:
    model = build(model_config(), "value")
    parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=False)
    fill(model, "", device=CPU, random_init=True, head="normal", seed=3)
    return model, Runner(group, CPU, 64)


def on_device(model: Any) -> int:
    """Bytes of the shards of its weights."""
    return sum(local(p).untyped_storage().nbytes() for p in model.parameters())


def learn_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Updates with each kind of offloading, and a checkpoint; what they give, and bytes on the
    device after each."""
    placement = place(PlacementConfig(mode="colocated"), world=2, local_world=2)
    runtime = Runtime(Launch(rank, 2, rank, 2), placement, CPU, 60.0)
    group, found, parts = runtime.groups["actor"], {}, []
    rows = Rollout(
        [
            episode(row, [5, 6], [7 + row] * (3 + row), [0.0] * (3 + row), "eos")
            for row in (rank, rank + 2)
        ]
    )
    fields = {"old": torch.zeros(rows.tokens), "returns": torch.linspace(-1, 1, rows.tokens)}
    offload.PART, step = 2**14, torch.optim.AdamW.step  # several parts

    def noted(self: Any, *args: Any) -> Any:
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        parts.append(sum(2 * local(p).nbytes for p in parameters))
        return step(self, *args)

    setattr(torch.optim.AdamW, "step", noted)  # noqa: B010
    for kind, how, steps in (
        *((kind, kind, (1, 2, 3)) for kind in KINDS),
        ("resumed", "all", (3,)),
    ):
        model, runner = make(group, runtime.shards["actor"])
        options: Any = {"steps": 4, "aggregate": "token_mean", "offload": how}
        learner, sizes = (
            Learner(model, runner, OptimConfig(lr=1e-2, weight_decay=0.1), **options),
            [],
        )
        sizes.append(on_device(model))
        if kind == "resumed":
            saver.load(
                [learner], folder / "checkpoints/step_000002/actor", [], runtime.saving["actor"]
            )
            sizes.append(on_device(model))
        for number in steps:
            values = learner.forward(rows, outputs)[0]
            metrics = learner.update(
                rows, [rows.places(rows.rows)], fields, objective, step=number, epochs=1
            )
            sizes.append(on_device(model))
            if (kind, number) == ("all", 2):
                writer = saver.Saver(
                    [learner], "actor", folder, runtime.saving["actor"], committed=lambda: None
                )
                writer.begin(2, {})
                sizes.append(on_device(model))
                writer.commit(2)
                writer.wait()
                runtime.all_gather("written", "")
        weights = [tensor.clone() for _, tensor in learner.weights(torch.float32)]
        sizes.append(on_device(model))
        state = [
            local(tensor) for p in model.parameters() for tensor in learner.state_of(p).values()
        ]
        found[kind] = {
            "bits": [values, *weights, *state],
            "metrics": metrics,
            "sizes": sizes,
            "parts": parts[:],
        }
        parts.clear()
    model, runner = make(group, runtime.shards["actor"])
    found["whole"], logs = on_device(model), []
    frozen = Frozen(model, runner, outputs, offload=True)
    for _ in range(2):
        logs.append(frozen.run(rows.episodes)[0])
        frozen.release_memory()
    found["frozen"] = (logs, on_device(model))
    return found


def test_offloading_changes_no_bit_and_frees_memory(tmp_path: Path) -> None:
    for found in run_ranks(2, learn_rank, tmp_path):
        plain, whole = found["none"], found["whole"]
        for kind in ("optimizer", "all", "resumed"):
            assert all(map(torch.equal, found[kind]["bits"], plain["bits"])), kind
            assert found[kind]["metrics"] == plain["metrics"]
        assert {*plain["sizes"], *found["optimizer"]["sizes"]} == {whole}
        assert {*found["all"]["sizes"], *found["resumed"]["sizes"]} == {0}
        assert len(plain["parts"]) == 3
        # no more of AdamW's state at once than two parts with a tensor each
        for kind in ("optimizer", "all"):
            most = max(plain["parts"]) // 3
            assert len(found[kind]["parts"]) > 6
            assert sum(found[kind]["parts"]) == sum(plain["parts"])
            assert max(found[kind]["parts"]) < most
        (first, second), left = found["frozen"]
        assert torch.equal(first, second)
        assert left == 0
