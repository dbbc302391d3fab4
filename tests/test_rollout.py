"""Rows with stretches that the policy did not sample: as messages, as a rollout, as the inputs of a
forward pass."""

import pickle
import random
from dataclasses import replace

import pytest
import torch

from splitppo.models.batching import ROUND, micro_batch
from splitppo.rollout import ENDS, HEADER, Rollout, Sample, pack_rows, packed_sizes, unpack_rows

CPU = torch.device("cpu")
PLAIN = Sample(4, [5, 6, 7], [8, 9], [-1.0, -2.0], "eos")
TURNS = Sample(1, [5], [7, 8, 9, 10, 11, 12], [-1.0, -2.0, -3.0, -4.0], "environment",
               [True, True, False, False, True, True], (2, 4))  # fmt: skip
EDGES = Sample(
    2, [1, 2], [3, 4, 5], [-1.0], "stop", [False, True, False], (1,)
)  # observations first and last


def some_samples() -> list[Sample]:
    """Of every end, with and without masks and turns, some without a response."""
    draw, found = random.Random(3), []
    for row in range(40):
        response = [draw.randrange(1000) for _ in range(draw.randrange(6))]
        mask = [draw.random() < 0.6 for _ in response] if row % 3 else None
        count = len(response) if mask is None else sum(mask)
        turns = (
            tuple(sorted(draw.sample(range(1, count + 1), draw.randrange(count)))) if count else ()
        )
        prompt = [draw.randrange(1000) for _ in range(draw.randint(1, 4))]
        found.append(Sample(row, prompt, response, [], ENDS[row % len(ENDS)], mask, turns))
    return found


def test_rows_come_back_from_a_message():
    samples = some_samples()
    header, ids = pack_rows(samples)
    assert all(type(number) is int for number in header)
    assert ids.dtype == torch.int32
    assert unpack_rows(header, ids) == samples
    sizes = packed_sizes(header)
    assert (len(header), len(sizes), sum(sizes)) == (HEADER * len(samples), len(samples), len(ids))
    at = 0
    for i, (sample, size) in enumerate(zip(samples, sizes, strict=True)):  # and each on its own
        assert unpack_rows(header[HEADER * i : HEADER * (i + 1)], ids[at : at + size]) == [sample]
        at += size
    header, ids = pack_rows([])
    assert (header, len(ids), unpack_rows(header, ids)) == ([], 0, [])


def test_log_probs_stay_behind():
    (found,) = unpack_rows(*pack_rows([TURNS]))
    assert found == Sample(1, [5], TURNS.response, [], "environment", TURNS.mask, (2, 4))


def test_response_tokens_are_those_that_the_policy_sampled():
    assert [s.tokens for s in (PLAIN, TURNS, EDGES)] == [2, 4, 1]
    assert [s.places.tolist() for s in (PLAIN, TURNS, EDGES)] == [[0, 1], [0, 1, 4, 5], [1]]
    assert [Sample(0, [1], [2], [0.0], end).truncated for end in ENDS] == [
        end == "limit" for end in ENDS
    ]


def test_a_rollout_counts_response_tokens_apart_from_all_tokens():
    rollout = Rollout([PLAIN, TURNS, EDGES])  # given in any order
    assert rollout.rows == [1, 2, 4]
    assert rollout.lengths == [4, 1, 2]
    assert rollout.totals == [7, 5, 5]
    assert rollout.tokens == 7
    packed = torch.arange(7.0)
    assert [part.tolist() for part in rollout.split(packed)] == [[0, 1, 2, 3], [4], [5, 6]]
    assert rollout.select(packed, [4, 1]).tolist() == [5, 6, 0, 1, 2, 3]
    assert rollout.sums(packed).tolist() == [6, 4, 11]
    assert rollout.logprobs().tolist() == [-1, -2, -3, -4, -1, -1, -2]
    assert (
        Rollout([]).sums(packed[:0]).shape
        == Rollout([]).logprobs().shape
        == Rollout([]).ages().shape
        == (0,)
    )


def test_ids_and_log_probs_are_arrays_of_four_bytes_a_number():
    found = pickle.loads(pickle.dumps(Sample(4, [5] * 500, [8] * 500, [-1.0] * 500, "eos")))
    assert [
        (part.typecode, part.itemsize) for part in (found.prompt, found.response, found.logprobs)
    ] == [("i", 4), ("i", 4), ("f", 4)]
    assert len(pickle.dumps(found)) < 4 * 1500 + 500
    assert found.ids.tolist() == [5] * 500 + [8] * 500
    assert found == replace(found, prompt=[5] * 500, logprobs=[-1.0] * 500)


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
    assert batch.mask.tolist() == [
        [True, False, False, False],
        [True] * 4,
        [True, True, False, False],
    ]
    assert batch.pad(torch.arange(1.0, 8.0)).tolist() == [[1, 0, 0, 0], [2, 3, 4, 5], [6, 7, 0, 0]]


def test_a_forward_pass_without_rows_has_no_response_tokens():
    batch = micro_batch([], CPU)
    assert batch.inputs["input_ids"].numel() > 0
    assert (batch.before.numel(), batch.responses.numel(), batch.places.numel()) == (0, 0, 0)
    assert not batch.mask.any()
