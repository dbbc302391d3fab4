"""splitppo.train with a baseline that the product lacks, for critic_block.py; on one rank.

    python tests/gpu/critic_arms.py digits|deviation|none TRAINER FLAGS

* `digits`: a token's advantage is its row's return less the mean over the step's rows of the same
  data_source, which names the count of digits. Replaces `--ppo.baseline batch`.
* `deviation`: a row's return less the mean over its prompt's responses, divided by their standard
  deviation + 1e-6, as GRPO does (arXiv:2402.03300). Replaces `--ppo.baseline group`.
* `none`: the trainer as it is.
"""

import os
import sys

import torch
from torch import Tensor

from splitppo.critic.baselines import Mean
from splitppo.placement import Streams
from splitppo.rollout import Rollout
from splitppo.train import main


def first_tokens(lengths: Tensor) -> Tensor:
    """`[B]`: where each row's tokens begin in the packed ones."""
    return lengths.cumsum(0) - lengths


def means(scores: Tensor, classes: Tensor) -> Tensor:
    """`[B]` float64: the mean of the scores of each row's class; `classes` are int64 from 0."""
    count = int(classes.max()) + 1
    total = torch.zeros(count, dtype=torch.float64).index_add_(0, classes, scores.double())
    rows = torch.bincount(classes, minlength=count)
    return (total / rows.clamp(min=1))[classes]


def digits_baseline(baseline: Mean, rollout: Rollout, returns: Tensor) -> Tensor:
    """`[N]`: the mean return of the rows with the same data_source."""
    sources = [baseline.context.prompt(row).data_source for row in rollout.rows]
    names = sorted({*sources})
    lengths = torch.tensor(rollout.episode_lengths)
    classes = torch.tensor([names.index(source) for source in sources])
    return means(returns[first_tokens(lengths)], classes).repeat_interleave(lengths)


def deviation_baseline(baseline: Mean, rollout: Rollout, returns: Tensor) -> Tensor:
    """`[N]`: what is to be subtracted from the returns so that GRPO's advantages are left."""
    config = baseline.context.config.rollout
    lengths = torch.tensor(rollout.episode_lengths)
    streams = Streams(config.batch_size, config.samples)
    prompts = torch.tensor([streams.slot_prompt(row) for row in rollout.rows])
    scores = returns[first_tokens(lengths)].double()
    errors = scores - means(scores, prompts)
    # unbiased: by one less than the responses
    variance = means(errors.square(), prompts) * config.samples / (config.samples - 1)
    advantages = errors / (variance.sqrt() + 1e-6)
    return returns.double() - advantages.repeat_interleave(lengths)


BASELINES = {"digits": digits_baseline, "deviation": deviation_baseline}

if __name__ == "__main__":
    if sys.argv[1] in BASELINES:
        setattr(Mean, "means", BASELINES[sys.argv[1]])  # noqa: B010
    os._exit(main(sys.argv[2:]))
