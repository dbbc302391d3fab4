"""What both roles know of a run, and the metrics that they have in common."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from splitppo.config import Config
from splitppo.config.cli import map_paths
from splitppo.placement import Role, StepPlan
from splitppo.rollout import Episode, Messages, Prompt, Rollout, dialogue

# figures of how the work was cut; they depend on the placement
WORK = ("padding", "imbalance", "update_tflop")
# the first of a recorded row's, which have figures of their own: of 128k tokens they take 4 MB
RECORDED_TOKENS = 4096


@dataclass(frozen=True)
class Context:
    """What both roles know of the run.

    Attributes:
        prompt: row -> its prompt.
        decode: token ids of a response -> its text. read: of an environment -> its messages.
        held_out: prompts of the validation.
        vocabulary_size: ids from 0 that a policy may sample.
    """

    config: Config
    prompt: Callable[[int], Prompt]
    held_out: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]
    vocabulary_size: int
    read: Callable[[Sequence[int]], Messages] = lambda _: []

    @property
    def configs(self) -> tuple[Config, Config]:
        """The configuration with names in the place of paths, and as it is. A checkpoint names what
        its state belongs to by the first, since files may be moved; earlier versions did by the
        second."""
        return map_paths(self.config, lambda _, path: os.path.basename(path)), self.config

    def to_score(
        self, prompt: Prompt, episode: Episode
    ) -> tuple[Prompt, str, Callable[[], Messages]]:
        """A row as `Scorer.submit` gets it."""
        messages = partial(dialogue, prompt, episode, self.decode, self.read)
        return prompt, self.decode(episode.turns[-1][0]), messages

    def record(
        self,
        step: int,
        prompt: Prompt,
        episode: Episode,
        score: float,
        tokens: Mapping[str, Sequence[Any]] | None = None,
    ) -> dict[str, Any]:
        """A scored row as it is written to the run's folder. Its `question`: of a chat, what the
        user said last. `tokens`: of `token_figures`, of which the first are written. With
        environments `turns` are the dialogue's messages; the policy's have the `reward` of their
        turn and, if there are values, the `value` of its first token."""
        asked = [turn["content"] for turn in prompt.messages or () if turn["role"] == "user"]
        found = {
            "step": step,
            "row": episode.row,
            "question": asked[-1] if asked else prompt.text,
            "response": self.decode(episode.response),
            "ground_truth": prompt.ground_truth,
            "score": round(score, 6),
            "end": episode.end,
            "data_source": prompt.data_source,
            "prompt": prompt.text,
        }
        if self.config.has_env:
            found["turns"] = dialogue(prompt, episode, self.decode, self.read)
            said = [message for message in found["turns"] if message["role"] == "assistant"]
            spans = [len(ids) + len(answer) for ids, answer in episode.turns]
            rewards = (
                Rollout([episode]).turn_rewards().split([len(ids) for ids, _ in episode.turns])
            )
            values = (tokens or {}).get("value")
            # the prompt may have an assistant's messages, too
            own = said[len(said) - len(spans) :]
            for message, end, span, part in zip(
                own, accumulate(spans), spans, rewards, strict=True
            ):
                message["reward"] = round(float(part.sum()), 6)
                if values:
                    message["value"] = values[end - span]
        if tokens:
            found["tokens"] = {name: line[:RECORDED_TOKENS] for name, line in tokens.items()}
            more = max(map(len, tokens.values())) - RECORDED_TOKENS
            if more > 0:
                found["tokens_left_out"] = more
        return found

    def trainable_rows(
        self, plan: StepPlan, rollout: Rollout, role: Role, rank: int, count: int = 0
    ) -> list[list[int]]:
        """The rows of each mini-batch that the losses are over; the last arguments are those of
        `StepPlan.slots`."""
        masked = self.config.ppo.mask_truncated
        rows = [e.row for e in rollout.episodes if not (masked and e.is_unfinished)]
        return [plan.rows_of(slots, rows) for slots in plan.slots(role, rank, count)]


def learning_metrics(
    role: str, loss: str, figures: Sequence[dict[str, float]], names: Sequence[str]
) -> dict[str, Any]:
    """Means over a step's optimizer steps (`figures`, of `Learner.update`), those that were
    skipped, and the bare figures of each. A step that trained on no row has 0 for every mean.
    `names`: of the objective's metrics."""
    metrics: dict[str, Any] = {}
    for name in figures[0] if figures else (*names, "loss", "grad_norm", "skipped", *WORK):
        total = sum((figure[name] for figure in figures), 0.0)
        full = f"perf/{name}" if name in WORK else f"{role}/{loss if name == 'loss' else name}"
        metrics[full] = total if name == "skipped" else total / max(1, len(figures))
    metrics["optimizer_steps"] = [
        {name: figure[name] for name in ("loss", "grad_norm")} for figure in figures
    ]
    return metrics
