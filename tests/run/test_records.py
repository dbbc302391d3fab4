"""Reading JSON lines: torn and wrong lines, and the records of older versions."""

import json
import tracemalloc
from pathlib import Path

import pytest

from splitppo.errors import UserError
from splitppo.run.files import read_lines
from splitppo.tools.runs import Step, read_column


def test_the_last_record_of_a_step_counts_and_a_torn_line_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "actor.jsonl"
    assert read_column(path) == {}, "without a file"
    path.write_text(
        '{"step": 1, "a": 1.0}\n{"step": 1, "a": 2.0, "optimizer_steps": [{"loss": 1.0}]}\n'
        '{"step": 2, "a"'
    )
    assert read_column(path) == {1: Step({"step": 1.0, "a": 2.0}, [])}, (
        "a step done again counts as it was done last"
    )
    assert f"{path}:3 is torn" in capsys.readouterr().err
    path.write_text('{"step": 1}\n{"step": 2}')
    assert set(read_column(path)) == {1, 2}, "whole but for its newline"


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 2, "a"',
        "[1]",
        '{"time": 1.0}',
        '{"step": 1, "spans": [["rollout", 1]]}',
        '{"step": 1, "spans": null}',
        '{"step": 1, "spans": [["rollout", NaN, 1]]}',
        '{"step": 1e400}',
        '{"step": 1, "a": 1' + "0" * 400 + "}",
        "[" * 100_000,
        "",
    ],
)
def test_a_wrong_record_is_named_with_file_line_and_remedy(tmp_path: Path, line: str):
    path = tmp_path / "actor.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match=r"actor.jsonl:2: .* is no .*; fix or remove that line"):
        read_column(path)


def test_torn_and_wrong_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "step_000001.jsonl"
    path.write_text('{"response": "a\u2028b"}\n{"respo', encoding="utf-8")
    assert list(read_lines(path)) == [{"response": "a\u2028b"}]
    assert f"{path}:2 is torn" in capsys.readouterr().err
    for wrong, says in (
        ('{"respo\n{"a": 1}\n', "no JSON object, .*; fix"),
        ("[1]\n", "no JSON object, .*; fix"),
    ):
        path.write_text(wrong)
        with pytest.raises(UserError, match=rf"step_000001.jsonl:1: .* {says}"):
            list(read_lines(path))


def test_the_first_rows_of_a_file_take_no_memory_for_the_others(tmp_path: Path):
    path = tmp_path / "step_000001.jsonl"
    path.write_text((json.dumps({"response": "a" * 100_000}) + "\n") * 20)
    tracemalloc.start()
    next(read_lines(path))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_000_000
