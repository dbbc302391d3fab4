"""What the screen shows: the score first, no line over 120 columns, the way on at the end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from splitppo import train
from splitppo.config.cli import parse
from splitppo.data import PromptSet
from splitppo.errors import say
from splitppo.placement import place
from splitppo.rollout import Prompt
from splitppo.run.resolve import resolve
from splitppo.run.screen import SHOWN, WIDTH, Screen, opening, summary

FIGURES = dict.fromkeys(SHOWN, 1234.5678) | {"critic/score/mean": 0.6251}


def line_of(role: Any, step: int, steps: int, took: float, spans: Any, metrics: Any, capsys: Any) -> str:
    """What the screen shows of one step."""
    Screen(role, 0, steps).step(step, took, spans, metrics)
    return capsys.readouterr().out.rstrip("\n")


def test_a_steps_line_has_the_score_first_and_its_two_longest_spans(capsys) -> None:
    spans = {"wait_logprobs": 1.0, "update": 5.25, "score": 3.0}
    line = line_of("critic", 7, 13, 10.0, spans, {"critic/vf_loss": 2.0, "critic/score/mean": 0.6251}, capsys)
    head, tail = line.split("|")
    assert head.split() == ["[critic]", "step", "7/13", "score", "0.625", "loss", "2"]
    assert tail.split("  ")[1:] == ["update 5.25 s", "score 3.00 s", "ETA 0:01:00"]


def test_a_span_that_took_next_to_nothing_is_left_out(capsys) -> None:
    line = line_of("actor", 2, 2, 10.0, {"sync": 0.49, "rollout": 0.5}, {}, capsys)
    assert "sync" not in line
    assert line.endswith("|  rollout 0.50 s")


def test_no_line_is_too_wide_and_figures_go_before_spans_do(capsys) -> None:
    spans = {"wait_advantages": 1000.0, "wait_rollouts": 1000.0}
    line = line_of("critic", 1000, 1400, 2000.0, spans, FIGURES, capsys)
    assert len(line) <= WIDTH
    assert line.endswith("ETA 9 days, 6:13:20")
    assert "wait_advantages" in line
    assert "wait_rollouts" in line
    assert "held-out" in line  # as many as fit, from the first
    assert "mismatch" not in line


def test_the_rest_of_the_time_is_taken_from_the_median_step(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen("actor", 0, 10)
    for step, took in enumerate((60.0, 2.0, 2.0), 1):
        screen.step(step, took, {}, {})
    assert "ETA 0:00:14" in capsys.readouterr().out.splitlines()[-1]
    screen.step(10, 2.0, {}, {"actor/skipped": 1.0})
    last, skipped = capsys.readouterr().out.splitlines()
    assert "ETA" not in last
    assert "SKIPPED 1 " in skipped


def test_on_a_terminal_a_line_takes_the_place_of_the_progress_bar(monkeypatch, capsys) -> None:
    say("plain")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    say("line")
    assert capsys.readouterr().out == "plain\n\r\x1b[Kline\n"


def shown(*flags: str, start: int = 0) -> dict[str, str]:
    """The opening's lines by their titles; `settings` may take several."""
    config = parse(flags)
    placement = place(config.placement, world=3, local_world=3)
    resolved = resolve(config, placement, 3, torch.device("cpu"), probe=False)
    prompts = [Prompt("", [1] * n, "", "", {}, None) for n in (3, 9)]
    text = opening(resolved, Path("runs/a"), start, PromptSet(prompts, []), PromptSet(prompts[:1], []))
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 13
    return {line[:13].strip(): line[13:] for line in lines}


def test_the_opening_says_what_the_run_is() -> None:
    lines = shown("--ppo.kl-coef=0.1", "--steps=50", "--checkpoint.every=20", start=4)
    assert "2 prompts of 3 to 9 tokens; 1 held out" in lines["data"]
    assert lines["placement"] == "per_node: 2 actor, 1 critic"
    assert lines["policy"].endswith("on actor ranks")
    assert lines["value"] == "tiny, 87,617 parameters, on critic ranks"
    assert lines["reference"].endswith("on actor ranks")
    assert lines["one step"].startswith("128 rows (1 a prompt) of up to 6 new tokens")
    assert lines["steps"] == "4 to 50, held-out score every 10, checkpoint every 20"
    assert lines["run folder"].startswith("runs/a ")


def write(run: Path, role: str, *records: dict[str, Any]) -> None:
    path = run / "metrics" / f"{role}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"time": 0.0, "spans": [], **record}) + "\n" for record in records))


def test_the_summary_has_scores_times_weights_and_the_next_commands(tmp_path: Path) -> None:
    actor = [{"step": step, "timing_s/step": 10.0, "timing_s/update": 4.0, "timing_s/sync": 0.1} for step in range(4)]
    for step, score in ((0, 0.25), (2, 0.75), (3, 0.5)):
        actor[step]["val/score/mean"] = score
    write(tmp_path, "actor", *actor)
    scores = [{"step": step, "timing_s/step": 5.0, "timing_s/score": 5.0} for step in (1, 2, 3)]
    write(tmp_path, "critic", *({**line, "critic/score/mean": line["step"] / 10} for line in scores))
    lines = summary(tmp_path, parse(["--steps=3"]), tmp_path / "checkpoints" / "step_000003").splitlines()
    assert lines[0].split() == ["done", "3", "of", "3", "steps", "in", "0:00:40"]
    assert "score 0.250 at step 0, 0.500 at step 3; best 0.750 at step 2" in lines[1]
    assert "score 0.100 at step 1, 0.300 at step 3; best 0.300 at step 3" in lines[2]
    assert lines[3].endswith("update 40%")  # sync's 1 % is left out
    assert lines[4].endswith("score 100%")
    assert lines[5].endswith("step_000003")
    assert [line.split()[-2] for line in lines[6:]] == ["report", "chat", "export"]
    assert all(line.endswith(str(tmp_path)) for line in lines[6:])


def test_a_run_ends_with_the_summary_and_starting_it_again_does_nothing(tmp_path: Path, capfd: Any) -> None:
    flags = ["--steps=1", f"--run-dir={tmp_path / 'run'}", "--log.validate-every=0", "--reward.workers=1"]
    assert train.main(flags) == 0
    out = capfd.readouterr().out
    assert max(map(len, out.splitlines())) <= WIDTH
    assert f"splitppo export {tmp_path / 'run'}" in out.splitlines()[-1]
    assert str(tmp_path / "run" / "checkpoints" / "step_000001") in out
    before = sorted(tmp_path.rglob("*"))
    assert train.main(flags) == 0
    assert capfd.readouterr().out.startswith("already finished")
    assert sorted(tmp_path.rglob("*")) == before
    assert train.main([*flags, "--ppo.lam=0.5"]) == 2  # another run
