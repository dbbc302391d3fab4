"""Validation: n responses to each held-out prompt, scored over the actor group; metrics `val/...`,
RUN/validation. Row `p * n + j` is response j to held-out prompt p, both from 0. Its noise is the
same in every validation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from splitppo.context import Context, record
from splitppo.engine import RolloutEngine, row_seed
from splitppo.envs.player import Player
from splitppo.errors import say
from splitppo.job.collectives import Group
from splitppo.rewards.scorer import Pending, Scorer, failure_line
from splitppo.rewards.summary import Response, answer, metrics
from splitppo.rollout import Episode
from splitppo.sampler import Sampler

NO_ROW = -1  # training's rows count from 0; the seed of this one is validation's
FILE_ROWS = 256  # rows that a validation writes at most, the first


class Validator:
    """Scores the held-out prompts; each rank of the actor group takes a part of them. `context`
    holds the held-out prompts, `group` are the actors, `write` writes a step's rows to the run's
    folder, `player` plays their environments, if they have some."""

    def __init__(
        self,
        context: Context,
        engine: RolloutEngine,
        group: Group,
        scorer: Scorer,
        write: Callable[[int, Sequence[Mapping[str, Any]]], None],
        player: Player | None = None,
    ):
        self.config = context.config
        self.prompts = context.held_out
        self.decode = context.decode
        self.to_score = context.to_score
        self.engine = engine
        self.group = group
        self.scorer = scorer
        self.write = write
        self.player = player

    def due(self, step: int) -> bool:
        """Whether to validate after this step; 0: before the first. The same on every rank."""
        every = self.config.log.validate_every
        return bool(every and self.prompts) and (step % every == 0 or step == self.config.steps)

    def run(self, step: int) -> dict[str, float]:
        """Validates the weights that the engine holds; all ranks of the group call it. Returns the
        group's metrics, the same on every rank and under any number of ranks; see
        `summary.metrics`."""
        n = self.config.log.validate_samples
        mine = range(self.group.dp_rank, len(self.prompts), self.group.dp_size)
        rows = [prompt * n + j for prompt in mine for j in range(n)]
        batches: list[tuple[list[Episode], list[str], Pending]] = []
        rollout = self.config.rollout
        sampling = replace(rollout, temperature=self.config.log.validate_temperature)
        seed = row_seed(self.config.seed, NO_ROW, 0)
        sampler = Sampler(
            len(self.prompts) * n,
            lambda row: self.prompts[row // n],
            limit=rollout.max_new_tokens,
            context=rollout.max_context,
            player=self.player,
        )
        for finished in sampler.generate(self.engine, 1, rows, sampling, seed, self.group):
            if finished:
                said = [self.to_score(self.prompts[row.row // n], row) for row in finished]
                # the scorer works while the engine generates
                texts = [text for _, text, _ in said]
                batches.append((finished, texts, self.scorer.submit(said)))
        found = []
        written = []
        failures = []
        for episodes, texts, pending in batches:
            for episode, text, scored in zip(
                episodes, texts, self.group.of_first(pending), strict=True
            ):
                failed = bool(scored.failures) or episode.end == "failed"
                what = answer(text), episode.tokens, episode.truncated, failed
                score = scored.score + sum(episode.rewards)
                found.append(Response(episode.row, score, dict(scored.figures), *what))
                failures += [(episode.row, failure) for failure in scored.failures]
                if episode.row < FILE_ROWS:  # without prompts, which every rank has
                    written.append((episode.row, self.decode(episode.response), score, episode.end))
        failures += self.player.take()[1] if self.player else []
        gathered = self.group.all_gather((found, written, failures))
        if self.group.is_first:
            rows = sorted(row for _, part, _ in gathered for row in part)
            lines = [
                record(step, row, score, self.prompts[row // n], text, end)
                for row, text, score, end in rows
            ]
            self.write(step, [line | {"sample": line["row"] % n} for line in lines])
            if failed := [failure for *_, part in gathered for failure in part]:
                say(f"[actor] step {step}, held-out rows, {failure_line(failed)}")
        responses = sorted((one for part, *_ in gathered for one in part), key=lambda one: one.row)
        return metrics(responses, [prompt.data_source for prompt in self.prompts])
