"""Rows: what crosses between data, engine, channels and learner.

A row is one episode: the prompt, then what the policy sampled and, between its turns, what an environment answered.
The *response tokens* are those that the policy sampled. Losses, GAE and KL are over these alone, so the packed tensors
`[N]` hold nothing else.
"""

import hashlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from splitppo.errors import UserError

End = Literal["eos", "stop", "limit", "environment", "window"]
ENDS: tuple[End, ...] = get_args(End)
HEADER = 6  # numbers that describe a row in `pack_rows`
RECORDED = 32  # slots, the first, whose rows the metrics have
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
class Request:
    """One row to generate.

    Attributes:
        row: its number in the data order; seeds its noise.
        length: tokens of its response, whatever ends others (for benchmarks); None: until it ends.
        response, logprobs: what earlier steps have sampled of it. The row goes on from there.
    """

    row: int
    prompt: Sequence[int]
    length: int | None = None
    response: Sequence[int] = ()
    logprobs: Sequence[float] = ()

    def left(self, max_new_tokens: int) -> int:
        """Tokens that it may still get."""
        return (self.length or max_new_tokens) - len(self.response)


@dataclass(frozen=True)
class Sample:
    """One finished row, or one that goes on in the next step. Its ids and log-probs are arrays, four bytes a number,
    whatever sequences they are given as: they are copied, sent and pickled as bytes.

    Attributes:
        row: its number in the data order, from 0. Slot `row % S` of a step's S slots generates it.
        prompt, response: token ids. The response holds its end-of-sequence token or stop string, if it ended by one,
            and, between two turns, what an environment answered.
        logprobs: the engine's log-probs of the response tokens at the sampling temperature.
        end: what ended the row: the end-of-sequence token, a stop string, `max_new_tokens`, the environment. `window`:
            its slot has decoded the step's tokens, and the row goes on.
        mask: of each id of `response`, whether the policy sampled it; None: all.
        turns: where each turn ends, counted in response tokens; empty: one turn.
        stretches: (step, response tokens that it sampled), for each step that did; empty: not recorded.
    """

    row: int
    prompt: Sequence[int]
    response: Sequence[int]
    logprobs: Sequence[float]
    end: End
    mask: list[bool] | None = None
    turns: tuple[int, ...] = ()
    stretches: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        for name, kind in (("prompt", IDS), ("response", IDS), ("logprobs", LOGPROBS)):
            object.__setattr__(self, name, numbers(getattr(self, name), kind))

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
        return torch.arange(len(self.response)) if self.mask is None else torch.tensor(self.mask).nonzero()[:, 0]


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
    """Rows, without log-probs and stretches: `HEADER` integers for each row, and all ids, `[n]` int32."""
    header, ids = [], array(IDS)
    for sample in samples:
        masked, end = sample.mask is not None, ENDS.index(sample.end)
        header += [sample.row, len(sample.prompt), len(sample.response), end, len(sample.turns), masked]
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
        samples.append(Sample(row, own[:prompt], own[prompt:both], [], cast(Any, ENDS)[end], mask, turns))
    return samples


def exchange_rows(group: Any, parts: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Sends each rank of a `Group`, in their order, its part; returns what all have sent here, without log-probs."""
    packed = [pack_rows(part) for part in parts]
    headers = group.all_to_all([torch.tensor(header, dtype=torch.int64) for header, _ in packed])
    ids = group.all_to_all([ids for _, ids in packed])
    pairs = zip(headers, ids, strict=True)
    return [sample for header, part in pairs for sample in unpack_rows(header.tolist(), part)]


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

    def sums(self, packed: Tensor) -> Tensor:
        """`[N]` -> `[B]`, the sum of each row."""
        row_of = torch.arange(len(self.rows)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))
        wide = torch.zeros(len(self.rows), dtype=torch.float64).index_add_(0, row_of, packed.double())
        return wide.to(packed.dtype)

    def logprobs(self) -> Tensor:
        """`[N]` float32, the engine's log-probs of the response tokens."""
        return torch.cat([torch.zeros(0), *(tensor_of(sample.logprobs, LOGPROBS) for sample in self.samples)])

    def ages(self) -> Tensor:
        """`[N]` int64: for each response token, how many steps before its row's last one it was sampled."""
        parts = [(s.stretches[-1][0] - step, tokens) for s in self.samples for step, tokens in s.stretches]
        ages, tokens = torch.tensor(parts, dtype=torch.int64).view(-1, 2).T
        return ages.repeat_interleave(tokens)


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Tensors `[T_i]` to one `[B, T]`, right-padded with 0."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


class OpenRow(NamedTuple):
    """What every rank knows of a slot's open row: its number, and (step, tokens) for each step that sampled some."""

    row: int
    stretches: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """The tokens that it has so far."""
        return sum(tokens for _, tokens in self.stretches)


class Streams:
    """The rows of all slots, as a rank of the actor group sees them, and those that go on from one step to the next.

    Slot s of S has rows s, s + S, s + 2S, ... of the data order. Without windows it generates one a step. With
    `rollout.window = W` it decodes W tokens a step: a row that ends is followed at once by the next one, and a row that
    has not ended goes on in the next step, with the new weights. No row is skipped or taken twice, and no slot asks
    another.

    Args:
        slots: S. windows: whether rows go on.
        prompt: row -> its prompt.
        lengths: of the responses, in the order of the rows, in a benchmark; else empty.
        limit: most tokens of a response.

    Attributes:
        open: slot -> its row that goes on, or that comes next and has no token yet. The same on all ranks.
        held: slot -> the open row with its contents, on the rank that owns the slot in the next step. After
            `load_state`, on all ranks.
    """

    def __init__(
        self, slots: int, prompt: Callable[[int], Prompt], lengths: Sequence[int], *, windows: bool, limit: int = 2**31
    ):
        self.limit = limit
        self.slots, self.prompt, self.lengths, self.windows = slots, prompt, lengths, windows
        self.open: dict[int, OpenRow] = {}
        self.held: dict[int, Sample] = {}
        # by this rank since the last `share`: slots' open rows; of the first slots, the (row, tokens) that they decoded
        self._changed: dict[int, Sample] = {}
        self._decoded: dict[int, list[tuple[int, int]]] = {}

    def request(self, step: int, slot: int) -> Request:
        """What a slot's engine begins a step with."""
        known = slot in self.open  # its contents must be here
        return self._request(self.held[slot] if known else self._fresh((step - 1) * self.slots + slot))

    def following(self, row: int) -> Request:
        """The row after another one in its stream."""
        return self._request(self._fresh(row + self.slots))

    def take(self, step: int, samples: Sequence[Sample]) -> list[Sample]:
        """Keeps the rows that go on. Returns those that have ended, with the steps that sampled them."""
        ended = []
        for given in samples:
            slot, before = given.row % self.slots, self.open.get(given.row % self.slots)
            stretches = before.stretches if before and before.row == given.row else ()
            sampled = given.tokens - sum(tokens for _, tokens in stretches)
            sample = replace(given, stretches=(*stretches, (step, sampled)))
            if slot < RECORDED:
                self._decoded.setdefault(slot, []).append((given.row, sampled))
            goes_on = sample.end == "window"
            ended += [] if goes_on else [sample]
            if self.windows:
                self._changed[slot] = sample if goes_on else self._fresh(sample.row + self.slots)
        return ended

    def share(self, group: Any, owned: Callable[[], Sequence[Sequence[int]]]) -> list[list[tuple[int, int]]]:
        """Tells every rank of the actor's `Group` about the open rows of all slots, after each rollout, and moves their
        contents to the ranks that own the slots next. `owned`: the slots of each rank in the next step, asked for once
        all open rows are known. Returns what the first `RECORDED` slots have decoded: (row, tokens) one after another.
        """
        changed = self._changed
        known = [(slot, row.row, row.stretches) for slot, row in changed.items()]
        parts = group.all_gather((known, self._decoded))
        decoded = {}
        for rows, part in parts:
            self.open |= {slot: OpenRow(row, stretches) for slot, row, stretches in rows}
            decoded |= part
        self._changed = {}
        self._decoded = {}
        if self.windows:
            slots = owned()
            here = set(slots[group.dp_rank])
            sent = [sorted(changed.keys() & set(own)) for own in slots]
            received = group.all_to_all([_contents([changed[slot] for slot in own]) for own in sent])
            self.held = {slot: row for slot, row in self.held.items() if slot in here}
            for (rows, _), part in zip(parts, received, strict=True):
                self.held |= self._rows(sorted(here.intersection(slot for slot, *_ in rows)), part)
        return [decoded[slot] for slot in sorted(decoded)]

    def contexts(self) -> list[int]:
        """Tokens of the row that each slot goes on with: those that the engine's KV cache must hold at once."""
        rows = (self.open.get(slot) or OpenRow(slot) for slot in range(self.slots))
        return [len(self.prompt(row.row).tokens) + row.tokens for row in rows]

    def state(self, group: Any) -> list[Any]:
        """The open rows as a checkpoint holds them: number, response, its log-probs, stretches, and the hash of what
        was asked for. Prompts follow from data. All ranks of the actor's `Group` call it; the first one gets the rows.
        """
        if not self.windows:
            return []
        own = sorted(self.held)
        nothing = [_contents([])] * (group.dp_size - 1)
        received = group.all_to_all([_contents([self.held[slot] for slot in own]), *nothing])
        rows: dict[int, Sample] = {}
        for slots, part in zip(group.all_gather(own), received, strict=True):
            rows |= self._rows(slots if group.dp_rank == 0 else [], part)
        return [
            [row.row, _text(row.response, IDS), _text(row.logprobs, LOGPROBS), list(row.stretches), self._asked(row)]
            for _, row in sorted(rows.items())
        ]

    def load_state(self, state: Sequence[Any]) -> None:
        """Goes on from what `state` returned, also with another window; every rank holds all rows then. Raises
        UserError if there are other slots now, or rows do not go on, have another prompt, or are too long. Older
        checkpoints have no hashes, or lists for arrays."""
        if state and not (self.windows and len(state) == self.slots):
            raise UserError(
                f"the checkpoint holds the rows of {len(state)} slots that go on; set rollout.window above 0 and"
                f" rollout.batch_size={len(state)}"
            )
        longest = max((sum(tokens for _, tokens in entry[3]) for entry in state), default=0)
        for row, response, logprobs, stretches, *asked in state:
            goes_on = Sample(
                row,
                self.prompt(row).tokens,
                _array(response, IDS),
                _array(logprobs, LOGPROBS),
                "window",
                stretches=tuple((step, tokens) for step, tokens in stretches),
            )
            if response and asked not in ([], [self._asked(goes_on)]):
                raise UserError(
                    f"row {row} of the checkpoint goes on, and its prompt is another one here (hash"
                    f" {self._asked(goes_on)}, not {asked[0]}); restore seed, data, rollout.samples and rollout.lengths"
                    " of its run, or start from its exported policy (splitppo export)"
                )
            if self._request(goes_on).left(self.limit) < 1:
                raise UserError(
                    f"rollout.max_new_tokens={self.limit}, and row {row} of the checkpoint goes on after"
                    f" {goes_on.tokens} tokens; set it to {longest + 1} at least"
                )
            slot = row % self.slots
            self.open[slot] = OpenRow(row, goes_on.stretches)
            self.held[slot] = goes_on

    def _rows(self, slots: Sequence[int], contents: Tensor) -> dict[int, Sample]:
        """The open rows of these slots, by slot, from their `_contents`."""
        tokens = [self.open[slot].tokens for slot in slots]
        ids = contents[: sum(tokens)].split(tokens)
        logprobs = contents[sum(tokens) :].split(tokens)
        rows = {}
        for slot, response, sampled in zip(slots, ids, logprobs, strict=True):
            known = self.open[slot]
            prompt = self.prompt(known.row).tokens
            held = array_of(response, IDS), array_of(sampled, LOGPROBS)
            rows[slot] = Sample(known.row, prompt, *held, "window", stretches=known.stretches)
        return rows

    def _request(self, row: Sample) -> Request:
        length = self.lengths[row.row % len(self.lengths)] if self.lengths else None
        return Request(row.row, row.prompt, length, row.response, row.logprobs)

    def _asked(self, row: Sample) -> str:
        return digest(self.prompt(row.row).tokens, self._request(row).length)

    def _fresh(self, row: int) -> Sample:
        return Sample(row, self.prompt(row).tokens, [], [], "window")


def _contents(rows: Sequence[Sample]) -> Tensor:
    """What the rows have sampled so far: their ids, then the bits of their log-probs; `[2 N]` int32."""
    none = torch.zeros(0, dtype=torch.int32)
    ids = [tensor_of(row.response, IDS) for row in rows]
    logprobs = [tensor_of(row.logprobs, LOGPROBS).view(torch.int32) for row in rows]
    return torch.cat([none, *ids, *logprobs])


def _text(values: Sequence[float], kind: str) -> str:
    """An array as a checkpoint's JSON holds it."""
    return b64encode(numbers(values, kind)).decode()


def _array(stored: str | list[float], kind: str) -> array:
    """What `_text` returned, or an older checkpoint's list."""
    return array(kind, b64decode(stored) if isinstance(stored, str) else stored)
