"""Processes that end with the rank that started them."""

import os
import signal

import pytest

from splitppo.job import child


def test_a_process_whose_rank_has_ended_before_it_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(child, "kill_with_parent", said.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    child.end_with_parent(os.getppid(), "engine")
    with pytest.raises(SystemExit, match="rank that started this engine has ended"):
        child.end_with_parent(os.getppid() + 1, "engine")
    assert said == [signal.SIGKILL] * 2
