"""Rows: what crosses between data, engine, wire and learner. Packed, never padded, never pickled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROUND = 64  # tokens of a packed micro-batch are a multiple of this


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
    """One row to generate.

    Attributes:
        row: its index in the step's batch; seeds its noise.
        length: tokens of its response, whatever ends others (for benchmarks); None: until it ends.
    """

    row: int
    prompt: list[int]
    length: int | None = None


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


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass, prompt and response together.

    Packed: one after the other, with what the library's flash attention calls for (`cu_seq_lens_q` and so on).
    Padded: on the right; under causal attention no token sees the padding behind it, so there is no attention mask.

    Attributes:
        inputs: what the model is called with; `input_ids` are `[1, L]` if packed, `[B, L]` if padded, int64.
        before: `[N]` int64, where in the flattened ids the N response tokens were chosen: one before each.
        responses: `[N]` int64, the response tokens.
        mask: `[B, T]` bool, True at response tokens; `[N]` tensors fill it row by row.
        places: `[N]` int64, where in the flattened mask the response tokens are.
    """

    inputs: dict[str, Any]
    before: Tensor
    responses: Tensor
    mask: Tensor
    places: Tensor

    def pad(self, packed: Tensor) -> Tensor:
        """`[N]` -> `[B, T]`, 0 where padded."""
        # by index: the gradient through a mask would make the host wait for the GPU to count it
        return packed.new_zeros(self.mask.numel()).index_copy(0, self.places, packed).view(self.mask.shape)


def micro_batch(samples: Sequence[Sample], device: torch.device, *, packed: bool = False) -> MicroBatch:
    """The rows of one forward pass. No rows: some ids whose response nobody asks for, for a rank that must take part in
    a forward of its group without having rows."""
    rows = [torch.tensor(sample.prompt + sample.response) for sample in samples] or [torch.zeros(2, dtype=torch.int64)]
    lengths = torch.tensor([len(sample.response) for sample in samples] or [0])
    if packed:
        inputs, starts = _packed_inputs(rows)
    else:
        inputs: dict[str, Any] = {"input_ids": pad_rows(rows)}
        starts = [i * inputs["input_ids"].shape[1] for i in range(len(rows))]
    ends = [start + len(row) - 1 for start, row in zip(starts, rows, strict=True)]
    before = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, lengths.tolist(), strict=True)])
    responses = torch.tensor([token for sample in samples for token in sample.response], dtype=torch.int64)
    mask = torch.arange(max(int(lengths.max()), 1)) < lengths[:, None]
    places = mask.flatten().nonzero()[:, 0]
    inputs = {name: to_device(x, device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return MicroBatch(inputs, *(to_device(tensor, device) for tensor in (before, responses, mask, places)))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor there, without waiting for what the GPU has under way."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _packed_inputs(rows: Sequence[Tensor]) -> tuple[dict[str, Any], list[int]]:
    """The inputs, and where each row begins. Filled up with a row of zeros: matrices of a round size are faster."""
    count, lengths = len(rows), [len(row) for row in rows]
    if short := -sum(lengths) % ROUND:
        rows, lengths = [*rows, torch.zeros(short, dtype=torch.int64)], [*lengths, short]
    begins = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    longest = max(lengths)
    names = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": longest, "max_length_k": longest}
    return {"input_ids": torch.cat(list(rows))[None], "position_ids": positions[None]} | names, begins[:count].tolist()


def cut_lengths(lengths: Sequence[int], budget: int, *, packed: bool = False) -> list[list[int]]:
    """Cuts rows of these lengths into micro-batches of at most `budget` tokens, padding counted: indices.

    Rows of like length go together if they are padded (longest first, so that memory peaks at once); a row over the
    budget goes alone.
    """
    cut: list[list[int]] = []
    left: list[int] = []  # of the budget of each, if they are packed
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if packed:
            at = next((k for k, room in enumerate(left) if room >= lengths[i]), len(cut))
        else:  # the first row of a micro-batch is its longest
            at = len(cut) - 1 if cut and (len(cut[-1]) + 1) * lengths[cut[-1][0]] <= budget else len(cut)
        if at == len(cut):
            cut.append([])
            left.append(budget)
        cut[at].append(i)
        left[at] -= lengths[i]
    return cut


def deal(costs: Sequence[float], count: int, *, sizes: Sequence[int] = (), room: int = 0) -> list[list[int]] | None:
    """Deals things out into `count` lots of about the same cost, dearest first into the cheapest lot: indices.

    With `sizes`, a lot's are at most `room` together, unless it is one thing alone; None if they don't go in.
    """
    lots: list[list[int]] = [[] for _ in range(count)]
    cost, filled = [0.0] * count, [0] * count
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        fit = [k for k in range(count) if not sizes or not lots[k] or filled[k] + sizes[i] <= room]
        if not fit:
            return None
        k = min(fit, key=lambda k: (cost[k], k))
        lots[k].append(i)
        cost[k] += costs[i]
        filled[k] += sizes[i] if sizes else 0
    return lots
