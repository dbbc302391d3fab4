"""Mixtures of experts on ranks are the library's loop over experts; what is said of their load and
size, what stays float32, what is refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from test_families import CPU, EXPERTS, PLAIN, configured, preflown, rows, written
from tiers import wide
from torch import nn
from transformers import AutoModelForCausalLM

from splitppo import algo
from splitppo.config import LoraConfig, OptimConfig, PlacementConfig
from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models import probe
from splitppo.models.build import build, freeze, read_config
from splitppo.models.experts import Load, Packing, experts_of, routers_of, top_k
from splitppo.models.heads import PolicyOutputs
from splitppo.models.learner import Learner
from splitppo.models.lora import Adapter
from splitppo.models.runner import Runner
from splitppo.models.sharding import local, parallelize
from splitppo.models.stored import Stored, open_folder
from splitppo.models.tensor import check_plan
from splitppo.models.trainable import Trainable, cost_of, count
from splitppo.models.weights import fill, save, to_precision
from splitppo.placement import place
from splitppo.rollout import Episode, Rollout
from splitppo.run import checkpoint
from splitppo.run import resolve as resolve_room
from splitppo.run.checks import preflight, warnings
from splitppo.run.resolve import _unreplayed, resolve
from splitppo.run.saver import Saver, tensors_of
from splitppo.run.saver import load as resume

FAMILIES = [name for name, (kind, _, _) in PLAIN.items() if "moe" in kind] + [
    *("mixtral", "gpt-oss", "qwen3-next", "deepseek-v3")
]
OUTPUTS = PolicyOutputs(1.0, 96)
# of each optimizer step; of the first, one rank has none
MINI_BATCHES = [[0], [1, 2], [0, 2]]
DEEP = {"num_hidden_layers": 4}
OPTIM = OptimConfig(lr=1e-2, eps=1e-3)
MANY = {"num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12}


def many(name: str) -> Any:
    """Twelve experts: some get no token."""
    kind, settings, _ = PLAIN[name]
    return configured(kind, settings | {n: m for n, m in MANY.items() if n in settings})


def objective(model: Any, batch: Any, fields: Any, outputs: PolicyOutputs = OUTPUTS) -> Any:
    logprobs, _ = outputs(model, batch)
    return algo.aggregate_loss(-fields["a"] * logprobs, batch.lengths, "token_mean"), {}


def advantages(rollout: Rollout) -> torch.Tensor:
    return torch.linspace(-1, 2, rollout.tokens)


def told(config: Any) -> list[Episode]:
    """Rows with experts that no router would choose; of some tokens they are not known."""
    k = config.num_experts_per_tok
    packing = Packing(layers_of(config), k, experts_number(config))
    draw = torch.Generator().manual_seed(5)
    episodes = []
    for row in rows():
        shape = len(row.response), packing.layers, packing.experts
        packed = packing.pack(torch.rand(shape, generator=draw).argsort(-1)[..., :k])
        packed[4:6] = 255
        (segment,) = row.segments
        experts = packed.numpy().tobytes()
        episodes.append(replace(row, segments=(segment._replace(experts=experts),)))
    return episodes


def layers_of(config: Any) -> int:
    """Layers with experts."""
    dense = getattr(config, "first_k_dense_replace", 0) or getattr(config, "num_dense_layers", 0)
    return config.num_hidden_layers - dense


def experts_number(config: Any) -> int:
    return getattr(config, "num_experts", None) or config.num_local_experts


def weigh(config: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A router's weights of these experts, as each family's paper has them."""
    if config.model_type in ("deepseek_v3", "glm4_moe", "lfm2_moe"):
        scores = logits.sigmoid()
    else:
        scores = logits.softmax(-1)
    weights = scores.gather(-1, ids)
    if config.model_type in ("mixtral", "gpt_oss", "granitemoe", "qwen3_5_moe_text") or getattr(
        config, "norm_topk_prob", False
    ):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(config, "routed_scaling_factor", 1.0)


def on_ranks(
    rank: int,
    folders: dict[str, Path],
    modes: dict[str, tuple[bool, bool, bool]],
    replays: bool = False,
) -> Any:
    placement = place(PlacementConfig(mode="colocated"), world=2, local_world=2)
    runtime = Runtime(Launch(rank, 2, rank, 2), placement, CPU, 60.0)
    results: dict[str, Any] = {}
    for name, folder in folders.items():
        packed, checkpointed, compiled = modes[name]
        config = read_config(str(folder))
        model: Any = build(config, "policy", packed=packed)
        parallelize(
            model,
            runtime.groups["actor"].mesh,
            dtype=torch.float32,
            activation_checkpointing=checkpointed,
            compiled=compiled,
        )
        fill(model, str(folder), device=CPU)
        runner = Runner(runtime.groups["actor"], CPU, 12)
        learner = Learner(model, runner, OPTIM, steps=9, aggregate="token_mean")
        if replays:
            model.load.drive()
        outputs = replace(OUTPUTS, replays=replays)
        rollout = Rollout([] if rank else told(config) if replays else rows())
        steps = MINI_BATCHES if rank == 0 else [[]] * len(MINI_BATCHES)
        fields = {"a": advantages(Rollout(rows())) if rank == 0 else torch.zeros(0)}
        before = learner.forward(rollout, outputs)[0]
        loss = partial(objective, outputs=outputs)
        figures = learner.update(rollout, steps, fields, loss, step=1, epochs=1)
        after = {n: w.clone() for n, w in learner.weights(torch.float32)}
        results[name] = before, figures, after
        broken = torch._dynamo.utils.counters.pop("graph_break", {})
        assert not any("side effect" in reason for reason in broken), broken
    return results


def in_a_loop(folder: Path, replays: bool = False) -> Any:
    """The same by transformers, row by row and expert by expert."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, eps=OPTIM.eps, weight_decay=0.0)
    rollout = Rollout(told(model.config) if replays else rows())
    parts = rollout.split(advantages(rollout))
    experts = experts_of(model)
    given: dict[int, torch.Tensor] = {}  # by layer

    def keep(module: Any, _: Any, out: Any) -> None:
        module.logits = out[0]

    def force(module: Any, inputs: Any, layer: int) -> Any:
        states, ids, _ = inputs
        ids = torch.where(given[layer] < module.num_experts, given[layer], ids)
        return states, ids, weigh(model.config, routers[layer].logits, ids)

    routers = routers_of(model)
    for layer, (router, module) in enumerate(zip(routers, experts, strict=True)):
        if replays:
            router.register_forward_hook(keep)
            module.register_forward_pre_hook(partial(force, layer=layer))

    def logprobs(row: Any) -> torch.Tensor:
        if replays:
            packing = Packing(len(experts), top_k(model), experts[0].num_experts)
            packed = torch.full((row.total, packing.width), 255, dtype=torch.uint8)
            held = torch.frombuffer(bytearray(row.segments[0].experts), dtype=torch.uint8)
            packed[len(row.prompt) - 1 : -1] = held.view(-1, packing.width)
            given.update(enumerate(packing.unpack(packed)))
        n = len(row.response)
        logits = model(input_ids=row.ids[None].long(), use_cache=False).logits[0, -n - 1 : -1]
        return logits.log_softmax(-1).gather(-1, row.ids[-n:, None].long())[:, 0]

    before = torch.cat([logprobs(row) for row in rollout.episodes]).detach()
    norms = []
    for places in MINI_BATCHES:
        tokens = sum(len(parts[i]) for i in places)
        loss: Any = sum((-parts[i] * logprobs(rollout.episodes[i])).sum() for i in places)
        (loss / tokens).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return before, norms, model.state_dict()


@pytest.mark.parametrize(
    ("names", "checkpointed", "compiled"),
    [
        (["qwen3-moe", "deepseek-v3"], False, False),
        wide(FAMILIES, True, False),
        wide(["olmoe", "glm4-moe"], True, True),
    ],
    ids=["some", "all", "compiled"],
)
def test_experts_on_ranks_are_a_loop_over_experts(
    names: list[str], checkpointed: bool, compiled: bool, tmp_path: Path
) -> None:
    """Log-probs, norms and three steps' weights, with experts and a rank that get no token."""
    check_ranks(*written_modes(names, checkpointed, compiled, tmp_path))


@pytest.mark.parametrize(
    ("names", "checkpointed", "compiled"),
    [
        (["qwen3-moe", "deepseek-v3"], True, False),
        wide(FAMILIES, False, False),
        wide(["olmoe", "granite-moe"], True, True),
    ],
    ids=["some", "all", "compiled"],
)
def test_replayed_experts_on_ranks_are_a_loop_over_them(
    names: list[str], checkpointed: bool, compiled: bool, tmp_path: Path
) -> None:
    """With weights that the router makes of them. Where they are not known, it chooses."""
    check_ranks(*written_modes(names, checkpointed, compiled, tmp_path), replays=True)


def written_modes(names: list[str], checkpointed: bool, compiled: bool, folder: Path) -> Any:
    """Folders of these families, and how each runs: padded, and packed if it can."""
    folders, modes = {}, {}
    for name in names:
        written(folder / name, many(name))
        for packed in (False, True)[: 1 + PLAIN[name][2]]:
            folders[f"{name} {packed}"] = folder / name
            modes[f"{name} {packed}"] = packed, checkpointed, compiled
    return folders, modes


def check_ranks(folders: Any, modes: Any, replays: bool = False) -> None:
    first, _ = run_ranks(2, on_ranks, folders, modes, replays)
    for name, (before, figures, after) in first.items():
        due, norms, weights = in_a_loop(folders[name], replays)
        assert ("routes_differ" in figures[0]) == replays
        assert figures[0].get("routes_differ", 1) > 0.5
        torch.testing.assert_close(before, due, rtol=1e-5, atol=1e-5, msg=name)
        assert [step["grad_norm"] for step in figures] == pytest.approx(norms, rel=1e-5), name
        assert figures[0]["experts_idle_max"] >= 1, name
        for weight, tensor in after.items():
            torch.testing.assert_close(
                tensor, weights[weight], rtol=1e-5, atol=1e-5, msg=f"{name}: {weight}"
            )


@pytest.fixture
def group():
    runtime = Runtime(Launch(), place(PlacementConfig(), world=1, local_world=1), CPU, 60.0)
    yield runtime.groups["actor"]
    runtime.close()


def test_the_load_counts_response_tokens(group: Any) -> None:
    """Not prompts, not padding."""
    torch.manual_seed(0)
    config = configured("qwen3_moe", EXPERTS | {"num_experts": 12})
    model: Any = build(config, "policy")
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    due = torch.zeros(2, 12, dtype=torch.int64)
    for row in rows():
        chosen.clear()
        model.causal(input_ids=row.ids[None].long())
        for counts, ids in zip(due, chosen, strict=True):
            counts += ids[len(row.prompt) - 1 : -1].flatten().bincount(minlength=12)
    Runner(group, CPU, 64).forward(model, Rollout(rows()), lambda m, b: [OUTPUTS(m, b)[0]])
    counted = model.load.counts
    assert torch.equal(counted, due)
    figures = model.load.figures(group)
    share = counted.amax(1) / counted.sum(1)
    assert figures["expert_share"] == pytest.approx(float(share.mean()))
    assert figures["expert_share_max"] == pytest.approx(float(share.max()))
    assert figures["experts_idle_max"] == float((counted == 0).sum(1).max())


def test_a_rank_reads_its_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none of them."""
    plain = written(tmp_path, configured("qwen3_moe", EXPERTS)).state_dict()
    stored = open_folder(str(tmp_path), build(read_config(str(tmp_path)), "policy"))
    names: list[str] = []
    read = Stored._slice
    monkeypatch.setattr(
        Stored, "_slice", lambda self, name: [names.append(name), read(self, name)][1]
    )
    weight = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(stored.read(weight, (slice(1, 3),)), plain[weight][1:3])
    kinds = [f"{number}.{kind}_proj" for number in (1, 2) for kind in ("gate", "up")]
    assert names == [f"model.layers.1.mlp.experts.{kind}.weight" for kind in kinds]
    assert stored.read(weight, (slice(4, 4),)).shape == (0, 32, 32)


LARGE = {"num_experts": 64, "hidden_size": 512, "moe_intermediate_size": 256}


def peak(verb: Callable[[], Any]) -> int:
    """Bytes of memory that this process has at most while `verb` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    verb()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def peaks(rank: int, folder: Path, run_dir: Path) -> dict[str, int]:
    """Of one of four ranks that reads a model, writes checkpoints and reads one: bytes above those
    with which it began."""
    placement = place(PlacementConfig(mode="colocated"), world=4, local_world=4)
    runtime = Runtime(Launch(rank, 4, rank, 4), placement, CPU, 60.0)
    checkpoint.BLOCK = 2**20
    model: Any = build(read_config(str(folder)), "policy")
    mesh = runtime.groups["actor"].mesh
    parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=False)
    begun = peak(lambda: None)
    load = peak(lambda: fill(model, str(folder), device=CPU))
    runner = Runner(runtime.groups["actor"], CPU, 64)
    learner = Learner(model, runner, OPTIM, steps=1, aggregate="token_mean")
    for tensors in tensors_of([learner]).values():
        for tensor in tensors.values():
            local(tensor).add_(1)  # zeros take no memory before
    saver = Saver([learner], "actor", run_dir, runtime.saving["actor"], committed=lambda: None)

    def save() -> None:
        saver.begin(1, {})
        saver.commit(1)
        saver.wait()

    saved = peak(save)
    runtime.all_gather("written", "")
    part = checkpoint.step_folder(run_dir, 1) / "actor"
    resumed = peak(lambda: resume([learner], part, [], runtime.saving["actor"]))
    return {"load": load - begun, "save": saved - begun, "resume": resumed - begun}


@pytest.mark.wide
def test_no_rank_holds_the_others_experts(tmp_path: Path) -> None:
    """Four ranks with a quarter of 100 MB of experts each. A rank that reads, writes or resumes
    needs less than twice its part beside what it keeps; of others' experts the matrices `gate` and
    `up` alone would be 2.7 parts."""
    written(tmp_path / "model", configured("qwen3_moe", EXPERTS | LARGE | {"num_hidden_layers": 1}))
    part = 64 * 3 * 512 * 256 * 4 / 4
    # weights and the file's pages of them; weights and moments, and their copies
    kept = {"load": 2, "save": 6, "resume": 6}
    for rank, highest in enumerate(run_ranks(4, peaks, tmp_path / "model", tmp_path)):
        parts = {verb: round(size / part - kept[verb], 2) for verb, size in highest.items()}
        print(f"rank {rank}, parts of experts beside what it keeps: {parts}")
        assert max(parts.values()) < 2, parts


def test_a_token_meets_some_of_the_parameters() -> None:
    config = configured("qwen3_moe", EXPERTS)
    counts = count(config, Trainable("policy"))
    experts = 2 * 4 * 3 * 16 * 32  # two layers of four experts with three matrices
    assert counts.active == counts.parameters - experts // 2
    assert counts.trained == counts.parameters
    frozen = count(config, Trainable("policy", frozen=("router",)))
    assert frozen.trained == counts.parameters - 2 * 4 * 32


@pytest.mark.parametrize("experts", [255, 256, 300])
def test_experts_are_packed_in_a_byte_or_two(experts: int) -> None:
    packing = Packing(3, 2, experts)
    ids = torch.randint(0, experts, (5, 3, 2))
    ids[0] = experts - 1
    packed = packing.pack(ids)
    assert packed.shape == (5, 8 if experts < 256 else 12)
    assert torch.equal(packing.unpack(packed), ids.transpose(0, 1))
    assert (packing.unpack(torch.full_like(packed, 255)) >= experts).all()


def replaying(folder: Path, setting: str) -> tuple[bool, list[str]]:
    """Whether a run replays the engine's experts, and its warnings; checks all else."""
    short = ["--rollout.max-prompt-tokens=8", "--rollout.max-new-tokens=24"]
    config = parse([f"--policy.path={folder}", f"--policy.replay-routing={setting}", *short])
    placement = place(config.placement, world=1, local_world=1)
    resolved = resolve(config, placement, 1, CPU, probe=False)
    preflight(resolved)
    return not resolved.unreplayed, [line for line in warnings(resolved) if "replay" in line]


def test_routing_is_replayed_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, mixture = tmp_path / "dense", tmp_path / "mixture"
    written(dense, configured("qwen3", {}))
    written(mixture, configured("qwen3_moe", EXPERTS))
    assert replaying(dense, "auto") == (False, [])
    with pytest.raises(UserError, match="replay_routing=on: type 'qwen3' has no experts"):
        replaying(dense, "on")
    assert replaying(mixture, "off") == (False, [])
    assert replaying(mixture, "auto") == replaying(mixture, "on") == (True, [])
    late = tmp_path / "late"  # its first layers are dense
    written(late, configured("qwen3_moe", EXPERTS | {"mlp_only_layers": [0, 1], **DEEP}))
    assert replaying(late, "on") == (True, [])
    _unreplayed.cache_clear()
    monkeypatch.setattr(probe, "Load", Undriven)
    with pytest.raises(UserError, match="replay_routing=on: type 'qwen3_moe' has routers"):
        replaying(mixture, "on")
    replays, said = replaying(mixture, "auto")
    assert not replays
    assert ["routers that can't be overridden" in line for line in said] == [True]
    policy: Any = SimpleNamespace(counts=SimpleNamespace(active=1, parameters=2))
    monkeypatch.setattr(resolve_room, "vllm_version", lambda: "0.33.1")
    assert "vLLM 0.33.1" in _unreplayed.__wrapped__("on", policy, "vllm")


class Undriven(Load):
    """Of routers that choose without `torch.topk`."""

    def replay(self, packed: torch.Tensor | None) -> None: ...


def test_the_experts_of_a_token_by_another_name() -> None:
    config = SimpleNamespace(num_experts_per_tok=None, top_k_experts=3)
    assert top_k(cast(Any, SimpleNamespace(config=config))) == 3


def test_activations_of_float32_experts_are_measured() -> None:
    """As twice those of bfloat16: without memory, their products run in that alone."""
    config = configured("qwen3_moe", EXPERTS)
    whole = Trainable("policy")
    counts = count(config, whole)
    saved, half = (
        cost_of(config, whole, counts, dtype, compiled=False).saved
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert saved == 2 * half


def rounded(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What an export in bfloat16 holds."""
    save(to_precision(model, torch.bfloat16), folder / "out", folder, folder)
    return load_file(folder / "out" / "model.safetensors")


@pytest.mark.parametrize("name", ["glm4-moe", wide("deepseek-v3"), "lfm2-moe"])
def test_what_a_family_keeps_in_float32_stays(name: str, group: Any, tmp_path: Path) -> None:
    """Where the model runs, in what engines get and in exports."""
    plain = written(tmp_path, configured(*PLAIN[name][:2])).state_dict()
    model: Any = build(read_config(str(tmp_path)), "policy", torch.bfloat16)
    fill(model, str(tmp_path), device=CPU)
    exported = rounded(model, tmp_path)
    parallelize(model, group.mesh, dtype=torch.bfloat16, activation_checkpointing=False)
    fill(model, str(tmp_path), device=CPU)
    runner = Runner(group, CPU, 64)
    learner = Learner(model, runner, OPTIM, steps=1, aggregate="token_mean")
    sent = dict(learner.weights(torch.bfloat16))
    # transformers 5.17 does not name the routers
    endings = ("expert_bias", *(model.model._keep_in_fp32_modules_strict or ()))
    exact = {weight for weight in plain if weight.endswith(endings)}
    assert exact
    for tensors in (sent, exported):
        assert {n for n, w in tensors.items() if w.dtype == torch.float32} == exact
        assert all(torch.equal(tensors[weight], plain[weight]) for weight in exact)
    if "gate.weight" in endings:
        routed = []
        gate = model.model.layers[1].mlp.gate
        gate.register_forward_pre_hook(lambda module, _: routed.append(module.weight.dtype))
        runner.forward(model, Rollout(rows()), lambda m, b: [OUTPUTS(m, b)[0]])
        assert {*routed} == {torch.float32}


@pytest.mark.parametrize("name", ["qwen3-moe", *(wide(n) for n in FAMILIES if n != "qwen3-moe")])
def test_an_export_is_the_folder_again(name: str, tmp_path: Path) -> None:
    """Its tensors, and transformers' own model."""
    start, out = tmp_path / "start", tmp_path / "out"
    plain = written(start, configured(*PLAIN[name][:2])).state_dict()
    model: Any = build(read_config(str(start)), "policy")
    fill(model, str(start), device=CPU)
    save(model, out, start, start)
    before, after = (load_file(folder / "model.safetensors") for folder in (start, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[weight], plain[weight]) for weight in plain)


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3-next", "deepseek-v3"])
def test_adapters_are_beside_linear_layers_alone(name: str) -> None:
    """peft would put those of layers that are called as an expert's on the experts."""
    model = build(configured(*PLAIN[name][:2]), "policy")
    Adapter("policy", LoraConfig(rank=2)).add(model)
    names = [weight for weight, _ in model.named_parameters() if "lora_" in weight]
    assert names
    assert not [weight for weight in names if "experts" in weight]


@pytest.mark.parametrize(
    ("name", "lacks"), [("qwen3", "experts"), ("glm4-moe", "load-balancing loss")]
)
def test_a_loss_that_no_family_has_is_refused(name: str, lacks: str, tmp_path: Path) -> None:
    written(tmp_path, configured(*PLAIN[name][:2]))
    with pytest.raises(UserError, match=f"router_aux_coef=0.1: policy.path=.* has no {lacks}"):
        preflown(tmp_path, "--policy.router-aux-coef=0.1")


def test_what_experts_can_not_do_is_refused_by_name() -> None:
    config = configured("olmoe", EXPERTS)
    with pytest.raises(UserError, match="tensor_parallel=2: type 'olmoe' has experts"):
        check_plan(config, "policy", 2, "fsdp")
    with pytest.raises(UserError, match=r"lora\.targets=gate_up_proj .* experts"):
        count(config, Adapter("policy", LoraConfig(rank=2, targets=("gate_up_proj",))))
    shared = configured(*PLAIN["glm4-moe"][:2])
    with pytest.raises(UserError, match=r"lora\.targets=gate_proj .* experts"):
        count(shared, Adapter("policy", LoraConfig(rank=2, targets=("gate_proj",))))
    with pytest.raises(UserError, match="freeze=router matches no weight"):
        freeze(build(configured("llama", {}), "policy"), ["router"], "policy.freeze")
