"""Resuming a run after damage of every kind: as if nothing had been, or refused in one line. The
hold on its folder."""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from runs import figures, made_up, names, once
from tiers import wide

from splitppo import train
from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.config.toml import to_toml
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.models.tiny import build_tiny
from splitppo.placement import place
from splitppo.run import checkpoint
from splitppo.run import folder as run_files
from splitppo.run import main as run_main
from splitppo.run.life import Run, find_checkpoint
from splitppo.run.metrics import ColumnLog
from splitppo.run.resolve import resolve

FLAGS = "--rollout.batch-size=4 --ppo.mini-batches=1 --ppo.epochs=1 --log.validate-every=0".split()
FLAGS += ["--rollout.max-new-tokens=4"]
FLAGS += (
    "--checkpoint.every=1 --placement.mode=colocated --engine.kind=hf --data.answer-key=answer"
).split()
REWARD = (
    "def score(*, data_source, solution_str, ground_truth, extra_info):\n    return "
    "float(len(solution_str))\n"
)

Spoil = Callable[[Path, Path], object]


def part(run: Path, role: str, step: int = 2) -> Path:
    return checkpoint.step_folder(run, step) / role


def tensors(run: Path) -> Path:
    return next(part(run, "actor").glob("__0_*"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def by_hand(run: Path, name: str, text: str) -> None:
    """Changes a file of a part, and its size and checksum in the manifest with it."""
    folder = part(run, "actor")
    (folder / name).write_text(text)
    step, files = checkpoint.read_manifest(folder)
    checkpoint.write_manifest(folder, step, files | {name: checkpoint.measure(folder / name)})


def file_for_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def as_older(run: Path) -> None:
    """What a version wrote that had a longest prompt by default, and kept no record of the settings
    given."""
    (run / "given.json").unlink()
    text = (run / "config.toml").read_text()
    assert "max_prompt_tokens = 5\n" in text, "the longest prompt of the data"
    (run / "config.toml").write_text(
        text.replace("max_prompt_tokens = 5\n", "max_prompt_tokens = 512\n")
    )


# does what `run_files.take` does, and imports nothing
HOLDER = """
import fcntl, os, sys
held = open(f"{sys.argv[1]}/lock", "a+")
fcntl.lockf(held, fcntl.LOCK_EX)
held.truncate(0)
held.write(f"process {os.getpid()} on {sys.argv[2]} since 2026-11-26 09:00:00")
held.flush()
print(held.name, flush=True)
sys.stdin.read()
"""


def hold(run: Path, host: str) -> subprocess.Popen[str]:
    """Another process that holds a run's folder until its standard input ends."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run), host], **pipes)
    assert holder.stdout
    assert holder.stdout.readline() == f"{run / 'lock'}\n"
    return holder


def metrics(run: Path, role: str = "actor") -> Path:
    return run / "metrics" / f"{role}.jsonl"


# what is done to a run of two steps, and what is said of it; all of these go on as if nothing had
# been. The other damages to a checkpoint are in test_checkpoint.py.
GOES_ON: dict[str, tuple[Spoil, str]] = {
    "nothing": (
        lambda run, _: None,
        "resuming from .*step_000002, with its settings unless the command sets them",
    ),
    "an earlier version's": (
        lambda run, _: as_older(run),
        "warning: log.validate_every=3 is not used: nothing is held out; set data.validation_files",
    ),
    "a line of metrics torn": (
        lambda run, _: append(metrics(run), '{"step": 3, "ti'),
        "from .*step_000002",
    ),
    "the last line's end torn": (lambda run, _: cut(metrics(run), 1), "from .*step_000002"),
    "a byte flipped": (
        lambda run, _: flip(tensors(run)),
        r"actor/__0_0.distcp does not match its checksum \(CRC-32\)",
    ),
    "renamed to another step": (
        lambda run, _: checkpoint.step_folder(run, 1).rename(checkpoint.step_folder(run, 3)),
        "step_000003: actor/manifest.json is of step 1",
    ),
    "half a checkpoint": (
        lambda run, _: part(run, "critic").rename(part(run, "critic.partial")),
        "removed an unfinished checkpoint: .*step_000002",
    ),
    "a dead process's lock": (
        lambda run, _: (run / "lock").write_text(f"process 1 on {socket.gethostname()} since noon"),
        "from .*step_000002",
    ),
}

REFUSED: dict[str, tuple[Spoil, str]] = {
    "a broken line among others": (
        lambda run, _: metrics(run).write_text("{]\n" + metrics(run).read_text()),
        "actor.jsonl:1: .* is not a JSON",
    ),
    "a state made by hand": (
        lambda run, _: by_hand(run, "state.json", "[1"),
        "actor/state.json can't be read",
    ),
    "another state": (
        lambda run, _: by_hand(run, "state.json", "{}"),
        "actor/state.json can't be read .KeyError",
    ),
    "tensors made by hand": (
        lambda run, _: by_hand(run, ".metadata", "no"),
        r"actor can't be loaded \(\w+Error: .*\); use the models that it was written with",
    ),
    "a live process's lock": (
        lambda run, _: hold(run, socket.gethostname()),
        r"run_dir=.* is in use by process \d+ on \S+ since \d{4}-\S+ \S+; wait for its end",
    ),
    "a lock that is a folder": (
        lambda run, _: ((run / "lock").unlink(), (run / "lock").mkdir()),
        "run_dir: .*lock.*; fix that, or choose",
    ),
    "data changed": (
        lambda _, inputs: append(inputs / "rows.jsonl", "\n"),
        r"data.files \S+rows.jsonl was [\d,]+ bytes, \w+ and is now [\d,]+ bytes, \w+: this is "
        r"another run than the one",
    ),
    "reward changed": (
        lambda _, inputs: (inputs / "reward.py").write_text(REWARD.replace("len", "1 + len")),
        r"reward.function \S+reward.py was .*: this is another run",
    ),
    "weights changed": (
        lambda _, inputs: flip(inputs / "model/model.safetensors"),
        r"policy.path \S+model.safetensors was .*: this is another run",
    ),
    "a chat template added": (
        lambda _, inputs: (inputs / "model/chat_template.jinja").write_text("{{ messages }}"),
        r"policy.path \S+chat_template.jinja was unset and is now",
    ),
    "settings torn": (
        lambda run, _: cut(run / "config.toml", 9),
        "config.toml can't be read .*; fix it, or delete",
    ),
    "inputs torn": (
        lambda run, _: cut(run / "inputs.json", 9),
        "inputs.json can't be read .*; fix it, or delete it",
    ),
    "settings not text": (
        lambda run, _: (run / "config.toml").write_bytes(b"\xff"),
        "config.toml can't be read",
    ),
    "a file for the checkpoints": (
        lambda run, _: file_for_folder(run / "checkpoints"),
        "/checkpoints is not a folder; move it away",
    ),
    "a file for the metrics": (
        lambda run, _: file_for_folder(run / "metrics"),
        "/metrics is not a folder; move it away",
    ),
}


def one_run(config: Config, run_dir: Path, steps: int) -> tuple[int, str]:
    """Exit status and screen of a run in this process."""
    said = io.StringIO()
    # parsing takes its time
    run_main.parse = lambda *_, **__: replace(config, run_dir=str(run_dir), steps=steps)
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        warnings.catch_warnings(),
    ):
        status = train.main([])
    if dist.is_initialized():
        dist.destroy_process_group()
    return status, said.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"]
    return {str(path): path.read_bytes() for path in files}


# in the suite; the others are wide
TAKEN = {
    *("nothing", "an earlier version's", "a line of metrics torn", "a byte flipped"),
    *("a broken line among others", "another state", "a live process's lock", "data changed"),
    *("weights changed", "settings torn", "a file for the metrics"),
}


def taken(damages: Iterable[str]) -> list[Any]:
    return [name if name in TAKEN else wide(name) for name in damages]


def all_runs(rank: int, folder: Path, damages: list[str]) -> dict[str, tuple[int, str]]:
    """Does each damage to a copy of a run of two steps, and resumes it to four; one process, since
    it starts once."""
    del os.environ["RANK"]
    inputs = folder / "inputs"
    inputs.mkdir()
    rows = [
        {"prompt": f"{number}+1=", "answer": number + 1, "data_source": "mine"}
        for number in range(20)
    ]
    (inputs / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (inputs / "reward.py").write_text(REWARD)
    build_tiny(inputs / "model", seed=5)
    argv = [
        *FLAGS,
        f"--data.files={inputs / 'rows.jsonl'}",
        f"--reward.function={inputs / 'reward.py'}:score",
    ]
    argv += [f"--policy.path={inputs / 'model'}", "--log.validate-every=3"]
    config = parse(argv)
    found = {
        "whole": one_run(config, folder / "whole", 4),
        "two steps": one_run(config, folder / "two", 2),
    }
    shutil.copytree(inputs, folder / "kept")
    for name in damages:
        spoil, _ = (GOES_ON | REFUSED)[name]
        run = folder / name
        shutil.copytree(folder / "two", run)
        spoil(run, inputs)
        before = contents(run)
        found[name] = one_run(config, run, 4)
        if (
            name in REFUSED
            and contents(run) != before
            and "state" not in name
            and "tensors" not in name
        ):
            found[name] = (-1, f"the run's folder was changed: {found[name]}")
        # a reward worker may still be writing its bytecode there
        shutil.rmtree(inputs, ignore_errors=True)
        shutil.copytree(folder / "kept", inputs, dirs_exist_ok=True)
    return found


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory) -> tuple[Path, dict[str, tuple[int, str]]]:
    """Those of the damages that are tested now."""
    tests = [item for item in request.session.items if "runs" in item.fixturenames]
    damages = [item.callspec.params["damage"] for item in tests if item.module is request.module]

    def make(folder: Path) -> dict[str, tuple[int, str]]:
        (found,) = run_ranks(1, all_runs, folder, damages)
        return found

    folder, found = once(tmp_path_factory, "damage", make)
    assert [found.pop(name)[0] for name in ("whole", "two steps")] == [0, 0]
    return folder, found


@pytest.mark.parametrize("damage", taken(GOES_ON))
def test_a_damaged_run_goes_on_as_if_nothing_had_been(runs, damage):
    folder, found = runs
    status, said = found[damage]
    assert status == 0, said
    assert re.search(GOES_ON[damage][1], said), said
    for role in ("actor", "critic"):
        assert figures(folder / damage, role) == figures(folder / "whole", role)
    assert names(folder / damage) == ["step_000003", "step_000004"]
    assert not any(checkpoint.damage(saved) for saved in checkpoint.complete(folder / damage))


@pytest.mark.parametrize("damage", taken(REFUSED))
def test_what_cannot_go_on_is_refused_in_a_line(runs, damage):
    status, said = runs[1][damage]
    assert status == 2, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(REFUSED[damage][1], errors[0]), said
    assert "Traceback" not in said


@pytest.mark.ranks
def test_force_goes_on_and_records_anew(tmp_path):
    config, file = (
        parse([*FLAGS, f"--data.files={tmp_path / 'rows.jsonl'}"]),
        tmp_path / "rows.jsonl",
    )
    file.write_text("{}")
    run_files.write_run_files(config, tmp_path, None, before := run_files.inputs_of(config, {}, {}))
    run_files.check_same_run(config, tmp_path, before)
    file.write_text("[]")
    after = run_files.inputs_of(config, {}, {})
    assert list(before) == list(after) == [f"data.files {file}"]
    with pytest.raises(
        UserError, match=r"rows.jsonl was 2 bytes, \w+ and is now 2 bytes, \w+: this is another run"
    ):
        run_files.check_same_run(config, tmp_path, after)
    run_files.write_run_files(config, tmp_path, None, after)
    run_files.check_same_run(config, tmp_path, after)
    (tmp_path / "inputs.json").unlink()  # a run of an earlier version
    run_files.check_same_run(config, tmp_path, before)


def test_a_setting_that_this_version_lacks_makes_no_other_run(tmp_path, capfd):
    """The tools leave it out, with a line; a user's preset may not name it."""
    config, file = parse([*FLAGS, f"--run-dir={tmp_path}"]), tmp_path / "config.toml"
    file.write_text(to_toml(config).replace("[value]", "[value]\nensemble = 2"))
    run_files.check_same_run(config, tmp_path)
    assert parse([f"--config={file}"], recorded=True) == replace(config, config=str(file))
    said = capfd.readouterr().err
    assert said == f"note: {file}: this version has no setting value.ensemble; left out\n"
    with pytest.raises(UserError, match=r"there is no value.ensemble"):
        parse([f"--config={file}"])


def clock_rank(rank: int, argv: list[str]) -> tuple[int, list[str], str]:
    """Exit status, a prompt, and what the rank says."""
    found: list[str] = []

    def play(run: Run) -> None:
        found.append(run.build.training.prompts[0].text)
        train.train(run)

    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        status = run_main.run_rank(play, lambda: argv)
    return status, found, said.getvalue()


def test_prompts_that_show_the_time_are_rank_0s_and_a_resume_at_another_time_is_refused(
    tmp_path, capsys
):
    build_tiny(tmp_path / "model", seed=0)
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{{ strftime_now('%f') }} {{ messages[0].content }}"
    )
    argv = [*FLAGS, f"--policy.path={tmp_path}/model", f"--run-dir={tmp_path}/run", "--steps=1"]
    (_, (first,), said), (_, others, _) = run_ranks(2, clock_rank, argv)
    assert others == [first]
    assert said.count("the chat template shows the current time, so a later resume is refused") == 1
    kept = json.loads((tmp_path / "run" / "inputs.json").read_text())[run_files.TRAINING]
    argv[-1] = "--steps=2"
    ((status, _, said),) = run_ranks(1, clock_rank, argv)
    assert train.main([*argv, "--dry-run"]) == status == 2
    for text in (said, capsys.readouterr().err):
        assert re.search(
            f"^error: training prompts as rendered was {kept} and is now [0-9a-f]+; .* --force",
            text,
            re.M,
        )
    ((status, (forced,), _),) = run_ranks(1, clock_rank, [*argv, "--force"])
    assert status == 0
    assert forced != first
    assert json.loads((tmp_path / "run" / "inputs.json").read_text())[run_files.TRAINING] != kept


def test_a_restart_renders_what_the_jobs_first_start_did():
    runtime: Any = SimpleNamespace(
        launch=Launch(), job=dist.HashStore(), broadcast=lambda _, value: value()
    )
    runtime.all_gather = lambda _, own: [own]
    runtime.status = SimpleNamespace(set_phase=lambda _: None)
    config = parse(FLAGS)
    placement = place(config.placement, world=1, local_world=1)
    starts = [resolve(config, placement, 1, torch.device("cpu"), probe=False) for _ in range(2)]
    assert starts[0].now < starts[1].now
    assert [run_main.agree(start, runtime)[0].now for start in starts] == [starts[0].now] * 2


def test_another_prompt_makes_another_run(tmp_path):
    config, new = parse(FLAGS), {run_files.TRAINING: "a", run_files.VALIDATION: "b"}
    run_files.write_run_files(config, tmp_path, None, new)
    run_files.check_same_run(config, tmp_path, {})  # no data are read yet
    with pytest.raises(
        UserError, match="validation prompts as rendered was b and is now c: this is another run"
    ):
        run_files.check_same_run(config, tmp_path, new | {run_files.VALIDATION: "c"})


def test_all_that_a_run_reads_is_among_its_inputs(tmp_path):
    files = "a.jsonl b.parquet lengths rw.py m/config.json m/sub/x.json m/README.md r/x.json"
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    argv = [
        f"--data.files={tmp_path / 'a.jsonl'}",
        f"--data.validation-files={tmp_path / 'b.parquet'}",
    ]
    argv += [
        f"--rollout.lengths={tmp_path / 'lengths'}",
        f"--reward.function={tmp_path / 'rw.py'}:score",
    ]
    models = {"policy": f"{tmp_path}/m", "value": f"{tmp_path}/m", "reward": f"{tmp_path}/r"}
    found = run_files.inputs_of(
        parse([*argv, f"--reward.validation={tmp_path / 'rw.py'}:other"]), models, {}
    )
    due = [
        "data.files a.jsonl",
        "rollout.lengths lengths",
        "data.validation_files b.parquet",
        "reward.function rw.py",
    ]
    due += ["reward.validation rw.py", "policy.path m/config.json", "reward.model r/x.json"]
    assert sorted([name.replace(f"{tmp_path}/", "") for name in found]) == sorted(due)


def test_large_weights_are_told_apart_by_a_part_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "BLOCK", 4)
    path = tmp_path / "model.safetensors"
    seen = set()
    for change in (1, 5, 80 * 16 - 1):  # in the head; between two blocks
        content = bytearray(80 * 16)
        content[change] = 1
        path.write_bytes(bytes(content))
        seen.add(run_files.fingerprint(path))
    assert len(seen) == 2
    (tmp_path / "rows.jsonl").write_bytes(path.read_bytes())
    assert run_files.fingerprint(tmp_path / "rows.jsonl") not in seen, "data is read as a whole"


def test_a_good_checkpoint_is_kept_where_newer_ones_are_damaged(tmp_path):
    for step in (1, 2, 3, 4):
        made_up(tmp_path, step)
    for step in (2, 4):
        (checkpoint.step_folder(tmp_path, step) / "critic" / ".metadata").unlink()
    checkpoint.prune(tmp_path, 1)
    assert names(tmp_path) == ["step_000003", "step_000004"]
    good = Run.last_checkpoint(cast(Any, SimpleNamespace(folder=tmp_path)))
    assert good == checkpoint.step_folder(tmp_path, 3)


def test_a_checkpoint_is_named_by_its_step(tmp_path):
    saved = made_up(tmp_path / "run", 2)
    (tmp_path / "newest").symlink_to(saved)
    assert checkpoint.find(tmp_path / "other", str(tmp_path / "newest")) == saved
    saved.rename(saved.with_name("best"))
    with pytest.raises(UserError, match=r"no complete checkpoint there; name a run"):
        checkpoint.find(tmp_path / "other", str(saved.with_name("best")))


def test_a_line_is_on_the_disk_before_its_checkpoint_counts(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def noting(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", noting)
    log = ColumnLog("actor", tmp_path, first=True, phase=print, start=0, steps=9)
    synced.clear()
    log.finish(1, {})
    assert synced == [str(metrics(tmp_path))]


def test_the_lock_of_another_host_is_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_files, "PATIENCE", 2)
    with hold(tmp_path, "elsewhere") as holder:
        told = rf"{tmp_path} is in use by process {holder.pid} on elsewhere since \d{{4}}-\S+ \S+"
        with pytest.raises(UserError, match=f"^run_dir={told}; wait for its end, or choose"):
            run_files.take(tmp_path)
        assert re.match(f"{told}: waiting 2 s for its end$", capsys.readouterr().out)
        threading.Timer(0.5, holder.kill).start()
        with run_files.take(tmp_path) as held:
            taken = rf"process {os.getpid()} on {socket.gethostname()} since \d{{4}}-\S+ \S+"
            assert re.fullmatch(taken, Path(held.name).read_text())


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    run_files.take(tmp_path).close()
    assert f"warning: {tmp_path} can't be locked" in capsys.readouterr().out


def test_two_runs_of_one_second_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = iter(["now", "now", "later"])
    monkeypatch.setattr(time, "strftime", lambda _: next(names))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert [str(run_files.new_folder()) for _ in range(2)] == ["runs/now", "runs/later"]


@pytest.mark.ranks
def test_what_was_refused_is_refused_when_torchrun_starts_it_anew(tmp_path):
    """And nothing is overwritten; a restart of a start that was let in resumes from its
    checkpoints."""
    job, rows, run = dist.HashStore(), tmp_path / "rows", tmp_path / "run"

    def start(*argv: str) -> str:
        runtime: Any = {
            "launch": Launch(),
            "job": job,
            "broadcast": lambda _, value: value(),
            "all_gather": lambda _, own: [own],
        }
        config = parse(
            [*FLAGS, "--steps=4", f"--run-dir={run}", f"--rollout.lengths={rows}", *argv]
        )
        inputs = run_files.inputs_of(config, {}, {})
        found = find_checkpoint(config, cast(Any, SimpleNamespace(**runtime)), run, inputs)
        run_files.write_run_files(config, run, found, inputs)
        return found.name if found else ""

    def begun() -> None:
        made_up(run, 1)
        for role in checkpoint.ROLES:
            metrics(run, role).parent.mkdir(exist_ok=True)
            metrics(run, role).write_text('{"step": 1}\n')

    rows.write_text("1")
    begun()
    for _ in range(2):
        with pytest.raises(UserError, match="no complete checkpoint there"):
            start("--resume=nowhere")
    assert start() == "step_000001"
    rows.write_text("2")
    with pytest.raises(
        UserError, match=r"rollout.lengths .*rows was 1 bytes, .*: this is another run"
    ):
        start()
    assert start("--force") == "step_000001"
    metrics(run).write_text('{"step": \n{"step": 1}\n')
    with pytest.raises(UserError, match=r"actor.jsonl:1: .*; fix or remove that line"):
        start()
