"""The verbs of actor and critic by value, on two ranks, with models and engines that only hand out
numbers."""

import json
import math
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from episodes import episode
from ranks import run_threads

from splitppo import algo
from splitppo.config.cli import parse
from splitppo.context import Context
from splitppo.critic import Critic, ScoredRows
from splitppo.critic.baselines import Mean, Values
from splitppo.errors import UserError
from splitppo.generator import Generator
from splitppo.generator.sampler import Sampler
from splitppo.job.collectives import Group
from splitppo.models.learner import learning_metrics
from splitppo.placement import Streams, make_step_plan
from splitppo.policy import Policy
from splitppo.rewards.scorer import Failure, count_failures
from splitppo.rollout import End, Prompt, Rollout
from splitppo.run.life import Run

CPU = torch.device("cpu")
HELD = [[0, 1], [2, 3]]  # rows of each rank
LENGTHS, PROMPTS = [2, 1, 3, 2], [1, 2, 3, 4]
ENDS: list[End] = ["eos", "limit", "eos", "stop"]
SCORES = [[1.0, 3.0, -5.0, 2.5], [0.0, 2.0, 4.0, 40.0]]  # of two steps
PARSING = threading.Lock()  # ranks are threads, and tyro's cache is not made for them
GAMMA, LAM, KL_COEF = 0.9, 0.8, 0.5


def figure(name: str) -> list[list[float]]:
    """Numbers for each token of each row, others for each name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return [torch.randn(n, generator=generator).double().tolist() for n in LENGTHS]


VALUES, OLD, ENTROPY = figure("values"), figure("old"), figure("entropy")
# one token of either is far off
REF = [
    [p - 30 * (row == 2) * (t == 1) for t, p in enumerate(line)]
    for row, line in enumerate(figure("ref"))
]
SAMPLED = [
    [p + 0.1 * (t - row) - 25 * (row == 3) * (t == 0) for t, p in enumerate(x)]
    for row, x in enumerate(OLD)
]


def packed(figures: list[list[float]], rank: int) -> torch.Tensor:
    return torch.tensor([x for row in HELD[rank] for x in figures[row]])


def rollout_of(rank: int) -> Rollout:
    return Rollout(
        [episode(r, [1] * PROMPTS[r], [2] * LENGTHS[r], SAMPLED[r], ENDS[r]) for r in HELD[rank]]
    )


def context_of(*argv: str) -> Context:
    with PARSING:
        config = parse(["--rollout.batch-size=4", "--ppo.mini-batches=1", *argv])
    return Context(config, cast(Any, None), (), cast(Any, None), 10)


def advantages_rank(group: Group) -> list:
    rank, found = group.dp_rank, []
    for how in ("batch", "running"):
        ppo = [
            f"--ppo.gamma={GAMMA}",
            f"--ppo.lam={LAM}",
            f"--ppo.kl-coef={KL_COEF}",
            "--ppo.kl-kind=k1",
        ]
        context = context_of(*ppo, f"--reward.normalize={how}", "--ppo.lam-value=1.0")
        value: Any = SimpleNamespace(runner=SimpleNamespace(group=group))
        critic = Critic(context, group, Values(context, value), cast(Any, None), None)
        for scores in SCORES:
            rollout, mine = rollout_of(rank), torch.tensor([scores[row] for row in HELD[rank]])
            extra = {"length": [10.0 * row for row in HELD[rank]]}
            scored = ScoredRows(rollout, packed(VALUES, rank), mine, extra, [])
            made = critic.advantages(1, scored, [packed(OLD, rank), packed(REF, rank)])
            found.append((made.advantages.tolist(), made.returns.tolist(), made.metrics))
    return found


def variance(xs: list[float]) -> float:
    mean = sum(xs) / len(xs)
    return sum((x - mean) ** 2 for x in xs) / (len(xs) - 1)


def inside(xs: list[float]) -> float:
    """Squares around the means at the same token of the rows."""
    places = [t for n in LENGTHS for t in range(n)]
    parts = [[x for x, at in zip(xs, places, strict=True) if at == t] for t in {*places}]
    return sum((x - sum(part) / len(part)) ** 2 for part in parts for x in part)


def expected(
    scores: list[float], seen: list[float]
) -> tuple[list[float], list[float], dict[str, float]]:
    """What a critic should make of it, over all rows in plain numbers; `seen`: the scores that
    normalise."""
    shaped = [(s - sum(seen) / len(seen)) / math.sqrt(variance(seen)) for s in scores]
    advantages, returns, rewards = [], [], []
    kls = [[o - r for o, r in zip(*lines, strict=True)] for lines in zip(OLD, REF, strict=True)]
    for row, n in enumerate(LENGTHS):
        line = [-KL_COEF * kl for kl in kls[row]]
        line[-1] += shaped[row]
        rewards.append(sum(line))
        deltas = [line[t] + GAMMA * [*VALUES[row], 0.0][t + 1] - VALUES[row][t] for t in range(n)]
        advantages += [
            sum((GAMMA * LAM) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)
        ]
        returns += [sum(GAMMA ** (k - t) * line[k] for k in range(t, n)) for t in range(n)]
    values, mean = [v for line in VALUES for v in line], sum(advantages) / len(advantages)
    error = [r - v for r, v in zip(returns, values, strict=True)]
    all_kl = [kl for line in kls for kl in line]
    figures = {
        "critic/score/mean": sum(scores) / 4, "critic/score/min": min(scores),
        "critic/score/max": max(scores), "critic/rewards/mean": sum(rewards) / 4,
        "critic/rewards/min": min(rewards), "critic/length/mean": 15.0,
        "critic/advantages/mean": mean, "critic/returns/max": max(returns),
        "critic/values/min": min(values),
        "critic/vf_explained_var": 1 - inside(error) / inside(returns),
        "critic/kl_coef": KL_COEF, "critic/kl_row": sum(all_kl) / 4,
        "critic/ref_kl": sum(all_kl) / 8, "critic/reward_failures": 0.0,
    }  # fmt: skip
    return (
        [(a - mean) / math.sqrt(variance(advantages) + 1e-8) for a in advantages],
        returns,
        figures,
    )


def test_what_the_critic_makes_of_scores_kl_and_values():
    both = run_threads(2, advantages_rank)
    seen = [
        SCORES[0],
        SCORES[1],
        SCORES[0],
        SCORES[0] + SCORES[1],
    ]  # batch, batch, running, running
    for first, second, scores, of in zip(*both, SCORES * 2, seen, strict=True):
        advantages, returns, figures = expected(scores, of)
        assert first[0] + second[0] == pytest.approx(advantages, rel=1e-4, abs=1e-5)
        assert first[1] + second[1] == pytest.approx(returns, rel=1e-4, abs=1e-5)
        for _, _, metrics in (first, second):
            assert {name: metrics[name] for name in figures} == pytest.approx(
                figures, rel=1e-4, abs=1e-5
            )


def failing_rank(group: Group) -> list[str]:
    """`most` fails on three of the four rows in each step; `all` on all rows, but for one in step
    3. The run is resumed before step 6."""
    rank, mean = group.dp_rank, Mean(context := context_of(), group)
    critic, said = Critic(context, group, mean, cast(Any, None), None), []
    for step in range(1, 8):
        if step == 6:
            saved, critic = (
                json.dumps(critic.state()),
                Critic(critic.context, group, mean, cast(Any, None), None),
            )
            critic.load_state(json.loads(saved))
        failed = [
            (row, Failure("all", "error", f"step {step}"))
            for row in HELD[rank]
            if (step, row) != (3, 1)
        ]
        failed += [(row, Failure("most", "timeout", "late")) for row in HELD[rank] if row]
        try:
            critic.failing, told = count_failures(group, critic.failing, 2, failed, never=False)
            share = told["critic/reward_failures/share"]
            said.append(
                f"{told['critic/reward_failures']} {told['critic/reward_failures/error']} {share}"
            )
        except UserError as error:
            said.append(str(error))
    return said


def test_a_reward_that_fails_on_all_rows_for_some_steps_ends_the_run(capfd):
    said = run_threads(2, failing_rank)
    assert said[0] == said[1]
    assert said[0][:6] == ["7.0 4.0 1.0"] * 2 + ["6.0 3.0 0.75"] + ["7.0 4.0 1.0"] * 3
    for part in (
        "reward all ",
        "every row",
        "4 steps",
        "step 7",
        "fix it",
    ):  # 12 rows of three steps say too little
        assert part in said[0][6]
    assert (
        capfd.readouterr().out.count("[critic] rewards that failed") == 7
    )  # told by the first rank alone


class Engine:
    """Notes what it is asked."""

    def __init__(self):
        self.loaded, self.calls = False, []

    def load_weights(self, weights: Any) -> None:
        self.loaded = True
        self.calls.append(weights)


def act_rank(group: Group) -> tuple:
    rank, engine, bad = group.dp_rank, Engine(), []

    def check_finite() -> None:
        if bad:
            raise FloatingPointError

    forward = lambda *_, **__: [packed(OLD, rank), packed(ENTROPY, rank)]  # noqa: E731
    runner = SimpleNamespace(group=group)
    ratios = {"ratio_mean": 2.0, "ratio_square": 5.0}
    steps = [
        {"loss": 1.0, "grad_norm": 2.0, "skipped": 1.0, **ratios},
        {"loss": 3.0, "grad_norm": 4.0, "skipped": 0.0, **ratios},
    ]
    given: list[Any] = []

    def optimize(rollout: Rollout, mini_batches: Any, fields: dict, *_: Any, **__: Any) -> list:
        given.append((mini_batches, sorted(fields), fields["weights"].tolist()))
        return steps[: len(given)]

    learner: Any = SimpleNamespace(
        model=SimpleNamespace(load=None),
        runner=runner,
        updates=0,
        waited=0,
        check_finite=check_finite,
        update=optimize,
        forward=forward,
    )
    learner.weights = lambda dtype: f"{learner.updates} in {dtype}"
    learner.learning_rate = lambda step: step / 100
    reference: Any = SimpleNamespace(
        logprobs=lambda _: packed(REF, rank), release_memory=lambda: None
    )
    scores = iter([0.3, 0.5, 0.4])
    validator: Any = SimpleNamespace(
        due=lambda step: step, run=lambda _: {"val/score/mean": next(scores)}
    )
    context = context_of("--ppo.importance=token", "--ppo.mask-truncated", "--ppo.kl-kind=k2")
    owned = make_step_plan(
        Streams(4), seed=0, step=1, mini_batches=1, sizes={"actor": 2, "critic": 2}
    )
    plans = [replace(owned, step=step, mini_batches=((0, 1, 2, 3),)) for step in range(4)]
    sampler = Sampler(4, lambda row: Prompt("", [1], "", "", {}), limit=9)
    outputs: Any = lambda: None  # noqa: E731
    outputs.replays = False
    policy = Policy(context, learner, outputs, reference, dtype=torch.bfloat16)
    generator = Generator(context, group, cast(Any, engine), sampler, validator)
    rollout, policy.compared = rollout_of(rank), True  # what is given is no engine's
    generator.load_weights(policy.weights())  # neither engine has weights
    generator.load_weights(policy.weights())
    learner.updates = 1 if rank else 0
    generator.load_weights(policy.weights())  # for both, as one is stale
    bad, learner.updates = [1], 2
    with pytest.raises(FloatingPointError):
        generator.load_weights(policy.weights())
    calls, bad[:] = list(engine.calls), []
    logprobs, metrics = policy.logprobs(rollout)
    metrics |= generator.gather_open_rows(rollout)
    sent = packed(OLD, rank)

    def update(step: int) -> dict[str, Any]:
        # that the policy waits is said to one rank alone
        waits = step == 1 and rank == 1
        return metrics | policy.update(plans[step], rollout, logprobs, [sent], waits=waits)

    told = [update(1), update(2)]
    trained = [policy.trained]
    told.append(update(3))
    trained.append(policy.trained)
    validated = [generator.validate(step, policy.weights()) for step in (0, 1, 2, 3)]
    assert [bool(metrics) for metrics in validated] == [False, True, True, True]
    return calls, told, given, trained


def test_what_policy_and_generator_tell_and_hand_on():
    for rank, (calls, told, given, trained) in enumerate(run_threads(2, act_rank)):
        # no weights go to an engine that has them, and none that are not finite
        assert calls == ["0 in torch.bfloat16", f"{rank} in torch.bfloat16"]
        logs = [
            o - s
            for old, line in zip(OLD, SAMPLED, strict=True)
            for o, s in zip(old, line, strict=True)
        ]
        at = [min(max(log, -20.0), 20.0) for log in logs]
        kl = [
            (o - r) ** 2 / 2
            for old, ref in zip(OLD, REF, strict=True)
            for o, r in zip(old, ref, strict=True)
        ]
        weights = [min(math.exp(log), 2.0) for log in at]
        due = {
            "actor/mismatch_mean": sum(map(abs, logs)) / 8,
            "actor/mismatch_max": max(map(abs, logs)),
            "actor/mismatch_ratio": sum(map(math.exp, at)) / 8,
            "actor/mismatch_k3": sum(math.exp(log) - 1 - log for log in at) / 8,
            "actor/entropy": sum(e for line in ENTROPY for e in line) / 8,
            "actor/ref_kl": sum(kl) / 8,
            "actor/importance_mean": sum(weights) / 8, "actor/importance_capped": 1 / 8,
            "response_length/mean": 2.0, "response_length/max": 3,
            "response_length/clip_ratio": 1 / 4, "prompt_length/mean": 2.5, "tokens": 18.0,
        }  # fmt: skip
        first, second, third = told
        for metrics in told:
            assert {name: metrics[name] for name in due} == pytest.approx(due, rel=1e-4)
        assert [metrics["actor/lr"] for metrics in told] == [0.0, 0.02, 0.03]
        assert (first["optimizer_steps"], first["actor/skipped"], first["actor/pg_loss"]) == (
            [],
            0.0,
            0.0,
        )
        assert (second["actor/skipped"], second["actor/pg_loss"]) == (1.0, 1.0)
        assert (first["actor/ratio_ess"], second["actor/ratio_ess"]) == (0.0, 4 / 5)
        assert (third["actor/skipped"], third["actor/pg_loss"], third["actor/grad_norm"]) == (
            1.0,
            2.0,
            3.0,
        )
        assert third["optimizer_steps"] == [
            {"loss": 1.0, "grad_norm": 2.0},
            {"loss": 3.0, "grad_norm": 4.0},
        ]
        assert trained == [False, True]  # not by an update that was skipped
        mine = [weights[i] for i in ((0, 1, 2), (3, 4, 5, 6, 7))[rank]]
        for mini_batches, names, seen in given:
            # places of rows 0, and 2 and 3; row 1 is cut
            assert mini_batches == [[0], [0, 1]][rank : rank + 1]
            assert names == ["advantages", "old", "ref", "weights"]
            assert seen == pytest.approx(mine, rel=1e-4)


def test_figures_of_how_work_was_cut_are_of_perf_and_none_is_missing_without_a_step():
    one = {"loss": 2.0, "mine": 4.0, "grad_norm": 1.0, "skipped": 1.0}
    one["update_tflop"] = 3.0
    got = learning_metrics("critic", "vf_loss", [one, one | {"loss": 4.0}], ["mine"])
    assert got.pop("optimizer_steps") == [
        {"loss": 2.0, "grad_norm": 1.0},
        {"loss": 4.0, "grad_norm": 1.0},
    ]
    due = {
        "critic/vf_loss": 3.0,
        "critic/mine": 4.0,
        "critic/grad_norm": 1.0,
        "critic/skipped": 2.0,
    }
    assert got == due | {"perf/update_tflop": 3.0}
    nothing = learning_metrics("critic", "vf_loss", [], ["mine"])
    assert nothing == dict.fromkeys(got, 0.0) | {"optimizer_steps": []}


def test_a_steps_line_is_written_before_its_checkpoint_counts():
    """What fails meanwhile, such as a tracker, is in a phase of its own."""
    done: list[Any] = []
    run: Any = object.__new__(Run)
    log = SimpleNamespace(
        screen=None,
        first=False,
        finish=lambda step, metrics: done.append(("line", step, metrics)),
        phase=lambda name: done.append("trackers" in name),
    )
    run.logs = {"critic": log}
    run.config, run.start, run.written = parse([]), 0, None
    run.savers, run.bad = (
        {"critic": SimpleNamespace(commit=lambda step: done.append(("counts", step)))},
        {"critic": 0},
    )
    run.finish("critic", 3, {"x": 1.0})
    assert done == [True, ("line", 3, {"x": 1.0}), ("counts", 3)]


def test_the_critics_state_goes_through_json():
    def state_rank(group: Group) -> None:
        mean = Mean(context_of(), group)
        adaptive, fixed = (
            ["--ppo.kl-coef=0.1", "--ppo.kl-target=6"],
            ["--ppo.kl-coef=0.2", "--reward.timeout=9"],
        )
        before, after, other = (
            Critic(context_of(*ppo), group, mean, cast(Any, None), None)
            for ppo in (adaptive, adaptive, fixed)
        )
        due = {"kl_coef": 0.1, "scores": [0.0, 0.0, 0.0], "failing": {}}
        assert before.state() == due | {"scored_by": before.scored_by}
        before.kl_coef = 0.37
        before.past_scores = algo.moments(torch.tensor([1.0, 3.0, -5.0, 1.0]))
        state = json.loads(json.dumps(before.state()))
        after.load_state(state)
        assert after.kl_coef == 0.37
        assert after.state() == before.state()
        other.load_state(state)
        assert other.kl_coef == 0.2  # it does not adapt: what is configured now
        elsewhere = Critic(
            context_of("--reward.function=exact_match"), group, mean, cast(Any, None), None
        )
        elsewhere.load_state(state)  # what another reward scored says nothing of this one's scores
        assert (elsewhere.past_scores.count, other.past_scores.count) == (0, 4)
        for critic in (after, other):  # float32 would count no further than to 2^24 scores
            past = critic.past_scores
            assert {part.dtype for part in (past.count, past.mean, past.variance)} == {
                torch.float64
            }

    run_threads(1, state_rank)
