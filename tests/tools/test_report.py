"""The report: what it measures (overlap), what it picks (the step), what it prints.
tests/tools/test_html.py has what goes into its page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from splitppo.__main__ import main
from splitppo.config import Config, PPOConfig
from splitppo.config.toml import to_toml
from splitppo.tools.runs import (
    COLOURS,
    Run,
    Span,
    Step,
    as_text,
    read_runs,
    results_table,
    settings_table,
)
from splitppo.tools.timeline import build_timeline, shared_work

ROOT = Path(__file__).parents[2]


def spans_of(step: int, length: float = 4.0) -> tuple[list[Span], list[Span]]:
    """A step of both columns: the critic's update of it ends 1 s into the next step."""
    t = 1000.0 + 4.0 * step
    actor = [
        ("sync", t, t + 0.02),
        ("rollout", t + 0.02, t + 2),
        ("wait_advantages", t + 2, t + 2.5),
    ]
    actor += [("update", t + 2.5, t + length)]
    critic = [
        ("wait_rollouts", t + 1, t + 1.5),
        ("score", t + 1.5, t + 2.5),
        ("novel_work", t + 2.5, t + 3),
    ]
    critic += [("update", t + 3, t + 5)]
    return actor, critic


def write_run(run: Path, steps: int = 8, critic: bool = True) -> Path:
    """A made-up run; its step 0 is a validation alone."""
    (run / "metrics").mkdir(parents=True)
    rows: dict[str, list] = {
        "actor": [{"step": 0, "time": 1.0, "val/score/mean": 0.1, "spans": []}],
        "critic": [],
    }
    for step in range(1, steps + 1):
        a, c = spans_of(step)
        rows["actor"].append(
            {
                "step": step,
                "time": 1.0,
                "actor/pg_loss": -0.1 / step,
                "timing_s/step": 4.0,
                "spans": a,
            }
        )
        rows["critic"].append(
            {"step": step, "time": 1.0, "critic/score/mean": 0.1 * step, "spans": c}
        )
    for name in ("actor", "critic") if critic else ("actor",):
        (run / "metrics" / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows[name])
        )
    return run


def test_overlap_counts_only_work_of_both():
    actor = [("rollout", 0.0, 4.0), ("wait_advantages", 4.0, 5.0), ("update", 5.0, 8.0)]
    critic = [
        ("update", -1.0, 1.0),
        ("wait_rollouts", 1.0, 3.0),
        ("score", 3.0, 4.5),
        ("update", 6.0, 12.0),
    ]
    assert (
        shared_work(actor, critic)
        == shared_work(critic, actor)
        == [(0.0, 1.0), (3.0, 4.0), (6.0, 8.0)]
    )
    assert shared_work(actor, []) == []
    assert shared_work([("rollout", 0, 1)], [("score", 1, 2)]) == [], "touching is no overlap"


def test_overlap_of_a_step_takes_in_the_deferred_update():
    actor = {n: Step({}, spans_of(n)[0]) for n in (1, 2, 3)}
    critic = {n: Step({}, spans_of(n)[1]) for n in (1, 2, 3)}
    middle = build_timeline(actor, critic, 2)
    # second 0 to 1: critic update 1 under rollout 2; 1.5 to 2: score under rollout; 2.5 to 4: under
    # the policy's update
    assert sum(end - start for start, end in middle.shared) == pytest.approx(1 + 0.5 + 1.5)
    assert middle.title == "Step 2: both groups worked at the same time for 3.00 s of 4.00 s (75%)"
    after = {2: Step({}, [("update", 1012.0, 1013.0)])}
    assert build_timeline(actor, after, 2).title == "Step 2: 4.00 s, in which nothing overlaps"


def test_a_page_of_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    run = Path("runs", "first")
    write_run(tmp_path / run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["splitppo", "report"])
    assert main() == 0
    heads, results, _, *more = capsys.readouterr().out.splitlines()
    assert heads.split()[:2] == ["run", "steps"]
    assert results.split()[:2] == ["first", "8"]
    assert more == [
        "Step 7: both groups worked at the same time for 3.00 s of 4.00 s (75%)",
        f"run folder: {run}",
        f"page: {run}/report.html",
    ]
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    out = tmp_path / "x.html"
    monkeypatch.setattr(sys, "argv", ["splitppo", "report", str(run), f"--out={out}"])
    assert main() == 0
    assert '"chosen":7' in out.read_text(encoding="utf-8")


def test_a_run_without_a_critic_has_no_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    run = write_run(tmp_path / "alone", critic=False)
    monkeypatch.setattr(sys, "argv", ["splitppo", "report", str(run)])
    assert main() == 0
    assert "no spans recorded: no timeline" in capsys.readouterr().out.splitlines()


def compared_run(
    folder: Path, settings: Config | None, metrics: dict[int, dict[str, float]]
) -> Path:
    """A run that holds nothing but these settings and metrics, those of the critic in the critic's
    file."""
    (folder / "metrics").mkdir(parents=True)
    for role in ("actor", "critic"):
        kept = [
            {"step": step, "spans": []}
            | {k: v for k, v in found.items() if k.startswith("critic/") == (role == "critic")}
            for step, found in metrics.items()
        ]
        (folder / "metrics" / f"{role}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in kept)
        )
    if settings:
        (folder / "config.toml").write_text(to_toml(settings))
    return folder


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Path]:
    """One with validations and twelve minutes long; one without, of another version, that recorded
    less."""
    long = {0: {"val/score/mean": 0.1, "timing_s/step": 60.0}}
    for step in range(1, 4):
        speed = {"timing_s/step": 220.0 + 5 * step, "perf/throughput": 1000.0 * step}
        long[step] = {"critic/score/mean": step / 10, **speed}
    long[2]["val/score/mean"], long[3]["val/score/mean"] = 0.75, 0.5
    first = compared_run(
        tmp_path / "long",
        Config(steps=3, seed=1, run_dir="long", ppo=PPOConfig(lam_value=0.1)),
        long,
    )
    second = compared_run(
        tmp_path / "short", Config(steps=9, seed=1, run_dir="x"), {1: {"critic/score/mean": 0.25}}
    )
    text = (second / "config.toml").read_text().replace(
        "lam = 1.0\n", ""
    ) + "[older]\nflag = [1.0]\n"
    (second / "config.toml").write_text(text)
    return [first, second]


def test_results_of_runs(two_runs: list[Path]):
    long, short = results_table(read_runs(two_runs))[1:]
    assert long == ("long", "3", "0.5", "0.75", "0.3", "230.0 s", "2,000", "12.5 min")
    assert short == ("short", "1", "-", "-", "0.25", "-", "-", "-")
    before = Run("before", "", {"timing_s/step": {0: 2.0}, "val/score/mean": {0: 0.5}}, {})
    assert results_table([before])[1] == ("before", "0", "0.5", "0.5", "-", "-", "-", "2.00 s")


def test_seeds_of_one_configuration_have_a_row_of_means(tmp_path: Path):
    folders = []
    for seed, held_out, speed in ((0, 0.25, 300.0), (1, 0.75, 500.0), (2, None, 1000.0)):
        metrics = {"critic/score/mean": float(seed), "perf/throughput": speed}
        if held_out is not None:
            metrics["val/score/mean"] = held_out
        config = Config(steps=9, seed=seed, run_dir=f"run{seed}")
        folders.append(compared_run(tmp_path / f"run{seed}", config, {1: metrics}))
    other = compared_run(tmp_path / "other", Config(steps=8), {1: {"critic/score/mean": 7.0}})
    _, *rows, means = results_table(read_runs([folders[0], other, *folders[1:]]))
    assert [row[0] for row in rows] == ["run0", "other", "run1", "run2"]
    assert means == ("run0: mean of 3 seeds", "1", "-", "-", "1", "-", "600", "-")
    means = results_table(read_runs([other, *folders[:2]]))[-1]
    assert means == ("run0: mean of 2 seeds", "1", "0.5", "0.5", "0.5", "-", "400", "-")


def test_settings_that_differ_between_runs(two_runs: list[Path]):
    heads, *rows = settings_table(read_runs(two_runs))
    assert heads == ("setting", "long", "short")
    assert rows == [
        ("steps", "3", "9"),
        ("ppo.lam", "1.0", "-"),
        ("ppo.lam_value", "0.1", "unset"),
        ("older.flag", "-", "[1.0]"),
    ]
    for run, given in zip(two_runs, (["steps"], ["ppo.lam_value", "run_dir"]), strict=True):
        assert settings_table(read_runs(two_runs))[1:] == rows, (
            "one of them has no record of what its user set"
        )
        (run / "given.json").write_text(json.dumps(given))
    assert [row[0] for row in settings_table(read_runs(two_runs))[1:]] == ["steps", "ppo.lam_value"]
    (two_runs[1] / "config.toml").unlink()
    assert settings_table(read_runs(two_runs)) == [heads], "a run without settings differs in none"


def test_a_table_has_at_most_120_columns():
    names = [f"run {i} of a long name" for i in range(10)]
    lines = as_text(
        [("setting", *names), ("data.files", *['["' + "a" * 200 + '"]' for _ in names])]
    )
    assert {len(line) for line in lines} == {120}
    assert lines[1].split()[0] == "data.files"
    assert lines[1].count("…") == 10
    assert as_text([("a", "b"), ("long one", "x\ny")]) == ["a         b", "long one  x y"]


def test_runs_over_each_other(
    two_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["splitppo", "report", *map(str, two_runs)])
    assert main() == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == "page: report_long_short.html"
    assert [line.split()[:2] for line in told[:3]] == [
        ["run", "steps"],
        ["long", "3"],
        ["short", "1"],
    ]
    assert ["ppo.lam", "1.0", "-"] in [line.split() for line in told]
    assert Path("report_long_short.html").is_file()


def test_runs_of_one_name_are_told_apart(tmp_path: Path):
    folders = [compared_run(tmp_path / seed / "run", None, {1: {}}) for seed in ("one", "two")]
    assert [run.name for run in read_runs(folders)] == list(map(str, folders))
    assert [run.colour for run in read_runs(folders)] == list(COLOURS[:2])


def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = write_run(tmp_path / "run", steps=2)
    (tmp_path / "empty" / "metrics").mkdir(parents=True)
    (tmp_path / "empty" / "metrics" / "actor.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    for args, says in (
        ([], "./runs holds no run with metrics"),
        (["nowhere"], "nowhere: no such folder"),
        (["empty"], "empty has no step in metrics/actor.jsonl"),
        ([str(run), "--out", "no/page.html"], "no/page.html.new: No such file or directory"),
        ([str(run), "nowhere"], "nowhere: no such folder"),
        ([str(run)] * 11, "11 runs: at most 10"),
    ):
        monkeypatch.setattr(sys, "argv", ["splitppo", "report", *args])
        status = main()
        told = capsys.readouterr()
        assert (status, told.out) == (2, "")
        assert told.err.startswith("error: ")
        assert told.err.count("\n") == 1
        assert says in told.err


def test_help_needs_no_torch():
    """Each command's --help, in one process; what a run's tools import with torch, they import when
    it is needed."""
    program = """if True:
        import sys
        from splitppo.__main__ import COMMANDS, main
        for name in COMMANDS:
            sys.argv = ["splitppo", name, "--help"]
            assert main() == 0, name
            assert "torch" not in sys.modules, f"{name} --help imports torch"
    """
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert all(
        f"usage: splitppo {name}" in done.stdout
        for name in ("report", "plan", "bench", "chat", "export", "push", "prepare")
    )
