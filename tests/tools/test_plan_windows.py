"""What `splitppo plan` says of rollout.window, against a case worked out by hand."""

import json
from pathlib import Path

import pytest
from test_plan import WORK, write_run

from splitppo.errors import UserError
from splitppo.tools import plan
from splitppo.tools.cost import Split, columns, row_lengths, splits, window_advice, with_window

LENGTHS = [100, 300]  # 200 on average; a token's row has 125 more on average


def test_a_step_with_windows_by_hand():
    # 100 tokens of 2.5 ms, twice as long with 250 slots a rank; half the tokens of a whole rollout
    # to train on; and a forward pass over 125 tokens of each slot, where one over 200 takes 2 s of
    # a GPU
    actor, critic = columns(with_window(WORK, Split(2, 2), LENGTHS, 100), Split(2, 2))
    assert actor == pytest.approx(0.5 + 2.0 * 125 / 200 / 2 + 0.3 + (1.0 + 1.0) / 2 + 3.0 / 2)
    assert critic == pytest.approx((1.0 + 3.0) / 2)


def test_windows_below_the_longest_response_are_advised_on():
    (line,) = window_advice(WORK, Split(2, 2), LENGTHS, splits(4, movable=False))
    each = {
        split: columns(with_window(WORK, split, LENGTHS, 256), split)
        for split in (Split(2, 2), Split(3, 1))
    }
    seconds = min(max(both) for both in each.values())
    seconds = min(seconds, sum(columns(with_window(WORK, Split(4, 0), LENGTHS, 256), Split(4, 0))))
    assert line.startswith(f"  rollout.window 256: {500 * 256 / seconds:,.0f} response tokens/s, ")
    assert f"{256 / seconds / (200 / 6.8):.2f}x this run's" in line
    assert line.endswith("tokens are 0.5 steps old on average")
    assert window_advice(WORK, Split(2, 2), [256, 20], splits(4, movable=False)) == []


def test_lengths_are_those_of_the_runs_samples(tmp_path: Path):
    folder = tmp_path / "samples"
    folder.mkdir()
    rows = [{"row": i, "tokens": {"text": ["x"] * n}} for i, n in enumerate((3, 5))]
    (folder / "step_000002.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "step_000001.jsonl").write_text('{"row": 4, "response": "of an old version"}\n')
    assert row_lengths(tmp_path) == [3, 5]
    config = write_run(tmp_path / "run") / "config.toml"
    config.write_text(config.read_text().replace("[rollout]\n", "[rollout]\nwindow = 8\n"))
    with pytest.raises(UserError, match=r"rollout\.window=8; name a run"):
        plan.plan(tmp_path / "run")
