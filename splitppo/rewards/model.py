"""A learned reward: a checkpoint that classifies texts or tokens, sharded over the critic ranks. It
scores a row, or each of its steps."""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitppo.config import RewardConfig
from splitppo.errors import UserError
from splitppo.models.attention import is_packed
from splitppo.models.batching import MicroBatch
from splitppo.models.heads import last_scores, read_scores
from splitppo.models.runner import Frozen, Runner
from splitppo.models.tokenizer import find_differences, token_ends
from splitppo.rewards.functions import Failure
from splitppo.rewards.scorer import Scored
from splitppo.rollout import Episode, Messages, Prompt, dialogue, episode_of

ROWS = 2**40  # more than a run has: a row's further texts are numbered behind them


class Reading(NamedTuple):
    """How the reward model reads a row: token ids of its texts, each with the first place at which
    the model scores it; which of all these scores are those of the steps (of the whole); where the
    steps end, in characters of the last message; and whether the text lost its beginning."""

    texts: list[tuple[list[int], int]]
    which: list[int]
    ends: list[int]
    cut: bool


class RewardText:
    """Turns a prompt and its response into the reward model's token ids.

    With the policy's vocabulary and chat template, these are the policy's ids, unless steps have a
    token. Otherwise the text is tokenised again: with a chat template of the reward model, as a
    conversation; else as plain text, prompt and response. A text that is too long loses its
    beginning.

    Args:
        tokenizer: the reward model's.
        longest: most tokens that the model can read.
        steps: what ends a step of a response; None: the row is scored as a whole.
        step_token: what stands in its place in the model's text, where the model scores the step.
        one_pass: what the model says at a token depends on the text up to it alone, so that all
            steps are scored in one text; else each in a text that ends with it.
    """

    def __init__(
        self,
        tokenizer: Any,
        policy: Any,
        *,
        longest: int,
        steps: str | None = None,
        step_token: str | None = None,
        one_pass: bool = False,
    ):
        self.tokenizer = tokenizer
        self.policy = policy
        self.longest = longest
        self.steps = steps
        self.step_token = step_token
        self.one_pass = one_pass
        template = getattr(tokenizer, "chat_template", None)
        self.same = (
            template == getattr(policy, "chat_template", None)
            and not find_differences(tokenizer, policy)
            and not step_token
        )
        self.chat = template is not None

    def encode(self, prompt: Prompt, episode: Episode) -> Reading:
        """The row as the model reads it."""
        said, heard = episode.turns[-1]
        ends = step_ends(self._decode(said), self.steps) if self.steps else []
        if self.same:
            ids = episode.ids.tolist()
            special = [0] * len(ids)
            held = token_ends(self._decode, said) if ends else []
            places = [len(ids) - len(heard) - len(said) + bisect_left(held, end) for end in ends]
        else:
            text, marks = self._render(prompt, episode)
            encoded = self.tokenizer(
                text,
                add_special_tokens=not self.chat,
                return_special_tokens_mask=True,
                return_offsets_mapping=self.steps is not None,
            )
            ids = encoded["input_ids"]
            special = encoded["special_tokens_mask"]
            places = find_places(encoded.get("offset_mapping", []), marks)
        cut = len(ids) > self.longest
        if ends and self.one_pass and not cut:
            return Reading([(ids, places[0])], [place - places[0] for place in places], ends, cut)
        # special tokens at both ends of the text stay there
        first = [*special, 0].index(0)
        last = len(ids) - [*special[::-1], 0].index(0)
        if self.one_pass or self.step_token:
            last = len(ids)  # a causal model, or one with a marker, is read at the step's own token
        heads = [ids[: place + 1] + ids[last:] for place in places] or [ids]
        heads = [head[:first] + head[first:][first - self.longest :] for head in heads]
        return Reading([(head, len(head) - 1) for head in heads], [*range(len(heads))], ends, cut)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.policy.decode(list(ids), skip_special_tokens=True)

    def _render(self, prompt: Prompt, episode: Episode) -> tuple[str, list[int]]:
        """The row as one text, and where the steps of the last message end in it."""
        messages = dialogue(prompt, episode, self._decode)
        if not self.steps:
            return self._join(prompt, messages), []
        last = next(message for message in reversed(messages) if message["role"] == "assistant")
        marked, marks = mark_steps(last["content"], self.steps, self.step_token)
        # some templates strip a message, and some leave out parts of it
        last["content"] = "\0"
        before, _, after = self._join(prompt, messages).partition("\0")
        return f"{before}{marked}{after}", [len(before) + mark for mark in marks]

    def _join(self, prompt: Prompt, messages: Messages) -> str:
        if self.chat:
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        return ("\n" if prompt.messages else "").join(m["content"] for m in messages)


class RewardModel(Frozen):
    """The reward model. `text` turns rows into its token ids."""

    def __init__(self, model: nn.Module, runner: Runner, text: RewardText, *, offload: bool):
        super().__init__(model, runner, self._outputs, offload=offload)
        self.text = text
        self.pad: int | None = getattr(model.config, "pad_token_id", None)

    def score(
        self, prompts: Sequence[Prompt], episodes: Sequence[Episode], config: RewardConfig
    ) -> list[Scored]:
        """The model's part of the rows' scores, weighted, with what is paid for steps; its figures:
        the raw score, and 1 where the beginning of the text was cut. All ranks of the group must
        call it, even those without rows."""
        readings = [
            self.text.encode(prompt, episode)
            for prompt, episode in zip(prompts, episodes, strict=True)
        ]
        texts = [
            episode_of(episode.row + number * ROWS, ids[:first], ids[first:])
            for episode, reading in zip(episodes, readings, strict=True)
            for number, (ids, first) in enumerate(reading.texts)
        ]
        (every,) = self.run(texts)
        counts = [sum(len(ids) - first for ids, first in reading.texts) for reading in readings]
        return [
            self._score(reading, scores[reading.which].tolist(), config)
            for reading, scores in zip(readings, every.split(counts), strict=True)
        ]

    def _score(self, reading: Reading, scores: list[float], config: RewardConfig) -> Scored:
        """A row's score of those of its steps."""
        failures = [
            Failure(
                "reward model",
                "invalid",
                f"reward.model={config.model} returned {score}; check its weights and "
                "--compute.dtype",
            )
            for score in scores
            if not math.isfinite(score)
        ]
        scores = [config.failed_score] if failures else scores
        weighted = [score * config.model_weight for score in scores]
        paid = [*zip([] if failures else reading.ends, weighted, strict=False)]
        return Scored(
            sum(weighted),
            {"reward_model": sum(scores), "reward_model_cut": float(reading.cut)},
            tuple(failures[:1]),
            paid if self.text.steps else None,
        )

    def _outputs(self, model: Any, batch: MicroBatch) -> list[Tensor]:
        """The scores `[B]`. In padded texts a decoder's score is read at the last token that is not
        `pad_token_id`, so a model without a padding token gets an id that no text contains."""
        if is_packed(model):
            return [last_scores(model, batch)]
        ids: Tensor = batch.inputs["input_ids"]
        mask = torch.ones_like(ids).bool()
        if len(batch.before):  # or the rank has no rows left, and runs a dummy
            ends = (batch.before[:, None] + 1) % ids.shape[1]
            mask = torch.arange(ids.shape[1], device=ids.device) <= ends
        pad = self.pad
        if pad is None or pad < 0:  # older folders write -1 for none
            used = set(ids[mask].tolist())
            pad = model.config.pad_token_id = next(i for i in range(len(used) + 1) if i not in used)
        ids = ids.masked_fill(~mask, pad)
        outputs = model(input_ids=ids, attention_mask=mask.to(torch.int64)).logits
        if outputs.dim() == 3:  # of each token
            outputs = outputs.flatten(0, 1)[batch.before + 1]
        return [read_scores(outputs[: len(batch.before)], model.config)]


def longest_text(config: Any, tokenizer: Any) -> int:
    """Most tokens that a model can read, by its config and its tokenizer."""
    most = tokenizer.model_max_length
    return int(min(getattr(config, "max_position_embeddings", None) or most, most))


def step_ends(text: str, separator: str) -> list[int]:
    """Where the steps of a text end, in characters: behind each separator, and with the text. What
    is blank is no step."""
    parts = re.finditer(rf"(.*?)({re.escape(separator)}|\Z)", text, re.DOTALL)
    return [part.end() for part in parts if part[1].strip()]


def mark_steps(text: str, separator: str, token: str | None) -> tuple[str, list[int]]:
    """The text with a token in the place of each step's separator, if there is one, and where its
    steps end then."""
    ends = step_ends(text, separator)
    if not token:
        return text, ends
    parts = [text[begin:end].removesuffix(separator) + token for begin, end in pairwise([0, *ends])]
    return "".join(parts), list(accumulate(map(len, parts)))


def find_places(offsets: list[tuple[int, int]], ends: list[int]) -> list[int]:
    """The tokens that hold the last characters of the parts of a text that end there. `offsets`:
    where each token begins and ends in the text, alike if it is none of it."""
    tokens = [(begin, i) for i, (begin, end) in enumerate(offsets) if begin < end]
    # of a character of several tokens each begins with it
    return [tokens[bisect_left(tokens, (end,)) - 1][1] for end in ends]


def check_steps(tokenizer: Any, reward: RewardConfig) -> None:
    """Raises UserError if the reward model's tokenizer can't tell where a step ends."""
    if reward.steps and not tokenizer.is_fast:
        raise UserError(
            f"reward.steps={reward.steps!r}: the reward model's tokenizer does not map characters "
            "to tokens; save it as tokenizer.json, or unset reward.steps"
        )
