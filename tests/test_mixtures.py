"""Runs of mixtures of experts against the single-process PPO, whose experts are a loop; resumed
runs are the same."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from mixtures import write_mixture
from ranks import run_ranks
from runs import SMALL, main_rank
from test_dialogues import LIMITS, OLD, listener, write_game
from test_flagship import REWARD, compare, reference, run
from test_lora import RANK, SHARED, assert_same, begun, figures
from test_windows import LENGTHS, WINDOW, check
from tiers import wide
from transformers import AutoModelForCausalLM

from splitppo.config import LoraConfig
from splitppo.models.tiny import build_tiny
from splitppo.run import checkpoint

COLOCATED = {"placement__mode": "colocated"}
SEQUENCE = {**COLOCATED, "fsdp__sequence_parallel": 2, "value__sequence_parallel": 1}
LAYERS = {"compute__activation_checkpointing": "", "compute__compile": "on"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Inputs of runs, by the policy's type. OLMoE has a dense critic."""
    made = {}
    for kind in ("qwen3_moe", "olmoe"):
        folder = made[kind] = tmp_path_factory.mktemp(kind)
        write_mixture(folder / "policy", kind, 1)
        if kind == "olmoe":
            build_tiny(folder / "value", seed=2)
        else:
            write_mixture(folder / "value", kind, 2)
        (folder / "reward.py").write_text(REWARD)
    return made


@pytest.fixture(autouse=True)
def in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference runs transformers' loop over experts."""
    plain = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args: Any, **options: Any) -> Any:
        return plain(*args, experts_implementation="eager", **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)


@pytest.mark.parametrize(
    ("kind", "world", "changes"),
    [
        wide("qwen3_moe", 2, {"placement__actor": 1}),
        wide("qwen3_moe", 2, {"placement__actor": 1, "policy__replay_routing": "off"}),
        wide("olmoe", 3, {"placement__actor": 2, "compute__packing": "on"}),
        wide("olmoe", 2, {**COLOCATED, "policy__offload": "all"}),
        wide("qwen3_moe", 2, {**COLOCATED, "policy__offload": "all", "value__offload": "all"}),
        wide("qwen3_moe", 2, {**SEQUENCE, "compute__packing": "on"}),
        wide("olmoe", 2, SEQUENCE),
        wide("qwen3_moe", 3, {"placement__actor": 2, **LAYERS}),
        wide("olmoe", 2, {"placement__actor": 1, **LAYERS, "compute__packing": "on"}),
    ],
)
def test_every_placement_is_the_paper(folders, tmp_path, kind, world, changes) -> None:
    """The engine's choice of experts is replayed in all updates, unless that is off."""
    replays = "policy__replay_routing" not in changes
    seen = run(folders[kind], tmp_path, world, **changes)
    compare(seen, reference(folders[kind], seen, replays=replays))
    check_experts(seen, critic=kind == "qwen3_moe")


def check_experts(seen: dict[str, Any], *, critic: bool) -> None:
    for line in seen["lines"][:3]:
        assert 1 / 6 <= line["actor/expert_share"] <= line["actor/expert_share_max"] <= 1
    assert ("critic/experts_idle" in seen["lines"][3]) == critic


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"placement__actor": 1}),
        wide(2, {"placement__actor": 1, **LAYERS}),
        wide(2, {**SEQUENCE, "compute__packing": "on"}),
    ],
)
def test_the_routers_balancing_loss_is_the_papers(folders, tmp_path, world, changes) -> None:
    """Of a mini-batch, where that is one micro-batch."""
    folder = folders["qwen3_moe"]
    whole = {"policy__router_aux_coef": 0.5, "compute__micro_batch_tokens": 4096}
    seen = run(folder, tmp_path, world, **whole, **changes)
    compare(seen, reference(folder, seen, balance=0.5, replays=True))
    assert all(2 < line["actor/router_aux"] < 3 for line in seen["lines"][:3])
    check_experts(seen, critic=True)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe"])
def test_with_windows(folders, tmp_path, kind) -> None:
    """Experts are of the policy that sampled a token, also in later steps."""
    changes: Any = {"placement__actor": 2, "rollout__samples": 2}
    check(folders[kind], tmp_path, 3, LENGTHS, WINDOW, replays=True, **changes)


@pytest.mark.wide
def test_what_an_environment_says_has_the_trainers_experts(folders, tmp_path) -> None:
    """With windows, and rows that are cut over ranks."""
    folder = tmp_path / "inputs"
    shutil.copytree(folders["qwen3_moe"], folder)
    write_game(folder)
    changes: Any = {"env__path": f"{folder / 'env.py'}:Env", "rollout__window": 5, **LIMITS}
    changes |= {"fsdp__sequence_parallel": 2, "value__sequence_parallel": 1}
    changes |= {f"ppo__{name}": value for name, value in OLD.items()}
    seen = run(folder, tmp_path, 3, odd="exact", placement__actor=2, **changes)
    like: Any = {"heard": listener(folder), "replays": True, **OLD}
    compare(seen, reference(folder, seen, window=5, **like))
    assert all(line["env/turns"] > 0 for line in seen["lines"][:3])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_moe", {"placement__actor": 1, "policy__lora__rank": RANK}),
        ("olmoe", {**COLOCATED, "policy__lora__rank": RANK, "policy__offload": "all"}),
        ("qwen3_moe", {**SHARED, **COLOCATED, "fsdp__sequence_parallel": 2}),
    ],
)
def test_adapters_beside_attention(folders, tmp_path, kind, changes) -> None:
    """Also where policy and value model share their base: the value model's experts are its
    own."""
    folder = folders[kind]
    kinds = ["policy", "value"] if "value__share_base" in changes else ["policy"]
    base = "policy" if "value" in kinds else "value"
    seen = run(folder, tmp_path, 2, **{"value__path": folder / base, **changes})
    adapters = {each: begun(folder / "policy", each, LoraConfig(RANK)) for each in kinds}
    compare(seen, reference(folder, seen, adapters=adapters, value_base=base, replays=True))


@pytest.mark.wide
def test_a_router_that_is_frozen(folders, tmp_path) -> None:
    folder = folders["qwen3_moe"]
    seen = run(folder, tmp_path, 2, placement__actor=1, policy__freeze="router")
    compare(seen, reference(folder, seen, policy_frozen=r"\.gate\.", replays=True))


@pytest.mark.wide
@pytest.mark.parametrize("window", [0, 5])
def test_a_resumed_run_is_the_same_also_elsewhere(folders, tmp_path, window) -> None:
    """Bit for bit in its own placement, and within rounding in another one. With a window, open
    rows keep their experts."""
    model = f"--policy.path={folders['qwen3_moe'] / 'policy'}"
    windowed = f"--rollout.window={window}"
    # such that routers choose otherwise in the next step
    argv = [*SMALL, model, windowed, "--policy.optim.lr=3e-3", "--checkpoint.every=2"]
    for name, steps in (("whole", 4), ("cut", 2), ("moved", 2)):
        run_ranks(2, main_rank, [*argv, f"--run-dir={tmp_path / name}", f"--steps={steps}"])
    run_ranks(2, main_rank, [*argv, f"--run-dir={tmp_path / 'cut'}", "--steps=4"])
    alone = ["--placement.mode=colocated", f"--run-dir={tmp_path / 'moved'}", "--steps=4"]
    run_ranks(1, main_rank, [*argv, *alone])
    for role in checkpoint.ROLES:
        assert_same(figures(tmp_path / "cut", role), figures(tmp_path / "whole", role))
        moved, whole = (figures(tmp_path / name, role) for name in ("moved", "whole"))
        loss = {"actor": "actor/pg_loss", "critic": "critic/vf_loss"}[role]
        losses = [[steps[step][loss] for step in (1, 2, 3, 4)] for steps in (moved, whole)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)
