"""What samples on a rank of the actor group, and its verbs in the loops of train.py."""

from collections.abc import Iterator
from typing import Any

import torch

from splitppo.context import Context
from splitppo.engine import RolloutEngine, Weights
from splitppo.generator.sampler import Sampler
from splitppo.generator.validation import Validator
from splitppo.job.collectives import Group
from splitppo.placement import StepPlan
from splitppo.rollout import Episode, Rollout


class Generator:
    """Engine, sampler with the open rows and their environments, validation. It knows no learner:
    weights come by `load_weights`. `validator`: of the same engine."""

    def __init__(
        self,
        context: Context,
        group: Group,
        engine: RolloutEngine,
        sampler: Sampler,
        validator: Validator,
    ):
        self.context = context
        self.group = group
        self.engine = engine
        self.sampler = sampler
        self.validator = validator
        self.version = -1  # of the weights that the engine has

    def load_weights(self, weights: Weights) -> None:
        """Brings the policy's weights into the engine, unless it has them. All ranks of the group
        call it."""
        # engines decide on their own whether they sleep, so the group must agree
        if self.group.all_max([self.version != weights.version or not self.engine.loaded])[0]:
            self.engine.load_weights(weights.stream())
            self.version = weights.version

    def move_open_rows(self, plan: StepPlan) -> None:
        """Moves the rows that go on to the ranks that own their slots in this step."""
        self.sampler.move_open(self.group, plan.of_ranks("actor"))

    def generate(self, plan: StepPlan) -> Iterator[list[Episode]]:
        """The rows of this rank's slots as they end; empty lists in between."""
        config = self.context.config
        slots = plan.all_slots("actor", self.group.dp_rank)
        return self.sampler.generate(
            self.engine, plan.step, slots, config.rollout, config.seed, self.group
        )

    def release_engine(self, *, trained: bool) -> None:
        """The trainer needs the GPU now: the engine gives back the memory that an update will need.
        `trained`: whether the trainer's memory peak so far includes an update."""
        self.engine.release_memory(trained=trained)

    def gather_open_rows(self, rollout: Rollout) -> dict[str, Any]:
        """Tells all actor ranks which rows go on. Returns metrics of what was sampled in this step:
        of the rows that ended, `rollout`, and of those that go on."""
        self.sampler.gather_open(self.group)
        return self.sampler.player.metrics(self.group) | self._metrics(rollout)

    def validate(self, step: int, weights: Weights) -> dict[str, float]:
        """The metrics of the held-out prompts, if a validation is due after this step."""
        if not self.validator.due(step):
            return {}
        self.load_weights(weights)
        return self.validator.run(step)

    def close(self) -> None:
        """Ends the engine, environments, and the processes of the validation's rewards."""
        self.engine.close()
        self.sampler.player.close()
        self.validator.scorer.close()

    def state(self) -> dict[str, Any]:
        """Its part of the group's state in a checkpoint; all ranks of the group call it, and the
        first one's is whole."""
        return {"open": self.sampler.state(self.group)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self.sampler.load_state(state["open"])

    def _metrics(self, rollout: Rollout) -> dict[str, float]:
        """Metrics of the whole batch. Means over rows are left out if none has ended."""
        ages = rollout.ages()
        sums = [
            len(rollout.rows),
            rollout.tokens,
            sum(len(episode.prompt) for episode in rollout.episodes),
            sum(episode.truncated for episode in rollout.episodes),
            sum(rollout.totals),
            int(ages.sum()),
            int((ages == 0).sum()),
        ]
        rows, tokens, prompts, cut, whole, age, sampled_now = self.group.all_sum(
            torch.tensor([float(part) for part in sums])
        ).tolist()
        largest = max(rollout.episode_lengths, default=0), max(ages.tolist(), default=0)
        longest, oldest = self.group.all_max(largest)
        metrics = {"tokens": whole}
        if open_rows := self.sampler.open.values():  # with windows
            lengths = [row.tokens for row in open_rows]
            metrics |= {
                "window/rows": rows,
                "window/sampled": sampled_now + sum(row.last_step_tokens for row in open_rows),
                "window/age/max": oldest,
                "window/open_length/mean": sum(lengths) / len(lengths),
                "window/open_length/max": max(lengths),
            }
            metrics |= {"window/age/mean": age / tokens} if rows else {}
        if rows:
            metrics |= {
                "response_length/mean": tokens / rows,
                "response_length/max": longest,
                "response_length/clip_ratio": cut / rows,
                "prompt_length/mean": prompts / rows,
            }
        return metrics
