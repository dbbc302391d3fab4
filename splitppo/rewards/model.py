"""A learned reward: a sequence-classification checkpoint with one label, sharded over the critic ranks."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from splitppo.learner import Runner, padded
from splitppo.models.sharding import all_max
from splitppo.rollout import Prompt, Sample, cut_lengths, pad_rows


class RewardText:
    """Prompts and responses as the token ids that a reward model reads.

    The policy's own ids are taken over where both have the same vocabulary and chat template. Else the text is
    encoded again: through the reward model's chat template if it has one and `chat` is set, with the response as the
    assistant's message; as plain text otherwise, prompt and response one after the other.

    Args:
        tokenizer: the reward model's. policy: the policy's.
        longest: tokens that it can read; of a longer text the beginning is left out.
    """

    def __init__(self, tokenizer: Any, policy: Any, *, chat: bool, longest: int):
        self.tokenizer, self.policy, self.longest = tokenizer, policy, longest
        template = getattr(tokenizer, "chat_template", None)
        self.same = tokenizer.get_vocab() == policy.get_vocab() and template == getattr(policy, "chat_template", None)
        self.chat = chat and template is not None
        tokenizer.truncation_side = "left"

    @property
    def reads(self) -> str:
        """What the reward model is given."""
        if self.same:
            return "the policy's token ids"
        return "the text in its own chat template" if self.chat else "plain text, the response behind the prompt"

    def encode(self, prompt: Prompt, sample: Sample) -> tuple[list[int], bool]:
        """Token ids, and whether the beginning was left out."""
        if self.same:
            ids = sample.prompt + sample.response
            return ids[-self.longest :], len(ids) > self.longest
        response = self.policy.decode(sample.response, skip_special_tokens=True)
        if self.chat:
            asked = prompt.messages or [{"role": "user", "content": prompt.text}]
            messages = [*asked, {"role": "assistant", "content": response}]
            ids = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
            return ids[-self.longest :], len(ids) > self.longest
        asked = [message["content"] + "\n" for message in prompt.messages or []]
        text = "".join(asked or [prompt.text]) + response
        ids = self.tokenizer(text)["input_ids"]
        if len(ids) <= self.longest:
            return ids, False
        # cut by the library, which keeps the special tokens at both ends
        return self.tokenizer(text, truncation=True, max_length=self.longest)["input_ids"], True


class RewardModel:
    """The model on its group; with `offload`, its shards sit on the CPU between its uses.

    Args:
        model: sharded by `parallelize` and filled.
        runner: how its group runs.
    """

    def __init__(self, model: nn.Module, runner: Runner, text: RewardText, *, offload: bool):
        self.model, self.runner, self.text, self.offload = model, runner, text, offload
        self.pad: int | None = getattr(model.config, "pad_token_id", None)
        self.rest()

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Scores of rows; all ranks of the group must call it, even those without rows.

        Returns:
            `[B]` float32 scores, and `[B]` float32: 1 where the text was too long and lost its beginning.
        """
        encoded = [self.text.encode(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]
        if self.offload:
            self.model.to(self.runner.device)
        scores = self._forward([ids for ids, _ in encoded])
        return scores, torch.tensor([float(cut) for _, cut in encoded])

    def rest(self) -> None:
        """Nothing is to be scored for a while."""
        if self.offload:
            self.model.to("cpu")

    @torch.no_grad()
    def _forward(self, texts: Sequence[list[int]]) -> Tensor:
        scores = torch.zeros(len(texts))
        cut = cut_lengths([len(ids) for ids in texts], self.runner.budget)
        for rows in padded(cut, all_max([len(cut)], self.runner.mesh)[0]):
            inputs = self._batch([texts[i] for i in rows] or [[0, 0]])
            found = self.model(**inputs).logits[:, 0].float().cpu()
            scores[rows] = found[: len(rows)]
        return scores

    def _batch(self, texts: Sequence[list[int]]) -> dict[str, Tensor]:
        """Padded on the right. A decoder is read at its last token that is no padding: without a pad token of its own,
        one that no text holds is taken."""
        pad = self.pad
        if pad is None:
            used = {token for ids in texts for token in ids}
            pad = next(i for i in range(len(used) + 1) if i not in used)
            cast(Any, self.model).config.pad_token_id = pad
        ids = pad_rows([torch.tensor(ids) - pad for ids in texts]) + pad
        mask = pad_rows([torch.ones(len(ids), dtype=torch.int64) for ids in texts])
        return {"input_ids": ids.to(self.runner.device), "attention_mask": mask.to(self.runner.device)}


def longest_text(config: Any, tokenizer: Any) -> int:
    """Tokens of a text that a model can read: the smaller of what its config and its tokenizer say."""
    by_config = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    return int(min(by_config, tokenizer.model_max_length))
