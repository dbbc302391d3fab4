"""Rows: what crosses between data, engine, channels and learner.

A row is one episode: the prompt, then what the policy sampled and, between its turns, what an
environment answered. The *response tokens* are those that the policy sampled. Losses, GAE and KL
are over these alone, so the packed tensors `[N]` hold nothing else.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

End = Literal["eos", "stop", "limit", "environment", "failed"]
ENDS: tuple[End | None, ...] = (*get_args(End), None)
Messages = list[dict[str, Any]]  # of a dialogue: role and content
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
        teacher: the same row's prompt as a teacher reads it, if it reads another.
    """

    text: str
    tokens: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]] | None = None
    column: str | list[dict[str, Any]] = ""
    teacher: "Prompt | None" = None


class Span(NamedTuple):
    """A message of an environment: `role`, and where its content stands in the decoded text of the
    observed ids."""

    role: str
    begin: int
    end: int


class Segment(NamedTuple):
    """Tokens of a row that came at once: sampled by the policy, or observed, which is what an
    environment answered. An observation ends the turn before it, also one without tokens.

    Attributes:
        ids: the token ids, int32.
        logprobs: the engine's log-probs at the sampling temperature, float32, or an empty array
            away from the rank that sampled them. None: the ids were observed.
        version: the step in which the ids were sampled, or observed.
        reward: of the turn that the segment ends.
        spans: the messages of observed ids.
        experts: of a mixture's tokens that were sampled, the experts at the place where each was
            chosen, by layer: uint8, from 256 experts on uint16, for each token as many bytes, a
            multiple of 4. All bits are ones where they are not known. Empty: none are known.
            Only ranks of the actor group have them.
    """

    ids: array
    logprobs: array | None
    version: int = 0
    reward: float = 0.0
    spans: tuple[Span, ...] = ()
    experts: bytes = b""


@dataclass(frozen=True)
class Episode:
    """One row, while it is open and when it has ended. Only the sampler appends segments.

    Attributes:
        row: its identity, the number in the data order, from 0. `placement.Streams` says which slot
            generates it.
        prompt: token ids, int32.
        segments: what came after the prompt. The last one holds the end-of-sequence token or stop
            string, if the row ended by one.
        spans: the messages of the prompt, if an environment wrote it.
        end: what ended the row: the end-of-sequence token, a stop string, a limit (of tokens or
            turns), the environment, its failure. None: it is open.
    """

    row: int
    prompt: array
    segments: tuple[Segment, ...] = ()
    end: End | None = None
    spans: tuple[Span, ...] = ()

    @property
    def truncated(self) -> bool:
        """Whether the row was cut at a limit."""
        return self.end == "limit"

    @property
    def is_unfinished(self) -> bool:
        """Whether nothing that the policy said ended the row, a limit or its environment's failure
        did: `ppo.mask_truncated` leaves such rows out of the losses."""
        return self.end in ("limit", "failed")

    @cached_property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of each segment that was sampled."""
        return tuple((s.version, len(s.ids)) for s in self.segments if s.logprobs is not None)

    @cached_property
    def tokens(self) -> int:
        """The number of response tokens."""
        return sum(tokens for _, tokens in self.stretches)

    @property
    def last_step_tokens(self) -> int:
        """The response tokens of the last step in which something was appended."""
        return sum(tokens for step, tokens in self.stretches if step == self.segments[-1].version)

    @property
    def turns(self) -> list[tuple[array, array]]:
        """Of each turn, the ids that were sampled, and those that were observed then."""
        groups = groupby(self.segments, key=lambda segment: segment.logprobs is None)
        parts = [array(IDS, b"".join(segment.ids for segment in part)) for _, part in groups]
        return list(zip_longest(parts[::2], parts[1::2], fillvalue=array(IDS)))

    @property
    def rewards(self) -> list[float]:
        """Of each segment that was sampled; a turn's is its last segment's."""
        return [segment.reward for segment in self.segments if segment.logprobs is not None]

    @property
    def awaits(self) -> bool:
        """Of an open row between two steps, whether its last turn waits for its answer."""
        return bool(self.segments) and self.segments[-1].logprobs is None

    @cached_property
    def total(self) -> int:
        """The number of all tokens: prompt, response tokens, observations."""
        return len(self.prompt) + sum(len(segment.ids) for segment in self.segments)

    @property
    def response(self) -> array:
        """The ids after the prompt, sampled and observed."""
        return array(IDS, b"".join(segment.ids for segment in self.segments))

    @property
    def logprobs(self) -> array:
        """The log-probs of the response tokens."""
        return array(LOGPROBS, b"".join(segment.logprobs or b"" for segment in self.segments))

    @property
    def ids(self) -> Tensor:
        """Prompt and response, `[n]` int32."""
        return tensor_of([self.prompt, *(segment.ids for segment in self.segments)], torch.int32)

    @property
    def places(self) -> Tensor:
        """Where in `response` the response tokens stand; `[T_i]` int64."""
        sampled = [torch.full((len(s.ids),), s.logprobs is not None) for s in self.segments]
        return torch.cat([torch.zeros(0, dtype=torch.bool), *sampled]).nonzero().flatten()


def dialogue(prompt: Prompt, episode: Episode, decode: Callable[[Sequence[int]], str]) -> Messages:
    """A row as messages: the prompt, what the policy said, what an environment answered."""
    messages = list(prompt.messages or [{"role": "user", "content": prompt.text}])
    if episode.spans and list(episode.prompt) != prompt.tokens:
        messages = _messages(episode.prompt, episode.spans, decode)
    observed = [segment for segment in episode.segments if segment.logprobs is None]
    for (said, _), answer in zip_longest(episode.turns, observed):
        messages.append({"role": "assistant", "content": decode(said)})
        messages += _messages(answer.ids, answer.spans, decode) if answer else []
    return messages


def _messages(
    ids: array, spans: Iterable[Span], decode: Callable[[Sequence[int]], str]
) -> Messages:
    text = decode(ids)
    return [{"role": role, "content": text[begin:end]} for role, begin, end in spans]


def episode_of(row: int, prompt: Sequence[int], response: Sequence[int]) -> Episode:
    """An ended row whose response was sampled at once; it has no log-probs."""
    sampled = Segment(array(IDS, response), array(LOGPROBS))
    return Episode(row, array(IDS, prompt), (sampled,), "eos")


class Rollout:
    """The `B` episodes that one rank holds in a step, given in any order and held in data order.
    An episode is known by its place here, from 0 to B - 1; its identity goes with it.

    Per-token figures (log-probs, values, advantages) travel beside it as packed tensors `[N]` on
    the CPU, float32 but for a teacher's `[N, k]`: the response tokens of one episode after the
    other.

    Attributes:
        rows: the episodes' identities, ascending.
        sequence_lengths: response tokens of each sequence: how a forward pass gives them out.
        episode_lengths: response tokens of each episode: how GAE reads them. Today an episode is
            one sequence.
        totals: all tokens of each sequence: prompt, response tokens, observations.
    """

    def __init__(self, episodes: Iterable[Episode]):
        self.episodes = sorted(episodes, key=lambda episode: episode.row)
        self.rows = [episode.row for episode in self.episodes]
        self.episode_lengths = [episode.tokens for episode in self.episodes]
        self.sequence_lengths = self.episode_lengths
        self.totals = [episode.total for episode in self.episodes]
        self._places = {row: place for place, row in enumerate(self.rows)}

    @property
    def tokens(self) -> int:
        """N, the response tokens."""
        return sum(self.episode_lengths)

    def places(self, rows: Iterable[int]) -> list[int]:
        """Where the episodes of these identities stand."""
        return [self._places[row] for row in rows]

    def split(self, packed: Tensor) -> list[Tensor]:
        """`[N, ...]` -> a tensor an episode."""
        return list(packed.split(self.episode_lengths))

    def select(self, packed: Tensor, places: Sequence[int]) -> Tensor:
        """The part of a packed tensor `[N, ...]` that belongs to the episodes at `places`, in their
        order."""
        pieces = self.split(packed)
        return torch.cat([packed[:0], *(pieces[place] for place in places)])

    def sums(self, packed: Tensor) -> Tensor:
        """`[N]` -> `[B]`, the sum of each episode."""
        lengths = torch.tensor(self.episode_lengths, dtype=torch.int64)
        row_of = torch.arange(len(self.rows)).repeat_interleave(lengths)
        wide = torch.zeros(len(self.rows), dtype=torch.float64)
        return wide.index_add_(0, row_of, packed.double()).to(packed.dtype)

    def turn_rewards(self) -> Tensor:
        """`[N]` float32: what environments gave, at the last token of each turn."""
        sizes = [tokens for episode in self.episodes for _, tokens in episode.stretches]
        rewards = [reward for episode in self.episodes for reward in episode.rewards]
        ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0) - 1
        return torch.zeros(self.tokens).index_put((ends,), torch.tensor(rewards))

    def turns(self) -> Tensor:
        """`[N]` int64: the turn of each response token, from 0. Between two turns stands what an
        environment answered."""
        parts = [
            (number, len(said))
            for episode in self.episodes
            for number, (said, _) in enumerate(episode.turns)
        ]
        turns, tokens = torch.tensor(parts, dtype=torch.int64).view(-1, 2).T
        return turns.repeat_interleave(tokens)

    def logprobs(self) -> Tensor:
        """`[N]` float32, the engine's log-probs of the response tokens."""
        return tensor_of([episode.logprobs for episode in self.episodes], torch.float32)

    def ages(self) -> Tensor:
        """`[N]` int64: for each response token, how many steps before its row's last one it was
        sampled."""
        parts = [
            (episode.segments[-1].version - step, tokens)
            for episode in self.episodes
            for step, tokens in episode.stretches
        ]
        ages, tokens = torch.tensor(parts, dtype=torch.int64).view(-1, 2).T
        return ages.repeat_interleave(tokens)


def tensor_of(parts: Iterable[Any], dtype: torch.dtype) -> Tensor:
    """Arrays or bytes, one after the other, as a tensor `[n]`."""
    held = bytearray().join(parts)
    return torch.frombuffer(held, dtype=dtype) if held else torch.zeros(0, dtype=dtype)


def add_turn_rewards(scores: Tensor, episodes: Iterable[Episode]) -> Tensor:
    """`[B]`: the rows' whole scores, of what rewards said of them and the rewards of their
    turns."""
    turns = torch.tensor([sum(episode.rewards) for episode in episodes], dtype=torch.float64)
    return scores + turns.to(scores.dtype)
