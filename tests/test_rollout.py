"""Rows with stretches that the policy did not sample: as messages, as a rollout, as the inputs of a
forward pass."""

import random
from array import array
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
import torch
from episodes import episode
from ranks import ALONE, run_threads

from splitppo.job.collectives import Group
from splitppo.models.batching import ROUND, micro_batch
from splitppo.rollout import ENDS, Episode, Rollout, Segment
from splitppo.rollout.wire import exchange_rows, pack_rows, unpack_rows

CPU = torch.device("cpu")
PLAIN = episode(4, [5, 6, 7], [8, 9], [-1.0, -2.0])
TURNS = episode(
    1,
    [5],
    [7, 8, 9, 10, 11, 12],
    [-1.0, -2.0, -3.0, -4.0],
    "environment",
    mask=[True, True, False, False, True, True],
    steps=[3, 3, 0, 0, 3, 5],
)
# observations first and last
EDGES = episode(2, [1, 2], [3, 4, 5], [-1.0], "stop", mask=[False, True, False])


def some_episodes() -> list[Episode]:
    """Open and of every end, of up to five segments, some without tokens, some with log-probs."""
    draw = random.Random(3)
    found = []
    for row in range(60):
        segments = []
        for _ in range(row % 6):
            ids = array("i", [draw.randrange(2**31) for _ in range(draw.randrange(4))])
            logprobs = array("f", [-draw.random() for _ in ids[: len(ids) * (row % 2)]])
            sampled = draw.random() < 0.6
            turn = draw.choice([0.0, -0.5, 1.25])
            told = Segment(ids, logprobs if sampled else None, draw.randrange(9), turn)
            experts = bytes(8 * len(ids)) if sampled and row % 3 else b""
            segments.append(told._replace(experts=experts))
        prompt = array("i", [draw.randrange(1000) for _ in range(draw.randint(1, 4))])
        found.append(Episode(2**33 + row, prompt, tuple(segments), ENDS[row % len(ENDS)]))
    return found


def without(row: Episode, **parts: Any) -> Episode:
    """A row whose sampled segments lack something."""
    segments = [s if s.logprobs is None else s._replace(**parts) for s in row.segments]
    return replace(row, segments=tuple(segments))


NO_LOGPROBS: dict[str, Any] = {"logprobs": array("f")}
NO_EXPERTS: dict[str, Any] = {"experts": b""}


def test_rows_come_back_from_a_message():
    """With observations, each segment's step and its turn's reward; log-probs and experts if asked
    for."""
    episodes = some_episodes()
    message = pack_rows(episodes, logprobs=True, experts=True)
    assert message.dtype == torch.int32
    assert unpack_rows(message) == episodes
    bare = unpack_rows(pack_rows(episodes))
    assert bare == [without(row, **NO_LOGPROBS, **NO_EXPERTS) for row in episodes]
    cut = [pack_rows(part) for part in (episodes[:7], episodes[7:])]
    assert torch.equal(torch.cat(cut), pack_rows(episodes)), "messages can follow one another"
    assert unpack_rows(pack_rows([])) == exchange_rows(ALONE, [[]]) == []


def exchanged(group: Group) -> list[list[Episode]]:
    own = some_episodes()[group.dp_rank :: group.dp_size]
    parts = [own[: 3 * rank] for rank in range(group.dp_size)]
    return [exchange_rows(group, parts, logprobs=kept) for kept in (True, False)]


def test_rows_change_ranks():
    """With their experts: a group's ranks hold them all."""
    found = run_threads(3, exchanged)
    own = [some_episodes()[rank::3] for rank in range(3)]
    for rank, (whole, bare) in enumerate(found):
        assert whole == [row for part in own for row in part[: 3 * rank]]
        assert bare == [without(row, **NO_LOGPROBS) for row in whole]


def test_response_tokens_are_those_that_the_policy_sampled():
    assert [s.tokens for s in (PLAIN, TURNS, EDGES)] == [2, 4, 1]
    assert [s.places.tolist() for s in (PLAIN, TURNS, EDGES)] == [[0, 1], [0, 1, 4, 5], [1]]
    assert [replace(PLAIN, end=end).truncated for end in ENDS] == [end == "limit" for end in ENDS]


def test_what_is_derived_from_segments():
    assert [*TURNS.response] == [7, 8, 9, 10, 11, 12]
    assert [*TURNS.logprobs] == [-1, -2, -3, -4]
    assert TURNS.ids.tolist() == [5, *TURNS.response]
    assert TURNS.stretches == ((3, 2), (3, 1), (5, 1))
    assert Rollout([TURNS]).ages().tolist() == [2, 2, 2, 0]
    opened = replace(TURNS, segments=TURNS.segments[:3])
    assert [row.last_step_tokens for row in (TURNS, opened, replace(TURNS, segments=()))] == [
        1,
        3,
        0,
    ]


def test_a_rollout_counts_response_tokens_apart_from_all_tokens():
    rollout = Rollout([PLAIN, TURNS, EDGES])  # given in any order
    assert rollout.rows == [1, 2, 4]
    assert rollout.episode_lengths == rollout.sequence_lengths == [4, 1, 2]
    assert rollout.totals == [7, 5, 5]
    assert rollout.tokens == 7
    packed = torch.arange(7.0)
    assert [part.tolist() for part in rollout.split(packed)] == [[0, 1, 2, 3], [4], [5, 6]]
    assert rollout.select(packed, rollout.places([4, 1])).tolist() == [5, 6, 0, 1, 2, 3]
    assert rollout.sums(packed).tolist() == [6, 4, 11]
    assert rollout.logprobs().tolist() == [-1, -2, -3, -4, -1, -1, -2]
    assert (
        Rollout([]).sums(packed[:0]).shape
        == Rollout([]).logprobs().shape
        == Rollout([]).ages().shape
        == (0,)
    )


@pytest.mark.parametrize("packed", [True, False])
def test_a_forward_pass_reads_one_before_each_response_token(packed):
    batch = micro_batch([EDGES, TURNS, PLAIN], CPU, packed=packed)
    ids = batch.inputs["input_ids"]
    rows = [[1, 2, 3, 4, 5], [5, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 9]]
    if packed:
        assert ids[0].tolist() == [*rows[0], *rows[1], *rows[2], *[0] * (ROUND - 17)]
        assert batch.inputs["cu_seq_lens_q"].tolist() == [0, 5, 12, 17, ROUND]
        assert batch.before.tolist() == [2, 5, 6, 9, 10, 14, 15]
    else:
        assert ids.tolist() == [row + [0] * (7 - len(row)) for row in rows]
        assert batch.before.tolist() == [2, 7, 8, 11, 12, 16, 17]
    assert batch.responses.tolist() == [4, 7, 8, 11, 12, 8, 9]
    assert ids.flatten()[batch.before + 1].tolist() == batch.responses.tolist()
    assert batch.lengths.tolist() == [1, 4, 2]


class Piece:
    """A rank of a set, without the others."""

    size = 2
    first: ClassVar[torch.Tensor]

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def places(self, length: int) -> torch.Tensor:
        return torch.arange(length).chunk(2)[self.rank]

    def join(self, own: torch.Tensor) -> torch.Tensor:
        """As if the first rank's numbers were known to the second."""
        if not self.rank:
            Piece.first = own
        return torch.cat([Piece.first, own])


def test_rows_are_cut_over_a_set_and_joined_in_order():
    long = episode(7, [3] * 70, list(range(100, 180)), [-1.0] * 80)
    rows = [EDGES, TURNS, long, PLAIN]
    whole = micro_batch(rows, CPU, packed=True)
    parts = [
        micro_batch(rows, CPU, packed=True, sequence=cast(Any, Piece(rank))) for rank in (0, 1)
    ]
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([part.inputs[name] for part in parts], 1)[0]
        assert len(joined) == 4 * ROUND, "a round number for each rank"
        assert joined[: 3 * ROUND].tolist() == whole.inputs[name][0].tolist()
    assert all(part.inputs["cu_seq_lens_q"][-1] == 4 * ROUND for part in parts)
    for part in parts:
        assert 0 < len(part.before) < len(whole.before)
        assert part.inputs["input_ids"].shape[1] == 2 * ROUND
        assert part.chosen.tolist() == whole.before.tolist()
        found = part.join(part.responses.float())
    assert found.tolist() == whole.responses.tolist()
    columns = torch.stack([whole.responses, -whole.responses], 1)
    assert whole.experts.shape == (3 * ROUND, 0)
    for part in parts:
        assert part.cut(columns)[:, 0].tolist() == part.responses.tolist()
        pairs = part.join(part.cut(columns))
    assert pairs.tolist() == columns.tolist() == whole.cut(columns).tolist()


def with_experts(row: Episode, first: int) -> Episode:
    """Each sampled token's are four numbers that count up."""
    numbers = iter(range(first, 255))
    return replace(
        row,
        segments=tuple(
            s._replace(experts=bytes(next(numbers) for _ in range(4 * len(s.ids))))
            if s.logprobs is not None
            else s
            for s in row.segments
        ),
    )


@pytest.mark.parametrize("packed", [True, False])
def test_experts_are_where_their_tokens_were_chosen(packed: bool) -> None:
    """Those of all other places are not known; nor those of a row that brings none."""
    rows = [EDGES, with_experts(TURNS, 0), with_experts(PLAIN, 100)]
    batch = micro_batch(rows, CPU, packed=packed)
    unknown = [[255] * 4]
    told = torch.tensor([*range(16), *range(100, 108)]).view(-1, 4).tolist()
    assert batch.experts[batch.before].tolist() == unknown * EDGES.tokens + told
    others = torch.ones(len(batch.experts), dtype=torch.bool).index_fill(0, batch.before, False)
    assert (batch.experts[others] == 255).all()
    if packed:
        rows += [episode(7, [3] * 70, list(range(100, 180)), [-1.0] * 80)]
        whole = micro_batch(rows, CPU, packed=True)
        for rank in (0, 1):
            part = micro_batch(rows, CPU, packed=True, sequence=cast(Any, Piece(rank)))
            place = rank * 2 * ROUND
            due = whole.experts[place : place + 2 * ROUND]
            assert part.experts[: len(due)].tolist() == due.tolist()


def test_a_forward_pass_without_rows_has_no_response_tokens():
    batch = micro_batch([], CPU)
    assert batch.inputs["input_ids"].numel() > 0
    assert (batch.before.numel(), batch.responses.numel(), batch.lengths.sum()) == (0, 0, 0)
