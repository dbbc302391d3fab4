"""Validation: n responses to each held-out prompt, scored over the actor group; metrics `val/...`,
RUN/validation. Row `p * n + j` is response j to held-out prompt p, both from 0. Its noise is the
same in every validation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from splitppo.context import Context
from splitppo.engine import RolloutEngine, row_seed
from splitppo.generator.sampler import SINGLE_TURN, Player, Sampler, SingleTurn
from splitppo.job.collectives import Group
from splitppo.rewards.samples import record
from splitppo.rewards.scorer import Pending, Scored, Scorer, say_failures, to_score
from splitppo.rewards.summary import Response, metrics
from splitppo.rollout import Episode, add_turn_rewards

NO_ROW = -1  # training's rows count from 0; the seed of this one is validation's
FILE_ROWS = 256  # rows that a validation writes at most, the first


@dataclass(frozen=True)
class Validator:
    """Scores the held-out prompts; each rank of the actor group takes a part of them. `context`
    holds the held-out prompts, `group` are the actors, `write` writes a step's rows to the run's
    folder, `player` plays their environments."""

    context: Context
    engine: RolloutEngine
    group: Group
    scorer: Scorer
    write: Callable[[int, Sequence[Mapping[str, Any]]], None]
    player: Player | SingleTurn = SINGLE_TURN
    most_written: int = FILE_ROWS

    def due(self, step: int) -> bool:
        """Whether to validate after this step; 0: before the first. The same on every rank."""
        return bool(self.context.held_out) and self.context.config.validates(step)

    def run(self, step: int) -> dict[str, float]:
        """Validates the weights that the engine holds; all ranks of the group call it. Returns the
        group's metrics, the same on every rank and under any number of ranks; see
        `summary.metrics`."""
        config = self.context.config
        prompts = self.context.held_out
        sampler = Sampler(
            len(prompts) * config.log.validate_samples,
            prompts.__getitem__,
            samples=config.log.validate_samples,
            limit=config.rollout.max_new_tokens,
            context=config.rollout.max_context,
            player=self.player,
        )
        responses = []
        lines = []
        failures = []
        for episode, scored, score in self._scored_rows(sampler):
            responses.append(
                Response(
                    episode.row,
                    score,
                    dict(scored.figures),
                    episode.tokens,
                    cut=episode.truncated,
                    failed=bool(scored.failures) or episode.end == "failed",
                )
            )
            failures += [(episode.row, failure) for failure in scored.failures]
            if episode.row < self.most_written:
                line = record(self.context, step, sampler.prompt(episode.row), episode, score)
                lines.append(line | {"sample": sampler.streams.sample(episode.row)})
        failures += self.player.take()[1]
        gathered = self.group.all_gather((responses, lines, failures))
        if self.group.is_first:
            written = (line for _, part, _ in gathered for line in part)
            self.write(step, sorted(written, key=lambda line: line["row"]))
            say_failures(
                f"[actor] step {step}, held-out rows, ",
                [failure for *_, part in gathered for failure in part],
            )
        return metrics(
            sorted((one for part, *_ in gathered for one in part), key=lambda one: one.row),
            [prompt.data_source for prompt in prompts],
        )

    def _scored_rows(self, sampler: Sampler) -> Iterator[tuple[Episode, Scored, float]]:
        """This rank's rows: each with what the rewards said of it, and its whole score."""
        config = self.context.config
        n = config.log.validate_samples
        mine = range(self.group.dp_rank, len(self.context.held_out), self.group.dp_size)
        rows = [prompt * n + j for prompt in mine for j in range(n)]
        sampling = replace(config.rollout, temperature=config.log.validate_temperature)
        seed = row_seed(config.seed, NO_ROW, 0)
        batches: list[tuple[list[Episode], Pending]] = []
        for finished in sampler.generate(self.engine, 1, rows, sampling, seed, self.group):
            if finished:
                asks = [to_score(self.context, sampler.prompt(row.row), row) for row in finished]
                # the scorer works while the engine generates
                batches.append((finished, self.scorer.submit(asks)))
        for episodes, pending in batches:
            results = self.group.of_first(pending)
            of_rewards = torch.tensor([result.score for result in results], dtype=torch.float64)
            scores = add_turn_rewards(of_rewards, episodes).tolist()
            yield from zip(episodes, results, scores, strict=True)
