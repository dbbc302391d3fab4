"""Tensor parallelism beside FSDP: ranks that share the layers are one plain module of transformers,
to 1e-5."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from episodes import episode
from ranks import run_ranks, run_threads
from runs import SMALL, assert_same, figures, main_rank
from tiers import wide
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from splitppo import algo
from splitppo.config import OptimConfig, PlacementConfig, RewardConfig, RolloutConfig
from splitppo.engine import Piece
from splitppo.generator.sampler import Sampler
from splitppo.job import wire
from splitppo.job.collectives import Group
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models import attention
from splitppo.models.build import build, read_config
from splitppo.models.heads import PolicyOutputs, value_outputs
from splitppo.models.learner import Learner
from splitppo.models.runner import Runner
from splitppo.models.sharding import bounds, local, parallelize
from splitppo.models.weights import fill
from splitppo.placement import SetShape, Streams, make_step_plan, place
from splitppo.rewards.model import RewardModel, RewardText
from splitppo.rollout import Episode, Prompt, Rollout
from splitppo.run import checkpoint
from splitppo.tools.export import export

CPU = torch.device("cpu")
BATCH, STEPS, LR, CLIP = 9, 2, 2e-3, 0.5
OUTPUTS = PolicyOutputs(0.7, 80)
LAYERS = ["sliding_attention", "full_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "head_dim": 16, "layer_types": LAYERS},
}
# whether embedding and output layer are tied
KINDS = [(True, "policy"), (False, "policy"), (False, "value")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for name, more in SHAPES.items():
            for tied in (True, False):
                config = AutoConfig.for_model(
                    name, hidden_size=32, intermediate_size=42, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, vocab_size=83,
                    max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.2,
                    pad_token_id=None, bos_token_id=None, eos_token_id=1, **more,
                )  # fmt: skip
                model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
                for parameter in model.parameters():  # no bias 0 and no norm 1
                    parameter.data += 0.1 * torch.randn_like(parameter)
                model.save_pretrained(path / f"{name}_{tied}")
    return path


def samples() -> list[Episode]:
    made = []
    for row in range(BATCH):
        generator = torch.Generator().manual_seed(row)
        prompt = torch.randint(3, 80, (1 + row % 4,), generator=generator).tolist()
        response = torch.randint(3, 80, (1 + (row * 5) % 8,), generator=generator).tolist()
        made.append(episode(row, prompt, response, [0.0] * len(response), "eos"))
    return made


def target(row: int) -> float:
    return float(row % 3) - 0.7


def objective(model, batch, given, kind):
    if kind == "policy":
        losses = -OUTPUTS(model, batch, entropy=False)[0] * given["target"]
    else:
        losses = (value_outputs(model, batch) - given["target"]) ** 2
    return algo.aggregate_loss(losses, batch.lengths, "token_mean"), {}


def outputs(model, batch, kind):
    return [
        OUTPUTS(model, batch, entropy=False)[0] if kind == "policy" else value_outputs(model, batch)
    ]


def make_learner(
    folder, kind, runtime, role, *, packed=False, checkpointing=False, compiled=False
) -> Learner:
    model, group = build(read_config(str(folder)), kind, packed=packed), runtime.groups[role]
    (ranks,) = runtime.sets[role].values()
    how: Any = {"activation_checkpointing": checkpointing, "compiled": compiled, "ranks": ranks}
    parallelize(model, runtime.shards[role], dtype=torch.float32, **how)
    fill(model, str(folder), device=CPU, head="normal", seed=9)
    optim = OptimConfig(lr=LR, eps=1e-3, max_grad_norm=CLIP)
    return Learner(model, Runner(group, CPU, 40), optim, steps=STEPS, aggregate="token_mean")


def rows_of(learner: Learner) -> tuple[Rollout, list[list[int]], dict[str, torch.Tensor]]:
    """This rank's rows of the batch, as mini-batches, and the fields of the objective."""
    group = learner.runner.group
    cut = make_step_plan(
        Streams(BATCH), seed=0, step=1, mini_batches=1, sizes={"actor": group.dp_size}
    )
    rows = cut.slots("actor", group.dp_rank)
    rollout = Rollout([s for s in samples() if s.row in rows[0]])
    return (
        rollout,
        [*map(rollout.places, rows)],
        {"target": torch.tensor([target(s.row) for s in rollout.episodes for _ in s.response])},
    )


def train(learner: Learner, kind: str, steps: int = STEPS) -> list[float]:
    """The gradient's norm in each step."""
    rollout, rows, fields = rows_of(learner)
    update = partial(learner.update, rollout, rows, fields, partial(objective, kind=kind), epochs=1)
    return [update(step=step)[0]["grad_norm"] for step in range(1, steps + 1)]


def full_weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in learner.weights(torch.float32)}


def case_rank(folders, runtime, role, packed, cases):
    """For each case: rows' outputs, gradient norms, weights before and after."""
    found = {}
    for number, case in enumerate(cases):
        name, tied, kind = case
        folder, checkpointing = folders / f"{name}_{tied}", number % 3 == 0
        learner = make_learner(
            folder, kind, runtime, role, packed=packed, checkpointing=checkpointing
        )
        rollout, *_ = rows_of(learner)
        before = full_weights(learner)
        for weight, parameter in learner.sharded().items():
            due = before[weight][bounds(learner.model, weight, parameter)]
            assert torch.equal(local(parameter).view_as(due), due)
        (out,) = learner.runner.forward(learner.model, rollout, partial(outputs, kind=kind))
        by_row = dict(zip(rollout.rows, [x.tolist() for x in rollout.split(out)], strict=True))
        found[case] = by_row, train(learner, kind), before, full_weights(learner)
    return found


def ranks(rank, folders, actor, sizes, shard_size, packed, cases):
    """One of 4 ranks: colocated, or in two groups."""
    config = (
        PlacementConfig(mode="per_node", actor=actor)
        if actor < 4
        else PlacementConfig(mode="colocated")
    )
    placement = place(config, world=4, local_world=4)
    runtime = Runtime(
        Launch(rank, 4, rank, 4), placement, CPU, 60.0, shard_size=shard_size, set_shapes=sizes
    )
    role = "actor" if "actor" in runtime.groups else "critic"
    return role, case_rank(folders, runtime, role, packed, cases)


def plain(
    folder: Path, kind: str, head: dict[str, torch.Tensor]
) -> tuple[dict, list[float], dict, dict]:
    """The same by transformers, in one process, row by row."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if kind == "value":
        model = nn.ModuleDict({"model": model.base_model, "score": nn.Linear(32, 1)})
        model["score"].load_state_dict(head)
    before = {name: x.clone() for name, x in model.state_dict().items()}

    def of_row(sample: Episode) -> torch.Tensor:
        ids, n = sample.ids[None].long(), len(sample.response)
        if kind == "value":
            return model["score"](model["model"](input_ids=ids).last_hidden_state[0, -n - 1 : -1])[
                :, 0
            ]
        log_p = (model(input_ids=ids).logits[0, -n - 1 : -1, :80] / 0.7).log_softmax(-1)
        return log_p.gather(-1, torch.tensor(sample.response)[:, None])[:, 0]

    with torch.no_grad():
        outs = {sample.row: of_row(sample).tolist() for sample in samples()}
    tokens, norms = sum(len(s.response) for s in samples()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3, weight_decay=0.0)
    for _ in range(STEPS):
        for sample in samples():
            out, due = of_row(sample), target(sample.row)
            (((out - due) ** 2 if kind == "value" else -out * due).sum() / tokens).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return outs, norms, before, model.state_dict()


TWO = SetShape(tensor=2)
CUT = SetShape(sequence=2)


def chosen(*kinds: int) -> list[tuple]:
    """A kind of each shape, in turn."""
    return [(name, *KINDS[kinds[at % len(kinds)]]) for at, name in enumerate(SHAPES)]


MESHES = {  # what shares layers has each shape twice; what cuts rows, which no shape knows, once
    "2x2": (4, {"actor": [TWO]}, None, False, chosen(0, 2)),
    "2x1x2": (4, {"actor": [TWO]}, 2, True, chosen(1)[1:2]),  # two replicas of 1x2
    # 1x2 in the one group, 2x1 in the other
    "1x2 and 2x1": (2, {"actor": [TWO], "critic": [SetShape()]}, None, True, chosen(2, 1)[3:]),
    "the same, others": (2, {"actor": [TWO], "critic": [SetShape()]}, None, True, chosen(2, 1)[:3]),
    # rows, sequence, tensor
    "2x2x1": (4, {"actor": [CUT]}, None, True, chosen(1, 2, 0)[::2]),
    "1x2x2": (4, {"actor": [SetShape(2, 2)]}, None, True, chosen(1, 2, 0)[1::2]),
    "1x4x1": (4, {"actor": [SetShape(4)]}, 2, True, chosen(0)[-1:]),  # two key heads
    "1x2x1 and 1x1x2": (2, {"actor": [CUT], "critic": [TWO]}, None, True, chosen(0)[3:4]),
}


@pytest.mark.parametrize(
    ("actor", "sizes", "shard_size", "packed", "cases"),
    [MESHES[name] if name == "1x2 and 2x1" else wide(*MESHES[name]) for name in MESHES],
    ids=MESHES,
)
def test_sets_are_one_module(folders, actor, sizes, shard_size, packed, cases):
    every = run_ranks(4, ranks, folders, actor, sizes, shard_size, packed, cases)
    for case in cases:
        name, tied, kind = case
        some = next(found[case] for _, found in every)
        head = (
            {"weight": some[2]["score.weight"], "bias": some[2]["score.bias"]}
            if kind == "value"
            else {}
        )
        outs, norms, before, after = plain(folders / f"{name}_{tied}", kind, head)
        for role in ("actor", "critic") if actor < 4 else ("actor",):
            parts = [found[case] for own_role, found in every if own_role == role]
            seen = {row: out for part in parts for row, out in part[0].items()}
            assert sorted(seen) == list(range(BATCH))
            for row, out in seen.items():
                torch.testing.assert_close(
                    out, outs[row], rtol=1e-5, atol=1e-5, msg=f"{case} {role} row {row}"
                )
            for _, seen_norms, first, last in parts:
                assert seen_norms == pytest.approx(norms, rel=1e-5, abs=1e-5), case
                for got, due in ((first, before), (last, after)):
                    assert {n for n in due if n != "lm_head.weight" or not tied} == set(got)
                    for weight, value in got.items():
                        torch.testing.assert_close(
                            value, due[weight], rtol=0, atol=1e-5, msg=f"{case} {weight}"
                        )


def compiled_rank(rank, folder, shape):
    """Gradient norms of some steps of a compiled model, and the graphs that they needed. Layers
    that are cut are also checkpointed."""
    from torch._dynamo.testing import CompileCounterWithBackend  # half a second for each rank

    graphs, compiler = CompileCounterWithBackend("eager"), torch.compile

    def over_all(q: Any, k: Any, v: Any, *_: Any) -> torch.Tensor:
        """Rows see each other: what the lengths cut can't be compiled, and there is no kernel."""
        heads = (x.transpose(0, 1) for x in (q, k, v))
        return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(0, 1)

    # in this process
    attention._row_by_row = over_all  # type: ignore[assignment]
    torch.compile = lambda given, *, dynamic, **_: compiler(given, dynamic=dynamic, backend=graphs)
    placement = place(PlacementConfig(mode="colocated"), world=2, local_world=2)
    runtime = Runtime(Launch(rank, 2, rank, 2), placement, CPU, 60.0, set_shapes={"actor": [shape]})
    norms = []
    for compiled in (False, True):
        how: Any = {"compiled": compiled, "packed": shape == CUT, "checkpointing": shape == TWO}
        norms.append(train(make_learner(folder, "policy", runtime, "actor", **how), "policy"))
    return norms, graphs.frame_count


@pytest.mark.wide
@pytest.mark.parametrize("shape", [TWO, CUT])
def test_compiled_layers_of_a_set_are_the_same(folders, shape):
    for (plain_norms, norms), graphs in run_ranks(2, compiled_rank, folders / "qwen3_True", shape):
        assert norms == pytest.approx(plain_norms, rel=1e-6)
        assert 0 < graphs <= 3, "lengths or layers are compiled anew"


def wire_rank(rank: int, argv: list[str]) -> tuple[list[str], list[str]]:
    """A rank of a run: what it sent and received."""
    sent, received = [], []
    send, recv = wire.Wire.send, wire.Wire.recv

    def sends(self, hop, *given):
        sent.append(str(hop))
        return send(self, hop, *given)

    def receives(self, hop, *given):
        received.append(str(hop))
        return recv(self, hop, *given)

    wire.Wire.send, wire.Wire.recv = sends, receives  # type: ignore[method-assign]
    main_rank(rank, argv)
    return sent, received


@pytest.mark.parametrize(
    ("axis", "actors", "critics", "speakers"),
    [wide("tensor", 4, 2, [0, 2, 4, 5]), wide("sequence", 2, 1, [0, 2])],
)
def test_a_run_goes_on_with_sets_of_other_sizes(tmp_path, axis, actors, critics, speakers):
    """Actor ranks in sets of two and critic ranks without; then one rank; then two of both roles,
    and only the critics are one set."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    argv = [
        *SMALL,
        "--steps=3",
        "--rollout.batch-size=10",
        "--ppo.kl-target=0.001",
        "--ppo.kl-horizon=100",
    ]
    sets = [f"--placement.actor={actors}", f"--fsdp.{axis}-parallel=2"]
    sets += [f"--value.{axis}-parallel=1"]
    saving = ["--checkpoint.every=1", "--checkpoint.keep=0", f"--run-dir={whole}"]
    hops = run_ranks(actors + critics, wire_rank, [*argv, *sets, *saving])
    every = [sorted(key for part in hops for key in part[side]) for side in (0, 1)]
    assert every[0] == every[1] != []
    assert [rank for rank, (sent, received) in enumerate(hops) if sent or received] == speakers
    first = f"--resume={checkpoint.step_folder(whole, 1)}"
    run_ranks(1, main_rank, [*argv, f"--run-dir={cut}", first, "--steps=2"])
    both = ["--placement.mode=colocated", f"--value.{axis}-parallel=2"]
    run_ranks(2, main_rank, [*argv, *both, f"--run-dir={cut}"])
    for role in ("actor", "critic"):
        due = figures(whole, role)
        assert_same(figures(cut, role), {step: due[step] for step in (2, 3)})
    states = [
        json.loads((checkpoint.step_folder(run, 3) / "critic" / "state.json").read_text())
        for run in (whole, cut)
    ]
    assert states[1]["scores"] == pytest.approx(states[0]["scores"])
    assert states[1]["kl_coef"] == pytest.approx(states[0]["kl_coef"])
    models = [export(run, dtype="float32") for run in (whole, cut)]
    for kind in ("policy", "value"):
        due, got = (
            AutoModelForCausalLM.from_pretrained(folder / kind).state_dict() for folder in models
        )
        for name, weight in due.items():
            torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-5)


class Slow:
    """An engine that ends a row in a tick, after some ticks without; `closed` once its work is
    stopped."""

    def __init__(self, ticks: int):
        self.ticks, self.asks, self.polled, self.closed = ticks, [], 0, False

    def submit(self, asks, sampling, seed):
        self.seed = seed
        self.asks += asks

    def poll(self):
        self.polled += 1
        if self.polled % (self.ticks + 1):
            return []
        ask = self.asks.pop(0)
        return [Piece(ask.row, [self.seed], [-1.0], "eos")]

    def abort(self):
        self.closed = True


def joined_rank(group: Group, ticks: list[int]) -> tuple:
    slow: Any = Slow(ticks[2 * group.dp_rank + group.set_rank])
    sampler = Sampler(20, lambda row: Prompt("", [1], "", "", {}), limit=2)
    slots = range(10 * group.dp_rank, 10 * group.dp_rank + 5)
    lists = sampler.generate(slow, 1, slots, RolloutConfig(), 3, group)
    return [sample.row for found in lists for sample in found], slow.closed


def test_the_engines_of_a_set_are_one():
    for ticks in ([0, 3, 2, 0], [2, 0, 0, 1]):  # their order does not depend on which is the faster
        found = run_threads((2, 2), joined_rank, ticks)
        due = [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
        assert found == [(due[rank // 2], True) for rank in range(4)]


class Ids:
    """A tokenizer of token ids alone."""

    def get_vocab(self) -> dict:
        return {}

    def decode(self, ids: Any, **_: Any) -> str:
        return ""


def reward_rank(rank: int, folder: Path, shapes: list[SetShape]) -> dict[int, float]:
    """Scores of a rank's rows by a reward model that four ranks share, some of which own the same
    rows. `shapes`: the group's sets and the model's."""
    placement = place(PlacementConfig(mode="colocated"), world=4, local_world=4)
    runtime = Runtime(Launch(rank, 4, rank, 4), placement, CPU, 60.0, set_shapes={"critic": shapes})
    group, ranks = runtime.groups["critic"], runtime.sets["critic"][shapes[1]]
    packed = shapes[1].sequence > 1
    model = build(read_config(str(folder)), "reward", packed=packed).requires_grad_(False)
    parallelize(
        model,
        runtime.shards["critic"],
        dtype=torch.float32,
        activation_checkpointing=False,
        ranks=ranks,
    )
    fill(model, str(folder), device=CPU)
    text = RewardText(Ids(), Ids(), longest=64)
    reward: Any = RewardModel(model, Runner(group, CPU, 24), text, offload=True)
    # a rank of four has rows 3 and 7 alone
    mine = [sample for sample in samples() if sample.row % 4 == group.dp_rank]
    scored = reward.score([Prompt("", [], "", "", {})] * len(mine), mine, RewardConfig())
    return {sample.row: row.score for sample, row in zip(mine, scored, strict=True)}


@pytest.mark.parametrize(
    "shapes",
    [
        wide([SetShape(), SetShape(tensor=4)]),
        wide([TWO, SetShape(tensor=4)]),
        wide([CUT, SetShape(sequence=4)]),
        [TWO, SetShape(2, 2)],
    ],
)
def test_a_frozen_model_is_cut_otherwise_than_its_group(folders, tmp_path, shapes):
    config = AutoConfig.from_pretrained(
        folders / "qwen3_False", num_labels=1, num_key_value_heads=4, intermediate_size=44
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: Any = AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32
        ).eval()
    model.save_pretrained(tmp_path)
    found = run_ranks(4, reward_rank, tmp_path, shapes)
    seen = {row: score for part in found for row, score in part.items()}
    assert sorted(seen) == [row for row in range(BATCH) if row % 4 < 4 // shapes[0].size]
    for sample in samples():
        if sample.row in seen:
            with torch.no_grad():
                due = float(model(input_ids=sample.ids[None].long()).logits[0, 0])
            assert seen[sample.row] == pytest.approx(due, abs=1e-5)
