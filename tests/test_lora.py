"""LoRA against the oracle of test_flagship.py, peft, and the whole model."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from reference_ppo import Adapted
from runs import SMALL, assert_same, figures, main_rank
from safetensors.torch import load_file, save_file
from test_families import PLAIN, SOME, configured
from test_flagship import SEED, compare, inputs, parts, reference, run
from tiers import wide
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from splitppo import train
from splitppo.config import LoraConfig, OptimConfig, PlacementConfig
from splitppo.config.cli import kept_rates, parse
from splitppo.engine.hf import HFEngine
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models import lora, tiny
from splitppo.models.batching import micro_batch
from splitppo.models.build import build, read_config
from splitppo.models.heads import PolicyOutputs, adapters_off, value_outputs
from splitppo.models.learner import Learner
from splitppo.models.names import weights_of
from splitppo.models.runner import Runner
from splitppo.models.sharding import local, parallelize
from splitppo.models.weights import fill
from splitppo.placement import place
from splitppo.rollout import Episode, episode_of
from splitppo.run import checkpoint
from splitppo.run import main as run_main
from splitppo.tools.export import export
from splitppo.tools.held_out import _of_model
from splitppo.tools.saved import load_model

peft = pytest.importorskip("peft")
__all__ = ["inputs"]  # a fixture
CPU = torch.device("cpu")
RANK = 3
TARGETS = ("q_proj", r"mlp\..*_proj")
SHARED = {"value__share_base": "", "value__lora__rank": RANK, "policy__lora__rank": RANK}
COLOCATED = {"placement__mode": "colocated"}


def lora_model(folder: Path, kind: Any, settings: LoraConfig, dtype: Any = torch.float32) -> Any:
    """A whole model with adapters, in this process alone, as the trainer begins with it."""
    adapter = lora.Adapter(kind, settings, str(folder))
    model = build(read_config(str(folder)), kind, dtype)
    adapter.add(model)
    fill(model, str(folder), CPU, head="normal", seed=SEED)
    adapter.read(model, SEED)
    return model, adapter


def randomize(model: nn.Module, scale: float = 0.05) -> nn.Module:
    """As after some training: no B is 0."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in weights_of(model).items():
        if ".lora_B." in name:
            local(weight).copy_(scale * torch.randn(weight.shape, generator=generator))
    return model


def begun(folder: Path, kind: str, settings: LoraConfig) -> tuple[dict, float]:
    """The adapters with which the trainer begins, for the reference: layer -> (A, B); alpha."""
    model, adapter = lora_model(folder, kind, settings)
    weights = weights_of(model)
    layers = {layer: adapter.pair(layer) for layer in adapter.layers(model)}
    found = {layer: tuple(weights[name].data for name in pair) for layer, pair in layers.items()}
    return found, adapter.alpha


@pytest.fixture(scope="module")
def trained_adapter(inputs, tmp_path_factory) -> Path:
    """An adapter as peft saves it, with another scale."""
    folder = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=RANK, lora_alpha=6, target_modules="all-linear")
    plain = AutoModelForCausalLM.from_pretrained(inputs / "policy")
    model = peft.get_peft_model(plain, config)
    for number, (name, weight) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(number)
            weight.data.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("world", "kinds", "changes"),
    [
        wide(2, "policy", {"placement__actor": 1, "policy__lora__targets": " ".join(TARGETS)}),
        wide(3, "value", {"placement__actor": 2}),
        wide(
            2, "policy value", {"placement__actor": 1, "policy__lora__path": "", "slow": "critic"}
        ),
        wide(2, "policy value", {**COLOCATED, "policy__offload": "all", "ppo__kl_kind": "k1"}),
        (1, "policy value", {**SHARED, **COLOCATED}),
        wide(
            4,
            "policy value",
            {
                **SHARED,
                **COLOCATED,
                "fsdp__tensor_parallel": 2,
                "fsdp__shard_size": 2,
                "compute__packing": "on",
                "compute__activation_checkpointing": "",
            },
        ),
        wide(3, "policy value", {"placement__actor": 2, "compute__packing": "on"}),
        wide(2, "policy value", {**SHARED, **COLOCATED, "fsdp__sequence_parallel": 2}),
    ],
    ids=["policy", "value", "from an adapter", "both", "shared", "shared in sets", "2+1", "cut"],
)
def test_adapters_are_the_papers(inputs, tmp_path, trained_adapter, world, kinds, changes):
    """Losses, gradient norms, adapters, merged weights; and no bit of a base changes."""
    changes = dict(changes)
    if "policy__lora__path" in changes:
        changes |= {"policy__lora__path": trained_adapter, "policy__lora__alpha": 6}
    bases = {"policy": "policy", "value": "value"}
    if "value__share_base" in changes:
        bases["value"] = "policy"
        changes["value__path"] = inputs / "policy"
    changes |= {f"{kind}__lora__rank": RANK for kind in kinds.split()}
    seen = run(inputs, tmp_path, world, **changes)
    adapters = {}
    for kind in kinds.split():
        settings = LoraConfig(
            RANK,
            changes.get(f"{kind}__lora__alpha"),
            TARGETS if f"{kind}__lora__targets" in changes else (),
            changes.get(f"{kind}__lora__path"),
        )
        adapters[kind] = begun(inputs / bases[kind], kind, settings)
    due = reference(inputs, seen, adapters=adapters, value_base=bases["value"])
    compare(seen, due)
    for kind in kinds.split():
        check_parts(seen[f"{kind}_parts"], due["models"][kind], inputs / bases[kind], kind)


def check_parts(held: dict, model: Any, folder: Path, kind: str) -> None:
    """What a learner holds in the end: its base as in the folder, adapters as the reference's."""
    base = load_file(folder / "model.safetensors")
    count = 0
    for name, weight in held.items():
        if part := re.search(rf"(.*)\.lora_([AB])\.{kind}\.weight", name):
            due = getattr(model.get_submodule(part[1]), f"lora_{part[2]}")
            torch.testing.assert_close(weight, due.detach(), rtol=0, atol=1e-5)
            count += 1
        elif not name.startswith("score"):
            assert torch.equal(weight, base[name]), f"{name}: the base has changed"
    layers = [module for module in model.modules() if isinstance(module, Adapted)]
    assert count == 2 * len(layers)
    assert max(float(layer.lora_B.detach().abs().max()) for layer in layers) > 1e-3


@pytest.mark.wide
def test_with_windows(inputs, tmp_path):
    from test_windows import LENGTHS, WINDOW, lengths_file

    options = {
        "rollout__lengths": lengths_file(tmp_path, LENGTHS),
        "rollout__max_new_tokens": 12,
        "rollout__window": WINDOW,
        "policy__lora__rank": RANK,
        "ppo__old_logprobs": "engine",
    }
    seen = run(inputs, tmp_path, 2, odd="exact", placement__actor=1, **options)
    adapters = {"policy": begun(inputs / "policy", "policy", LoraConfig(RANK))}
    due = reference(inputs, seen, window=WINDOW, adapters=adapters, old_logprobs="engine")
    compare(seen, due)


def episodes() -> list[Episode]:
    """Ten states in three rows."""
    draw = torch.Generator().manual_seed(1)
    sizes = ((4, 3), (2, 6), (5, 1))
    ids = [torch.randint(3, 83, (sum(size),), generator=draw).tolist() for size in sizes]
    return [
        episode_of(row, tokens[:prompt], tokens[prompt:])
        for row, ((prompt, _), tokens) in enumerate(zip(sizes, ids, strict=True))
    ]


@torch.no_grad()
def outputs(model: Any, kind: str, packed: bool = False) -> torch.Tensor:
    batch = micro_batch(episodes(), CPU, packed=packed)
    if kind == "value":
        return value_outputs(model, batch)
    return PolicyOutputs(1.0, 83)(model, batch, entropy=False)[0]


def test_full_rank_is_a_full_update(inputs):
    folder = inputs / "policy"
    adapted, adapter = lora_model(folder, "policy", LoraConfig(64))
    whole = load_plain(folder, "policy")
    weights, plain = weights_of(adapted), weights_of(whole)
    for number, layer in enumerate(adapter.layers(adapted)):
        weight = plain[f"{layer}.weight"].data
        generator = torch.Generator().manual_seed(number)
        change = 0.05 * torch.randn(weight.shape, generator=generator)
        up, sizes, down = torch.linalg.svd(change, full_matrices=False)
        for name, value in zip(adapter.pair(layer), (sizes[:, None] * down, up), strict=True):
            weights[name].data.copy_(value)
        weight += change
    before = outputs(load_plain(folder, "policy"), "policy")
    after = outputs(whole, "policy")
    torch.testing.assert_close(outputs(adapted, "policy"), after, rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 0.1


def load_plain(folder: Path, kind: Any, dtype: Any = torch.float32, packed: bool = False) -> Any:
    model = build(read_config(str(folder)), kind, dtype, packed=packed)
    fill(model, str(folder), CPU, head="normal", seed=SEED)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_off_are_the_base_bit_for_bit(inputs, dtype):
    model, _ = lora_model(inputs / "policy", "policy", LoraConfig(RANK), dtype)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)  # as fully_shard gathers it
    due = outputs(load_plain(inputs / "policy", "policy", dtype), "policy")
    assert torch.equal(outputs(model, "policy"), due), "it does not begin as its base"
    adapted = outputs(randomize(model), "policy")
    with adapters_off(model):
        assert torch.equal(outputs(model, "policy"), due)
    assert torch.equal(outputs(model, "policy"), adapted)
    assert not torch.equal(adapted, due)


def test_a_shared_base_is_two_models(inputs):
    folder = inputs / "policy"
    settings = {"policy": LoraConfig(RANK), "value": LoraConfig(2, 8, ("mlp",))}
    shared = build(read_config(str(folder)), "both")
    adapters = {kind: lora.Adapter(kind, settings[kind]) for kind in ("policy", "value")}
    for adapter in adapters.values():
        adapter.add(shared)
    fill(shared, str(folder), CPU, head="normal", seed=SEED)
    for adapter in adapters.values():
        adapter.read(shared, SEED)
    randomize(shared)
    held = weights_of(shared)
    for kind in ("policy", "value", "policy"):
        own, adapter = lora_model(folder, kind, settings[kind])
        assert adapters[kind].parameters(shared).keys() == weights_of(own).keys()
        for name, weight in adapter.trained(own).items():
            weight.data.copy_(held[name])
        assert torch.equal(outputs(shared, kind), outputs(own, kind)), kind


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.families] * (name not in SOME))
        for name in PLAIN
        if name != "gpt2"
    ],
)
def test_merged_weights_do_what_adapters_do(name):
    """In each family; none computes past the adapters, with a layer's weight alone."""
    config = configured(*PLAIN[name][:2])
    whole, adapted = (build(config, "policy") for _ in range(2))
    adapter = lora.Adapter("policy", LoraConfig(2, 4))
    adapter.add(adapted)
    for model in (whole, adapted):
        fill(model, "", CPU, random_init=True, seed=SEED)
    adapter.read(adapted, SEED)
    weights, plain = weights_of(randomize(adapted, 0.3)), weights_of(whole)
    assert plain.keys() == {key for key in weights if ".lora_" not in key}
    before = outputs(whole, "policy")
    for layer in adapter.layers(adapted):
        pair = (weights[part].data for part in adapter.pair(layer))
        weight = plain[f"{layer}.weight"].data
        weight.copy_(lora.merge(weight, *pair, scale=2.0))
    after = outputs(whole, "policy")
    torch.testing.assert_close(outputs(adapted, "policy"), after, rtol=0, atol=1e-4)
    assert not torch.allclose(before, after, atol=1e-3)


def test_a_type_without_linear_layers_is_refused():
    model = build(configured(*PLAIN["gpt2"][:2]), "policy")
    with pytest.raises(UserError, match="rank=2 matches no linear layer"):
        lora.Adapter("policy", LoraConfig(2)).add(model)


def test_what_eval_scores_of_an_adapter_is_its_base_with_it(inputs, trained_adapter):
    due = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(inputs / "policy"), trained_adapter
    )
    due = due.merge_and_unload().state_dict()
    merged = _of_model(str(trained_adapter), [])[1]()
    assert merged.keys() <= due.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight.detach(), due[name], rtol=0, atol=1e-6)


def test_eval_refuses_an_adapter_of_another_base(trained_adapter, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(trained_adapter, folder)
    tensors = load_file(folder / lora.WEIGHTS)
    save_file(tensors, folder / lora.WEIGHTS, {"format": "pt", "base": "another"})
    with pytest.raises(
        UserError, match=r"this adapter was trained on another base than policy\.path"
    ):
        _of_model(str(folder), [])[1]()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    runtime = Runtime(Launch(), place(PlacementConfig(), world=1, local_world=1), CPU, 60.0)
    yield runtime
    runtime.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_200_syncs_leave_the_base_as_it_was(inputs, runtime, dtype):
    folder = inputs / "policy"
    config = read_config(str(folder))
    adapter = lora.Adapter("policy", LoraConfig(RANK, 2 * RANK))
    model = build(config, "policy", dtype)
    parallelize(
        model,
        runtime.groups["actor"].mesh,
        dtype=dtype,
        activation_checkpointing=False,
        adapt=adapter.add,
    )
    fill(model, str(folder), CPU)
    adapter.read(model, SEED)
    randomize(model)
    runner = Runner(runtime.groups["actor"], CPU, 40)
    optim = OptimConfig(lr=1e-3)
    how: Any = {"steps": 1, "aggregate": "token_mean", "trainable": adapter}
    learner = Learner(model, runner, optim, **how)
    before = {name: weight.clone() for name, weight in parts(learner).items()}
    engine = HFEngine(
        config, tiny.build_tokenizer(), device=CPU, dtype=dtype, max_rows=2, folder=folder
    )
    first = {}
    for _ in range(200):
        engine.load_weights(learner.weights(dtype))
        got = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
        first = first or got
    assert all(torch.equal(weight, got[name]) for name, weight in first.items())
    assert all(torch.equal(weight, before[name]) for name, weight in parts(learner).items())
    merged = dict(learner.weights(torch.float32))
    for layer in adapter.layers(model):
        down, up = (before[name] for name in adapter.pair(layer))
        due = before[f"{layer}.weight"].double() + 2 * up.double() @ down.double()
        torch.testing.assert_close(merged[f"{layer}.weight"].double(), due, rtol=0, atol=1e-6)
        assert torch.equal(got[f"{layer}.weight"], merged[f"{layer}.weight"].to(dtype))


BOTH = ["--policy.lora.rank=3", "--value.lora.rank=3"]
ONE_BASE = [*BOTH, "--value.share-base", "--placement.mode=colocated"]


@pytest.fixture(scope="module", params=[wide((2, BOTH)), (1, ONE_BASE)], ids=["1+1", "shared"])
def finished(request, tmp_path_factory) -> tuple[int, list[str], Path]:
    """A run of four steps, with a checkpoint every other one."""
    world, flags = request.param
    folder = tmp_path_factory.mktemp("run") / "run"
    argv = [*SMALL, *flags, "--checkpoint.every=2", f"--run-dir={folder}"]
    run_ranks(world, main_rank, argv)
    return world, argv, folder


@pytest.mark.wide
def test_a_resumed_run_is_the_same_bit_for_bit(finished, tmp_path):
    world, argv, done = finished
    argv = [*argv[:-1], f"--run-dir={tmp_path / 'run'}"]
    run_ranks(world, main_rank, [*argv, "--steps=2"])
    run_ranks(world, main_rank, argv)
    for role in checkpoint.ROLES:
        assert_same(figures(tmp_path / "run", role), figures(done, role))
        one, other = (
            load_file(checkpoint.step_folder(run, 4) / role / lora.WEIGHTS)
            for run in (tmp_path / "run", done)
        )
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert max(float(x.abs().max()) for name, x in one.items() if "lora_B" in name) > 1e-4


def test_the_reference_is_no_second_model(finished):
    _, _, run = finished
    assert "reference" not in json.loads((run / "resolved.json").read_text())["models"]
    drift = [
        line["actor/ref_kl"] for _, line in sorted(figures(run, "actor").items()) if line["step"]
    ]
    assert drift[0] == 0 < drift[-1]


def test_a_checkpoint_is_small_and_peft_loads_it(finished, tmp_path, capsys):
    """Adapters and head alone; exports, too."""
    _, _, run = finished
    saved = checkpoint.step_folder(run, 4)
    config = parse(["--config", str(run / "config.toml")], recorded=True)
    out = export(run, out=tmp_path / "adapters")
    whole = export(run, out=tmp_path / "whole", dtype="float32", merged=True)
    rows = episodes()
    for kind, role in (("policy", "actor"), ("value", "critic")):
        names = {re.sub(r"\d+", "0", name) for name in load_file(saved / role / lora.WEIGHTS)}
        assert all("lora_" in name or name.startswith("base_model.model.score.") for name in names)
        held = checkpoint.TensorReader(saved / role).read_metadata().state_dict_metadata
        assert {name for name in held if "lora_" not in name and ".score." not in name} == set()
        for file in lora.FILES:
            assert (out / kind / file).read_bytes() == (saved / role / file).read_bytes()
        ours = load_model(config, run, kind, saved)
        due = outputs(ours, kind)
        lines = due.split([len(row.response) for row in rows])
        auto: Any = AutoModelForCausalLM if kind == "policy" else AutoModelForTokenClassification
        more = {} if kind == "policy" else {"num_labels": 1}
        base = auto.from_pretrained(run / "tiny", **more)
        loaded = peft.PeftModel.from_pretrained(base, saved / role)
        exported = auto.from_pretrained(whole / kind)
        for model in (loaded, exported):
            for row, line in zip(rows, lines, strict=True):
                torch.testing.assert_close(of_row(model.eval(), row, kind), line)
        assert not torch.allclose(
            due, outputs(load_model(config, run, kind, None), kind), atol=1e-3
        )


@pytest.mark.parametrize(
    ("base", "public"),
    [
        (f"acme/tiny@{'0123456789' * 4}", ["acme/tiny", "0123456789" * 4]),
        ("/home/alice/models/mine/", ["mine", None]),
        ("../alice/mine", ["mine", None]),
        ("alice/mine@v1", ["mine@v1", None]),
    ],
)
def test_an_adapters_settings_name_no_folder_of_the_machine(base, public, tmp_path):
    adapter = lora.Adapter("policy", LoraConfig(rank=2), base)
    model = build(tiny.model_config(), "policy")
    adapter.add(model)
    adapter.write(tmp_path, model, {})
    settings = json.loads((tmp_path / lora.SETTINGS).read_text())
    assert [settings["base_model_name_or_path"], settings["revision"]] == public


@torch.no_grad()
def of_row(model: Any, row: Episode, kind: str) -> torch.Tensor:
    """Log-probs or values of a row's response, by a model of transformers."""
    n = len(row.response)
    logits = model(input_ids=row.ids.long()[None]).logits[0, -n - 1 : -1]
    if kind == "value":
        return logits[:, 0]
    return logits.log_softmax(-1).gather(-1, row.ids.long()[-n:, None])[:, 0]


@pytest.mark.wide
def test_a_run_goes_on_with_two_bases_under_another_placement(finished, tmp_path):
    _, argv, done = finished
    argv = [flag for flag in argv if "share" not in flag and "mode" not in flag][:-1]
    shared = ["--placement.mode=colocated", "--value.share-base"]
    found = []
    for world, more in ((1, shared), (2, ["--value.no-share-base"])):
        folder = tmp_path / str(world)
        shutil.copytree(done, folder)
        run_ranks(world, main_rank, [*argv, *more, f"--run-dir={folder}", "--steps=5"])
        found.append([figures(folder, role) for role in checkpoint.ROLES])
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policy.lora.rank=2"], "policy.lora.rank was 3 and is now 2: this is another run"),
        (["--policy.lora.rank=2", "--force"], "actor has 3; set --policy.lora.rank 3"),
        (["--seed=3", "--force"], "on another base than policy.path=tiny (that base: drawn"),
        (["--value.lora.targets=mlp", "--force"], "critic: the model has no weight base"),
    ],
)  # fmt: skip
def test_what_a_resumed_run_refuses(finished, flags, said, capsys):
    _, argv, _ = finished
    assert train.main([*argv, *flags, "--steps=6", "--dry-run"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert said in line


def test_an_unset_learning_rate_is_ten_times_the_full_ones():
    def rates(*argv: str) -> list[float]:
        config = parse(argv)
        return [config.policy.optim.lr, config.value.optim.lr]

    other = "--policy.path=a/b"
    assert rates(other) == [1e-6, 5e-5]
    assert rates(other, *BOTH) == [1e-5, 5e-4]
    assert rates(*BOTH) == [1e-2, 1e-2]
    assert rates(other, BOTH[0]) == [1e-5, 5e-5]
    assert rates(other, *BOTH, "--policy.optim.lr=3e-6") == [3e-6, 5e-4]


def test_a_learning_rate_that_a_preset_has_for_whole_models_is_told(tmp_path, capsys):
    """Where flags add LoRA; not where the preset has LoRA, too, or a flag gives the rate."""

    def told(preset: str, *argv: str) -> list[str]:
        (tmp_path / "p.toml").write_text(preset)
        words = [f"--config={tmp_path}/p.toml", *argv]
        lines = "\n".join(kept_rates(parse(words), words))
        return re.findall(r"^warning: (\w+\.optim.lr=\S+) comes .*set (--\S+ \S+) \(", lines, re.M)

    rates = "policy.optim.lr = 3e-6\n"
    due = ("policy.optim.lr=3e-06", "--policy.optim.lr 3e-05")
    assert told(rates, *BOTH) == [due]
    assert train.main([f"--config={tmp_path}/p.toml", "--dry-run", *BOTH]) == 0
    assert f"set {due[1]} (" in capsys.readouterr().out
    assert told(rates + "policy.lora.rank = 0\n", *BOTH) == [due]
    assert told(rates) == told(rates, BOTH[1]) == told("", *BOTH) == []
    assert told(rates, *BOTH, "--policy.optim.lr=3e-6") == []
    assert told(rates + "policy.lora.rank = 2\n", *BOTH) == []


ADAPTER = "--policy.lora.path={adapter}"
WRONG: dict[str, list[str]] = {
    "policy.lora.rank=-1 must be at least 0; 0 turns it off": ["--policy.lora.rank=-1"],
    "policy.lora.alpha=0 must be above 0": [BOTH[0], "--policy.lora.alpha=0"],
    "policy.lora.targets=nope matches no linear layer; their names are like": [
        BOTH[0],
        "--policy.lora.targets=nope",
    ],
    "value.lora.targets=( is not a regular expression": [*BOTH, "--value.lora.targets=("],
    "lora.targets=lm_head matches no linear layer": [BOTH[0], "--policy.lora.targets=lm_head"],
    "policy.lora.alpha=8 without adapters: set policy.lora.rank": ["--policy.lora.alpha=8"],
    "value.freeze=attention with value.lora.rank=3": [*BOTH, "--value.freeze=attention"],
    "value.share_base=True needs LoRA for both models": [BOTH[0], "--value.share-base"],
    "with value.layers=1": [*ONE_BASE, "--value.layers=1"],
    "with value.path=": [*ONE_BASE, "--value.path={model}"],
    "with policy.offload=all": [*ONE_BASE, "--policy.offload=all"],
    "sequence_parallel=1 for the policy and tensor_parallel=2": [
        *ONE_BASE,
        "--value.tensor-parallel=2",
    ],
    "use placement.mode=colocated": [*BOTH, "--value.share-base", "--world-size=2"],
    "policy.lora.rank=2: the adapter in {adapter} has 3; set --policy.lora.rank 3": [
        "--policy.lora.rank=2",
        ADAPTER,
    ],
    "policy.lora.alpha=3: the adapter in {adapter} has 6; set --policy.lora.alpha 6": [
        BOTH[0],
        ADAPTER,
    ],
    "the adapter was trained with another base or other targets": [
        BOTH[0],
        ADAPTER,
        "--policy.lora.alpha=6",
        "--policy.lora.targets=mlp",
    ],
    "no adapter can be read there": [BOTH[0], "--policy.lora.path={model}"],
    "this adapter was trained on another base than policy.path=": [
        BOTH[0],
        "--policy.path={model}",
        "--policy.lora.path={saved}",
    ],
    "the adapter has use_dora": [BOTH[0], "--policy.lora.path={dora}"],
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_refused(said, inputs, trained_adapter, tmp_path, capsys, monkeypatch):
    """Before a process group is made, and in the dry run."""
    monkeypatch.setattr(run_main, "Runtime", None)
    monkeypatch.chdir(tmp_path)
    dora = tmp_path / "dora"
    dora.mkdir()
    settings = {"r": 3, "lora_alpha": 3, "use_dora": True}
    (dora / lora.SETTINGS).write_text(json.dumps(settings))
    (dora / lora.WEIGHTS).write_bytes((trained_adapter / lora.WEIGHTS).read_bytes())
    model, adapter = lora_model(inputs / "policy", "policy", LoraConfig(RANK))
    weights = {lora.peft_name(name): w.detach() for name, w in adapter.trained(model).items()}
    other_base = replace(adapter, digest=lambda: "another")
    other_base.write(tmp_path / "saved", model, weights)
    names = {
        "adapter": trained_adapter,
        "model": inputs / "policy",
        "saved": tmp_path / "saved",
        "dora": dora,
    }
    argv = [flag.format(**names) for flag in WRONG[said]]
    dry = ["--dry-run", "--compute.device=cpu"]
    for more in [dry] if "--world-size=2" in argv else [dry, dry[1:]]:
        assert train.main([*argv, *more]) == 2
        printed = capsys.readouterr()
        (line,) = printed.err.strip().splitlines()
        assert line.startswith("error: ")
        assert said.format(**names) in line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"r": 0, "lora_alpha": 3}, "has r=0"),
        ({"r": 4.0, "lora_alpha": 3}, r"has r=4\.0"),
        ({"r": True, "lora_alpha": 3}, "has r=True"),
        ({"r": 4, "lora_alpha": None}, "has lora_alpha=None"),
        ({"r": 4, "lora_alpha": "8"}, "has lora_alpha='8'"),
    ],
)
def test_an_adapter_that_is_scored_names_its_base(settings, said, tmp_path):
    (tmp_path / lora.SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(UserError, match=said):
        _of_model(str(tmp_path), [])
    (tmp_path / lora.SETTINGS).write_text(
        json.dumps({"r": 2, "lora_alpha": 0.5, "base_model_name_or_path": "org/base"})
    )
    assert _of_model(str(tmp_path), [])[0].policy.path == "org/base"
    assert _of_model(str(tmp_path), ["--policy.path=mine"])[0].policy.path == "mine"
