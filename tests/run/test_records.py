"""Reading JSON lines: torn and wrong lines, and the records of older versions."""

import io
import json
import os
import shlex
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from splitppo.errors import UserError
from splitppo.run import folder
from splitppo.run.files import Tail, parse_record, read_lines
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
    assert f"{path}:3 is incomplete" in capsys.readouterr().err
    path.write_text('{"step": 1}\n{"step": 2}')
    assert set(read_column(path)) == {1}, "what lacks its end may be longer"


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
    with pytest.raises(UserError, match=r"actor.jsonl:2: .* is not .*; fix or remove that line"):
        read_column(path)


def test_torn_and_wrong_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "step_000001.jsonl"
    path.write_text('{"response": "a\u2028b"}\n{"respo', encoding="utf-8")
    assert list(read_lines(path)) == [{"response": "a\u2028b"}]
    assert f"{path}:2 is incomplete" in capsys.readouterr().err
    for wrong, says in (
        ('{"respo\n{"a": 1}\n', "not a JSON object; fix"),
        ("[1]\n", "not a JSON object; fix"),
    ):
        path.write_text(wrong)
        with pytest.raises(UserError, match=rf"step_000001.jsonl:1: .* {says}"):
            list(read_lines(path))


class Growing(io.RawIOBase):
    """A file as a reader sees it while another process writes it: up to `cut` it ends there, once;
    a later read returns the rest."""

    def __init__(self, content: bytes, cut: int):
        self.parts = [content[:cut], b"", content[cut:]]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def readinto(self, buffer: Any) -> int:
        part = self.parts.pop(0) if self.parts else b""
        buffer[: len(part)] = part
        return len(part)


def test_lines_that_are_written_while_they_are_read_are_read_whole_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "actor.jsonl"
    lines = [f'{{"step": {step}, "text": "é "}}\n'.encode() for step in (1, 2, 3)]
    content = b"".join(lines)
    path.write_bytes(content)
    for cut in range(len(content) + 1):
        before = content[:cut].count(b"\n")
        tail = Tail(path)
        with monkeypatch.context() as patch:
            growing = io.BufferedReader(Growing(content, cut))
            patch.setattr(Path, "open", lambda *_, file=growing: file)
            assert [line for line, _ in tail] == lines[:before]
            growing = io.BufferedReader(Growing(content, cut))
            patch.setattr(Path, "open", lambda *_, file=growing: file)
            steps = [record["step"] for record in read_lines(path, parse_record)]
            assert steps == [1, 2, 3][:before]
        assert [where for _, where in tail] == [f"{path}:{n}" for n in range(before + 1, 4)]
        assert (tail.offset, tail.is_torn) == (len(content), False)


def test_the_first_rows_of_a_file_take_no_memory_for_the_others(tmp_path: Path):
    path = tmp_path / "step_000001.jsonl"
    path.write_text((json.dumps({"response": "a" * 100_000}) + "\n") * 20)
    tracemalloc.start()
    next(read_lines(path))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_000_000


@pytest.mark.parametrize(
    "typed",
    [
        "python3 -m splitppo.train --data.system 'Be brief, please.' --run-dir runs/a",
        "python3 mine.py --steps 2",
        "/venv/bin/python3 /venv/bin/splitppo eval 'a b'",
        "python3",
    ],
)
def test_the_command_is_recorded_as_it_was_typed(typed: str, monkeypatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "\0".join([*shlex.split(typed), ""]))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert folder.command_line() == typed.replace("/venv/bin/python3 /venv/bin/", "")


def test_of_a_rank_the_command_is_torchruns(tmp_path: Path, monkeypatch) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("print('up', flush=True)\ninput()")
    words = ["--nproc_per_node", "2", "mine.py", "--data.system", "It's brief"]
    command = [sys.executable, "-S", str(torchrun), *words]
    for python, shown in ((command, command), (command[:1] + command[2:], ["torchrun", *words])):
        pipe = subprocess.PIPE
        with subprocess.Popen(python, stdin=pipe, stdout=pipe) as parent:
            assert parent.stdout
            assert parent.stdout.readline()
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
            monkeypatch.setattr(os, "getppid", lambda parent=parent: parent.pid)
            assert shlex.split(folder.command_line()) == [Path(shown[0]).name, *shown[1:]]
            parent.communicate(b"\n")
