"""From a row's raw score to the score that its last token earns, and what is steered from step to step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitppo import algo
from splitppo.config import PPOConfig, RewardConfig


@dataclass
class Steering:
    """What the critic carries from step to step beside its weights; the same on all its ranks, saved with the run.

    Attributes:
        kl_coef: weight of the KL in the reward.
        scores: moments of all raw scores so far.
    """

    kl_coef: float
    scores: algo.Moments

    @classmethod
    def start(cls, ppo: PPOConfig) -> "Steering":
        nothing = torch.zeros((), dtype=torch.float64)
        return cls(ppo.kl_coef, algo.Moments(nothing, nothing, nothing))

    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        moments = [float(part) for part in (self.scores.count, self.scores.mean, self.scores.variance)]
        return {"kl_coef": self.kl_coef, "scores": moments}

    def load(self, state: dict[str, Any], ppo: PPOConfig) -> None:
        """Goes on from what `state` returned; a coefficient that isn't steered is the configuration's."""
        if ppo.kl_target is not None:
            self.kl_coef = state["kl_coef"]
        self.scores = algo.Moments(*(torch.tensor(part, dtype=torch.float64) for part in state["scores"]))


def steer_kl(kl_coef: float, kl: float, *, target: float, rows: int, horizon: int) -> float:
    """The KL coefficient of the next step: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2.

    Args:
        kl: mean over the step's rows of the KL summed over their tokens, nats.
        target: where it should be. rows: of the step. horizon: rows.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * rows / horizon)


def shape_scores(
    scores: Tensor, lengths: Sequence[int], finished: Sequence[bool], moments: algo.Moments, config: RewardConfig,
    *, max_new_tokens: int,
) -> Tensor:  # fmt: skip
    """Normalised by `moments` if asked for, clipped, then less what a cut or nearly cut row loses; `[B]` float32.

    Args:
        scores: `[B]` raw. lengths: response tokens of each row. finished: whether it ended by itself.
    """
    shaped = scores.double()
    if config.normalize != "off":
        spread = moments.variance.sqrt()
        if spread <= 1e-6 * moments.mean.abs():  # scores that are all alike, beside which a failed row may stand
            spread = torch.ones_like(spread)
        shaped = (shaped - moments.mean) / (spread + 1e-8)
    if config.clip is not None:
        shaped = shaped.clamp(*config.clip)
    shaped = shaped - config.missing_eos_penalty * torch.tensor([float(not done) for done in finished])
    if config.overlong_tokens:
        used = torch.tensor([float(length) for length in lengths]) - (max_new_tokens - config.overlong_tokens)
        shaped = shaped - config.overlong_penalty * (used / config.overlong_tokens).clamp(0, 1)
    return shaped.float()


def importance(
    old: Sequence[Tensor], engine: Sequence[Tensor], kind: str, cap: float
) -> tuple[list[Tensor], dict[str, float]]:
    """Truncated importance weights of rows that an engine sampled a little off the trainer's policy.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training": min(pi_trainer /
    pi_engine, cap), of each token, or (`sequence`) of the whole response for each of its tokens. The log-ratio is
    clamped (`algo.clamp_log_ratio`).

    Args:
        old: log-probs of each row's tokens, trainer's; `[T_i]`. engine: the engine's.

    Returns:
        weights `[T_i]` of each row, and sums over tokens: `importance_mean`, `importance_capped`.
    """
    logs = [row - other for row, other in zip(old, engine, strict=True)]
    if kind == "sequence":
        logs = [log.sum().expand_as(log) for log in logs]
    ratios = [algo.clamp_log_ratio(log).exp() for log in logs]
    weights = [ratio.clamp(max=cap) for ratio in ratios]
    sums = {
        "importance_mean": sum(float(weight.sum()) for weight in weights),
        "importance_capped": sum(float((ratio > cap).sum()) for ratio in ratios),
    }
    return weights, sums
