"""Three steps of every placement against a single-process PPO written from the paper
(reference_ppo.py).

The trainer runs as its users run it, `main(argv)` on torchrun's variables, in forked ranks over
Gloo. What it sampled is recorded and handed to the reference, with the scores; the rest the
reference works out for itself.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from devices import gpus
from ranks import run_ranks
from reference_ppo import ADAPTERS_ALONE, Hyper, Row, Step, adapt, merged, reference_ppo, windows
from tiers import wide
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from splitppo import critic, policy, train
from splitppo.generator import Generator
from splitppo.models.sharding import gather_full
from splitppo.models.tiny import build_tiny
from splitppo.placement import StepPlan, Streams, make_step_plan

SEED, STEPS, BATCH, MINI = 5, 3, 22, 2
HYPER = {
    "gamma": 0.98,
    "lam": 0.9,
    "kl_coef": 0.05,
    "kl_kind": "k1",
    "kl_loss_coef": 0.1,
    "kl_loss_kind": "k3",
    "clip_low": 0.1,
    "clip_high": 0.15,
    "dual_clip": None,
    "value_clip": 0.1,
    "entropy_coef": 0.01,
    "whiten": True,
    "epochs": 2,
    "aggregate": "token_mean",
}
POLICY_LR, VALUE_LR, EPS = 1e-3, 2e-3, 1e-6

REWARD = '''
def score(data_source, solution_str, ground_truth, extra_info):
    """Digits are worth more the larger they are: every row gets another score."""
    digits = sum(int(c) for c in solution_str if c.isdigit())
    return {"score": digits / 20 - 0.01 * len(solution_str), "length": len(solution_str)}


def alike(data_source, solution_str, ground_truth, extra_info):
    return 0.7
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    build_tiny(folder / "policy", seed=1)
    build_tiny(folder / "value", seed=2)
    (folder / "reward.py").write_text(REWARD)
    return folder


def flags(inputs: Path, run_dir: Path, changes: dict) -> list[str]:
    values = {
        "seed": SEED,
        "steps": STEPS,
        "run-dir": run_dir,
        "policy.path": inputs / "policy",
        "value.path": inputs / "value",
        "value.head": "normal",
        "reward.function": f"{inputs / 'reward.py'}:score",
        "rollout.batch-size": BATCH,
        "rollout.max-new-tokens": 7,
        "rollout.temperature": 0.8,
        "ppo.mini-batches": MINI,
        "policy.optim.lr": POLICY_LR,
        "value.optim.lr": VALUE_LR,
        "policy.optim.eps": EPS,
        "value.optim.eps": EPS,
        "policy.optim.weight-decay": 0.1,
        "value.optim.weight-decay": 0.1,
        # several micro-batches a mini-batch, and not as many on each rank
        "compute.micro-batch-tokens": 64,
        "log.validate-every": 0,
        "checkpoint.no-last": "",
        **{
            f"ppo.{name.replace('_', '-')}": value
            for name, value in HYPER.items()
            if name != "whiten"
        },
        **changes,
    }
    alone = changes.get("reward.function") == "none"  # a teacher leads alone
    valued = changes.get("ppo.baseline", "value") == "value" and not alone
    return [
        word
        for name, value in values.items()
        if valued or not name.startswith("value.")
        for word in (f"--{name.replace('_', '-')}", *str(value).split())
        if word
    ]


def train_rank(rank: int, argv: list[str], record: Path, slow: str, odd: str) -> None:
    """One rank of a training run that also notes its rows, scores and last weights.

    Args:
        slow: the role that is.
        odd: `cut`: every third row ends by itself, none in step 2, none of the first mini-batch in
            step 3. `far`: some of the engine's log-probs are 30 nats off. `exact`: nothing is off.
    """
    update, judge, score = policy.Policy.update, critic.Critic.update, critic.Critic.score
    generate = Generator.generate

    def actor_generate(self: Any, plan: StepPlan) -> Any:
        """Rows of an engine that is a little off."""
        first, *_ = plan.mini_batches
        cut = {2: range(BATCH), 3: first}.get(plan.step, ()) if odd == "cut" else ()
        far = {0: -30.0, 2: 30.0} if odd == "far" else {}
        policy.MISMATCH = {torch.float32: (99.0, 99.0)} if far else policy.MISMATCH
        for finished in generate(self, plan):
            for s in finished if odd != "exact" else ():
                off = [
                    far.get((s.row + i) % 9, 0.1 * ((s.row + i) % 5 - 2))
                    for i in range(len(s.response))
                ]
                logprobs = cast(Any, s.segments[0].logprobs)
                for i, change in enumerate(off):
                    logprobs[i] += change
            by_itself = {
                s.row: not s.truncated or (odd == "cut" and s.row % 3 == 0) for s in finished
            }
            yield [
                replace(s, end="eos" if by_itself[s.row] and s.row % BATCH not in cut else "limit")
                for s in finished
            ]

    def actor_update(self: Any, plan: StepPlan, rollout: Any, *tensors: Any, waits: bool) -> Any:
        step = plan.step
        rows = {
            s.row: (
                list(s.prompt),
                list(s.response),
                list(s.logprobs),
                not s.truncated,
                [[*said] for said, _ in s.turns],
            )
            for s in rollout.episodes
        }
        torch.save(rows, record / f"rows_{step}_{rank}.pt")
        time.sleep(0.3 if slow == "actor" else 0)
        metrics = update(self, plan, rollout, *tensors, waits=waits)
        weights = {
            name: weight.cpu().clone() for name, weight in self.learner.weights(torch.float32)
        }
        held = parts(self.learner)
        if step == STEPS and self.group.is_first:
            torch.save(weights, record / "policy.pt")
            torch.save(held, record / "policy_parts.pt")
        return metrics

    def critic_update(self, plan, scored, found):
        step = plan.step
        torch.save(
            dict(zip(scored.rollout.rows, scored.scores.tolist(), strict=True)),
            record / f"scores_{step}_{rank}.pt",
        )
        time.sleep(0.3 if slow == "critic" else 0)
        metrics = judge(self, plan, scored, found)
        full = (w for learner in self.learners for w in learner.weights(torch.float32))
        weights = {name: weight.cpu().clone() for name, weight in full}
        held = parts(self.learners[0]) if self.learners else {}
        if step == STEPS and self.group.is_first:
            torch.save(weights, record / "value.pt")
            torch.save(held, record / "value_parts.pt")
        return metrics

    def critic_score(self, step, rollout, pending):
        time.sleep(0.1 if slow == "critic" else 0)
        return score(self, step, rollout, pending)

    for owner, name, wrapper in (
        (Generator, "generate", actor_generate),
        (policy.Policy, "update", actor_update),
        (critic.Critic, "update", critic_update),
        (critic.Critic, "score", critic_score),
    ):
        setattr(owner, name, wrapper)
    if train.main(argv) != 0:
        raise RuntimeError("the run failed")


def parts(learner: Any) -> dict[str, torch.Tensor]:
    """The weights of a learner with adapters as it holds them: base, adapters, head."""
    if learner.trainable.sent(learner.model) == learner.trainable.parameters(learner.model):
        return {}
    held = gather_full(learner.model, dict(learner.sharded()), torch.float32)
    return {name: weight.cpu().clone() for name, weight in held}


def run(
    inputs: Path, tmp_path: Path, world: int, *, slow: str = "none", odd: str = "", **changes
) -> dict:
    """Trains and returns what was recorded."""
    run_dir, record = tmp_path / "run", tmp_path / "record"
    record.mkdir()
    argv = flags(inputs, run_dir, {k.replace("__", "."): v for k, v in changes.items()})
    run_ranks(world, train_rank, argv, record, slow, odd)

    def merged(kind: str, step: int) -> dict:
        found = {}
        for path in record.glob(f"{kind}_{step}_*.pt"):
            found |= torch.load(path)
        return found

    def lines(role: str) -> list:
        told = (run_dir / "metrics" / f"{role}.jsonl").read_text().splitlines()
        return [json.loads(line, parse_constant=pytest.fail) for line in told]

    return {
        "rows": [merged("rows", step) for step in range(1, STEPS + 1)],
        "scores": [merged("scores", step) for step in range(1, STEPS + 1)],
        "policy": torch.load(record / "policy.pt"),
        "value": torch.load(record / "value.pt"),
        "policy_parts": torch.load(record / "policy_parts.pt"),
        "value_parts": torch.load(record / "value_parts.pt"),
        "actor": [line["optimizer_steps"] for line in lines("actor")],
        "critic": [line["optimizer_steps"] for line in lines("critic")],
        "lines": lines("actor") + lines("critic"),
    }


def reference(
    inputs: Path,
    seen: dict,
    *,
    value_mini_batches: int = MINI,
    penalty: float = 0.0,
    value_layers: int | None = None,
    samples: int = 1,
    value_lr: float = VALUE_LR,
    head: str = "normal",
    window: int = 0,
    heard: Callable[[Row, int], Row] = lambda row, number: row,
    adapters: dict | None = None,
    value_base: str = "value",
    teacher: str | None = None,
    **changes,
) -> dict:
    """The paper's PPO over the recorded rows; `penalty` is what an unfinished one loses of its
    score. `heard` adds what an environment says to what was sampled, in the row of a number.
    `adapters`: model -> (layer -> its adapters as they begin, alpha); `value_base`: folder of the
    value model; `teacher`: folder of the teacher. With a `window` the reference finds out by
    itself in which step a row ends, and what its log-probs were when it was sampled."""
    policy = AutoModelForCausalLM.from_pretrained(inputs / "policy", dtype=torch.float32).eval()
    frozen = AutoModelForCausalLM.from_pretrained(inputs / "policy", dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(inputs / value_base, num_labels=1)
    config.classifier_dropout = 0.0
    if value_layers:
        config.num_hidden_layers = value_layers
    value: Any = None
    if changes.get("baseline", "value") == "value":
        value = AutoModelForTokenClassification.from_pretrained(
            inputs / value_base, config=config, dtype=torch.float32
        ).eval()
        value.load_state_dict(fresh_head(inputs, head), strict=False)
    for kind, how in (adapters or {}).items():
        adapt(policy if kind == "policy" else value, *how)
        changes[f"{kind}_frozen"] = ADAPTERS_ALONE
    steps, cuts, streams = [], [], [[] for _ in range(BATCH)]
    for step in range(1, STEPS + 1):
        rows, scores = seen["rows"][step - 1], seen["scores"][step - 1]
        cut = make_step_plan(
            Streams(BATCH, samples),
            seed=SEED,
            step=step,
            mini_batches=MINI,
            sizes={"actor": 1, "critic": 1},
        )
        made = [
            heard(
                Row(
                    prompt,
                    [token for said in turns for token in said],
                    scores[row] - (0 if finished else penalty),
                    engine,
                    finished,
                ),
                row,
            )
            for row, (prompt, _, engine, finished, turns) in sorted(rows.items())
        ]
        value_rows = cut.slots("critic", 0, value_mini_batches)
        cuts.append(([list(mini) for mini in cut.mini_batches], value_rows))
        steps.append(Step(made, *cuts[-1]))
        for number, row in zip(sorted(rows), made, strict=True):
            streams[number % BATCH].append(row)
    hyper = Hyper(
        **HYPER | changes,
        samples=samples,
        temperature=0.8,
        policy_lr=POLICY_LR,
        value_lr=value_lr,
        betas=(0.9, 0.999),
        eps=EPS,
        weight_decay=0.1,
        max_grad_norm=1.0,
    )
    made_windows: list[Step] = []

    def windowed() -> Any:
        for step in windows(policy, streams, cuts, window, hyper):
            made_windows.append(step)
            yield step

    guide = None
    if teacher:
        guide = AutoModelForCausalLM.from_pretrained(inputs / teacher, dtype=torch.float32)
    results = reference_ppo(policy, frozen, value, windowed() if window else steps, hyper, guide)
    return {
        "results": results,
        "policy": merged(policy),
        "value": merged(value) if value else {},
        "steps": made_windows,
        "models": {"policy": policy, "value": value},
    }


def fresh_head(inputs: Path, head: Any) -> dict:
    """The scalar head as the trainer draws it, on the same kind of device; the reference is to
    start from the same."""
    from splitppo.models.build import build, read_config
    from splitppo.models.weights import fill

    device = "cuda" if gpus() else "cpu"
    model = build(read_config(str(inputs / "value")), "value")
    fill(model, str(inputs / "value"), device=torch.device(device), head=head, seed=SEED)
    return {
        name: tensor.cpu()
        for name, tensor in model.state_dict().items()
        if name.startswith("score")
    }


def compare(seen: dict, due: dict, *, rtol: float = 1e-5) -> None:
    # a loss is a difference of numbers near 1 (whitened advantages), so its own size is no scale:
    # 1e-5 of 1. The gradients of rows cancel, too: processors round norms below .1 otherwise
    for role, losses, norms in (
        ("actor", "policy_losses", "policy_grad_norms"),
        ("critic", "value_losses", "value_grad_norms"),
    ):
        for step in range(STEPS):
            got = seen[role][step]
            loss = [figure["loss"] for figure in got]
            norm = [figure["grad_norm"] for figure in got]
            torch.testing.assert_close(
                loss, getattr(due["results"][step], losses), rtol=rtol, atol=1e-6
            )
            torch.testing.assert_close(
                norm, getattr(due["results"][step], norms), rtol=1e-5, atol=2e-6
            )
    for line, result in zip(seen["lines"], due["results"], strict=False):
        ess = result.ess if result.ratios else 0.0
        assert line["actor/ratio_ess"] == pytest.approx(ess, rel=1e-4)
    for kind in ("policy", "value"):
        for name, weight in seen[kind].items():
            torch.testing.assert_close(
                weight, due[kind][name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.fixture(scope="module")
def baseline(inputs, tmp_path_factory):
    """One rank's run and the reference's over its rows."""
    seen = run(inputs, tmp_path_factory.mktemp("colocated"), 1)
    return seen, reference(inputs, seen)


def test_one_rank_is_the_paper(baseline):
    compare(*baseline)


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"placement__actor": 1, "slow": "critic"}),
        wide(4, {"placement__actor": 3}),
        (2, {"placement__mode": "colocated"}),
        wide(
            3,
            {"placement__actor": 2, "compute__activation_checkpointing": "", "rollout__chunks": 1},
        ),
        wide(3, {"placement__actor": 1, "compute__packing": "on"}),
        wide(
            4,
            {
                "placement__mode": "colocated",
                "fsdp__tensor_parallel": 2,
                "value__tensor_parallel": 1,
                "fsdp__shard_size": 2,
            },
        ),
        wide(3, {"placement__actor": 2, "fsdp__shard_size": 1, "slow": "actor"}),
        wide(6, {"placement__actor": 4, "fsdp__tensor_parallel": 2, "value__tensor_parallel": 1}),
        wide(
            4,
            {"placement__mode": "colocated", "fsdp__tensor_parallel": 2, "compute__packing": "on"},
        ),
        wide(3, {"placement__actor": 2, "reference__tensor_parallel": 2}),
        wide(
            4,
            {
                "placement__mode": "colocated",
                "fsdp__sequence_parallel": 2,
                "fsdp__shard_size": 2,
                "value__sequence_parallel": 1,
                "value__tensor_parallel": 2,
            },
        ),
        wide(3, {"placement__actor": 2, "reference__sequence_parallel": 2}),
    ],
    ids=lambda value: (
        value if isinstance(value, int) else "-".join(f"{k}={v}" for k, v in value.items())
    ),
)
def test_every_placement_is_the_paper(inputs, baseline, tmp_path, world, changes):
    seen = run(inputs, tmp_path, world, **changes)
    drawn = [
        [{row: sample[:2] for row, sample in rows.items()} for rows in it["rows"]]
        for it in (seen, baseline[0])
    ]
    assert drawn[0] == drawn[1], "samples depend on the placement"
    compare(seen, baseline[1])


@pytest.mark.parametrize("world", [1, wide(3)])
def test_options_that_are_not_the_default(inputs, tmp_path, world):
    """Sums over rows, dual clip on, whitening off, other KL estimators, the reference moved away
    between its uses."""
    changes = {
        "dual_clip": 1.05,
        "kl_kind": "k3",
        "kl_loss_kind": "k2",
        "aggregate": "seq_mean_token_sum",
    }
    argv = {f"ppo__{name}": value for name, value in changes.items()} | {
        "ppo__no_whiten": "",
        "reference__offload": "",
    }
    argv |= {"placement__actor": 2} if world > 1 else {}
    seen = run(inputs, tmp_path, world, **argv)
    compare(seen, reference(inputs, seen, **changes, whiten=False))


def test_the_engines_log_probs_stand_in_for_the_old_ones(inputs, tmp_path):
    """Also those that are so far off that the ratio is clamped."""
    seen = run(inputs, tmp_path, 1, odd="far", ppo__old_logprobs="engine")
    # a loss that is the clamped ratio times an advantage shows the advantage's rounding
    compare(seen, reference(inputs, seen, old_logprobs="engine"), rtol=1e-4)
    for line in seen["lines"][:STEPS]:
        assert not [name for name in line if name == "actor/entropy" or "mismatch" in name], (
            "a forward pass was run"
        )
        assert "actor/ref_kl" in line
    for ours in seen["lines"][:STEPS]:
        rows = seen["rows"][ours["step"] - 1].items()
        far = [
            (row + i) % 9 in (0, 2) for row, (_, response, *_) in rows for i in range(len(response))
        ]
        # the mean of the mini-batches' shares
        assert ours["actor/ratio_clamped"] == pytest.approx(sum(far) / len(far), rel=0.2)


@pytest.mark.parametrize(
    ("actor", "argv", "changes"),
    [
        wide(2, {"rollout__chunks": 4}, {}),
        wide(
            1,
            {"rollout__chunks": 2, "reference__offload": ""},
            {"aggregate": "seq_mean_token_mean"},
        ),
    ],
)
def test_the_reference_on_the_critics_side(inputs, tmp_path, actor, argv, changes):
    """The second time with means over rows."""
    changes = changes | {"kl_loss_coef": 0.0}
    argv = (
        argv
        | {"placement__reference": "critic"}
        | {f"ppo__{name}": value for name, value in changes.items()}
    )
    seen = run(inputs, tmp_path, 3, placement__actor=actor, **argv)
    compare(seen, reference(inputs, seen, **changes))


@pytest.mark.wide
def test_streaming_changes_no_bit(inputs, tmp_path):
    """Scores under the rollout are a matter of time alone. (Each row is a micro-batch of its own
    here: which rows come together decides how sums are rounded, 4e-7 in a weight.)"""
    seen, sizes = [], {"rollout__batch_size": 8, "ppo__epochs": 1, "compute__micro_batch_tokens": 1}
    runs = {"streaming": {}, "none": {"rollout__chunks": 1}}
    for name, without in runs.items():
        (tmp_path / name).mkdir()
        seen.append(run(inputs, tmp_path / name, 3, placement__actor=2, **sizes, **without))
    for other in seen[1:]:
        for kind in ("policy", "value"):
            assert all(
                torch.equal(weight, other[kind][name]) for name, weight in seen[0][kind].items()
            ), kind
        assert [seen[0]["actor"], seen[0]["critic"]] == [other["actor"], other["critic"]]


PRACTICE = {
    "lam_value": 1.0,
    "value_epochs": 1,
    "pretrain_steps": 1,
    "pretrain_epochs": 1,
    "importance": "token",
    "importance_cap": 1.05,
    "mask_truncated": True,
    "kl_target": 0.002,
    "kl_horizon": 100,
}
SCHEDULE = {"schedule": "linear", "min_lr_ratio": 0.25}  # of the policy
OPTIM = {f"policy__optim__{name}": value for name, value in SCHEDULE.items()}


@pytest.mark.parametrize(
    ("world", "placement", "value_mini_batches", "changes"),
    [
        wide(1, {}, 1, {}),
        (1, {}, BATCH, {"importance": "sequence"}),
        wide(3, {"placement__actor": 1}, BATCH, {"importance": "sequence"}),
        wide(
            2,
            {"placement__mode": "colocated", "value__tensor_parallel": 2},
            1,
            {"importance": "sequence", "mask_truncated": False},
        ),
    ],
)
def test_what_is_practised_is_the_papers_too(
    inputs, tmp_path, world, placement, value_mini_batches, changes
):
    """Another lambda for the targets, a critic with epochs and mini-batches of its own and a head
    start, truncated importance weights, truncated rows left out, an adaptive KL coefficient, a
    penalty for rows without an end. Schedule and coefficient begin with the policy's first
    update."""
    practice = PRACTICE | changes
    argv = {
        f"{'value' if name.startswith('pretrain') else 'ppo'}__{name}": value
        for name, value in practice.items()
        if value is not True and value is not False
    }
    argv |= {"ppo__mask_truncated": ""} if practice["mask_truncated"] else {}
    extra = {
        "ppo__value_mini_batches": value_mini_batches,
        "reward__missing_eos_penalty": 0.3,
    } | OPTIM
    seen = run(inputs, tmp_path, world, odd="cut", **placement, **argv, **extra)
    finished = [row[3] for rows in seen["rows"] for row in rows.values()]
    assert 3 < sum(finished) < len(finished) - 3  # both kinds are there
    due = reference(
        inputs, seen, value_mini_batches=value_mini_batches, penalty=0.3, **practice, **SCHEDULE
    )
    assert seen["actor"][0] == [], "the policy learnt while the critic pretrained"
    rates = [0, 0, 1] if practice["mask_truncated"] else [0, 1, 0.25]
    assert [line["actor/lr"] for line in seen["lines"][:STEPS]] == pytest.approx(
        [POLICY_LR * x for x in rates]
    )
    compare(seen, due)
    if practice["mask_truncated"]:
        assert seen["actor"][1] == seen["critic"][1] == []
        assert len(seen["actor"][2]) == HYPER["epochs"] * (MINI - 1)
    for lines in (seen["lines"][:STEPS], seen["lines"][STEPS:]):
        told = [{name for name in line if not name.startswith("timing_s")} for line in lines]
        assert told[0] == told[1] == told[2], "a step that trains on nothing tells less"


PRETRAINING = {"pretrain_steps": 2, "pretrain_epochs": 3, "value_epochs": 1, "lam_value": 0.5}
CRITICS = {
    "sao": {
        "clip_mode": "mask", "clip_low": 0.05, "clip_high": 0.08, "old_logprobs": "engine",
        "lam": "adaptive", "lam_alpha": 0.3, "lam_value": 1.0, "value_epochs": 2,
        "value_frozen": "attn",
    },
    "pretraining": PRETRAINING | SCHEDULE | {"policy_frozen": "mlp", "value_layers": 1},
    "frozen embeddings": {"samples": 2, "value_frozen": "embed_tokens"},
    "bounded": {
        "value_range": (-0.5, 4.0),
        "value_epochs": 4,
        "lam_value": 1.0,
        "gamma": 1.0,
        "kl_coef": 0.0,
    },
    "batch": {"baseline": "batch"},
    "group": {"baseline": "group", "samples": 2},
}  # fmt: skip
AT_CRITIC = {"placement__reference": "critic"}
OTHERS = {
    "all layers frozen": {"value_frozen": "model"},
    "a head of zeros": {"head": "zero"},
    "a bounded head of zeros": CRITICS["bounded"] | {"head": "zero"},
}
FLAGS = {
    "value_frozen": (
        "value__freeze",
        {"attn": "attention", "embed_tokens": "embeddings", "model": "body"},
    ),
    "policy_frozen": ("policy__freeze", {"mlp": r"mlp\..*_proj"}),
    "value_layers": ("value__layers", {}),
    "samples": ("rollout__samples", {}),
    "head": ("value__head", {}),
    "value_range": ("value__range", {(-0.5, 4.0): "-0.5 4.0"}),
    "value_lr": ("value__optim__lr", {}),
    **{
        name: (f"policy__optim__{name}", {})
        for name in ("schedule", "min_lr_ratio", "warmup_steps")
    },
    **{name: (f"value__{name}", {}) for name in ("pretrain_steps", "pretrain_epochs")},
}


@pytest.mark.parametrize(
    ("name", "world", "placement"),
    [
        wide("sao", 3, {"placement__actor": 1}),
        wide("pretraining", 3, {"placement__actor": 2}),
        wide("pretraining", 2, {"placement__mode": "colocated"}),
        wide(
            "frozen embeddings", 2, {"placement__mode": "colocated", "fsdp__sequence_parallel": 2}
        ),
        ("bounded", 1, {}),
        wide("bounded", 3, {"placement__actor": 1}),
        wide("bounded", 2, {"placement__mode": "colocated", "value__sequence_parallel": 2}),
        wide("bounded", 2, {"placement__mode": "colocated", "value__tensor_parallel": 2}),
        ("batch", 2, {"placement__actor": 1, **AT_CRITIC}),
        wide("batch", 3, {"placement__actor": 2, **AT_CRITIC}),
        wide("group", 3, {"placement__actor": 1, "reference__tensor_parallel": 2, **AT_CRITIC}),
    ],
)
def test_the_critics_options_are_the_papers(inputs, tmp_path, name, world, placement):
    check_critic(inputs, tmp_path, CRITICS[name], world, placement)


@pytest.mark.wide
@pytest.mark.parametrize("name", OTHERS)
def test_other_critics(inputs, tmp_path, name):
    check_critic(inputs, tmp_path, OTHERS[name], 2, {"placement__actor": 1})


@pytest.mark.parametrize("bounds", [wide(None), wide((-0.5, 4.0))])
def test_rewards_that_are_all_alike_teach_nothing(inputs, tmp_path, bounds):
    options = {"head": "zero", "kl_coef": 0.0, "gamma": 1.0, "entropy_coef": 0.0}
    if bounds:
        options |= {"value_range": bounds, "lam_value": 1.0}
    reward = {"reward__function": f"{inputs / 'reward.py'}:alike"}
    seen, _ = check_critic(inputs, tmp_path, options, 3, {"placement__actor": 1, **reward})
    steps = seen["actor"] + seen["critic"]
    assert {update["grad_norm"] for step in steps for update in step} == {0.0}


def check_critic(inputs, tmp_path, options, world, placement):
    # many small updates at a high learning rate magnify the rounding
    options, argv = {"kl_loss_coef": 0.0, "value_lr": 5e-4} | options, {}
    for option, value in options.items():
        flag, names = FLAGS.get(option, (f"ppo__{option}", {}))
        argv[flag] = names.get(value, value)
    seen = run(inputs, tmp_path, world, **placement, **argv)
    due = reference(inputs, seen, **options)
    compare(seen, due)
    return seen, due
