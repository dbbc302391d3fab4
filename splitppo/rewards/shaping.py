"""Turns a row's score into the reward of its last token, apart from the rewards of spans inside the
response."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from splitppo import algo
from splitppo.config import RewardConfig
from splitppo.models.tokenizer import token_ends
from splitppo.rewards.functions import Spans
from splitppo.rollout import Rollout


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
    whether the row was cut at a limit. `centered`: whether to subtract the mean. Rewards of turns
    are not centred, since a row would then gain or lose by its number of turns."""
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


def place_spans(
    rollout: Rollout, spans: Sequence[Spans], decode: Callable[[Sequence[int]], str]
) -> Tensor:
    """`[N]` float32: the rewards of each row's spans, of its last message, at the tokens that hold
    their last characters."""
    rewards = torch.zeros(rollout.tokens)
    parts = rollout.split(rewards)  # views
    for of_tokens, episode, of_row in zip(parts, rollout.episodes, spans, strict=True):
        if of_row:
            said, _ = episode.turns[-1]
            ends = token_ends(decode, said)
            for end, reward in of_row:
                of_tokens[bisect_left(ends, end) - len(said)] += reward
    return rewards
