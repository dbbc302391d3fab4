"""Rows: what crosses between data, engine, channels and learner.

A row is one episode: the prompt, then what the policy sampled and, between its turns, what an
environment answered. The *response tokens* are those that the policy sampled. Losses, GAE and KL
are over these alone, so the packed tensors `[N]` hold nothing else.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

End = Literal["eos", "stop", "limit", "environment"]
ENDS: tuple[End, ...] = get_args(End)
HEADER = 6  # numbers that describe a row in `pack_rows`
IDS = "i"  # the kind of an array of token ids: int32
LOGPROBS = "f"  # of log-probs: float32


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
        messages: the conversation as messages, if the data has it or the prompt is a string that
            went through the chat template; a reward model with a template of its own reads it.
        column: the prompt as its row has it, a string or messages: without `data.system` and the
            chat template. For reward functions that ask for it.
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
    """One row while it is open, and when it has ended. Its ids and log-probs are arrays, four bytes
    a number, whatever sequences they are given as: they are copied, sent and pickled as bytes.

    Attributes:
        row: its number in the data order, from 0. Slot `row % S` of a step's S slots generates it.
        prompt, response: token ids. The response holds its end-of-sequence token or stop string, if
            it ended by one, and, between two turns, what an environment answered.
        logprobs: the engine's log-probs of the response tokens at the sampling temperature.
        end: what ended the row: the end-of-sequence token, a stop string, `max_new_tokens`, the
            environment. None: it is open.
        mask: of each id of `response`, whether the policy sampled it; None: all.
        turns: where each turn ends, counted in response tokens; empty: one turn.
        stretches: (step, response tokens that it sampled), for each step that did; empty: not
            recorded.
    """

    row: int
    prompt: Sequence[int]
    response: Sequence[int]
    logprobs: Sequence[float]
    end: End | None = None
    mask: list[bool] | None = None
    turns: tuple[int, ...] = ()
    stretches: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        for name, kind in (("prompt", IDS), ("response", IDS), ("logprobs", LOGPROBS)):
            object.__setattr__(self, name, numbers(getattr(self, name), kind))

    def extended(
        self, step: int, tokens: Sequence[int], logprobs: Sequence[float], end: End | None
    ) -> "Sample":
        """The row with tokens that a step's weights have sampled behind the others."""
        return replace(
            self,
            response=numbers(self.response, IDS) + numbers(tokens, IDS),
            logprobs=numbers(self.logprobs, LOGPROBS) + numbers(logprobs, LOGPROBS),
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
    def ids(self) -> Tensor:
        """Prompt and response, `[n]` int32."""
        return torch.cat([tensor_of(self.prompt, IDS), tensor_of(self.response, IDS)])

    @property
    def places(self) -> Tensor:
        """Where in `response` the response tokens stand; `[T_i]` int64."""
        return (
            torch.arange(len(self.response))
            if self.mask is None
            else torch.tensor(self.mask).nonzero()[:, 0]
        )


def numbers(values: Sequence[float], kind: str) -> array:
    """Ids (`IDS`) or log-probs (`LOGPROBS`) as an array; an array as it is."""
    return values if isinstance(values, array) else array(kind, values)


def tensor_of(values: Sequence[float], kind: str) -> Tensor:
    """`[n]` int32 ids or float32 log-probs, in the array's memory."""
    dtype = torch.int32 if kind == IDS else torch.float32
    held = numbers(values, kind)
    return torch.frombuffer(held, dtype=dtype) if held else torch.zeros(0, dtype=dtype)


def array_of(tensor: Tensor, kind: str) -> array:
    """A copy of an int32 or float32 tensor `[n]`."""
    return array(kind, tensor.numpy().tobytes())


def pack_rows(samples: Sequence[Sample]) -> tuple[list[int], Tensor]:
    """Rows, without log-probs and stretches: `HEADER` integers for each row, and all ids, `[n]`
    int32."""
    header = []
    ids = array(IDS)
    for sample in samples:
        # open rows do not travel
        masked = sample.mask is not None
        end = ENDS.index(cast(End, sample.end))
        header += [
            sample.row,
            len(sample.prompt),
            len(sample.response),
            end,
            len(sample.turns),
            masked,
        ]
        for part in (sample.prompt, sample.response, sample.mask or (), sample.turns):
            ids += numbers(part, IDS)
    return [int(number) for number in header], tensor_of(ids, IDS)


def packed_sizes(header: Sequence[int]) -> list[int]:
    """How many ids each row of `pack_rows` has, by its header."""
    parts = zip(*(header[i::HEADER] for i in (1, 2, 4, 5)), strict=True)
    return [prompt + response * (1 + masked) + turns for prompt, response, turns, masked in parts]


def unpack_rows(header: Sequence[int], ids: Tensor) -> list[Sample]:
    """The rows of `pack_rows`; their log-probs are empty."""
    samples = []
    sizes = packed_sizes(header)
    for first, part in zip(range(0, len(header), HEADER), ids.split(sizes), strict=True):
        row, prompt, response, end, _, masked = header[first : first + HEADER]
        own = array_of(part, IDS)
        both = prompt + response
        mask = [bool(flag) for flag in own[both : both + response]] if masked else None
        turns = tuple(own[both + response * masked :])
        samples.append(
            Sample(row, own[:prompt], own[prompt:both], [], cast(Any, ENDS)[end], mask, turns)
        )
    return samples


def exchange_rows(group: Any, parts: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Sends each rank of a `Group`, in their order, its part; returns what all have sent here,
    without log-probs."""
    packed = [pack_rows(part) for part in parts]
    headers = group.all_to_all([torch.tensor(header, dtype=torch.int64) for header, _ in packed])
    ids = group.all_to_all([ids for _, ids in packed])
    pairs = zip(headers, ids, strict=True)
    return [sample for header, part in pairs for sample in unpack_rows(header.tolist(), part)]


class Rollout:
    """The rows that one rank holds in a step, given in any order and kept in ascending order of
    rows.

    Per-token figures (log-probs, values, advantages) travel beside it as packed float32 tensors
    `[N]` on the CPU: the response tokens of one row after the other.

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
        """The part of a packed tensor `[N]` (or `[k, N]`) that belongs to `rows`, in their
        order."""
        pieces = packed.split(self.lengths, dim=-1)
        picked = [pieces[self.index[row]] for row in rows]
        return torch.cat(picked, dim=-1) if picked else packed[..., :0]

    def pack(self, by_row: dict[int, Tensor]) -> Tensor:
        """row -> `[T_i]`, for each row held here, to the packed `[N]`."""
        return torch.cat([by_row[row] for row in self.rows]) if self.rows else torch.zeros(0)

    def sums(self, packed: Tensor) -> Tensor:
        """`[N]` -> `[B]`, the sum of each row."""
        row_of = torch.arange(len(self.rows)).repeat_interleave(
            torch.tensor(self.lengths, dtype=torch.int64)
        )
        wide = torch.zeros(len(self.rows), dtype=torch.float64).index_add_(
            0, row_of, packed.double()
        )
        return wide.to(packed.dtype)

    def turns(self) -> Tensor:
        """`[N]` int64: the turn of each response token, from 0."""
        by_row = (
            torch.bucketize(torch.arange(tokens), torch.tensor(sample.turns).long(), right=True)
            for sample, tokens in zip(self.samples, self.lengths, strict=True)
        )
        return torch.cat([torch.arange(0), *by_row])

    def logprobs(self) -> Tensor:
        """`[N]` float32, the engine's log-probs of the response tokens."""
        return torch.cat(
            [torch.zeros(0), *(tensor_of(sample.logprobs, LOGPROBS) for sample in self.samples)]
        )

    def ages(self) -> Tensor:
        """`[N]` int64: for each response token, how many steps before its row's last one it was
        sampled."""
        parts = [
            (s.stretches[-1][0] - step, tokens)
            for s in self.samples
            for step, tokens in s.stretches
        ]
        ages, tokens = torch.tensor(parts, dtype=torch.int64).view(-1, 2).T
        return ages.repeat_interleave(tokens)


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Tensors `[T_i]` to one `[B, T]`, right-padded with 0."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
