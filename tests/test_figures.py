"""A step's figures and its optimizer steps by value, worked out by hand: ranks are threads, models
have two weights."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from episodes import episode
from ranks import run_threads
from torch import Tensor, nn

from splitppo import algo
from splitppo.config import Config, OptimConfig, PPOConfig, RolloutConfig, ValueConfig
from splitppo.critic import Critic, ScoredRows
from splitppo.critic.baselines import BoundedValues, Values
from splitppo.errors import UserError
from splitppo.job.collectives import Group
from splitppo.models.experts import Load
from splitppo.models.learner import Learner
from splitppo.models.runner import Runner
from splitppo.rewards.scorer import Failure
from splitppo.rollout import End, Episode, Rollout

CPU = torch.device("cpu")


def sample(row: int, prompt: int, *logprobs: float, end: End = "eos") -> Episode:
    return episode(row, [5] * prompt, [7] * len(logprobs), list(logprobs), end)


# The critic: two ranks with a row each


def make_critic(group: Group, config: Config) -> Critic:
    value: Any = SimpleNamespace(runner=SimpleNamespace(group=group))
    context: Any = SimpleNamespace(config=config, named=config)
    kind = BoundedValues if config.value.range else Values
    return Critic(context, group, kind(context, value), cast(Any, None), None)


def advantages(
    group: Group, config: Config, steps: list[list[ScoredRows]], logprobs: list[list[Tensor]]
) -> Any:
    """What each step gave: metrics, advantages, returns; and the critic."""
    critic, found = make_critic(group, config), []
    for step, parts in enumerate(steps, 1):
        made = critic.advantages(step, parts[group.dp_rank], logprobs[group.dp_rank])
        found.append((made.metrics, made.advantages.tolist(), made.returns.tolist()))
    return found, critic


def scored(row: int, values: list[float], score: float, failures: int = 0) -> ScoredRows:
    rollout = Rollout([sample(row, 1, *[0.0] * len(values))])
    failed = [(row, Failure("judge", "timeout", "took long"))] * failures
    return ScoredRows(
        rollout, torch.tensor(values), torch.tensor([score]), {"steps": [10.0 * row]}, failed
    )


OLD_AND_REF = [
    [torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -2.0])],
    [torch.tensor([-1.0]), torch.tensor([-3.0])],
]
STEP = [scored(0, [2.0, 1.0], 3.0), scored(1, [1.0], 1.0)]


def test_rewards_returns_and_explained_variance_by_hand():
    """KL 1, 0 / 2 and scores 3 / 1: rewards -0.5, 3 / 0, so returns 2.5, 3 / 0 and advantages 0.5,
    2 / -1."""
    ppo = PPOConfig(kl_coef=0.5, kl_kind="k1", gamma=1.0, lam=1.0, whiten=False)
    config = Config(ppo=ppo, rollout=RolloutConfig(batch_size=2))
    for (((found, white, returns),), _), row in zip(
        run_threads(2, advantages, config, [STEP], OLD_AND_REF), (0, 1), strict=True
    ):
        assert white == [[0.5, 2.0], [-1.0]][row]
        assert returns == [[2.5, 3.0], [0.0]][row]
        of = {
            name: tuple(found[f"critic/{name}/{part}"] for part in ("mean", "min", "max"))
            for name in ("score", "rewards", "advantages", "returns", "values", "steps")
        }
        assert of["score"] == (2.0, 1.0, 3.0)
        assert of["rewards"] == (1.25, 0.0, 2.5)  # of each row, with the KL
        assert of["advantages"] == (0.5, -1.0, 2.0)
        assert of["returns"] == (pytest.approx(5.5 / 3), 0.0, 3.0)
        assert of["values"] == (pytest.approx(4 / 3), 1.0, 2.0)
        assert of["steps"] == (5.0, 0.0, 10.0)
        # two tokens are first: returns 5/2 and 0, less the values 1/2 and -1
        assert found["critic/vf_explained_var"] == pytest.approx(1 - (9 / 8) / (25 / 8))
        assert (found["critic/kl_row"], found["critic/ref_kl"], found["critic/kl_coef"]) == (
            1.5,
            1.0,
            0.5,
        )


def test_without_a_spread_of_returns_none_of_it_is_explained():
    config = Config(
        ppo=PPOConfig(kl_coef=0.0, gamma=1.0, lam=1.0), rollout=RolloutConfig(batch_size=2)
    )
    same = [scored(0, [2.0], 1.0), scored(1, [3.0], 1.0)]
    no_kl = [[torch.zeros(1)], [torch.zeros(1)]]
    (((found, _, _),), _), _ = run_threads(2, advantages, config, [same], no_kl)
    assert found["critic/vf_explained_var"] == 0.0
    assert "critic/ref_kl" not in found  # there is no reference


@pytest.mark.parametrize(("score", "told"), [(1.5, "lie between 1.5 and 2"), (2.0, "")])
def test_a_return_outside_the_range_of_bounded_values_ends_the_run_on_all_ranks(score, told):
    config = Config(
        ppo=PPOConfig(lam=1.0),
        value=ValueConfig(range=(2.0, 3.0)),
        rollout=RolloutConfig(batch_size=2),
    )
    rows = [scored(0, [2.2], score), scored(1, [2.2], 2.0)]

    def found(group: Group) -> str:
        try:
            advantages(group, config, [rows], [[torch.zeros(1)], [torch.zeros(1)]])
        except UserError as error:
            return str(error)
        return ""

    for message in run_threads(2, found):
        assert told in message
        assert bool(told) == message.startswith("value.range=2 3: ")


def test_an_adaptive_coefficient_counts_from_the_next_step_on():
    ppo = PPOConfig(kl_coef=0.5, kl_kind="k1", kl_target=1.0, kl_horizon=10)
    config = Config(ppo=ppo, rollout=RolloutConfig(batch_size=2))
    for found, critic in run_threads(2, advantages, config, [STEP, STEP], OLD_AND_REF):
        # KL of a row 1.5, which is 0.5 too much; at most 0.2 counts, for 2 rows of 10
        assert [metrics["critic/kl_coef"] for metrics, *_ in found] == pytest.approx(
            [0.5, 0.5 * 1.04]
        )
        assert critic.kl_coef == pytest.approx(0.5 * 1.04**2)


# The learner: a matrix and a bias of one number each


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="padded")
        self.matrix, self.bias = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1))
        self.load = Load(self)


def make_learner(
    group: Group, aggregate: algo.Aggregate = "token_mean", steps: int = 10, **optim: Any
) -> Learner:
    settings = replace(OptimConfig(lr=0.1, max_grad_norm=0.0), **optim)
    runner = Runner(group, CPU, 8)
    return Learner(Two(), runner, settings, steps=steps, aggregate=aggregate, flops=12.0)


def learn(
    learner: Learner, rollout: Rollout, x: list[float], step: int = 1
) -> tuple[dict[str, float], list[float]]:
    """One optimizer step of the loss (matrix + bias) * x of a token; its figures, and the weights
    after it."""

    def objective(
        model: Any, batch: Any, given: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses = (model.matrix[0] + model.bias) * given["x"]
        return algo.aggregate_loss(losses, batch.lengths, learner.aggregate), {
            "x": algo.mean(given["x"])
        }

    (figures,) = learner.update(
        rollout, [rollout.rows], {"x": torch.tensor(x)}, objective, step=step, epochs=1
    )
    model: Any = learner.model
    return figures, [model.matrix.item(), model.bias.item()]


# 1 and 3 tokens, 2 and 5 with their prompts
ROLLOUT = Rollout([sample(0, 1, 0.0), sample(1, 2, 0.0, 0.0, 0.0)])


def test_the_scheduled_rate_is_the_optimizers():
    def weights(group: Group) -> list[list[float]]:
        learner = make_learner(group, steps=5, schedule="linear")
        return [learn(learner, ROLLOUT, [1.0] * 4, step)[1] for step in (3, 5, 1)]

    # an AdamW step along one direction is as long as the rate, here half, none, all
    (found,) = run_threads(1, weights)
    assert found == [pytest.approx([1 - moved] * 2) for moved in (0.05, 0.05, 0.15)]


def test_two_steps_of_adamw_by_hand():
    """Gradients 1, then 3; betas 1/2 and 3/4. Decay takes 0.1 * 0.5 of the matrix in each step,
    nothing of the bias."""

    def weights(group: Group) -> list[list[float]]:
        learner = make_learner(group, betas=(0.5, 0.75), weight_decay=0.5)
        return [learn(learner, ROLLOUT, [gradient] * 4)[1] for gradient in (1.0, 3.0)]

    (found,) = run_threads(1, weights)
    # m = 1/4 + 3/2, v = 3/16 + 9/4, both without their bias
    second = 0.1 * (1.75 / 0.75) / math.sqrt(2.4375 / 0.4375)
    assert found[0] == pytest.approx([0.85, 0.9])
    assert found[1] == pytest.approx([0.85 * 0.95 - second, 0.9 - second])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_as_they_were(bad):
    def found(group: Group) -> list[tuple[dict[str, float], list[float]]]:
        learner = make_learner(group, max_grad_norm=1.0)
        return [learn(learner, ROLLOUT, [1.0, bad, 1.0, 1.0]), learn(learner, ROLLOUT, [-3.0] * 4)]

    ((first, still), (second, moved)) = run_threads(1, found)[0]
    assert (first["skipped"], still) == (1.0, [1.0, 1.0])
    assert (second["skipped"], moved) == (0.0, pytest.approx([1.1, 1.1]))  # as a first step goes


@pytest.mark.parametrize(
    ("aggregate", "loss"),
    [
        ("token_mean", 2 * 7 / 4),
        ("seq_mean_token_sum", 2 * 7 / 2),
        ("seq_mean_token_mean", 2 * 5 / 2),
    ],
)
def test_metrics_are_token_means_however_the_loss_is_weighed(aggregate, loss):
    def found(group: Group) -> dict[str, float]:  # the two rows don't go into one micro-batch
        return learn(make_learner(group, aggregate), ROLLOUT, [4.0, 1.0, 1.0, 1.0])[0]

    (figures,) = run_threads(1, found)
    assert (figures["x"], figures["loss"]) == pytest.approx((7 / 4, loss))


def test_the_work_of_an_update_by_hand(monkeypatch):
    """Rows of 2 and 4 tokens on one rank, of 2 on the other: the mean is 4."""

    def shares(group: Group) -> dict[str, float]:
        rollout = Rollout(
            [sample(0, 1, 0.0), sample(1, 3, 0.0)] if group.dp_rank == 0 else [sample(2, 1, 0.0)]
        )
        learner = make_learner(group)

        def objective(model: Any, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
            return (model.matrix[0] + model.bias).sum(), {}

        first, *_ = learner.update(
            rollout, [[*range(len(rollout.rows))]], {}, objective, step=1, epochs=3
        )
        return {name: first[name] for name in due}

    monkeypatch.setattr(Runner, "balance", lambda _, model, *rows: rows)  # they stay
    # 4 tokens, 3 epochs, 2 weights
    due = {"update_tflop": 6e-12 * 4 * 3 * 2}
    assert run_threads(2, shares) == [pytest.approx(due)] * 2
