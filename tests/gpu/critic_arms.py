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

from splitppo import algo
from splitppo.context import Context
from splitppo.critic.baselines import Estimate, Mean
from splitppo.job.collectives import Group
from splitppo.placement import Streams
from splitppo.rollout import Rollout
from splitppo.run import build
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


class Arm(Mean):
    """Returns less what `subtracted` gives."""

    def __init__(self, context: Context, group: Group):
        super().__init__(context, group)
        self.context = context

    def subtracted(self, rollout: Rollout, returns: Tensor) -> Tensor:
        """`[N]` float64, of the returns `[N]`."""
        raise NotImplementedError

    def estimate(
        self, rollout: Rollout, rewards: Tensor, values: Tensor, **rest: object
    ) -> Estimate:
        gamma = self.config.ppo.gamma
        returns = algo.rewards_to_go(rewards, rollout.episode_lengths, gamma=gamma)
        return Estimate((returns - self.subtracted(rollout, returns)).to(returns.dtype), returns)


class Digits(Arm):
    """The mean return of the rows with the same data_source is subtracted."""

    def subtracted(self, rollout: Rollout, returns: Tensor) -> Tensor:
        sources = [self.context.prompt(row).data_source for row in rollout.rows]
        names = sorted({*sources})
        lengths = torch.tensor(rollout.episode_lengths)
        classes = torch.tensor([names.index(source) for source in sources])
        return means(returns[first_tokens(lengths)], classes).repeat_interleave(lengths)


class Deviation(Arm):
    """What is left are GRPO's advantages."""

    def subtracted(self, rollout: Rollout, returns: Tensor) -> Tensor:
        config = self.config.rollout
        lengths = torch.tensor(rollout.episode_lengths)
        streams = Streams(config.batch_size, config.samples)
        prompts = torch.tensor([streams.slot_prompt(row) for row in rollout.rows])
        scores = returns[first_tokens(lengths)].double()
        errors = scores - means(scores, prompts)
        # unbiased: by one less than the responses
        variance = means(errors.square(), prompts) * config.samples / (config.samples - 1)
        advantages = errors / (variance.sqrt() + 1e-6)
        return returns.double() - advantages.repeat_interleave(lengths)


ARMS = {"digits": Digits, "deviation": Deviation}

if __name__ == "__main__":
    if sys.argv[1] in ARMS:
        setattr(build, "Mean", ARMS[sys.argv[1]])  # noqa: B010
    os._exit(main(sys.argv[2:]))
