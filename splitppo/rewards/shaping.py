"""The raw score of a row becomes the reward of its last token. The adaptive KL controller."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitppo import algo
from splitppo.config import RewardConfig


@dataclass
class AdaptiveKL:
    """The adaptive KL controller of Ziegler et al. 2019 (arXiv:1909.08593), section 2.2."""

    coef: float  # the KL coefficient of the next step
    # KL per row in nats, summed over tokens; None: the coefficient is constant
    target: float | None
    horizon: int  # rows in which an error of 1 would double the coefficient, but for clipping

    def update(self, kl: float, rows: int) -> None:
        """Adapts the coefficient to a step's mean KL per row."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * rows / self.horizon


def spread_of(moments: algo.Moments) -> Tensor:
    """What normalised scores are divided by: their deviation, or 1 if all are equal."""
    spread = moments.variance.sqrt()
    # those of failed rows are not in the moments
    return torch.ones_like(spread) if spread <= 1e-6 * moments.mean.abs() else spread + 1e-8


def shape_scores(
    scores: Tensor,
    lengths: Sequence[int],
    truncated: Sequence[bool],
    moments: algo.Moments,
    config: RewardConfig,
    *,
    max_new_tokens: int,
    centered: bool = True,
) -> Tensor:
    """Scores after normalising by `moments`, clipping, and the penalties of truncated and overlong
    rows; `[B]` float32. `scores`: `[B]` raw. `lengths`: response tokens of each row. `truncated`:
    whether the row was cut at a limit. `centered`: whether to subtract the mean. The rewards of
    turns can't be: a row would gain by each turn that it has or lacks."""
    shaped = scores.double()
    if config.normalize != "off":
        mean = moments.mean if centered else torch.zeros_like(moments.mean)
        shaped = (shaped - mean) / spread_of(moments)
    if config.clip is not None:
        shaped = shaped.clamp(*config.clip)
    shaped = shaped - config.missing_eos_penalty * torch.tensor([float(cut) for cut in truncated])
    if config.overlong_tokens:
        used = torch.tensor(lengths).float() + config.overlong_tokens - max_new_tokens
        shaped = shaped - config.overlong_penalty * (used / config.overlong_tokens).clamp(0, 1)
    return shaped.float()
