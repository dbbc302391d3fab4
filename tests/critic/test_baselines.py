"""Baselines by value on two ranks, with a learner that only notes what it is told; and what the
critic makes of what they estimate."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from episodes import episode
from ranks import run_threads

from splitppo.config import Config, PPOConfig, RewardConfig, RolloutConfig, ValueConfig
from splitppo.critic import Critic, ScoredRows
from splitppo.critic.baselines import BoundedValues, Values
from splitppo.job.collectives import Group
from splitppo.placement import Streams, make_step_plan
from splitppo.rewards.scorer import Failure
from splitppo.rollout import Rollout

LENGTHS = ((2,), (1, 3))  # of each rank's rows
REWARDS = ((1.0, 2.0), (4.0, 0.0, 0.0, 8.0))
TO_GO = ((2.0, 2.0), (4.0, 2.0, 4.0, 8.0))  # at gamma .5
MEAN = 22 / 6


def context_of(config: Config) -> Any:
    return SimpleNamespace(config=config, named=config)


def rollout_of(rank: int) -> Rollout:
    lengths = LENGTHS[rank]
    return Rollout(episode(2 * rank + i, [1], [2] * n) for i, n in enumerate(lengths))


def learner_of(group: Group, **methods: Any) -> Any:
    return SimpleNamespace(runner=SimpleNamespace(group=group), **methods)


def start_rank(group: Group, head: list[float], bounds: Any, first: bool) -> tuple[list, Any, Any]:
    config = Config(ppo=PPOConfig(gamma=0.5), value=ValueConfig(range=bounds))
    weights: list[Any] = []
    learner = learner_of(group, set_weight=lambda *weight: weights.append(weight))
    kind = BoundedValues if bounds else Values
    rollout = rollout_of(group.dp_rank)
    values = torch.full((rollout.tokens,), head[group.dp_rank])
    kind(context_of(config), learner).estimate(
        rollout,
        torch.tensor(REWARDS[group.dp_rank]),
        values,
        spans=torch.zeros(()),
        first=first,
        pretraining=False,
    )
    return weights, values, learner


def test_a_head_of_zeros_starts_at_the_mean_reward_to_go_of_all_ranks():
    for (weights, values, _), lengths in zip(
        run_threads(2, start_rank, [0.0, 0.0], None, True), LENGTHS, strict=True
    ):
        assert [(name, float(bias)) for name, bias in weights] == [
            ("score.bias", pytest.approx(MEAN))
        ]
        assert values.tolist() == pytest.approx([MEAN] * sum(lengths))
    for weights, values, _ in run_threads(2, start_rank, [5.0, 5.0], (0.0, 10.0), True):
        ((_, bias),) = weights  # 5 is the middle of the range, where the logit is 0
        assert float(bias) == pytest.approx(torch.tensor(MEAN / 10).logit().item())
        assert values.tolist() == pytest.approx([MEAN] * len(values))


@pytest.mark.parametrize(("head", "first"), [([0.0, 0.1], True), ([0.0, 0.0], False)])
def test_a_head_that_was_drawn_or_trained_stays(head: list[float], first: bool):
    for rank, (weights, values, _) in enumerate(run_threads(2, start_rank, head, None, first)):
        assert weights == []
        assert values.unique().tolist() == pytest.approx([head[rank]])


@pytest.mark.parametrize("pretraining", [False, True])
def test_in_pretraining_the_values_targets_are_monte_carlo_returns(pretraining: bool):
    def estimate(group: Group) -> Any:
        config = Config(ppo=PPOConfig(gamma=0.5, lam=0.0))
        values = Values(context_of(config), learner_of(group))
        rank = group.dp_rank
        given = torch.ones(sum(LENGTHS[rank]))
        return values.estimate(
            rollout_of(rank), torch.tensor(REWARDS[rank]), given, spans=torch.zeros(()),
            first=False, pretraining=pretraining,
        )  # fmt: skip

    first, second = run_threads(2, estimate)
    # one step ahead: the reward plus half of the next value, less the value
    assert first.advantages.tolist() == [0.5, 1.0]
    assert second.advantages.tolist() == [3.0, -0.5, -0.5, 7.0]
    if pretraining:
        assert (first.returns.tolist(), second.returns.tolist()) == tuple(map(list, TO_GO))
    else:
        assert first.returns.tolist() == [1.5, 2.0]


def test_an_update_has_epochs_and_mini_batches_of_its_own():
    def update(group: Group) -> list[Any]:
        ppo = PPOConfig(mini_batches=1, epochs=2, value_mini_batches=2, value_epochs=3)
        config = Config(
            ppo=ppo,
            value=ValueConfig(pretrain_steps=1, pretrain_epochs=5),
            rollout=RolloutConfig(batch_size=4),
        )
        calls: list[Any] = []

        def optimize(_: Rollout, mini_batches: Any, columns: Any, *__: Any, **given: Any) -> list:
            calls.append((mini_batches, columns["old"].tolist(), given["epochs"]))
            return []

        rate = 0.25
        learner = learner_of(group, update=optimize, learning_rate=lambda step: rate / step)
        sizes: Any = {"actor": 1, "critic": 1}
        plan = make_step_plan(seed=0, step=2, streams=Streams(4, 1), mini_batches=1, sizes=sizes)
        rollout = Rollout(episode(row, [1], [2]) for row in range(4))
        for pretraining in (False, True):
            metrics = Values(context_of(config), learner).update(
                plan, rollout, torch.arange(4.0), torch.zeros(4), pretraining=pretraining
            )
            assert metrics["critic/lr"] == rate / 2
        return calls

    ((plain, pretrained),) = run_threads(1, update)
    assert [len(part) for part in plain[0]] == [2, 2]
    assert sorted(plain[0][0] + plain[0][1]) == [0, 1, 2, 3]
    assert (plain[1], plain[2]) == ([0.0, 1.0, 2.0, 3.0], 3)
    assert pretrained[2] == 5


def critic_rank(group: Group, config: Config, step: int, failed: bool) -> tuple[Any, Critic]:
    """A critic's estimate of three rows: of two turns, of one that ended by itself, and of one
    that failed or did not."""
    rows = [
        episode(0, [1], [2, 3, 4, 5], mask=[True, True, False, True]),
        episode(1, [1], [2]),
        episode(2, [1], [2], end="failed" if failed else "eos"),
    ]
    rollout = Rollout(rows)
    context = context_of(config)
    baseline = Values(context, learner_of(group))
    critic = Critic(context, group, baseline, cast(Any, None), None)
    scored = ScoredRows(
        rollout,
        torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        torch.tensor([1.0, 3.0, 50.0]),
        {},
        [(1, Failure("f", "error", "no"))] if failed else [],
    )
    zeros = torch.zeros(rollout.tokens)
    return critic.advantages(step, scored, [zeros, zeros - 1.0]), critic


@pytest.mark.parametrize("failed", [False, True])
def test_rows_that_failed_are_left_out_of_the_moments_that_normalise(failed: bool):
    config = Config(reward=RewardConfig(normalize="running"))
    ((_, critic),) = run_threads(1, critic_rank, config, 1, failed)
    assert float(critic.past_scores.count) == (1 if failed else 3)
    assert float(critic.past_scores.mean) == pytest.approx(1.0 if failed else 18.0)


def test_while_the_policy_waits_the_kl_coefficient_does_not_adapt():
    ppo = PPOConfig(kl_coef=0.5, kl_target=1e-3, kl_horizon=3)
    config = Config(ppo=ppo, value=ValueConfig(pretrain_steps=1))
    for step, waits in ((1, True), (2, False)):
        ((estimate, critic),) = run_threads(1, critic_rank, config, step, False)
        assert estimate.waits == waits
        assert estimate.metrics["critic/kl_coef"] == 0.5
        assert critic.kl_coef == (0.5 if waits else pytest.approx(0.5 * 1.2))
