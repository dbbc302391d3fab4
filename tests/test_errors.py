"""The boundary where texts and paths come in, and what every command makes of an error."""

import errno
import io
import os
import sys
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from splitppo import train
from splitppo.config.cli import PATHS, parse
from splitppo.config.toml import leaves, toml_value
from splitppo.errors import UserError, check_text, command, one_line, to_user_error, words
from splitppo.job.launch import Launch
from splitppo.run.metrics import ColumnLog

LATIN = os.fsdecode(b"caf\xe9")  # as Python has a word that is not UTF-8


@pytest.mark.parametrize("text", ["a\0b", "\ud800", LATIN])
def test_a_text_that_nothing_can_hold_is_refused_wherever_it_comes_in(text, tmp_path, monkeypatch):
    for argv in ([f"--run-dir={text}"], ["--data.system", text], [f"--no-such={text}"]):
        with pytest.raises(UserError, match="holds a NUL or bytes that are not UTF-8"):
            parse(argv)
    monkeypatch.setattr(sys, "argv", ["report", text])
    with pytest.raises(UserError, match="holds a NUL"):
        words()
    check_text(["", "é漢\u2028\n\x1b[2J"])


def test_a_preset_with_a_nul_is_named(tmp_path):
    (tmp_path / "a.toml").write_text('[data]\nsystem = "a\\u0000b"\n')
    with pytest.raises(UserError, match=r"a\.toml: .*b. holds a NUL"):
        parse(["--config", str(tmp_path / "a.toml")])


def test_the_users_home_is_every_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.toml").write_text('[reward]\nmodel = "~/judge"\n')
    several = {name: f"~/{name}" for name in PATHS if name != "reward.model"}
    config = parse(
        [
            "--config=~/a.toml",
            *(f"--{name}={path}" for name, path in several.items()),
            "--data.system=~/x",
        ]
    )
    found = dict(leaves(asdict(config)))
    for name in PATHS:
        path = f"{tmp_path}/{'judge' if name == 'reward.model' else name}"
        assert found[name] in (path, (path,)), name
    assert found["data.system"] == "~/x"
    monkeypatch.setattr(sys, "argv", ["export", "~/run", "--out=~/x", "a~"])
    assert words() == [f"{tmp_path}/run", f"--out={tmp_path}/x", "a~"]


def test_a_line_of_any_text_can_be_shown_anywhere():
    line = one_line(f"a\n\tb \x1b[2J \0 {LATIN} \u2028é")
    assert line == "a b \\x1b[2J \\x00 caf\\udce9 é"


def test_what_the_disk_says_of_a_path_is_the_users(tmp_path):
    with pytest.raises(OSError, match="File name too long") as caught:
        (tmp_path / ("x" * 5000)).open()
    assert str(to_user_error(caught.value)).endswith(
        "xxx: File name too long; fix that, or name another path"
    )
    assert len(str(to_user_error(caught.value))) < 300
    assert "No space left" in str(to_user_error(OSError(errno.ENOSPC, "No space left on device")))
    assert "os error 28" in str(
        to_user_error(RuntimeError("I/O error: No space left on device (os error 28)"))
    )
    assert "not finite" in str(to_user_error(FloatingPointError("weights are not finite")))
    crash, bug, disk = (
        RuntimeError("not written"),
        KeyError("in a handler"),
        NotADirectoryError(20, "Not a directory", "a"),
    )
    crash.__cause__ = bug.__context__ = disk
    assert str(to_user_error(crash)).startswith("not written: a: Not a directory")
    assert to_user_error(bug) is None
    bug.__context__ = RuntimeError("unexpected position")
    bug.__context__.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert "No space left" in str(to_user_error(bug))
    for ours in (
        OSError(errno.EBADF, "Bad file descriptor"),
        ConnectionResetError(),
        ValueError("a bug"),
        KeyError("a"),
    ):
        assert to_user_error(ours) is None


def test_a_command_shows_the_users_error_and_no_other(capsys, monkeypatch):
    def raising(error: BaseException) -> Any:
        def main() -> None:
            raise error

        return command(main)

    assert raising(UserError("a\nb"))() == 2
    assert raising(FileNotFoundError(2, "No such file or directory", "x"))() == 2
    assert raising(KeyboardInterrupt())() == 130
    assert capsys.readouterr().err.splitlines() == [
        "error: a b",
        "error: x: No such file or directory; fix that, or name another path",
        "interrupted",
    ]
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())()
    assert command(lambda: None)() == 0
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert command(lambda: print("é\ud800"))() == 0
    assert screen.buffer.getvalue() == b"\\xe9\\ud800\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        {"WORLD_SIZE": None}, {"WORLD_SIZE": "x"}, {"RANK": ""}, {"RANK": "2"}, {"RANK": "-1"},
        {"MASTER_ADDR": None}, {"MASTER_PORT": None}, {"LOCAL_RANK": "1e3"},
        {"LOCAL_WORLD_SIZE": ""}, {"GROUP_WORLD_SIZE": "two"},
    ],
)  # fmt: skip
def test_torchruns_variables_are_there_as_a_whole(change, monkeypatch):
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name in (*whole, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Launch.from_env() == Launch()
    for name, value in whole.items():
        monkeypatch.setenv(name, value)
    assert Launch.from_env() == Launch(1, 2, 1, 2, 1)
    for name, value in change.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="all of these must be set; start with torchrun"):
        Launch.from_env()


def test_a_clock_that_is_set_back_gives_no_negative_seconds(tmp_path, monkeypatch, capsys):
    log, before = (
        ColumnLog("actor", tmp_path, first=True, phase=lambda _: None, start=0, steps=9),
        time.time(),
    )
    monkeypatch.setattr(time, "time", lambda: before - 3600)
    with log.span("update"):
        time.sleep(0.01)
    (span,) = log.spans
    assert before - 5 < span[1] < span[2] < before + 60
    log.finish(1, {"tokens": 5})
    assert '"timing_s/step": -' not in log.path.read_text()
    assert log.began > before - 5


def test_control_characters_come_back_out_of_toml():
    text = "".join(map(chr, range(1, 0x2100)))
    assert tomllib.loads(f"a = {toml_value(text)}")["a"] == text


def test_a_dry_run_of_100_000_ranks_is_short(tmp_path: Path, capsys):
    began = time.process_time()
    argv = (
        "--dry-run --world-size=100000 --nodes=12500 --rollout.batch-size=200000 "
        "--rollout.chunks=99999999"
    ).split()
    assert train.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert time.process_time() - began < 15  # 2 s; anything quadratic takes hours
    assert "  and 99,936 more ranks" in lines
    assert len(lines) < 400
