"""Rows: what crosses between data, engine, wire and learner. Packed, never padded, never pickled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One prompt of the data set.

    Attributes:
        text: the prompt as text, after the chat template.
        tokens: its token ids.
        data_source, ground_truth, extra_info: what the reward function gets beside the response.
        messages: the conversation as messages, if the data has it or the prompt is a string that went through the chat
            template; a reward model with a template of its own reads it.
    """

    text: str
    tokens: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Request:
    """One row to generate: `row` is its index in the step's batch, and seeds its noise."""

    row: int
    prompt: list[int]


@dataclass(frozen=True)
class Sample:
    """One finished row.

    Attributes:
        row: index in the step's batch.
        prompt, response: token ids; the response holds its end-of-sequence token or stop string, if it ended.
        logprobs: the engine's log-probs of the response tokens at the sampling temperature.
        finished: False if the response was cut at max_new_tokens.
    """

    row: int
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    finished: bool


class Rollout:
    """The rows that one rank holds in a step, given in any order and kept in ascending order of rows.

    Per-token figures (log-probs, values, advantages) travel beside it as packed float32 tensors `[N]` on the CPU,
    N = the sum of the response lengths.
    """

    def __init__(self, samples: Sequence[Sample]):
        self.samples = sorted(samples, key=lambda sample: sample.row)
        self.rows = [sample.row for sample in self.samples]
        self.lengths = [len(sample.response) for sample in self.samples]
        self.index = {row: i for i, row in enumerate(self.rows)}

    @property
    def tokens(self) -> int:
        """N, the response tokens."""
        return sum(self.lengths)

    def split(self, packed: Tensor) -> list[Tensor]:
        """`[N]` -> a tensor a row."""
        return list(packed.split(self.lengths))

    def select(self, packed: Tensor, rows: Sequence[int]) -> Tensor:
        """The part of a packed tensor `[N]` (or `[k, N]`) that belongs to `rows`, in their order."""
        pieces = packed.split(self.lengths, dim=-1)
        picked = [pieces[self.index[row]] for row in rows]
        return torch.cat(picked, dim=-1) if picked else packed[..., :0]

    def pack(self, by_row: dict[int, Tensor]) -> Tensor:
        """row -> `[T_i]`, for each row held here, to the packed `[N]`."""
        return torch.cat([by_row[row] for row in self.rows]) if self.rows else torch.zeros(0)

    def pad(self, packed: Tensor) -> Tensor:
        """`[N]` -> `[B, T]`, right-padded with 0."""
        return pad_rows(self.split(packed)) if self.rows else packed.new_zeros(0, 0)

    def mask(self) -> Tensor:
        """`[B, T]` bool: True at response tokens."""
        return self.pad(torch.ones(self.tokens)).bool()

    def unpad(self, padded: Tensor) -> Tensor:
        """`[B, T]` -> `[N]`."""
        return padded[self.mask()]


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Tensors `[T_i]` to one `[B, T]`, right-padded with 0."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass, prompt and response together, padded on the right.

    Under causal attention no token sees the padding behind it: the model runs without an attention mask.

    Attributes:
        input_ids: `[B, L]` int64.
        before: `[N]` int64, where in the flattened `[B * L]` the N response tokens were chosen: one before each.
        responses: `[N]` int64, the response tokens.
        mask: `[B, T]` bool, True at response tokens; `[N]` tensors fill it row by row.
    """

    input_ids: Tensor
    before: Tensor
    responses: Tensor
    mask: Tensor

    def pad(self, packed: Tensor) -> Tensor:
        """`[N]` -> `[B, T]`, 0 where padded."""
        return packed.new_zeros(self.mask.shape).masked_scatter(self.mask, packed)


def micro_batch(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """Pads rows for one forward pass. No rows: one row of two tokens, whose response nobody asks for, for a rank that
    must take part in a forward of its group without having rows."""
    if not samples:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return MicroBatch(ids, nothing, nothing, torch.zeros(1, 1, dtype=torch.bool, device=device))
    ids = pad_rows([torch.tensor(sample.prompt + sample.response) for sample in samples])
    lengths = torch.tensor([len(sample.response) for sample in samples])
    starts = [i * ids.shape[1] + len(sample.prompt) - 1 for i, sample in enumerate(samples)]
    before = torch.cat([torch.arange(n) + start for n, start in zip(lengths.tolist(), starts, strict=True)])
    responses = torch.tensor([token for sample in samples for token in sample.response])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return MicroBatch(*(tensor.to(device) for tensor in (ids, before, responses, mask)))


def cut_micro_batches(samples: Sequence[Sample], budget: int) -> list[list[int]]:
    """Cuts rows into micro-batches of at most `budget` padded tokens: indices into `samples`.

    Rows of like length go together (longest first, so that memory peaks at once); a row over the budget goes alone.
    """
    return cut_lengths([len(sample.prompt) + len(sample.response) for sample in samples], budget)


def cut_lengths(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """`cut_micro_batches` for rows of these lengths."""
    cut: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # the first row of a micro-batch is its longest
        if cut and (len(cut[-1]) + 1) * lengths[cut[-1][0]] <= budget:
            cut[-1].append(i)
        else:
            cut.append([i])
    return cut
