"""A column's log by value, on a clock that the test moves."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitppo.errors import UserError
from splitppo.placement import ROLES
from splitppo.run import metrics
from splitppo.run.metrics import ColumnLog, records_until


class Clock(SimpleNamespace):
    now = 100.0

    def time(self) -> float:
        return self.now

    monotonic = perf_counter = time


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def spend(log: ColumnLog, clock: Clock, name: str, seconds: float) -> None:
    with log.span(name):
        clock.now += seconds


def records(run: Path, role: str = "actor") -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (run / "metrics" / f"{role}.jsonl").read_text().splitlines()
    ]


def test_a_steps_record_by_hand(tmp_path, clock, capsys):
    phases: list[str] = []
    log = ColumnLog("actor", tmp_path, first=True, phase=phases.append, start=4, steps=9)
    spend(log, clock, "rollout", 2.0)
    spend(log, clock, "wait_advantages", 1.5)
    spend(log, clock, "sync", 2**-12)  # under half a millisecond: there was nothing to do
    spend(log, clock, "wait_critic", 0.5)
    spend(log, clock, "rollout", 0.5)
    clock.now = 108.0
    log.finish(
        5, {"tokens": 400, "actor/pg_loss": 0.25, "actor/entropy": 1.5, "actor/skipped": 2.0}
    )
    spend(log, clock, "rollout", 4.0)
    log.finish(6, {"response_length/mean": 3.0})
    first, second = records(tmp_path)
    spans, first_spans = second.pop("spans"), first.pop("spans")
    assert first == {
        "step": 5,
        "time": 108.0,
        "tokens": 400,
        "actor/pg_loss": 0.25,
        "actor/entropy": 1.5,
        "actor/skipped": 2.0,
        "timing_s/rollout": 2.5,
        "timing_s/wait_advantages": 1.5,
        "timing_s/wait_critic": 0.5,
        "timing_s/step": 8.0,
        "perf/throughput": 50.0,  # 400 in 8 s
        "perf/idle_share": 0.25,  # 2 of 8 s
    }
    assert next(iter(first)) == "step"
    assert first_spans[0] == ["rollout", 100.0, 102.0]
    assert [name for name, *_ in first_spans] == [
        "rollout",
        "wait_advantages",
        "wait_critic",
        "rollout",
    ]
    due = {
        "step": 6,
        "time": 112.0,
        "response_length/mean": 3.0,
        "timing_s/rollout": 4.0,
        "timing_s/step": 4.0,
    }
    assert second == due | {"perf/idle_share": 0.0}
    assert spans == [["rollout", 108.0, 112.0]]
    assert phases[0] == "actor step 5 rollout"
    assert phases[-1] == "actor step 6 rollout"
    line, skipped, next_line = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == ["[actor]", "step", "5/9"]
    assert "2 updates" in skipped
    assert "len   3.0 " in next_line


def test_the_other_ranks_write_and_print_nothing(tmp_path, clock, capsys):
    log = ColumnLog("actor", tmp_path, first=False, phase=lambda _: None, start=0, steps=9)
    spend(log, clock, "rollout", 1.0)
    log.finish(1, {})
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""
    assert log.spans == []


def test_records_after_the_start_are_dropped(tmp_path):
    path = tmp_path / "metrics" / "actor.jsonl"
    path.parent.mkdir()
    # 0: a validation before all
    lines = [json.dumps({"step": step, "kept": step}) + "\n" for step in (0, 1, 2, 3, 4)]
    path.write_text("".join(lines) + '{"step": 5, "ke')  # torn by a crash
    ColumnLog("actor", tmp_path, first=True, phase=print, start=3, steps=9)
    assert path.read_text() == "".join(lines[:4])
    ColumnLog("actor", tmp_path, first=False, phase=print, start=1, steps=9)
    assert path.read_text() == "".join(lines[:4])
    ColumnLog("actor", tmp_path, first=True, phase=print, start=0, steps=9)
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("lines", "start", "kept"),
    [
        (["1", "2", "3", "4"], 3, "123"),
        (["1", "2", "3", '{"step": 4, "ke'], 3, "123"),  # torn by a crash
        (["1", "2", "3"], 3, "123"),
        (["1", "2", "2", "3"], 2, "12"),  # written again
        (["1", "{", "3"], 3, None),
    ],
)
def test_records_up_to_a_checkpoint(tmp_path, lines, start, kept):
    def record(step: str) -> str:
        return json.dumps({"step": int(step), "größe": 2}, ensure_ascii=False)

    path = tmp_path / "actor.jsonl"
    assert records_until(path, start) == ""
    # the last without an end
    path.write_text("\n".join(record(line) if line.isdigit() else line for line in lines))
    if kept is None:
        with pytest.raises(UserError, match=r"actor.jsonl:2: .*; fix or remove that line"):
            records_until(path, start)
    else:
        assert records_until(path, start) == "".join(record(step) + "\n" for step in kept)


def test_a_record_is_on_the_disk_when_its_step_ends(tmp_path, monkeypatch):
    synced: list[tuple[int, int]] = []
    log = ColumnLog("actor", tmp_path, first=True, phase=print, start=0, steps=9)
    path = tmp_path / "metrics" / "actor.jsonl"
    # which file, and how many lines it has by then
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, len(records(tmp_path))))
    )
    log.finish(1, {})
    log.finish(2, {})
    assert synced == [(path.stat().st_ino, 1), (path.stat().st_ino, 2)]


def test_the_most_memory_is_told_in_gib_where_there_is_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    ColumnLog("actor", tmp_path, first=True, phase=print, start=0, steps=9).finish(1, {"tokens": 1})
    assert records(tmp_path)[0]["perf/max_memory_allocated_gb"] == 3.0


def test_retries_of_the_allocator_are_counted_where_they_happen(tmp_path, monkeypatch):
    """By role and step, in its spans."""
    stats = {"num_alloc_retries": 7}  # of a run's start
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    how: Any = {"first": True, "phase": lambda _: None, "start": 0, "steps": 9}
    logs = {role: ColumnLog(role, tmp_path, **how) for role in ROLES}
    for step, counts in enumerate(
        ({"actor": [1, 0], "critic": [2, 3]}, {"actor": [1, 1], "critic": [0, 4]}), 1
    ):
        for role, retries in counts.items():
            for name, count in zip(("score", "update"), retries, strict=True):
                with logs[role].span(name):
                    stats["num_alloc_retries"] += count
        for log in logs.values():
            log.finish(step, {})
    counted = {
        role: [record["perf/alloc_retries"] for record in records(tmp_path, role)] for role in ROLES
    }
    assert counted == {"actor": [1, 2], "critic": [5, 4]}


def test_the_cpu_has_no_retries(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    log = ColumnLog("actor", tmp_path, first=True, phase=print, start=0, steps=9)
    spend(log, Clock(), "update", 1.0)
    log.finish(1, {})
    assert "perf/alloc_retries" not in records(tmp_path)[0]
