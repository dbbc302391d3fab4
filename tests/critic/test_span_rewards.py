"""What is paid on the way, against literal loops in float64: by values and by both means, over two
ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from episodes import episode
from ranks import run_threads

from splitppo.config import Config, PPOConfig, RewardConfig, RolloutConfig
from splitppo.critic import Critic, ScoredRows, join
from splitppo.critic.baselines import Mean, Values
from splitppo.job.collectives import Group
from splitppo.rewards.scorer import Scored
from splitppo.rewards.shaping import spread_of
from splitppo.rollout import Rollout

GAMMA, LAM, KL_COEF = 0.9, 0.8, 0.5
# of each row, two of a prompt: tokens, score, (end, reward), as many characters as tokens
ROWS: list[tuple[int, float, list[tuple[int, float]]]] = [
    (6, 1.0, [(2, 0.5), (4, -0.25), (6, 0.125)]),
    (3, 0.0, [(1, 1.0)]),
    (1, 2.0, []),
    (8, -1.0, [(8, 3.0), (3, 0.5), (3, 0.5)]),
    (5, 0.5, [(2, 0.5)]),
    (2, 4.0, []),
]
HELD = [[0, 2, 3], [1, 4, 5]]  # rows of each rank
VALUES, OLD, REF = ([[*torch.randn(n, generator=torch.Generator().manual_seed(10 * n + i)).tolist()]
                     for n, *_ in ROWS] for i in range(3))  # fmt: skip


def packed(lines: list[list[float]], rows: list[int]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in lines[row]])


def critic_rank(group: Group, config: Config, part: int = 3) -> Any:
    """Estimates of the rows; they come in chunks of `part`."""
    context: Any = SimpleNamespace(
        config=config, named=config, prompt=lambda row: None, decode=lambda ids: "x" * len(ids)
    )
    learner: Any = SimpleNamespace(
        runner=SimpleNamespace(group=group),
        forward=lambda rollout, *_, **__: [packed(VALUES, rollout.rows)],
    )
    baseline = Values(context, learner) if config.has_value else Mean(context, group)
    critic = Critic(context, group, baseline, cast(Any, None), None)
    held = HELD[group.dp_rank]
    scored: list[ScoredRows] = []
    for rows in (held[i : i + part] for i in range(0, len(held), part)):
        rollout = Rollout(episode(row, [1], [2] * ROWS[row][0]) for row in rows)
        results = [Scored(ROWS[row][1], {}, (), ROWS[row][2] or None) for row in rows]
        scored.append(critic.score(1, rollout, lambda results=results: results))
    logprobs = [packed(OLD, held), packed(REF, held)]
    return critic.advantages(1, join(scored), logprobs), float(spread_of(critic.past_scores))


def rewards_of(row: int, scale: float) -> list[float]:
    """Of each token: the spans that end there, the KL, at the last one what the score has left."""
    tokens, score, spans = ROWS[row]
    line = [sum(r for end, r in spans if end == t + 1) / scale for t in range(tokens)]
    line[-1] += score / scale - sum(line)
    return [r - KL_COEF * (o - f) for r, o, f in zip(line, OLD[row], REF[row], strict=True)]


def to_go(rewards: list[float], t: int) -> float:
    return sum(GAMMA ** (k - t) * r for k, r in enumerate(rewards) if k >= t)


def config_of(**ppo: Any) -> Config:
    ppo |= {"gamma": GAMMA, "lam": LAM, "kl_coef": KL_COEF, "kl_kind": "k1", "whiten": False}
    return Config(ppo=PPOConfig(**ppo), rollout=RolloutConfig(batch_size=len(ROWS), samples=2))


@pytest.mark.parametrize("part", [1, 3])
def test_spans_through_gae(part: int):
    for rank, (estimate, _) in enumerate(run_threads(2, critic_rank, config_of(), part)):
        advantages, returns = [], []
        for row in HELD[rank]:
            rewards = rewards_of(row, 1.0)
            values = [*VALUES[row], 0.0]
            deltas = [r + GAMMA * values[t + 1] - values[t] for t, r in enumerate(rewards)]
            line = [
                sum((GAMMA * LAM) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
                for t in range(len(deltas))
            ]
            advantages += line
            returns += [a + v for a, v in zip(line, VALUES[row], strict=True)]
            # the score is the row's sum
            kls = sum(o - f for o, f in zip(OLD[row], REF[row], strict=True))
            assert sum(rewards) + KL_COEF * kls == pytest.approx(ROWS[row][1])
        assert estimate.advantages.tolist() == pytest.approx(advantages, abs=1e-5)
        assert estimate.returns.tolist() == pytest.approx(returns, abs=1e-5)
        due = [r for row in HELD[rank] for r in rewards_of(row, 1.0)]
        assert estimate.columns["reward"].tolist() == pytest.approx(due, abs=1e-6)
        counts = [len(spans) for *_, spans in ROWS if spans]
        assert estimate.metrics["critic/spans/mean"] == sum(counts) / len(counts)


@pytest.mark.parametrize("baseline", ["batch", "group"])
def test_no_token_is_charged_for_what_was_paid_before_it(baseline: Any):
    """Means of what spans pay are over the rewards-to-go of the same token; a row that lacks it is
    left out of the batch's, and counts 0 in the group's."""
    spans = [[sum(r for end, r in spans if end == t + 1) for t in range(n)] for n, _, spans in ROWS]
    rest = [
        [r - s for r, s in zip(rewards_of(row, 1.0), spans[row], strict=True)]
        for row in range(len(ROWS))
    ]
    for rank, (estimate, _) in enumerate(run_threads(2, critic_rank, config_of(baseline=baseline))):
        due = []
        for row in HELD[rank]:
            for t in range(ROWS[row][0]):
                if baseline == "batch":
                    mean = sum(to_go(line, 0) for line in rest) / len(rest)
                    among = [to_go(line, t) for line in spans if t < len(line)]
                else:
                    mean = to_go(rest[row ^ 1], 0)
                    among = [to_go(spans[row ^ 1], t)]
                returned = to_go(rewards_of(row, 1.0), t)
                due.append(returned - mean - sum(among) / len(among))
        assert estimate.advantages.tolist() == pytest.approx(due, abs=1e-5)


def test_rows_that_are_paid_alike_have_no_advantage_at_any_token(monkeypatch: pytest.MonkeyPatch):
    alike = [(6, 1.0, [(2, 0.5), (4, 0.25)])] * len(ROWS)
    zeros = [[0.0] * 6] * len(ROWS)
    for name, lines in {"ROWS": alike, "OLD": zeros, "REF": zeros}.items():
        monkeypatch.setitem(globals(), name, lines)
    ppo = PPOConfig(baseline="batch", whiten=False)
    config = Config(ppo=ppo, rollout=RolloutConfig(batch_size=len(ROWS), samples=2))
    for estimate, _ in run_threads(2, critic_rank, config):
        assert estimate.returns.tolist()[:6] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
        assert estimate.advantages.abs().max() < 1e-6


def test_normalised_scores_with_spans_are_divided_alone(monkeypatch: pytest.MonkeyPatch):
    """On all ranks, also on one whose rows have none."""
    config = Config(
        ppo=config_of().ppo, reward=RewardConfig(normalize="running"), rollout=config_of().rollout
    )
    without = [(tokens, score, []) for tokens, score, _ in ROWS]
    for rows in (ROWS, [*without[:4], ROWS[4], without[5]], without):
        monkeypatch.setitem(globals(), "ROWS", rows)
        mean = sum(score for _, score, _ in rows) / len(rows) if rows is without else 0.0
        for rank, (estimate, scale) in enumerate(run_threads(2, critic_rank, config)):
            due = [r for row in HELD[rank] for r in rewards_of(row, scale)]
            ends = [sum(ROWS[row][0] for row in HELD[rank][: i + 1]) - 1 for i in range(3)]
            for end in ends:
                due[end] -= mean / scale
            assert estimate.columns["reward"].tolist() == pytest.approx(due, abs=1e-5)


@pytest.mark.parametrize(("turn", "score"), [(3e38, 3e38), (-3e38, -2e38), (3e38, 1.0)])
def test_a_sum_beyond_float32_fails_its_row_alone(turn: float, score: float):
    config = config_of(baseline="batch")
    context: Any = SimpleNamespace(config=config, named=config, decode=lambda ids: "x" * len(ids))
    group: Any = SimpleNamespace(of_first=lambda pending: pending())
    critic = Critic(context, group, Mean(context, group), cast(Any, None), None)
    long = episode(0, [1], [2])
    long = replace(long, segments=(long.segments[0]._replace(reward=turn),))
    results = [Scored(score, {}, ()), Scored(2.0, {}, ())]
    scored = critic.score(1, Rollout([long, episode(1, [1], [2])]), lambda: results)
    fails = abs(turn + score) > 3.41e38
    assert [(row, failure.kind) for row, failure in scored.failures] == [(0, "invalid")] * fails
    assert scored.totals.tolist() == pytest.approx([turn if fails else turn + score, 2.0])
