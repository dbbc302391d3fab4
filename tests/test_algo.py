"""`splitppo.algo` against numbers worked out by hand, definitions written out literally, and
invariances."""

import itertools
import math
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from splitppo import algo
from splitppo.algo import Aggregate, Moments
from splitppo.config import OptimConfig
from splitppo.models.learner import learning_rate

AGGREGATES: tuple[Aggregate, ...] = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")
NAN = math.nan


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def t(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def same(got: Tensor, *want, tol: float = 1e-12) -> None:
    """`got` equals the numbers written out; nan equals nothing."""
    expected = torch.tensor(want[0] if len(want) == 1 else want, dtype=torch.float64)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tol)


def draw(rows: int, length: int, seed: int) -> Tensor:
    return torch.randn(
        rows, length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def holey_mask(rows: int, length: int, seed: int) -> Tensor:
    """A random mask with holes; row 1 is empty."""
    mask = draw(rows, length, seed) > -0.4
    mask[1] = False
    return mask


def of_rows(loss: Callable[..., Any], count: int, *, lengths: bool = True) -> Callable[..., Any]:
    """A loss of `count` packed tensors, called with rows `[B, T]` and the mask of their tokens."""

    def call(*given: Any, weights: Tensor | None = None, **how: Any) -> Any:
        mask = given[count].bool()
        packed = [x[mask] for x in given[:count]]
        if weights is not None:
            how["weights"] = weights[mask]
        return loss(*packed, *[mask.sum(1)] * lengths, *given[count + 1 :], **how)

    return call


aggregate_loss = of_rows(algo.aggregate_loss, 1)
value_loss = of_rows(algo.value_loss, 3)
bounded_value_loss = of_rows(algo.bounded_value_loss, 2)
ppo_loss = of_rows(algo.policy_loss, 3)


# Statistics


def test_mean_by_hand():
    same(algo.mean(t(1, 2, 6)), 3.0)
    same(algo.mean(t()), 0.0)


def test_moments_by_hand():
    got = algo.moments(t(1, 2, 6, 3))
    same(got.count, 4.0)
    same(got.mean, 3.0)
    same(got.variance, 14 / 3)  # (4 + 1 + 9 + 0) / 3


def test_moments_keep_digits_that_float32_has_not():
    assert algo.moments(torch.tensor([4096.0, 4096.5, 4097.0])).variance.item() == 0.25
    million = torch.full((100_000,), 0.1)
    assert algo.moments(million).mean.item() == pytest.approx(million[0].item(), rel=1e-12)


def test_merge_moments_by_hand():
    def part(count: float, mean: float, variance: float) -> Moments:
        return Moments(*torch.tensor([count, mean, variance], dtype=torch.float64))

    # {1, 3}: mean 2, variance 2. {5}: no variance. Nothing. Together {1, 3, 5}: mean 3, variance 4.
    got = algo.merge_moments([part(2, 2, 2), part(1, 5, 0), part(0, 0, 0)])
    same(torch.stack([got.count, got.mean, got.variance]), 3.0, 3.0, 4.0)
    alone = algo.merge_moments([part(1, 5, 0)])
    same(torch.stack([alone.count, alone.mean, alone.variance]), 1.0, 5.0, 0.0)
    pair = algo.merge_moments([part(1, 1, 0), part(1, 3, 0)])
    same(torch.stack([pair.count, pair.mean, pair.variance]), 2.0, 2.0, 2.0)
    empty = algo.merge_moments([part(0, 0, 0)])
    same(torch.stack([empty.count, empty.mean, empty.variance]), 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="expected 3, got 0"):
        algo.merge_moments([])


def test_whiten_by_hand():
    # 1, 2, 6, 3: mean 3, unbiased variance 14/3.
    got = algo.whiten(t(1, 2, 6, 3))
    s = math.sqrt(14 / 3 + 1e-8)
    same(got, [-2 / s, -1 / s, 3 / s, 0])
    # A variance as small as eps shows where eps sits: values 0 and 2e-4 have variance 2e-8, so 1e-4
    # / sqrt(3e-8).
    same(algo.whiten(t(0, 2e-4)), [-1 / math.sqrt(3), 1 / math.sqrt(3)])


@pytest.mark.parametrize("tokens", [[5.0], []])
def test_whiten_without_a_variance_is_zero(tokens):
    same(algo.whiten(t(*tokens)), [0.0] * len(tokens))


def test_whiten_over_merged_parts_is_whitening_the_whole():
    x = 3 * draw(7, 5, seed=1).flatten() + 10
    whole = algo.whiten(x)
    cuts = x.split([5, 1, 0, 29])
    merged = algo.merge_moments([algo.moments(cut) for cut in cuts])
    torch.testing.assert_close(
        torch.cat([algo.whiten(cut, merged) for cut in cuts]), whole, rtol=0, atol=1e-12
    )
    same(whole.mean(), 0.0)
    same(whole.var(), 1.0, tol=1e-7)
    assert not torch.allclose(torch.cat([algo.whiten(cut) for cut in cuts]), whole)


def test_whiten_keeps_dtype_and_takes_no_gradient():
    got = algo.whiten(torch.tensor([1.0, 2.0], requires_grad=True))
    assert got.dtype == torch.float32
    assert not got.requires_grad


# From scores to advantages


@pytest.mark.parametrize(
    ("kind", "want", "slope"),
    # log p = log 1/2, log ref = log 1/4: r = 1/2, log r = -log 2; then the other way round: r = 2.
    [
        ("k1", [math.log(2), -math.log(2)], [1, 1]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2], [math.log(2), -math.log(2)]),
        ("k3", [math.log(2) - 1 / 2, 1 - math.log(2)], [1 / 2, -1]),
    ],
)
def test_kl_by_hand(kind, want, slope):
    logprobs, ref = (
        t([1 / 2, 1 / 4]).log().requires_grad_(),
        t([1 / 4, 1 / 2]).log().requires_grad_(),
    )
    got = algo.kl_estimate(logprobs, ref, kind)
    same(got, [want])
    got.sum().backward()
    assert logprobs.grad is not None
    same(logprobs.grad, [slope])
    assert ref.grad is None


@pytest.mark.parametrize(
    ("kl", "factor"), [(6.0, 1.0), (6.6, 1.001), (60.0, 1.002), (0.0, 0.998), (-3.0, 0.998)]
)
def test_the_kl_coefficient_follows_the_kl(kl: float, factor: float) -> None:
    adapted = algo.adapt_kl_coef(0.5, kl, 100, target=6.0, horizon=10000)
    assert adapted == pytest.approx(0.5 * factor)
    assert algo.adapt_kl_coef(0.5, kl, 100, target=None, horizon=10000) == 0.5


def test_k3_is_exact_near_zero():
    tiny = torch.tensor([[1e-4]])
    assert algo.kl_estimate(tiny, torch.zeros(1, 1), "k3").item() == pytest.approx(0.5e-8, rel=0.02)


@pytest.mark.parametrize("side", [1, -1])
def test_exponentials_are_taken_of_clamped_log_ratios(side):
    """Token by token: within, almost at the limit, beyond, far beyond; e^800 is inf. At the limit
    itself torch has a gradient up to 2.14, and none from 2.15 on."""
    logs = side * t([19, 19.9, 21, 800])
    clamped = side * t([19, 19.9, 20, 20])
    assert torch.equal(algo.clamp_log_ratio(logs), clamped)
    logprobs = (-logs).requires_grad_()
    k3 = algo.kl_estimate(logprobs, torch.zeros_like(logs), "k3")
    same(k3 / (clamped.exp() - 1 - clamped), [[1, 1, 1, 1]])
    k3.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].ne(0).tolist() == [True, True, False, False]
    new, ones = logs.clone().requires_grad_(), torch.ones_like(logs)
    loss, metrics = policy_loss(
        new, torch.zeros_like(logs), -ones if side > 0 else ones, ones, "seq_mean_token_sum"
    )
    same(loss / clamped.exp().sum(), float(side))
    same(gradient(loss, new) / clamped.exp(), [[side, side, 0, 0]])
    same(metrics["ratio_clamped"], 2 / 4)
    same(metrics["ratio_mean"] / clamped.exp().mean(), 1.0)
    same(metrics["ppo_kl"] / -logs.mean(), 1.0)  # no exponential: as it is


def test_token_rewards_by_hand():
    got = algo.token_rewards(t(10, 20, 30, 40), t(1, 2, 3, 4, 6, 7, 1), [3, 3, 0, 1], kl_coef=0.5)
    same(got, [-0.5, -1, 8.5, -2, -3, 16.5, 39.5])


def test_token_rewards_refuse_scores_of_other_rows():
    with pytest.raises(ValueError, match="one score a row"):
        algo.token_rewards(torch.zeros(3), torch.zeros(6), [3, 3], kl_coef=0.0)


def test_gae_by_hand():
    # gamma = 1/2, lam = 1/2. Row 0: residuals 1 + 2 - 2 = 1; 0 + 4 - 4 = 0; 4 - 8 = -4, so the
    # advantages are -4; 0 - 4/4 = -1; 1 - 1/4 = 3/4. A row of no token and one of a single token,
    # -1 = 4 - 5, stand around it.
    rewards, values = t(4, 1, 0, 4), t(5, 2, 4, 8)
    advantages, returns = algo.gae(rewards, values, [0, 1, 3], gamma=0.5, lam=0.5)
    same(advantages, [-1, 0.75, -1, -4])
    same(returns, [4, 2.75, 3, 4])


def literal_gae(
    rewards: list[float], values: list[float], lengths: list[int], gamma: float, lams: list[float]
) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t: in lists,
    O(T^2)."""
    advantages, start = [], 0
    for n, lam in zip(lengths, lams, strict=True):
        r, v = rewards[start : start + n], [*values[start : start + n], 0.0]
        delta = [r[k] + gamma * v[k + 1] - v[k] for k in range(n)]
        advantages += [
            sum((gamma * lam) ** j * delta[k + j] for j in range(n - k)) for k in range(n)
        ]
        start += n
    return advantages


@pytest.mark.parametrize("lengths", [[9, 1, 0, 4, 9, 2, 0], [3], [0], []])
@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (1.0, 0.0), (0.9, 0.95), (0.5, 0.3), (0.0, 0.7), (0.9, None)]
)
def test_gae_is_the_literal_sum(gamma, lam, lengths):
    """None: a lambda for each row."""
    rewards, values = (draw(1, sum(lengths), seed=seed)[0] for seed in (3, 4))
    lams = [lam] * len(lengths) if lam is not None else [(i + 1) / 8 for i in range(len(lengths))]
    advantages, returns = algo.gae(
        rewards, values, lengths, gamma=gamma, lam=t(*lams) if lam is None else lam
    )
    same(advantages, literal_gae(rewards.tolist(), values.tolist(), lengths, gamma, lams))
    same(returns, (advantages + values).tolist())


def literal_baseline(
    togo: list[list[float]], turns: list[list[int]], kind: str, samples: int
) -> list[list[float]]:
    """By loops over rows and tokens; `turns`: of each row, each token's turn."""
    found: list[list[float]] = []
    for row, of_tokens in enumerate(turns):
        found.append([])
        for turn in of_tokens:
            means = []
            for other, others_turns in enumerate(turns):
                has = turn in others_turns
                begin = togo[other][others_turns.index(turn)] if has else 0.0
                peer = other // samples == row // samples and other != row
                if (kind == "batch" and has) or (kind == "group" and peer):
                    means.append(begin)
            found[-1].append(sum(means) / len(means))
    return found


# tokens of each turn of each row; the last row has none
TURNS = [[2, 1, 2], [3], [1, 1], [2, 2, 1], [4, 1], []]


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("kind", ["batch", "group"])
@pytest.mark.parametrize("cut", [[6], [3, 3], [1, 0, 4, 1]], ids=str)
def test_baselines_without_values_are_the_literal_means(kind, samples, cut):
    """Over any cut of the rows into ranks."""
    turns = [[turn for turn, size in enumerate(row) for _ in range(size)] for row in TURNS]
    togo = [draw(1, len(row), seed=i)[0].tolist() for i, row in enumerate(turns)]
    count = 4  # more than any row has
    due = literal_baseline(togo, turns, kind, samples)
    first = [0, *itertools.accumulate(cut)]
    parts = [range(a, b) for a, b in itertools.pairwise(first)]

    def of_rank(rows: range, all_sum: Callable[[Tensor], Tensor]) -> Tensor:
        returns = torch.tensor([x for row in rows for x in togo[row]], dtype=torch.float64)
        of_tokens = torch.tensor([x for row in rows for x in turns[row]]).long()
        lengths = [len(turns[row]) for row in rows]
        prompts = torch.tensor(rows).long() // samples if kind == "group" else None
        shape = (len(TURNS) // samples, samples)
        return algo.turn_baseline(
            returns, of_tokens, lengths, count=count, all_sum=all_sum, prompts=prompts, shape=shape
        )

    sums: list[Tensor] = []
    for rows in parts:  # what a rank adds
        of_rank(rows, lambda own: sums.append(own) or own)
    got = [of_rank(rows, lambda _: torch.stack(sums).sum(0)) for rows in parts]
    same(torch.cat(got), [x for row in due for x in row])


def test_gae_without_discount_returns_the_rewards_to_go():
    _, returns = algo.gae(t(1, 2, 4), t(9, -3, 5), [3], gamma=1.0, lam=1.0)
    same(returns, [7, 6, 4])


def test_gae_of_no_tokens_and_without_gradient():
    values = torch.ones(2, requires_grad=True)
    rewards = algo.token_rewards(torch.ones(1), values, [2], kl_coef=0.1)
    assert not rewards.requires_grad
    assert not any(x.requires_grad for x in algo.gae(rewards, values, [2], gamma=1.0, lam=1.0))


def test_one_long_row_among_short_ones_costs_no_padding():
    """Padded, this would be 1,001 rows of 32k tokens: 131 MB a tensor."""
    lengths = [32_768] + [20] * 1000
    values = torch.ones(sum(lengths))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    advantages, _ = algo.gae(values, values, lengths, gamma=1.0, lam=0.5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    same(advantages[[0, 32_767, 32_768, 32_787]], [2, 0, 2, 0], tol=1e-4)


# Aggregation


@pytest.mark.parametrize(
    ("aggregate", "want", "weight"),
    # Rows of 1, 2, 3 / of 10 / of nothing.
    [("token_mean", 4.0, 4.0), ("seq_mean_token_sum", 8.0, 2.0), ("seq_mean_token_mean", 6.0, 2.0)],
)
def test_aggregate_by_hand(aggregate, want, weight):
    x, mask = t([1, 2, 3], [10, NAN, NAN], [NAN, NAN, NAN]), t([1, 1, 1], [1, 0, 0], [0, 0, 0])
    same(aggregate_loss(x, mask, aggregate), want)
    same(algo.aggregate_weight(mask.sum(1), aggregate), weight)
    assert aggregate_loss(x.float(), mask, aggregate).dtype == torch.float32


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_aggregate_of_nothing_is_zero_and_can_go_backward(aggregate):
    for shape in [(2, 3), (0, 3), (2, 0), (0, 0)]:
        x = torch.ones(shape, requires_grad=True)
        loss = aggregate_loss(x, torch.zeros(shape), aggregate)
        loss.backward()
        assert x.grad is not None
        assert (
            loss.item()
            == algo.aggregate_weight(torch.zeros(shape[0]), aggregate).item()
            == x.grad.abs().sum()
            == 0
        )


# Losses


def policy_loss(
    logprobs,
    old,
    advantages,
    mask,
    aggregate: Aggregate = "token_mean",
    dual_clip=None,
    high=0.2,
    weights=None,
):
    clips: Any = {"clip_low": 0.2, "clip_high": high, "dual_clip": dual_clip}
    return ppo_loss(logprobs, old, advantages, mask, **clips, aggregate=aggregate, weights=weights)


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x)[0]


# ratio, advantage, loss, clipped?, d loss / d log-prob (= -A * ratio where the plain term rules,
# else 0)
CLIP_TABLE = [
    (1.0, 2.0, -2.0, 0, -2.0),
    (1.1, 2.0, -2.2, 0, -2.2),
    (1.5, 2.0, -2.4, 1, 0.0),  # gain beyond 1.2 does not pay
    (0.5, 2.0, -1.0, 0, -1.0),  # a loss is not clipped
    (1.5, -2.0, 3.0, 0, 3.0),
    (0.5, -2.0, 1.6, 1, 0.0),  # nor does falling below 0.8
    (4.0, -2.0, 8.0, 0, 8.0),
    (4.0, 0.0, 0.0, 0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "want", "clipped", "slope"), CLIP_TABLE)
def test_policy_loss_of_one_token_by_hand(ratio, advantage, want, clipped, slope):
    old = t([-1.5])
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, metrics = policy_loss(logprobs, old, t([advantage]), t([1]))
    same(loss, want)
    same(gradient(loss, logprobs), [[slope]])
    same(metrics["pg_clipfrac"], float(clipped))
    same(metrics["pg_clipfrac_lower"], 0.0)
    same(metrics["ratio_mean"], ratio)
    same(metrics["ppo_kl"], -math.log(ratio))


def test_policy_loss_and_metrics_are_means_over_the_mask():
    ratios, advantages = t([1.5, 1.0, NAN], [NAN, 0.5, 4.0]), t([2, 2, NAN], [NAN, -2, -2])
    mask = t([1, 1, 0], [0, 1, 1])
    logprobs = ratios.log().requires_grad_()
    loss, metrics = policy_loss(
        logprobs, torch.zeros(2, 3).double(), advantages, mask, dual_clip=3.0
    )
    same(loss, (-2.4 - 2.0 + 1.6 + 6.0) / 4)  # the last would be 8 without the dual clip
    same(metrics["pg_clipfrac"], 2 / 4)
    same(metrics["pg_clipfrac_lower"], 1 / 4)
    same(metrics["ratio_mean"], (1.5 + 1.0 + 0.5 + 4.0) / 4)
    same(metrics["ratio_square"], (1.5**2 + 1.0 + 0.5**2 + 4.0**2) / 4)
    same(metrics["ppo_kl"], -math.log(1.5 * 0.5 * 4.0) / 4)
    assert not any(value.requires_grad or value.dim() for value in metrics.values())
    assert {value.dtype for value in metrics.values()} == {torch.float64}  # of the log-probs


def test_the_clips_shares_are_of_tokens_that_they_leave_without_a_gradient():
    """As the README explains these metrics; tokens whose ratio or value is out of bounds are
    more."""
    new, old, other, mask = (
        draw(9, 50, 1).requires_grad_(),
        draw(9, 50, 2),
        draw(9, 50, 3),
        torch.ones(9, 50),
    )
    loss, metrics = policy_loss(new, old, other, mask, dual_clip=3.0)
    by_dual_clip = (other < 0) & ((new - old).exp() > 3)
    still = gradient(loss, new) == 0
    same(metrics["pg_clipfrac_lower"], float(by_dual_clip.double().mean()))
    same(metrics["pg_clipfrac"], float((still & ~by_dual_clip).double().mean()))
    loss, metrics = value_loss(new, old, other, mask, clip=0.2, aggregate="token_mean")
    same(metrics["vf_clipfrac"], float((gradient(loss, new) == 0).double().mean()))
    assert 0.2 < metrics["vf_clipfrac"] < ((new - old).abs() > 0.2).double().mean() - 0.1


def test_clip_higher_moves_the_upper_bound_only():
    old = t([0.0])
    for ratio, advantage, want in [
        (1.25, 1.0, -1.25),
        (1.5, 1.0, -1.28),
        (0.5, -1.0, 0.8),
        (0.75, -1.0, 0.8),
    ]:
        loss, _ = policy_loss(old + math.log(ratio), old, t([advantage]), t([1]), high=0.28)
        same(loss, want)
    loss, _ = ppo_loss(
        old + math.log(0.5),
        old,
        t([-1.0]),
        t([1]),
        clip_low=0.4,
        clip_high=0.1,
        aggregate="token_mean",
    )
    same(loss, 0.6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "want", "active"),
    [
        (4.0, -2.0, 6.0, 1),  # 8, bounded by 3 * 2
        (2.0, -2.0, 4.0, 0),  # below the bound
        (0.5, -2.0, 1.6, 0),
        (4.0, 2.0, -2.4, 0),  # for A > 0 the bound of -6 plays no part
        (4.0, 0.5, -0.6, 0),
        (0.5, 2.0, -1.0, 0),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, want, active):
    old = t([-3.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, metrics = policy_loss(logprobs, old, t([advantage]), t([1]), dual_clip=3.0)
    same(loss, want)
    same(metrics["pg_clipfrac_lower"], float(active))
    if active:
        same(gradient(loss, logprobs), [[0.0]])


def test_weights_multiply_the_tokens_losses_and_take_no_gradient():
    ratios, weights = t([1.1, 0.5], [4.0, NAN]), t([0.25, 2.0], [0.5, NAN]).requires_grad_()
    logprobs, advantages, mask = (
        ratios.log().requires_grad_(),
        t([2, 2], [-2, NAN]),
        t([1, 1], [1, 0]),
    )
    loss, metrics = policy_loss(
        logprobs, 0 * t([1, 1], [1, 1]), advantages, mask, dual_clip=3.0, weights=weights
    )
    same(loss, (-2.2 * 0.25 - 1.0 * 2.0 + 6.0 * 0.5) / 3)
    same(metrics["ratio_mean"], (1.1 + 0.5 + 4.0) / 3)  # of the tokens as they are
    loss.backward()
    assert logprobs.grad is not None
    same(logprobs.grad, [-2.2 * 0.25 / 3, -1.0 * 2.0 / 3], [0, 0])
    assert weights.grad is None


def test_limits_at_their_ends():
    """A clip of 0 takes only the ratio 1 for what it is; a token at the dual clip's bound is not
    bounded."""
    old = t([0.0])
    loss, metrics = ppo_loss(
        old + math.log(2),
        old,
        t([1.0]),
        t([1]),
        clip_low=0.0,
        clip_high=0.0,
        aggregate="token_mean",
    )
    same(loss, -1.0)
    same(metrics["pg_clipfrac"], 1.0)
    loss, metrics = policy_loss(old + math.log(2), old, t([-1.0]), t([1]), dual_clip=2.0)
    same(loss, 2.0)
    same(metrics["pg_clipfrac_lower"], 0.0)
    loss, metrics = value_loss(
        t([5.0]), t([1.0]), t([3.0]), t([1]), clip=0.0, aggregate="token_mean"
    )
    same(loss, 2.0)  # clipped to 1 the error is 2, and so it is at 5
    same(metrics["vf_clipfrac"], 0.0)


def test_policy_loss_gradient_flows_into_the_new_logprobs_only_and_survives_junk_in_the_padding():
    logprobs = t([0.1, 900.0, NAN]).requires_grad_()
    old, advantages = (
        t([0.0, -900.0, NAN]).requires_grad_(),
        t([1.0, math.inf, NAN]).requires_grad_(),
    )
    loss, _ = policy_loss(logprobs, old, advantages, t([1, 0, 0]), dual_clip=3.0)
    loss.backward()
    assert logprobs.grad is not None
    same(logprobs.grad, [[-math.exp(0.1), 0, 0]])
    assert old.grad is None
    assert advantages.grad is None


def test_policy_loss_refuses_other_shapes():
    one = t([0.0])
    with pytest.raises(ValueError, match=r"'advantages': \(2,\)"):
        algo.policy_loss(one[0], one[0], t(0, 0), ROWS, **CLIPS)


@pytest.mark.parametrize(
    ("value", "want", "clipped", "slope"),
    # Old value 1, return 3, clip 0.5.
    [
        (1.25, 0.5 * 1.75**2, 0, -1.75),
        (2.0, 0.5 * 1.5**2, 1, 0.0),  # clipped to 1.5, the larger error
        (0.0, 0.5 * 3.0**2, 0, -3.0),  # clipped to 0.5, the smaller error
        (1.5, 0.5 * 1.5**2, 0, -1.5),
    ],
)
def test_value_loss_by_hand(value, want, clipped, slope):
    values = t([value]).requires_grad_()
    args = values, t([1.0]), t([3.0]), t([1])
    loss, metrics = value_loss(*args, clip=0.5, aggregate="token_mean")
    same(loss, want)
    same(metrics["vf_clipfrac"], float(clipped))
    same(metrics["vpred_mean"], value)
    if value != 1.5:  # a kink
        same(gradient(loss, values), [[slope]])
    mirrored = value_loss(-values, t([-1.0]), t([-3.0]), t([1]), clip=0.5, aggregate="token_mean")
    same(mirrored[0], want)  # the lower bound
    loss, metrics = value_loss(*args, clip=None, aggregate="token_mean")
    same(loss, 0.5 * (value - 3) ** 2)
    same(metrics["vf_clipfrac"], 0.0)


def test_value_loss_means_and_gradient_are_over_the_mask():
    values = t([2.0, NAN], [1.0, 4.0]).requires_grad_()
    old, returns = (
        t([1.0, NAN], [1.0, 4.0]).requires_grad_(),
        t([3.0, NAN], [2.0, 3.0]).requires_grad_(),
    )
    loss, metrics = value_loss(
        values, old, returns, t([1, 0], [1, 1]), clip=0.5, aggregate="seq_mean_token_sum"
    )
    same(loss, (0.5 * 1.5**2 + (0.5 + 0.5)) / 2)
    same(metrics["vf_clipfrac"], 1 / 3)
    same(metrics["vpred_mean"], 7 / 3)
    loss.backward()
    assert values.grad is not None
    same(values.grad, [0.0, 0.0], [-0.5, 0.5])
    assert old.grad is None
    assert returns.grad is None
    assert not any(value.requires_grad or value.dim() for value in metrics.values())


@pytest.mark.parametrize("aggregate", ["token_mean", "seq_mean_token_sum"])
def test_the_loss_of_bounded_values_is_a_loop_over_tokens(aggregate: Aggregate):
    low, high = -1.0, 3.0
    logits = t([0.3, -2.0], [1.5, NAN]).requires_grad_()
    returns, mask = t([-1.0, 3.0], [0.5, NAN]), t([1, 1], [1, 0])
    losses, slopes, values = [], [], []
    for x, target in ((0.3, -1.0), (-2.0, 3.0), (1.5, 0.5)):
        p, y = 1 / (1 + math.exp(-x)), (target - low) / (high - low)
        losses.append(-y * math.log(p) - (1 - y) * math.log(1 - p))
        slopes.append(p - y)
        values.append(low + (high - low) * p)
    count = 3 if aggregate == "token_mean" else 2
    loss, metrics = bounded_value_loss(
        logits, returns, mask, bounds=(low, high), aggregate=aggregate
    )
    same(loss, sum(losses) / count)
    same(gradient(loss, logits), [x / count for x in slopes[:2]], [slopes[2] / count, 0.0])
    same(metrics["vpred_mean"], sum(values) / 3)
    same(metrics["vf_clipfrac"], 0.0)
    same(algo.bounded_values(t(0.3, -2.0, 1.5), (low, high)), *values)
    same(algo.bounded_logits(t(*values), (low, high)), 0.3, -2.0, 1.5)
    same(algo.bounded_logits(t(low, high), (low, high)), -math.log(99), math.log(99))
    assert algo.bounded_values(logits, None) is algo.bounded_logits(logits, None) is logits


UNIT = 2.0**-24  # half the distance of float32 numbers near 1
WRONG = [(0, False), (2, False), (-3, False), (64, True), (-64, True)]  # by so many; teaches


@pytest.mark.parametrize(("wrong", "teaches"), WRONG)
@pytest.mark.parametrize("score", [0.1, 0.7, -1 / 3, 1e-3, 17.3])
def test_values_that_are_returns_but_for_rounding_teach_nothing(score, wrong, teaches):
    lengths = [3, 1, 40]
    returns = torch.full((44,), score)
    rewards = algo.token_rewards(returns[:3], torch.zeros(44), lengths, kl_coef=0.0)
    values = (returns * (1 + wrong * UNIT)).requires_grad_()
    advantages, _ = algo.gae(rewards, values.detach(), lengths, gamma=1.0, lam=1.0)
    assert bool(advantages.any()) == teaches
    loss, _ = algo.value_loss(
        values, values, returns, torch.tensor(lengths), clip=0.2, aggregate="token_mean"
    )
    assert bool(gradient(loss, values).any()) == teaches


@pytest.mark.parametrize(("wrong", "teaches"), WRONG)
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-30.0, 20.0), (-1.0, 0.9)])
@pytest.mark.parametrize("score", [0.1, 0.7, 1 / 3])
def test_bounded_values_that_are_returns_but_for_rounding_teach_nothing(
    score, bounds, wrong, teaches
):
    logits = algo.bounded_logits(torch.full((5,), score), bounds).requires_grad_()
    returns = torch.full((5,), score + wrong * UNIT * max(map(abs, bounds)))
    loss, _ = algo.bounded_value_loss(
        logits, returns, torch.tensor([3, 2]), bounds=bounds, aggregate="token_mean"
    )
    assert bool(gradient(loss, logits).any()) == teaches


def test_bounded_values_that_are_sure_and_wrong_lose_no_infinity():
    logits = t([-200.0, 200.0]).requires_grad_()
    loss, _ = bounded_value_loss(
        logits, t([1, 0]), t([1, 1]), bounds=(0.0, 1.0), aggregate="token_mean"
    )
    same(loss, 200.0)
    same(gradient(loss, logits), [[-0.5, 0.5]])


def test_entropy_by_hand():
    logits = t(
        [0, 0, 0, 0],
        [math.log(2), 0, 0, -math.inf],
        [0, -math.inf, -math.inf, -math.inf],
        [1e4, 0, 0, 0],
    )
    logits.requires_grad_()
    got = algo.entropy(logits)
    same(got, math.log(4), 1.5 * math.log(2), 0.0, 0.0)  # of 1/2, 1/4, 1/4: log 2 / 2 + log 4 / 2
    # dH / dlogit = -p (log p + H): for p = 1/2 -(-log 2 + 1.5 log 2) / 2, for 1/4 -(-2 log 2 + 1.5
    # log 2) / 4.
    slope = math.log(2) / 8
    same(gradient(got.sum(), logits), [0] * 4, [-2 * slope, slope, slope, 0], [0] * 4, [0] * 4)


def test_entropy_of_half_precision_is_computed_in_float32():
    logits = torch.zeros(2, 3, 1000, dtype=torch.bfloat16)
    got = algo.entropy(logits)
    assert got.dtype == torch.float32
    assert got.shape == (2, 3)
    torch.testing.assert_close(got, torch.full((2, 3), math.log(1000)), rtol=1e-5, atol=0)


# Invariances of both losses, for value and gradient

Loss = Callable[..., Tensor]  # of x, old, target, mask, aggregate


def policy_case(
    x: Tensor, old: Tensor, target: Tensor, mask: Tensor, aggregate: Aggregate
) -> Tensor:
    return policy_loss(x, old, target, mask, aggregate, dual_clip=1.5)[0]


def value_case(
    x: Tensor, old: Tensor, target: Tensor, mask: Tensor, aggregate: Aggregate
) -> Tensor:
    return value_loss(x, old, target, mask, clip=0.3, aggregate=aggregate)[0]


def kl_case(x: Tensor, old: Tensor, target: Tensor, mask: Tensor, aggregate: Aggregate) -> Tensor:
    return aggregate_loss(algo.kl_estimate(x, old, "k3"), mask, aggregate)


CASES = pytest.mark.parametrize("loss", [policy_case, value_case, kl_case])
AGGREGATE = pytest.mark.parametrize("aggregate", AGGREGATES)


def batch(seed: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (which takes a gradient), old, target, mask: 6 rows of 5, with holes and an empty row."""
    x = draw(6, 5, seed).requires_grad_()
    return (
        x,
        x.detach() + 0.5 * draw(6, 5, seed + 1),
        draw(6, 5, seed + 2),
        holey_mask(6, 5, seed + 3),
    )


@CASES
@AGGREGATE
def test_losses_do_not_see_padding_or_holes(loss: Loss, aggregate: Aggregate):
    x, *rest, mask = batch()
    whole = loss(x, *rest, mask, aggregate)

    def spread(y: Tensor, junk: float) -> Tensor:
        """Two columns in front, one in the middle, one behind, and a row below."""
        y = torch.cat(
            [y[:, :0].new_full((6, 2), junk), y[:, :3], y.new_full((6, 1), junk), y[:, 3:]], dim=1
        )
        y = torch.cat([y, y.new_full((6, 1), junk)], dim=1)
        return torch.cat([y, y.new_full((1, y.shape[1]), junk)])

    padded = loss(spread(x, 7.0), *[spread(y, -3.0) for y in rest], spread(mask, 0), aggregate)
    torch.testing.assert_close(padded, whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradient(padded, x), gradient(whole, x), rtol=0, atol=1e-13)
    assert gradient(loss(x, *rest, mask, aggregate), x)[~mask].abs().sum() == 0
    assert gradient(loss(x, *rest, mask, aggregate), x).abs().sum() > 0.1


@CASES
@AGGREGATE
def test_losses_do_not_see_the_order_of_rows(loss: Loss, aggregate: Aggregate):
    x, *rest, mask = batch()
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    whole = loss(x, *rest, mask, aggregate)
    shuffled = loss(x[order], *[y[order] for y in rest], mask[order], aggregate)
    torch.testing.assert_close(shuffled, whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradient(shuffled, x), gradient(whole, x), rtol=0, atol=1e-13)


@CASES
@AGGREGATE
@pytest.mark.parametrize("cuts", [(0, 3, 6), (0, 1, 2, 6), (0, 1, 2, 3, 4, 5, 6), (0, 0, 5, 6, 6)])
def test_losses_do_not_see_the_cut_into_micro_batches(loss: Loss, aggregate: Aggregate, cuts):
    x, *rest, mask = batch()
    whole = loss(x, *rest, mask, aggregate)
    total = algo.aggregate_weight(mask.sum(1), aggregate)
    parts = [slice(*ends) for ends in itertools.pairwise(cuts)]
    losses = [
        loss(x[p], *[y[p] for y in rest], mask[p], aggregate)
        * algo.aggregate_weight(mask[p].sum(1), aggregate)
        / total
        for p in parts
    ]
    cut = torch.stack(losses).sum()
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradient(cut, x), gradient(whole, x), rtol=0, atol=1e-13)


def test_rewards_and_gae_do_not_see_the_order_of_rows():
    lengths, order = [5, 0, 3, 3, 1, 4], [3, 1, 5, 0, 4, 2]
    scores, kl, values = draw(1, 6, 20)[0], draw(1, 16, 21)[0], draw(1, 16, 22)[0]

    def judge(scores: Tensor, kl: Tensor, values: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
        rewards = algo.token_rewards(scores, kl, lengths, kl_coef=0.1)
        return algo.whiten(algo.gae(rewards, values, lengths, gamma=0.9, lam=0.8)[0]).split(lengths)

    def shuffled(packed: Tensor) -> Tensor:
        return torch.cat([packed.split(lengths)[row] for row in order])

    want = judge(scores, kl, values, lengths)
    found = judge(scores[order], shuffled(kl), shuffled(values), [lengths[row] for row in order])
    torch.testing.assert_close(found, tuple(want[row] for row in order), rtol=0, atol=1e-13)


@AGGREGATE
@CASES
def test_gradients_are_the_finite_differences(loss: Loss, aggregate: Aggregate):
    x, *rest, mask = batch(seed=30)
    exact = gradient(loss(x, *rest, mask, aggregate), x)
    step = 1e-6
    for row, column in itertools.product(range(6), range(5)):
        nudge = torch.zeros_like(exact)
        nudge[row, column] = step
        up, down = (loss(x.detach() + s * nudge, *rest, mask, aggregate) for s in (1, -1))
        assert ((up - down) / (2 * step)).item() == pytest.approx(
            exact[row, column].item(), abs=1e-8
        )


def test_inputs_are_left_alone():
    tensors = [draw(6, 5, 40), draw(6, 5, 41), draw(6, 5, 42), holey_mask(6, 5, 43)]
    before = [x.clone() for x in tensors]
    a, b, c, mask = tensors
    algo.gae(a.flatten(), b.flatten(), [5] * 6, gamma=0.9, lam=0.9)
    algo.whiten(a.flatten())
    algo.token_rewards(a[:, 0], b.flatten(), [5] * 6, kl_coef=0.1)
    policy_case(a, b, c, mask, "seq_mean_token_mean")
    value_case(a, b, c, mask, "seq_mean_token_mean")
    kl_case(a, b, c, mask, "seq_mean_token_mean")
    algo.entropy(a)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


LOSSES: Any = algo
ROWS = torch.tensor([1, 3])
CLIPS: Any = {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "token_mean"}
# a function and how many tensors of one shape it takes
SHAPED: dict[str, tuple[Callable[..., Any], int]] = {
    "kl_estimate": (lambda x, ref: algo.kl_estimate(x, ref, "k1"), 2),
    "aggregate_loss": (lambda x: algo.aggregate_loss(x, ROWS, "seq_mean_token_mean"), 1),
    "policy_loss": (lambda *x: LOSSES.policy_loss(*x, ROWS, **CLIPS), 3),
    "weighted policy_loss": (lambda *x: LOSSES.policy_loss(*x[:3], ROWS, weights=x[3], **CLIPS), 4),
    "value_loss": (lambda *x: LOSSES.value_loss(*x, ROWS, clip=None, aggregate="token_mean"), 3),
    "bounded_value_loss": (
        lambda *x: LOSSES.bounded_value_loss(*x, ROWS, bounds=(0.0, 1.0), aggregate="token_mean"),
        2,
    ),
}


@pytest.mark.parametrize("name", [name for name, (_, count) in SHAPED.items() if count > 1])
def test_shapes_that_would_broadcast_are_refused(name):
    call, count = SHAPED[name]
    full = torch.ones(4)
    call(*[full] * count)
    for i in range(count):
        for other in (torch.ones(1), torch.ones(3, 4)):  # each broadcasts against the rest
            with pytest.raises(ValueError, match="one shape"):
                call(*[other if i == j else full for j in range(count)])


@pytest.mark.parametrize("name", [name for name in SHAPED if name != "kl_estimate"])
def test_shapes_that_are_not_packed_tokens_are_refused(name):
    call, count = SHAPED[name]
    with pytest.raises(ValueError, match="with 1 axes"):
        call(*[torch.ones(1, 4)] * count)


def test_packed_tokens_that_are_not_those_of_the_rows_are_refused():
    for wrong in (torch.ones(4), torch.ones(1), torch.ones(1, 3)):
        for call in (
            lambda x: algo.gae(x, torch.ones(3), [1, 2], gamma=1.0, lam=1.0),
            lambda x: algo.gae(torch.ones(3), x, [1, 2], gamma=1.0, lam=1.0),
            lambda x: algo.token_rewards(torch.ones(2), x, [1, 2], kl_coef=0.1),
        ):
            with pytest.raises(ValueError, match="one shape"):
                call(wrong)
    for call in (algo.moments, algo.whiten):
        with pytest.raises(ValueError, match="with 1 axes"):
            call(torch.ones(3, 4))


# Options of the critic, and old tokens


def test_the_mask_is_saos_whatever_the_advantages_sign():
    """arXiv:2607.07508, eq. 3: -ratio * advantage between the bounds; 0 on the bounds and
    beyond."""
    logprobs = t([math.log(0.5), math.log(0.9), math.log(1.3), math.log(2.0), NAN])
    advantages, mask = t([1.0, -1.0, 2.0, -3.0, 9.0]), t([1, 1, 1, 1, 0])
    given = logprobs, torch.zeros_like(logprobs), advantages, mask
    how: Any = {"aggregate": "token_mean", "mode": "mask"}
    loss, metrics = ppo_loss(*given, clip_low=0.4, clip_high=0.5, **how)
    same(loss, (0.9 - 1.3 * 2) / 4)
    same(metrics["pg_clipfrac"], 0.5)
    same(metrics["pg_lost"], (1 + 3) / 4)
    same(metrics["pg_advantage"], (1 + 1 + 2 + 3) / 4)
    assert "pg_lost" not in policy_loss(*given)[1]
    for bounds in ({"clip_low": 0.0, "clip_high": 1.0}, {"clip_low": 1.0, "clip_high": 0.0}):
        loss, metrics = ppo_loss(t([0.0]), t([0.0]), t([5.0]), t([1]), **bounds, **how)
        same(loss, 0.0)
        same(metrics["pg_clipfrac"], 1.0)


def test_the_adaptive_lambda_is_vapos():
    """arXiv:2504.05118: 1 - 1 / (alpha l), at least 0; rows of 0, 10 and 40 tokens."""
    same(algo.adaptive_lambda([0, 10, 40], 0.05), 0.0, 0.0, 0.5)
    same(algo.adaptive_lambda([0, 10, 40], 0.2), 0.0, 0.5, 0.875)


# Schedule


@pytest.mark.parametrize(
    ("schedule", "warmup", "want"),
    # Steps 1 to 6, peak 8, floor 2 (a quarter).
    [
        ("constant", 0, [8, 8, 8, 8, 8, 8]),
        ("constant", 4, [2, 4, 6, 8, 8, 8]),
        ("linear", 0, [8, 6.8, 5.6, 4.4, 3.2, 2]),
        ("linear", 1, [8, 6.8, 5.6, 4.4, 3.2, 2]),
        ("linear", 3, [8 / 3, 16 / 3, 8, 6, 4, 2]),
        ("cosine", 2, [4, 8, 2 + 3 * (1 + math.sqrt(0.5)), 5, 2 + 3 * (1 - math.sqrt(0.5)), 2]),
        ("cosine", 8, [1, 2, 3, 4, 5, 6]),
        ("linear", 6, [8 / 6, 16 / 6, 4, 32 / 6, 40 / 6, 8]),
    ],
)
def test_learning_rate_by_hand(schedule, warmup, want):
    optim = OptimConfig(lr=8.0, schedule=schedule, warmup_steps=warmup, min_lr_ratio=0.25)
    got = [learning_rate(s, 6, optim) for s in range(1, 7)]
    assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_learning_rate_at_the_ends(schedule):
    def lr(step: int, steps: int, floor: float) -> float:
        return learning_rate(
            step, steps, OptimConfig(lr=3.0, schedule=schedule, min_lr_ratio=floor)
        )

    assert lr(10, 10, 0.0) == pytest.approx(0.0, abs=1e-15)
    assert lr(12, 10, 0.5) == 1.5  # stays at the floor
    assert lr(1, 1, 0.0) == 3.0  # the only step learns
    # all of it was warm-up
    beyond = OptimConfig(lr=3.0, schedule=schedule, warmup_steps=6, min_lr_ratio=0.5)
    assert learning_rate(7, 6, beyond) == pytest.approx(1.5)


def test_importance_weights_are_of_clamped_log_ratios():
    # off by 59, -8, 40: 91
    old, engine = ([torch.tensor([-1.0, -9.0, -2.0])], [torch.tensor([-60.0, -1.0, -42.0])])
    weights, _ = algo.importance_weights(old, engine, "token", math.inf)
    assert weights[0].tolist() == pytest.approx([math.exp(20), math.exp(-8), math.exp(20)])
    weights, _ = algo.importance_weights(old, engine, "sequence", math.inf)
    assert weights[0].tolist() == pytest.approx([math.exp(20)] * 3)


def test_importance_weights_of_tokens_and_of_whole_responses():
    old = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    engine = [torch.tensor([-1.5, -1.9]), torch.tensor([-4.0])]
    weights, sums = algo.importance_weights(old, engine, "token", 2.0)
    assert weights[0].tolist() == pytest.approx([math.exp(0.5), math.exp(-0.1)])
    assert weights[1].tolist() == pytest.approx([2.0])
    assert sums["importance_capped"] == 1
    assert sums["importance_mean"] == pytest.approx(math.exp(0.5) + math.exp(-0.1) + 2.0)
    at_the_cap = algo.importance_weights(old, old, "token", 1.0)[1]
    assert (at_the_cap["importance_mean"], at_the_cap["importance_capped"]) == (3.0, 0.0)
    weights, sums = algo.importance_weights(old, engine, "sequence", 2.0)
    assert weights[0].tolist() == pytest.approx([math.exp(0.4)] * 2)
    assert weights[1].tolist() == pytest.approx([2.0])
