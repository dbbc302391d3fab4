"""A learner on 1, 2 and 3 ranks is one plain module: log-probs, gradients, gradient norms, policy
and value alike."""

import math
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from episodes import episode
from ranks import run_ranks
from tiers import wide
from torch import nn
from torch._inductor import list_options
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from splitppo import algo
from splitppo.config import OptimConfig, PlacementConfig
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models.attention import PACKED
from splitppo.models.batching import cut_lengths, micro_batch, partition
from splitppo.models.build import Kind, build, freeze, read_config
from splitppo.models.heads import PolicyOutputs, value_outputs
from splitppo.models.learner import Learner
from splitppo.models.runner import Runner
from splitppo.models.sharding import COMPILER, local, parallelize
from splitppo.models.tiny import build_tiny
from splitppo.models.weights import fill, materialize
from splitppo.placement import Streams, make_step_plan, place
from splitppo.rollout import Rollout
from splitppo.run import checkpoint
from splitppo.run import saver as saving
from splitppo.run.saver import Saver, load

BATCH, TEMPERATURE = 11, 0.7
VOCABULARY = 80  # the model's, 83, is padded: the last three are never sampled
OUTPUTS = PolicyOutputs(TEMPERATURE, VOCABULARY)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build_tiny(path, seed=3)
    return path


def samples(rows: Iterable[int] = range(BATCH)):
    made = []
    for row in rows:
        generator = torch.Generator().manual_seed(row)
        prompt = torch.randint(3, 80, (1 + row % 4,), generator=generator).tolist()
        response = torch.randint(3, 80, (1 + (row * 5) % 8,), generator=generator).tolist()
        made.append(episode(row, prompt, response, [0.0] * len(response), "eos"))
    return made


def fields(rollout):
    old = torch.cat([-torch.linspace(1, 4, n) for n in rollout.episode_lengths] or [torch.zeros(0)])
    return {
        "old": old,
        "advantages": torch.cat(
            [torch.tensor([float(s.row % 3 - 1)] * len(s.response)) for s in rollout.episodes]
            or [torch.zeros(0)]
        ),
    }


def policy_objective(model, batch, given):
    logprobs, entropy = OUTPUTS(model, batch, entropy=True)
    loss, metrics = algo.policy_loss(
        logprobs,
        given["old"],
        given["advantages"],
        batch.lengths,
        clip_low=0.2,
        clip_high=0.2,
        aggregate="token_mean",
    )
    return loss - 0.01 * algo.aggregate_loss(entropy, batch.lengths, "token_mean"), metrics


def value_objective(model, batch, given):
    values = value_outputs(model, batch)
    return algo.value_loss(
        values, given["old"], given["advantages"], batch.lengths, clip=0.5, aggregate="token_mean"
    )


def full_weights(learner):
    # on one rank the stream's tensors are the weights themselves
    return {name: weight.clone() for name, weight in learner.weights(torch.float32)}


def make_learner(
    folder, kind, world, rank, runtime=None, *, packed=False, frozen=(), dtype=torch.float32
):
    placement = place(PlacementConfig(mode="colocated"), world=world, local_world=world)
    runtime = runtime or Runtime(Launch(rank, world, rank, world), placement, CPU, 60.0)
    model = build(read_config(str(folder)), kind, packed=packed)
    freeze(model, frozen, f"{kind}.freeze")
    parallelize(model, runtime.groups["actor"].mesh, dtype=dtype, activation_checkpointing=False)
    fill(model, str(folder), device=CPU, head="normal", seed=9)
    runner = Runner(runtime.groups["actor"], CPU, 40)
    learner = Learner(
        model,
        runner,
        OptimConfig(lr=1e-2, eps=1e-3),
        steps=4,
        aggregate="token_mean",
        flops=6.0 * sum(weight.numel() for weight in model.parameters()),
    )
    return learner, runtime


def mine(world, rank):
    cut = make_step_plan(
        Streams(BATCH), seed=0, step=1, mini_batches=1, sizes={"actor": world, "critic": world}
    )
    return cut.slots("actor", rank)


def train_rank(rank, world, folder, kind, runtime=None, *, packed=False):
    """Forward, one update, weights: what the test compares."""
    learner, _ = make_learner(folder, kind, world, rank, runtime, packed=packed)
    rows = mine(world, rank)
    rollout = Rollout([s for s in samples() if s.row in rows[0]])
    outputs = (
        (lambda m, b: [OUTPUTS(m, b, entropy=False)[0]])
        if kind == "policy"
        else (lambda m, b: [value_outputs(m, b)])
    )
    before = full_weights(learner)
    (out,) = learner.runner.forward(learner.model, rollout, outputs)
    objective = policy_objective if kind == "policy" else value_objective
    figures = learner.update(
        rollout, [*map(rollout.places, rows)], fields(rollout), objective, step=1, epochs=1
    )
    by_row = dict(zip(rollout.rows, [t.tolist() for t in rollout.split(out)], strict=True))
    return by_row, figures, before, full_weights(learner)


def train_both_rank(rank, world, folder, packed):
    placement = place(PlacementConfig(mode="colocated"), world=world, local_world=world)
    runtime = Runtime(Launch(rank, world, rank, world), placement, CPU, 60.0)
    kinds: tuple[Kind, Kind] = ("policy", "value")
    return {kind: train_rank(rank, world, folder, kind, runtime, packed=packed) for kind in kinds}


def plain(folder, kind, weights):
    """The same on one unsharded module, one row at a time."""
    model: Any = build(read_config(str(folder)), kind)
    materialize(model, CPU)
    model.load_state_dict(weights, strict=kind == "value")  # of tied ones one is named
    rollout = Rollout(samples())
    given, outs, losses = fields(rollout), {}, []
    tokens = rollout.tokens
    for i, sample in enumerate(rollout.episodes):
        batch = micro_batch([sample], CPU)
        row = {name: rollout.split(packed)[i] for name, packed in given.items()}
        objective = policy_objective if kind == "policy" else value_objective
        loss, _ = objective(model, batch, row)
        losses.append(loss * len(sample.response) / tokens)
        with torch.no_grad():
            ids = sample.ids[None].long()
            if kind == "policy":
                logits = model.causal(input_ids=ids).logits[0]
            else:
                logits = model.score(model.model(input_ids=ids).last_hidden_state)[0]
        at = slice(len(sample.prompt) - 1, -1)
        if kind == "policy":
            log_p = (logits[at, :VOCABULARY] / TEMPERATURE).log_softmax(-1)
            outs[sample.row] = log_p.gather(-1, torch.tensor(sample.response)[:, None])[
                :, 0
            ].tolist()
        else:
            outs[sample.row] = logits[at, 0].tolist()
    loss = torch.stack(losses).sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    decay = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    decay.step()
    return outs, float(loss.detach()), float(norm), model.state_dict()


@pytest.fixture(scope="module", params=[(1, False), (3, False), (3, True)], ids=str)
def both_kinds(folder, request):
    world, packed = request.param
    return run_ranks(world, train_both_rank, world, folder, packed)


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_ranks_are_one_module(folder, both_kinds, kind):
    parts = [part[kind] for part in both_kinds]
    before = parts[0][2]
    outs, loss, norm, after = plain(folder, kind, before)
    seen = {row: out for part in parts for row, out in part[0].items()}
    assert sorted(seen) == list(range(BATCH))
    for row, out in seen.items():
        torch.testing.assert_close(out, outs[row], rtol=1e-4, atol=1e-5)
    for _, figures, _, weights in parts:
        assert figures[0]["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert figures[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert figures[0]["skipped"] == 0
        assert weights.keys() == before.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, after[name], rtol=0, atol=1e-5)


def test_tied_embeddings_stay_tied(folder):
    learner, runtime = make_learner(folder, "policy", 1, 0)
    model: Any = learner.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in learner.weights(torch.float32)]
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))
    runtime.close()


@pytest.mark.parametrize("most", [0.05, 0.0])
def test_a_gradient_is_clipped_unless_that_is_off(folder, most):
    learner, runtime = make_learner(folder, "policy", 1, 0)
    learner.optim, rollout = replace(learner.optim, max_grad_norm=most), Rollout(samples())
    rows = [list(range(BATCH))]
    (figures,) = learner.update(
        rollout, [*map(rollout.places, rows)], fields(rollout), policy_objective, step=1, epochs=1
    )
    # of AdamW's first step
    seen = [local(state["exp_avg"]) / 0.1 for state in learner.optimizer.state.values()]
    norm = float(torch.stack([moment.norm() for moment in seen]).norm())
    assert figures["grad_norm"] > 0.05, "before clipping"
    assert norm == pytest.approx(most or figures["grad_norm"], rel=1e-4)
    runtime.close()


WORK = [[[0, 1, 2], [6]], [[3, 4], [7, 8, 9, 10]]]  # rank -> mini-batch -> rows


def by_value_rank(rank, folder):
    """An update of two mini-batches over two epochs, whose rows stay where they are: its figures,
    the optimizer's settings in two steps, and what becomes of the weights if one rank's gradient
    is so large that its norm overflows."""
    learner, _ = make_learner(folder, "policy", 2, rank)
    optim = OptimConfig(
        lr=1e-2, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.3, schedule="linear", warmup_steps=2
    )
    runner = replace(learner.runner, budget=10**6)
    how: Any = {"steps": 6, "aggregate": "seq_mean_token_mean", "flops": learner.flops}
    learner = Learner(learner.model, runner, optim, **how)
    cast(Any, Runner).balance = lambda _, __, *given: given  # in this process alone
    rollout = Rollout(samples([row for rows in WORK[rank] for row in rows]))
    given = fields(rollout)
    (new,) = runner.forward(learner.model, rollout, lambda m, b: [OUTPUTS(m, b, entropy=False)[0]])
    kl = dict(
        zip(rollout.rows, [x.sum().item() for x in rollout.split(given["old"] - new)], strict=True)
    )
    figures = learner.update(
        rollout, [*map(rollout.places, WORK[rank])], given, policy_objective, step=1, epochs=2
    )
    settings = [
        [(g["lr"], g["betas"], g["eps"], g["weight_decay"]) for g in learner.optimizer.param_groups]
    ]
    whole = {p.ndim >= 2 for p in learner.optimizer.param_groups[0]["params"]}
    before = full_weights(learner)

    def huge(model, batch, given):
        loss, metrics = policy_objective(model, batch, given)
        return loss * (1e30 if rank else 1), metrics  # of one rank alone

    bad = learner.update(rollout, [*map(rollout.places, WORK[rank])], given, huge, step=3, epochs=1)
    after = full_weights(learner)
    settings.append([g["lr"] for g in learner.optimizer.param_groups])
    same = all(torch.equal(before[name], after[name]) for name in before)
    count = sum(p.numel() for p in learner.model.parameters())
    return (
        kl,
        figures,
        settings,
        whole,
        [(f["grad_norm"], f["skipped"]) for f in bad],
        same,
        learner.updates,
        count,
    )


def test_an_update_is_scheduled_counted_and_weighed_by_value(folder):
    both = run_ranks(2, by_value_rank, folder)
    kl = both[0][0] | both[1][0]
    rollout = Rollout(samples())
    tokens = dict(zip(rollout.rows, rollout.totals, strict=True))
    lengths = dict(zip(rollout.rows, rollout.episode_lengths, strict=True))
    on = [[sum(tokens[row] for row in rows) for rows in mine] for mine in WORK]
    total = sum(map(sum, on))
    for _, figures, settings, whole, bad, same, updates, count in both:
        assert len(figures) == 4
        for number, mine in enumerate(zip(*WORK, strict=True)):
            rows = [row for part in mine for row in part]
            # of tokens, whatever the loss is
            mean = sum(kl[row] for row in rows) / sum(lengths[row] for row in rows)
            if number == 0:  # the others are of weights that have moved
                assert figures[number]["ppo_kl"] == pytest.approx(mean, rel=1e-4)
        for figure in figures:
            assert figure["update_tflop"] == pytest.approx(6e-12 * total / 2 * 2 * count)
        assert settings[0] == [(5e-3, (0.5, 0.6), 1e-3, 0.3), (5e-3, (0.5, 0.6), 1e-3, 0.0)]
        assert settings[1] == [pytest.approx(7.5e-3)] * 2
        assert whole == {True}
        assert bad == [(math.inf, 1.0)] * 2
        assert same
        assert updates == 2


def empty_rank(rank, world, folder):
    """Rank 1 has no rows at all, but takes part."""
    learner, _ = make_learner(folder, "value", world, rank)
    rollout = Rollout([s for s in samples() if rank == 0])
    (out,) = learner.runner.forward(learner.model, rollout, lambda m, b: [value_outputs(m, b)])
    rows = [list(range(BATCH))] if rank == 0 else [[]]
    figures = learner.update(
        rollout, [*map(rollout.places, rows)], fields(rollout), value_objective, step=1, epochs=1
    )
    return len(out), figures[0]["loss"]


def test_a_rank_without_rows_takes_part(folder):
    (tokens, loss), (nothing, same) = run_ranks(2, empty_rank, 2, folder)
    assert tokens == Rollout(samples()).tokens
    assert nothing == 0
    assert loss == same != 0


def frozen_rank(rank, folder):
    """A value model in bfloat16 after an update: what changed, what has optimizer state, dtypes of
    body and head."""
    learner, _ = make_learner(
        folder, "value", 2, rank, frozen=["attention", "embeddings"], dtype=torch.bfloat16
    )
    rows, seen = mine(2, rank), {}
    for name in ("score", "model.norm"):
        module: Any = learner.model.get_submodule(name)
        module.register_forward_hook(
            lambda _, args, out, name=name: seen.update({name: (args[0].dtype, out.dtype)})
        )
    rollout = Rollout([s for s in samples() if s.row in rows[0]])
    before = full_weights(learner)
    learner.update(
        rollout, [*map(rollout.places, rows)], fields(rollout), value_objective, step=1, epochs=1
    )
    after = full_weights(learner)
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    return changed, set(saving.tensors_of([learner])["exp_avg"]), set(after), seen


def test_what_is_frozen_stays_and_the_head_runs_in_float32(folder):
    for changed, with_state, every, seen in run_ranks(2, frozen_rank, folder):
        frozen = {name for name in every if "self_attn" in name or "embed_tokens" in name}
        assert len(frozen) == 9
        assert changed == with_state == every - frozen
        assert seen == {"score": (torch.float32,) * 2, "model.norm": (torch.bfloat16,) * 2}


def save_rank(rank, world, folder, target):
    learner, runtime = make_learner(folder, "policy", world, rank)
    rows = mine(world, rank)
    rollout = Rollout([s for s in samples() if s.row in rows[0]])
    learner.update(
        rollout, [*map(rollout.places, rows)], fields(rollout), policy_objective, step=1, epochs=1
    )
    told = target / "committed"
    saver = Saver(
        [learner], "actor", target, runtime.saving["actor"], committed=lambda: told.write_text("1")
    )
    save, updated = saving.dcp.save, threading.Event()

    def save_late(*args, **kwargs):
        assert updated.wait(30), "training waits for the disk"
        return save(*args, **kwargs)

    saving.dcp.save = save_late
    saver.begin(1, {"kept": [1.5]})
    assert saver.thread is not None
    saver.thread.join(1.0)
    assert not told.exists(), "it counts before its step's line is written"
    saver.commit(1)
    # on the way to the disk; what is written must be what it was
    learner.update(
        rollout, [*map(rollout.places, rows)], fields(rollout), policy_objective, step=2, epochs=1
    )
    updated.set()
    saver.wait()
    return full_weights(learner)


def load_rank(rank, world, folder, target):
    learner, runtime = make_learner(folder, "policy", world, rank)
    states: list[Any] = []
    part = checkpoint.step_folder(target, 1) / "actor"
    load([learner], part, [states.append], runtime.saving["actor"])
    assert states == [{"kept": [1.5]}]
    rows = mine(world, rank)
    rollout = Rollout([s for s in samples() if s.row in rows[0]])
    learner.update(
        rollout, [*map(rollout.places, rows)], fields(rollout), policy_objective, step=2, epochs=1
    )
    return full_weights(learner)


def test_a_checkpoint_goes_on_under_another_size(folder, tmp_path):
    due = run_ranks(2, save_rank, 2, folder, tmp_path)[0]
    assert (tmp_path / "committed").read_text() == "1"
    for name, weight in run_ranks(3, load_rank, 3, folder, tmp_path)[0].items():
        torch.testing.assert_close(weight, due[name], rtol=0, atol=1e-6)


def draw_rank(rank, world, folder):
    placement = place(PlacementConfig(mode="colocated"), world=world, local_world=world)
    runtime = Runtime(Launch(rank, world, rank, world), placement, CPU, 60.0)
    model = build(read_config(str(folder)), "policy")
    parallelize(
        model, runtime.groups["actor"].mesh, dtype=torch.float32, activation_checkpointing=False
    )
    fill(model, str(folder), device=CPU, random_init=True, seed=4)
    runner = Runner(runtime.groups["actor"], CPU, 40)
    learner = Learner(model, runner, OptimConfig(lr=1e-6), steps=1, aggregate="token_mean")
    return full_weights(learner)


def test_random_weights_do_not_depend_on_the_sharding(folder):
    one, three = run_ranks(1, draw_rank, 1, folder)[0], run_ranks(3, draw_rank, 3, folder)[0]
    assert all(torch.equal(one[name], three[name]) for name in one)
    assert one["model.embed_tokens.weight"].std() > 0


@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_hold_every_row_once_within_the_budget(packed):
    lengths = Rollout(samples()).totals
    cut = cut_lengths([*lengths, 40], 30, packed=packed)
    assert sorted(i for micro in cut for i in micro) == list(range(BATCH + 1))
    assert cut[0] == [BATCH], "a row over the budget goes alone"
    for micro in cut[1:]:
        tokens = (
            sum(lengths[i] for i in micro)
            if packed
            else len(micro) * max(lengths[i] for i in micro)
        )
        assert tokens <= 30
    assert len(cut) - 1 == -(-sum(lengths) // 30) if packed else len(cut) > 3


def test_dealing_evens_the_bins_out():
    costs = [7.0, 1, 1, 5, 3, 2, 8, 4, 6, 2, 9]
    bins = partition(costs, 3)
    assert bins is not None
    assert sorted(i for lot in bins for i in lot) == list(range(len(costs)))
    assert {sum(costs[i] for i in lot) for lot in bins} == {16.0}
    assert partition([3, 3, 3], 2, sizes=[3, 3, 3], room=5) is None
    assert partition([9, 1], 2, sizes=[9, 1], room=5) == [[0], [1]]
    assert partition([], 2) == [[], []]


def warm_rank(rank, folder):
    """Tokens of each pass of a warm-up whose micro-batches may have 500; whether it left the
    weights as they were."""
    learner, _ = make_learner(folder, "policy", 1, rank)
    learner.runner = replace(learner.runner, budget=500)
    before, passes = full_weights(learner), []

    def outputs(model, batch):
        passes.append(batch.inputs["input_ids"].numel())
        return OUTPUTS(model, batch, entropy=True)

    def objective(model, batch, given):
        passes.append(batch.inputs["input_ids"].numel())
        return policy_objective(model, batch, given)

    learner.warm_up(
        outputs, objective, columns=lambda _, zeros: {"old": zeros, "advantages": zeros}
    )
    after = full_weights(learner)
    return passes, all(torch.equal(before[name], after[name]) for name in before)


def test_a_warm_up_runs_no_more_than_a_micro_batch(folder):
    ((passes, same),) = run_ranks(1, warm_rank, folder)
    assert max(passes) <= 500 + 106
    assert passes[-1] >= 400, "the backward pass is compiled for fewer tokens than it gets"
    assert same


def compiled_rank(rank, folder, backend):
    """How many graphs a warm-up gives to the compiler, and how many passes over rows of other
    lengths add. Layers are checkpointed: the harder case."""
    from torch._dynamo.testing import CompileCounterWithBackend  # half a second for each rank

    graphs, plain = CompileCounterWithBackend(backend), torch.compile

    def traced(given, *, dynamic=None, options=None):
        assert not set(options or {}) - set(list_options()), "the compiler has no such option"
        return plain(given, dynamic=dynamic, backend=graphs)

    def whole(module, query, key, value, mask, scaling, **given):
        """Attention that can be traced, as the GPU's can; what it gives is not looked at."""
        return scaled_dot_product_attention(
            query, key, value, scale=scaling, enable_gqa=True
        ).transpose(1, 2), None

    torch.compile = traced  # in this process alone, as the next one
    AttentionInterface.register(PACKED, whole)
    placement = place(PlacementConfig(mode="colocated"), world=1, local_world=1)
    runtime = Runtime(Launch(rank, 1, rank, 1), placement, CPU, 60.0)
    model = build(read_config(str(folder)), "policy", packed=True)
    how: Any = {"dtype": torch.float32, "activation_checkpointing": True, "compiled": True}
    parallelize(model, runtime.groups["actor"].mesh, **how)
    fill(model, str(folder), device=CPU, seed=9)
    runner = Runner(runtime.groups["actor"], CPU, 4096)
    learner = Learner(model, runner, OptimConfig(lr=1e-6), steps=4, aggregate="token_mean")
    outputs = PolicyOutputs(TEMPERATURE, VOCABULARY, compiled=True)

    def objective(model, batch, given):
        logprobs, entropy = outputs(model, batch, entropy=True)
        return -logprobs.sum() - 0.01 * entropy.sum(), {}

    def run(model, batch):
        return outputs(model, batch, entropy=True)

    learner.warm_up(run, objective, columns=lambda *_: {})
    warm = graphs.frame_count
    for rows in (range(2), range(3, BATCH), range(5)):
        rollout = Rollout(samples(rows))
        learner.runner.forward(model, rollout, run)
        learner.update(rollout, [rollout.places(rollout.rows)], {}, objective, step=1, epochs=1)
    return warm, graphs.frame_count - warm


# traced for its backward pass, too, it takes three times as long and gives no other graphs
@pytest.mark.parametrize(
    "backend", [wide("eager"), pytest.param("aot_eager", marks=pytest.mark.families)]
)
def test_the_warm_up_compiles_all_that_steps_run(folder, backend):
    ((warm, later),) = run_ranks(1, compiled_rank, folder, backend)
    # a layer and the log-probs, without and with a backward pass; the first layer is traced again
    # once its numbers are known to be constant
    assert warm <= 5
    assert not later
    assert "triton.mix_order_reduction" in COMPILER
