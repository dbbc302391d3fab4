"""Rows and packed tensors as messages, and their exchange between ranks."""

import struct
from array import array
from collections.abc import Iterable, Sequence
from io import BytesIO
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from splitppo.rollout import ENDS, IDS, LOGPROBS, Episode, Rollout, Segment, Span, tensor_of

# a message has before each row: its number, its end, tokens of the prompt, segments, spans of the
# prompt; before each segment: ids, log-probs (-1: observed), version, reward, spans of what was
# observed, or bytes of the experts of what was sampled
ROW = struct.Struct("=qiiii")
SEGMENT = struct.Struct("=iiifi")
SPAN = struct.Struct("=12sii")  # role, begin, end


def pack_rows(
    episodes: Iterable[Episode], *, logprobs: bool = False, experts: bool = False
) -> Tensor:
    """Rows as a message, `[n]` int32: of each row ROW, the prompt and its spans; of each segment
    SEGMENT, the ids, the bits of the log-probs if asked for, the spans, experts if asked for."""
    parts: list[Any] = []
    for episode in episodes:
        parts += [
            ROW.pack(
                episode.row,
                ENDS.index(episode.end),
                len(episode.prompt),
                len(episode.segments),
                len(episode.spans),
            ),
            episode.prompt,
            *_pack_spans(episode.spans),
        ]
        for ids, sampled, version, reward, spans, routes in episode.segments:
            sent = sampled if sampled and logprobs else b""
            count = -1 if sampled is None else len(sent)
            routes_sent = routes if experts else b""
            size = len(spans) if sampled is None else len(routes_sent)
            head = SEGMENT.pack(len(ids), count, version, reward, size)
            parts += [head, ids, sent, *_pack_spans(spans), routes_sent]
    return tensor_of(parts, torch.int32)


def _pack_spans(spans: Iterable[Span]) -> list[bytes]:
    return [SPAN.pack(role.encode(), begin, end) for role, begin, end in spans]


def unpack_rows(message: Tensor) -> list[Episode]:
    """The rows of `pack_rows`."""
    stream = BytesIO(message.numpy().data)
    episodes = []
    while head := stream.read(ROW.size):
        row, end, tokens, count, spans = ROW.unpack(head)
        prompt = array(IDS, stream.read(4 * tokens))
        of_prompt = _read_spans(stream, spans)
        segments = []
        for _ in range(count):
            head = SEGMENT.unpack(stream.read(SEGMENT.size))
            tokens, sampled, version, reward, size = head
            ids = array(IDS, stream.read(4 * tokens))
            logprobs = None if sampled < 0 else array(LOGPROBS, stream.read(4 * sampled))
            of_segment = _read_spans(stream, size if sampled < 0 else 0)
            experts = stream.read(0 if sampled < 0 else size)
            segments.append(Segment(ids, logprobs, version, reward, of_segment, experts))
        episodes.append(Episode(row, prompt, tuple(segments), ENDS[end], of_prompt))
    return episodes


def _read_spans(stream: BytesIO, count: int) -> tuple[Span, ...]:
    heads = SPAN.iter_unpack(stream.read(SPAN.size * count))
    return tuple(Span(role.rstrip(b"\0").decode(), begin, end) for role, begin, end in heads)


def exchange_rows(
    group: Any, parts: Sequence[Iterable[Episode]], *, logprobs: bool = False
) -> list[Episode]:
    """Sends each rank of a `Group`, in their order, its part; returns what all have sent here, with
    log-probs if asked for."""
    messages = group.all_to_all(
        [pack_rows(part, logprobs=logprobs, experts=True) for part in parts]
    )
    return [episode for message in messages for episode in unpack_rows(message)]


def pack(pieces: Iterable[Tensor], places: Iterable[int], empty: Tensor) -> Tensor:
    """Tensors `[T_i, ...]` of a rollout's episodes, in any order, to the packed `[N, ...]`.
    `places`: where each of them belongs; all places from 0 on, once each. `empty`: what no tokens
    are, `[0, ...]`."""
    in_order = sorted(zip(places, pieces, strict=True), key=itemgetter(0))
    return torch.cat([empty, *(piece for _, piece in in_order)])


def to_bytes(columns: Iterable[Tensor]) -> Tensor:
    """Packed tensors `[N, ...]` of any types to one message, `[N, bytes of a token]` uint8: what
    belongs to a token is side by side, so that one row's part follows another's."""
    wide = [column.unsqueeze(-1).flatten(1).contiguous() for column in columns]
    return torch.cat([column.view(torch.uint8) for column in wide], 1)


def from_bytes(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `to_bytes`; `like`: of their types, and their shapes but for N."""
    sizes = [to_bytes([column[:0]]).shape[1] for column in like]
    return [
        part.contiguous().view(column.dtype).view(len(message), *column.shape[1:])
        for part, column in zip(message.split(sizes, 1), like, strict=True)
    ]


def exchange_tensors(
    group: Any,
    packed: Sequence[Tensor],
    held: Rollout,
    sent: Sequence[Sequence[int]],
    due: Rollout,
    places: Sequence[int],
) -> list[Tensor]:
    """Sends each rank of a `Group`, in their order, the part of packed tensors `[N, ...]` of the
    rollout `held` that belongs to the episodes at its `sent` places. Returns such tensors of the
    rollout `due`; `places`: where what comes belongs, in the order in which it comes."""
    message = to_bytes(packed)
    parts = group.all_to_all([held.select(message, part).flatten() for part in sent])
    pieces = torch.cat(parts).view(-1, message.shape[1])
    lengths = [due.episode_lengths[place] for place in places]
    return from_bytes(pack(pieces.split(lengths), places, message[:0]), packed)
