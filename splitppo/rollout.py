"""Rows: what crosses between data, engine, channels and learner.

A row is one episode: the prompt, then what the policy sampled and, between its turns, what an environment answered.
The *response tokens* are those that the policy sampled. Losses, GAE and KL are over these alone, so the packed tensors
`[N]` hold nothing else.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

End = Literal["eos", "stop", "limit", "environment"]
ENDS: tuple[End, ...] = get_args(End)
HEADER = 6  # numbers that describe a row in `pack_rows`


def digest(*things: object) -> str:
    """A hash of plain values, by which a checkpoint names the outside data that its state is of."""
    return hashlib.blake2b(repr(things).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Prompt:
    """One prompt of the data set.

    Attributes:
        text: the prompt as text, after the chat template.
        tokens: its token ids.
        data_source, ground_truth, extra_info: what the reward function gets beside the response.
        messages: the conversation as messages, if the data has it or the prompt is a string that went through the chat
            template; a reward model with a template of its own reads it.
        column: the prompt as its row has it, a string or messages: without `data.system` and the chat template. For
            reward functions that ask for it.
    """

    text: str
    tokens: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]] | None = None
    column: str | list[dict[str, Any]] = ""


@dataclass(frozen=True)
class Sample:
    """One row while it is open, and when it has ended.

    Attributes:
        row: its number in the data order, from 0. Slot `row % S` of a step's S slots generates it.
        prompt, response: token ids. The response holds its end-of-sequence token or stop string, if it ended by one,
            and, between two turns, what an environment answered.
        logprobs: the engine's log-probs of the response tokens at the sampling temperature.
        end: what ended the row: the end-of-sequence token, a stop string, `max_new_tokens`, the environment. None: it
            is open.
        mask: of each id of `response`, whether the policy sampled it; None: all.
        turns: where each turn ends, counted in response tokens; empty: one turn.
        stretches: (step, response tokens that it sampled), for each step that did; empty: not recorded.
    """

    row: int
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    end: End | None = None
    mask: list[bool] | None = None
    turns: tuple[int, ...] = ()
    stretches: tuple[tuple[int, int], ...] = ()

    def extended(self, step: int, tokens: Sequence[int], logprobs: Sequence[float], end: End | None) -> "Sample":
        """The row with tokens that a step's weights have sampled behind the others."""
        return replace(
            self,
            response=[*self.response, *tokens],
            logprobs=[*self.logprobs, *logprobs],
            end=end,
            stretches=(*self.stretches, (step, len(tokens))),
        )

    @property
    def truncated(self) -> bool:
        """Whether the row was cut at max_new_tokens."""
        return self.end == "limit"

    @property
    def tokens(self) -> int:
        """The number of response tokens."""
        return len(self.response) if self.mask is None else sum(self.mask)

    @property
    def ages(self) -> list[int]:
        """For each response token, how many steps before the row's last one it was sampled."""
        return [self.stretches[-1][0] - step for step, tokens in self.stretches for _ in range(tokens)]

    @property
    def places(self) -> Tensor:
        """Where in `response` the response tokens stand; `[T_i]` int64."""
        return torch.arange(len(self.response)) if self.mask is None else torch.tensor(self.mask).nonzero()[:, 0]


def pack_rows(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Rows, without log-probs and stretches, as two lists of integers: `HEADER` numbers for each row, and all ids."""
    header, ids = [], []
    for sample in samples:
        masked, end = sample.mask is not None, ENDS.index(cast(End, sample.end))  # open rows do not travel
        header += [sample.row, len(sample.prompt), len(sample.response), end, len(sample.turns), masked]
        ids += [*sample.prompt, *sample.response, *map(int, sample.mask or ()), *sample.turns]
    return [int(number) for number in header], ids


def packed_sizes(header: Sequence[int]) -> list[int]:
    """How many ids each row of `pack_rows` has, by its header."""
    parts = zip(*(header[i::HEADER] for i in (1, 2, 4, 5)), strict=True)
    return [prompt + response * (1 + masked) + turns for prompt, response, turns, masked in parts]


def unpack_rows(header: Sequence[int], ids: Sequence[int]) -> list[Sample]:
    """The rows of `pack_rows`; their log-probs are empty."""
    samples, at = [], 0
    for first, size in zip(range(0, len(header), HEADER), packed_sizes(header), strict=True):
        row, prompt, response, end, _, masked = header[first : first + HEADER]
        own = list(ids[at : at + size])
        both = prompt + response
        mask = [bool(flag) for flag in own[both : both + response]] if masked else None
        turns = tuple(own[both + response * masked :])
        samples.append(Sample(row, own[:prompt], own[prompt:both], [], cast(Any, ENDS)[end], mask, turns))
        at += size
    return samples


class Rollout:
    """The rows that one rank holds in a step, given in any order and kept in ascending order of rows.

    Per-token figures (log-probs, values, advantages) travel beside it as packed float32 tensors `[N]` on the CPU: the
    response tokens of one row after the other.

    Attributes:
        lengths: response tokens of each row.
        totals: all tokens of each row: prompt, response tokens, observations.
    """

    def __init__(self, samples: Sequence[Sample]):
        self.samples = sorted(samples, key=lambda sample: sample.row)
        self.rows = [sample.row for sample in self.samples]
        self.lengths = [sample.tokens for sample in self.samples]
        self.totals = [len(sample.prompt) + len(sample.response) for sample in self.samples]
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
