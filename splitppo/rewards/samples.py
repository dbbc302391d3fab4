"""Scored rows, in the form in which the run's folder stores them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from splitppo.context import Context
from splitppo.models.tokenizer import token_texts
from splitppo.rollout import Episode, Prompt, Rollout, dialogue

# the first of a recorded row's, which have figures of their own: of 128k tokens they take 4 MB
RECORDED_TOKENS = 4096


def record(
    context: Context,
    step: int,
    prompt: Prompt,
    episode: Episode,
    score: float,
    tokens: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, Any]:
    """A scored row. Its `question`: of a chat, what the user said last. `tokens`: of
    `token_figures`, of which the first are written. With environments `turns` are the dialogue's
    messages; the policy's have the `reward` of their turn and, if there are values, the `value` of
    its first token."""
    questions = [turn["content"] for turn in prompt.messages or () if turn["role"] == "user"]
    line = {
        "step": step,
        "row": episode.row,
        "question": questions[-1] if questions else prompt.text,
        "response": context.decode(episode.response),
        "ground_truth": prompt.ground_truth,
        "score": round(score, 6),
        "end": episode.end,
        "data_source": prompt.data_source,
        "prompt": prompt.text,
    }
    if context.config.has_env:
        line["turns"] = dialogue(prompt, episode, context.decode)
        answers = [message for message in line["turns"] if message["role"] == "assistant"]
        spans = [len(ids) + len(answer) for ids, answer in episode.turns]
        rewards = Rollout([episode]).turn_rewards().split([len(ids) for ids, _ in episode.turns])
        values = (tokens or {}).get("value")
        # the prompt may have an assistant's messages, too
        for message, end, span, part in zip(
            answers[len(answers) - len(spans) :], accumulate(spans), spans, rewards, strict=True
        ):
            message["reward"] = round(float(part.sum()), 6)
            if values:
                message["value"] = values[end - span]
    if tokens:
        line["tokens"] = {name: column[:RECORDED_TOKENS] for name, column in tokens.items()}
    return line


def token_figures(
    rollout: Rollout, figures: Mapping[str, Tensor], decode: Callable[[Sequence[int]], str]
) -> Iterator[dict[str, list[Any]]]:
    """For each row of a rollout: the `text` of each token of `response`, and its figures to four
    digits, None where the policy did not sample the token. `figures` are `[N]` by name."""
    by_row = {name: rollout.split(packed) for name, packed in figures.items()}
    for i, episode in enumerate(rollout.episodes):
        columns: dict[str, list[Any]] = {"text": token_texts(decode, episode.response)}
        for name, rows in by_row.items():
            columns[name] = [None] * len(episode.response)
            for at, figure in zip(episode.places.tolist(), rows[i].tolist(), strict=True):
                columns[name][at] = round(figure, 4)
        yield columns
