"""A learned reward: a sequence-classification checkpoint with one label, sharded over the critic
ranks."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitppo.config import RewardConfig
from splitppo.models.attention import is_packed
from splitppo.models.batching import MicroBatch
from splitppo.models.heads import last_scores
from splitppo.models.runner import Frozen, Runner
from splitppo.models.tokenizer import find_differences
from splitppo.rewards.functions import Failure
from splitppo.rollout import Episode, Prompt, dialogue, episode_of


class RewardText:
    """Turns a prompt and its response into the reward model's token ids.

    With the policy's vocabulary and chat template, these are the policy's ids. Otherwise the text
    is tokenised again: with `chat` and a chat template of the reward model, as a conversation; else
    as plain text, prompt and response. `read` makes messages of what an environment said.
    `tokenizer` is the reward model's. A text of more than
    `longest` tokens, the most that the model can read, loses its beginning.
    """

    def __init__(self, tokenizer: Any, policy: Any, *, chat: bool, longest: int):
        self.tokenizer = tokenizer
        self.policy = policy
        self.longest = longest
        template = getattr(tokenizer, "chat_template", None)
        self.same = template == getattr(policy, "chat_template", None) and not find_differences(
            tokenizer, policy
        )
        self.chat = chat and template is not None
        own_form = (
            "the text in its own chat template"
            if self.chat
            else "plain text, the response behind the prompt"
        )
        # the form in which the reward model gets rows, for the user
        self.reads = "the policy's token ids" if self.same else own_form
        tokenizer.truncation_side = "left"

    def encode(self, prompt: Prompt, episode: Episode) -> tuple[list[int], bool]:
        """Token ids, and whether the beginning was cut."""
        decode = partial(self.policy.decode, skip_special_tokens=True)
        if self.same:
            ids = episode.ids.tolist()
        else:
            messages = dialogue(prompt, episode, lambda ids: decode(list(ids)))
            if self.chat:
                ids = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
            else:
                text = ("\n" if prompt.messages else "").join(m["content"] for m in messages)
                ids = self.tokenizer(text)["input_ids"]
                if len(ids) > self.longest:
                    # the tokenizer cuts, and so keeps the special tokens at both ends
                    cut = self.tokenizer(text, truncation=True, max_length=self.longest)
                    return cut["input_ids"], True
        return ids[-self.longest :], len(ids) > self.longest


class RewardModel(Frozen):
    """The reward model. `text` turns rows into its token ids."""

    def __init__(self, model: nn.Module, runner: Runner, text: RewardText, *, offload: bool):
        super().__init__(model, runner, self._outputs, offload=offload)
        self.text = text
        self.pad: int | None = getattr(model.config, "pad_token_id", None)

    def score(
        self, prompts: Sequence[Prompt], episodes: Sequence[Episode], config: RewardConfig
    ) -> tuple[Tensor, dict[str, list[float]], list[tuple[int, Failure]]]:
        """The model's part of the rows' scores `[B]` float32, weighted; its figures: the raw score,
        and 1 where the beginning of the text was cut; and the rows on which it failed. All ranks of
        the group must call it, even those without rows."""
        encoded = [
            self.text.encode(prompt, episode)
            for prompt, episode in zip(prompts, episodes, strict=True)
        ]
        # the last token stands for the response: a text has one score
        texts = [
            episode_of(episode.row, ids[:-1], ids[-1:])
            for episode, (ids, _) in zip(episodes, encoded, strict=True)
        ]
        (scores,) = self.run(texts)
        wrong = f"reward.model={config.model} returned {{}}; check its weights and --compute.dtype"
        failures = [
            (episode.row, Failure("reward model", "invalid", wrong.format(score)))
            for episode, score in zip(episodes, scores.tolist(), strict=True)
            if not math.isfinite(score)
        ]
        scores = torch.where(scores.isfinite(), scores, config.failed_score)
        return (
            scores * config.model_weight,
            {
                "reward_model": scores.tolist(),
                "reward_model_cut": [float(cut) for _, cut in encoded],
            },
            failures,
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
        logits = model(input_ids=ids, attention_mask=mask.to(torch.int64)).logits
        return [logits[: len(batch.before), 0].float()]


def longest_text(config: Any, tokenizer: Any) -> int:
    """Most tokens that a model can read, by its config and its tokenizer."""
    most = tokenizer.model_max_length
    return int(min(getattr(config, "max_position_embeddings", None) or most, most))
