"""Weights & Biases, TensorBoard, Trackio, MLflow and a user's tracker: what they hold is what
RUN/metrics holds."""

import io
import json
import re
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from devices import needs
from runs import in_one_process

from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.run import trackers
from splitppo.run.trackers import Trackers, find_tracker, metrics_of

# their imports take seconds: where they are used
pytestmark = [needs(name, "test") for name in ("wandb", "tensorboard", "trackio", "mlflow")]
ROLES = ("actor", "critic")
PAGE = Path(__file__).parents[2] / "docs" / "parts.md"
ARGV = (
    "--rollout.batch-size=12 --ppo.mini-batches=2 --log.validate-every=2 --checkpoint.every=2"
).split()


def check_trackers(config: Any) -> None:
    for name in config.log.trackers:
        find_tracker(name)


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures_due(run_dir: Path) -> dict[tuple[str, int], float]:
    """(name in the trackers, step) -> value, from the metrics' files."""
    due = {}
    for role in ROLES:
        for record in jsonl(run_dir / "metrics" / f"{role}.jsonl"):
            for name, value in record.items():
                if name not in ("step", "time", "spans", "optimizer_steps"):
                    group, _, rest = name.partition("/")
                    name = f"{group}/{role}/{rest}" if group in ("timing_s", "perf") else name
                    assert (name, record["step"]) not in due
                    due[name, record["step"]] = value
    return due


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run's file: LevelDB's log format (blocks of 32 KiB) after a header
    of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    internal: Any = wandb_internal_pb2
    data, offset, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while offset < len(data):
        if (left := 32768 - offset % 32768) < 7:  # too few for a header: padding
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            parsed = internal.Record()
            parsed.ParseFromString(record)
            record = b""
            yield parsed


def wandb_rows(path: Path) -> list[dict[str, Any]]:
    """What was logged, a dict for each call."""
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in wandb_records(path)
        if record.HasField("history")
    ]


def wandb_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A run with all trackers: two steps, then two more after resuming, by one process, since their
    imports take seconds. The last one is the class of docs/parts.md, by the page's command."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    page = PAGE.read_text(encoding="utf-8")
    (name,) = re.findall(r"--log.trackers (tracker.py:\w+)$", page, re.M)
    (code,) = re.findall(r"^```python\n(import json\n.*?)^```", page, re.M | re.S)
    (folder.parent / "tracker.py").write_text(code)
    names = [*trackers.TRACKERS, f"{folder.parent}/{name}"]
    argv = [*ARGV, f"--run-dir={folder}", "--log.trackers", *names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(folder.parent / "trackio"))
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{folder.parent / 'mlflow'}")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        results = in_one_process(folder.parent, [*argv, "--steps=2"], [*argv, "--steps=4"])
    assert [status for status, _ in results] == [0, 0], results
    return folder


def assert_figures(seen: Mapping[tuple[str, int], float], run_dir: Path, *, rel: float) -> None:
    """All figures of the files and nothing else."""
    due = figures_due(run_dir)
    assert dict(seen) == pytest.approx(due, rel=rel)
    assert {step for name, step in due if name == "timing_s/critic/update"} == {1, 2, 3, 4}
    assert {step for name, step in due if name == "timing_s/actor/update"} == {1, 2, 3, 4}
    assert {step for name, step in due if name == "val/score/mean"} == {0, 2, 4}
    for role in ROLES:
        for record in jsonl(run_dir / "metrics" / f"{role}.jsonl"):
            waits = sum(
                value for name, value in record.items() if name.startswith("timing_s/wait_")
            )
            share = seen[f"perf/{role}/idle_share", record["step"]]
            assert share == pytest.approx(
                waits / record["timing_s/step"], rel=max(rel, 1e-6), abs=1e-9
            )


def test_wandb_holds_both_roles_figures_once(tracked):
    seen: dict[tuple[str, int], float] = {}
    for path in wandb_files(tracked):
        for row in wandb_rows(path):
            for name, value in row.items():
                if name != "step" and not name.startswith("_"):
                    assert isinstance(value, int | float)
                    assert (name, row["step"]) not in seen, (
                        f"{name} of step {row['step']} was sent twice"
                    )
                    seen[name, row["step"]] = value
    assert_figures(seen, tracked, rel=1e-12)


def test_resumed_run_goes_on_in_the_same_wandb_run(tracked):
    first, second = wandb_files(tracked)
    ident = (tracked / "wandb_id").read_text()
    assert [path.name for path in (first, second)] == [f"run-{ident}.wandb"] * 2
    assert [{row["step"] for row in wandb_rows(path)} for path in (first, second)] == [
        {0, 1, 2},
        {3, 4},
    ]


def test_wandb_draws_over_step_and_knows_the_configuration(tracked):
    records = list(wandb_records(wandb_files(tracked)[0]))
    run = next(record.run for record in records if record.HasField("run"))
    assert (run.project, run.display_name) == ("splitppo", "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["rollout"]["batch_size"] == 12
    metrics = [record.metric for record in records if record.HasField("metric")]
    assert [metric.step_metric for metric in metrics if metric.glob_name == "*"] == ["step"]


def test_tensorboard_holds_both_roles_figures(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked / "tensorboard"))
    events.Reload()
    seen: dict[tuple[str, int], float] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert (name, event.step) not in seen, f"{name} of step {event.step} was sent twice"
            seen[name, event.step] = event.value
    assert_figures(seen, tracked, rel=1e-6)


def test_a_users_class_gets_both_roles_figures(tracked):
    seen: dict[tuple[str, int], float] = {}
    for line in jsonl(tracked / "lines.jsonl"):
        figures = {(name, line["step"]): value for name, value in line.items() if name != "step"}
        assert not seen.keys() & figures.keys()
        seen |= figures
    assert_figures(seen, tracked, rel=1e-12)
    inputs = json.loads((tracked / "inputs.json").read_text())
    assert [name for name in inputs if name.startswith("log.trackers ")]
    assert [*tracked.glob("rewards/**/tracker.py")]


def test_trackio_holds_both_roles_figures(tracked):
    with sqlite3.connect(tracked.parent / "trackio" / "splitppo.db") as database:
        rows = database.execute("select run_id, step, metrics from metrics").fetchall()
    assert len({ident for ident, *_ in rows}) == 1
    seen: dict[tuple[str, int], float] = {}
    for _, step, text in rows:
        for name, value in json.loads(text).items():
            assert (name, step) not in seen
            seen[name, step] = value
    assert_figures(seen, tracked, rel=1e-12)


def test_mlflow_goes_on_in_one_run_with_both_roles_figures(tracked, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    client = mlflow.MlflowClient(f"file:{tracked.parent / 'mlflow'}")
    (run,) = client.search_runs(["0"])
    assert run.info.run_id == (tracked / "mlflow_id").read_text()
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["rollout.batch_size"] == "12"
    seen: dict[tuple[str, int], float] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            assert (name, metric.step) not in seen
            seen[name, metric.step] = metric.value
    times = {record["step"]: record["time"] for record in jsonl(tracked / "metrics/actor.jsonl")}
    (first, *_) = client.get_metric_history(run.info.run_id, "actor/pg_loss")
    assert first.timestamp == round(1000 * times[first.step])
    assert_figures(seen, tracked, rel=1e-12)


@pytest.mark.ranks  # mlflow's import asks uname
def test_names_that_mlflow_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlflow'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = trackers.MLflow(parse([]), tmp_path, 0)
    tracker.write(1, 1.0, {"reward/a, b@4 (c)": 2.0})
    tracker.close()
    import mlflow

    run = mlflow.get_run((tmp_path / "mlflow_id").read_text())
    assert run.data.metrics == {"reward/a_ b_4 _c_": 2.0}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("class Mine: pass", "tracker.py:Mine needs the methods write and close; "),
        ("class Other: pass", "has no Mine when it is imported"),
    ],
)
def test_a_class_that_is_no_tracker(tmp_path, body, says):
    (tmp_path / "tracker.py").write_text(body)
    with pytest.raises(UserError, match=says):
        check_trackers(parse([f"--log.trackers={tmp_path}/tracker.py:Mine"]))


def test_a_word_that_is_no_tracker():
    known = "wandb, tensorboard, trackio, mlflow or path/to/file.py:name"
    with pytest.raises(UserError, match=f"log.trackers=neptune: no such tracker; use {known}"):
        check_trackers(parse(["--log.trackers=neptune"]))


def test_names_of_both_roles_do_not_collide():
    record = {"step": 3, "time": 1e9, "val/score/mean": 0.5, "perf/throughput": 7.0, "tokens": 12}
    record |= {"timing_s/wait_critic": 1.0, "timing_s/wait_advantages": 2.0, "timing_s/step": 12.0}
    record |= {
        "spans": [["update", 0.0, 1.0]],
        "optimizer_steps": [{"loss": 1.0}],
        "note": "text",
        "absent": None,
    }
    assert metrics_of("actor", record) == {
        "val/score/mean": 0.5,
        "perf/actor/throughput": 7.0,
        "tokens": 12,
        "timing_s/actor/wait_critic": 1.0,
        "timing_s/actor/wait_advantages": 2.0,
        "timing_s/actor/step": 12.0,
    }


class Notes:
    """A tracker that notes what it gets; `fails` makes it raise."""

    got: list[tuple[int, dict]]
    fails = False

    def __init__(self, config: Config, run_dir: Path, start: int):
        self.got, self.closed = [], False

    def write(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        if self.fails:
            raise ConnectionError("no network")
        self.got.append((step, dict(figures)))

    def close(self) -> None:
        self.closed = True

    def steps(self, name: str) -> list[int]:
        return [step for step, figures in self.got if name in figures]


def noted(run_dir: Path, start: int, *, argv: tuple[str, ...] = ()) -> tuple[Trackers, Notes]:
    config = parse(["--log.trackers=tensorboard", f"--run-dir={run_dir}", "--steps=400", *argv])
    owner = Trackers(config, run_dir, start)
    (tracker,) = owner.trackers
    assert isinstance(tracker, Notes)
    return owner, tracker


@pytest.fixture
def notes(monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Notes)


def write_lines(run_dir: Path, role: str, *steps: int) -> None:
    path = run_dir / "metrics" / f"{role}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(
            json.dumps({"step": step, "time": 0.0, f"{role}/loss": step / 2}) + "\n"
            for step in steps
        )


def test_torn_line_waits_for_its_end(tmp_path, notes):
    owner, tracker = noted(tmp_path, 0)
    path = tmp_path / "metrics" / "actor.jsonl"

    def new() -> list[tuple[int, dict[str, float]]]:
        tracker.got.clear()
        owner.update()
        return list(tracker.got)

    assert new() == []
    path.parent.mkdir()
    path.write_text('{"step": 1, "time": 0}\n{"step": 2, "no')
    assert new() == [(1, {})]
    assert new() == []
    with path.open("a") as file:
        file.write('te/ä": 5, "time": 0}\n{"step": 3, "time": 0}\n')
    assert new() == [(2, {"note/ä": 5.0}), (3, {})]
    assert new() == []
    with path.open("a") as file:
        file.write("{]\n")
    with pytest.raises(UserError, match=r"actor\.jsonl:4: .*fix or remove that line"):
        new()


def test_late_lines_of_the_critic_come_under_their_own_step(tmp_path, notes):
    owner, tracker = noted(tmp_path, 0)
    write_lines(tmp_path, "actor", 0, 1)
    owner.update()
    write_lines(tmp_path, "actor", 2)
    write_lines(tmp_path, "critic", 1)
    owner.update()
    write_lines(tmp_path, "critic", 2)
    owner.close()
    assert tracker.got == [
        (0, {"actor/loss": 0.0}),
        (1, {"actor/loss": 0.5}),
        (2, {"actor/loss": 1.0}),
        (1, {"critic/loss": 0.5}),
        (2, {"critic/loss": 1.0}),
    ]
    assert tracker.closed


def test_resumed_run_sends_what_is_done_again(tmp_path, notes):
    for role in ROLES:
        write_lines(tmp_path, role, 0, 1, 2, 3)  # it goes on from step 2
    owner, tracker = noted(tmp_path, 2)
    owner.close()
    assert tracker.steps("actor/loss") == tracker.steps("critic/loss") == [3]


def test_failing_tracker_ends_the_run(tmp_path, notes, monkeypatch):
    monkeypatch.setattr(Notes, "fails", True)
    owner, _ = noted(tmp_path, 0)
    write_lines(tmp_path, "actor", 1)
    with pytest.raises(ConnectionError, match="no network"):
        owner.update()


def test_a_tracker_that_cannot_be_closed_fails_no_run(tmp_path, notes, capfd):
    owner = Trackers(parse(["--log.trackers=tensorboard"]), tmp_path, 0)
    closed = []

    def fail() -> None:
        raise OSError("disk\nfull")

    closers: Any = (fail, lambda: closed.append(1))
    owner.trackers = [SimpleNamespace(close=close) for close in closers]
    owner.close()
    assert closed == [1]
    assert "close: OSError: disk full" in "".join(capfd.readouterr())


def test_other_ranks_trackers_do_nothing(tmp_path, notes):
    config = parse(["--log.trackers=tensorboard"])
    write_lines(tmp_path, "actor", 1)
    owner = Trackers(config, tmp_path, 0, active=False)
    owner.update()
    owner.close()
    assert not owner.trackers


@pytest.fixture
def fresh_wandb():
    """wandb reads the environment once a process, until it is torn down."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.usefixtures("fresh_wandb")
@pytest.mark.ranks
def test_wandb_may_be_disabled(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write_lines(tmp_path, "actor", 1)
    owner = Trackers(parse(["--log.trackers=wandb"]), tmp_path, 0)
    owner.update()
    owner.close()
    assert not (tmp_path / "wandb").exists()


@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_without_a_key_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nobody to ask
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"log.trackers=wandb: .*wandb login.*WANDB_MODE=offline"):
        Trackers(parse(["--log.trackers=wandb"]), tmp_path, 0)


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio", "mlflow"])
def test_tracker_that_is_not_installed_is_named(monkeypatch, name):
    config = parse([f"--log.trackers={name}"])
    check_trackers(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_trackers(parse([]))
    with pytest.raises(UserError, match=rf"{name} is not installed; pip install {name}, or leave"):
        check_trackers(config)


def test_folder_named_wandb_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb")
    with pytest.raises(UserError, match="wandb is not installed"):
        check_trackers(parse(["--log.trackers=wandb"]))
