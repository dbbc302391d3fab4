"""What the screen shows: fixed columns, no line over 120 columns, the way on at the end."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from splitppo import train
from splitppo.config.cli import parse
from splitppo.data import PromptSet
from splitppo.placement import place
from splitppo.rollout import Prompt
from splitppo.run.resolve import resolve
from splitppo.run.screen import FIGURES, WIDTH, Screen, cut, fixed, opening, summary

VALIDATION = {"val/score/mean": 0.5}


def lines_of(
    role: Any, steps: int, *each: dict[str, Any], capsys: Any, took: float = 2.0, start: int = 0
) -> list[str]:
    """What the screen shows of some steps with these metrics."""
    screen = Screen(role, steps)
    for step, metrics in enumerate(each, start + 1):
        screen.step(step, took, metrics)
    return capsys.readouterr().out.splitlines()


def test_a_steps_line_names_its_figures_and_its_seconds(capsys) -> None:
    (line,) = lines_of(
        "critic", 13, {"critic/vf_loss": 2.0, "critic/score/mean": 0.6251}, capsys=capsys, start=6
    )
    expected = "[critic] step 7/13 score 0.625 ev - kl_row - loss 2.000 ETA 0:00:12 step 2.00 s"
    assert " ".join(line.split()) == expected
    (line,) = lines_of("actor", 13, {"actor/entropy": 1.25, "tokens": 300}, capsys=capsys)
    expected = "[actor] step 1/13 loss - entropy 1.250 len - cut - 150 tok/s step 2.00 s"
    assert " ".join(line.split()) == expected


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_columns_do_not_jump(role: Any, capsys) -> None:
    # of the narrow columns, not negative
    values = [0.0, 1.0, -0.2345, -4e-5, 12.345, -98.76, 12345.6, -1e-9, None]
    signed = [
        {m: v if size == 6 else v and min(abs(v), 99999) for _, m, _, size in FIGURES[role]}
        for v in values
    ]
    each = [{m: v for m, v in one.items() if v is not None} | {"tokens": 1e5} for one in signed]
    lines = lines_of(role, 1234, *each, capsys=capsys, took=75.0)
    names = r" (loss|entropy|len|cut|score|ev|kl_row|step|s) "
    starts = [[found.start() for found in re.finditer(names, line)] for line in lines]
    assert len(lines) == len(values)
    assert len({*map(tuple, starts)}) == 1
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].endswith(" step 75.0 s")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, " 0.000"), (-0.23456, "-0.235"), (-12.345, "-12.35"), (12345.6, " 12346"),
        (0.00004, " 4e-05"), (-0.00004, "-4e-05"), (1e9, " 1e+09"), (float("nan"), "   nan"),
        (None, "     -"),
    ],
)  # fmt: skip
def test_a_number_in_six_columns(value: float | None, text: str) -> None:
    assert fixed(value, 3, 6) == text


def test_short_steps_have_a_line_a_second_beside_those_that_always_have_one(capsys) -> None:
    each: list[dict[str, Any]] = [{} for _ in range(40)]
    each[7] = {"actor/skipped": 1.0}
    each[9] = VALIDATION
    lines = lines_of("actor", 40, *each, capsys=capsys, took=0.125)
    shown = [int(line.split()[2].split("/")[0]) for line in lines if "tok/s" in line]
    assert shown == [1, 8, 10, 18, 26, 34, 40]
    assert "SKIPPED 1 " in lines[2]
    assert lines[4] == "[actor]  step 10/40  held-out score 0.500"
    Screen("actor", 40).step(0, 1.0, VALIDATION)
    assert capsys.readouterr().out.splitlines() == ["[actor]  step  0/40  held-out score 0.500"]


def test_a_sample_stands_below_each_tenth_line(capsys) -> None:
    screen = Screen("critic", 50)
    for step in range(1, 22):
        samples = [{"question": f"q{step}\nnext", "response": "\x1b[2J" + "7" * 500, "score": 0.25}]
        screen.samples = [*samples, {"question": "weit: \u6c34" * 90, "response": "", "score": 1}]
        screen.step(step, 2.0, {})
    lines = capsys.readouterr().out.splitlines()
    assert [n for n, line in enumerate(lines) if "question" in line] == [1, 13, 25]
    assert lines[1] == "[critic] question  q1 next"
    assert lines[2].startswith("[critic] answer    \\x1b[2J7777")
    assert lines[2].endswith("7777  (score 0.25)")
    assert lines[14].endswith("(score 1)")
    assert max(map(len, lines)) <= WIDTH


def test_a_text_is_cut_in_its_middle() -> None:
    assert cut("12345678901234567890", 20) == "12345678901234567890"
    assert cut("12345678901234567890x", 20) == "1234567 ... 567890x"


def test_the_rest_of_the_time_is_taken_from_the_median_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = Screen("critic", 10)
    for step, took in enumerate((60.0, 2.0, 2.0), 1):
        screen.step(step, took, {})
    assert "ETA  0:00:14" in capsys.readouterr().out.splitlines()[-1]


def shown(*flags: str, start: int = 0) -> dict[str, str]:
    """The opening's lines by their titles; `settings` may take several."""
    config = parse(flags)
    placement = place(config.placement, world=3, local_world=3)
    resolved = resolve(config, placement, 3, torch.device("cpu"), probe=False)
    prompts = [Prompt("", [1] * n, "", "", {}, None) for n in (3, 9)]
    text = opening(
        resolved,
        Path("runs/a"),
        start,
        PromptSet(prompts, ["note: of training"]),
        PromptSet(prompts[:1], ["held out: a row"]),
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 13
    return {line[:13].strip(): line[13:] for line in lines}


def test_the_opening_says_what_the_run_is() -> None:
    lines = shown("--ppo.kl-coef=0.1", "--steps=50", "--checkpoint.every=20", start=4)
    assert "2 prompts of 3 to 9 tokens; 1 held out" in lines["data"]
    assert [*lines][:2] == ["note: of trai", "held out: a r"]
    assert lines["placement"] == "per_node: 2 actor, 1 critic"
    assert lines["policy"].endswith("on actor ranks")
    assert lines["value"] == "tiny, 87,617 parameters, on critic ranks"
    assert lines["reference"].endswith("on actor ranks")
    assert lines["one step"].startswith("128 rows (1 per prompt) of up to 6 new tokens")
    assert lines["steps"] == "4 to 50, held-out score every 10, checkpoint every 20"
    assert lines["run folder"].startswith("runs/a ")


def write(run: Path, role: str, *records: dict[str, Any]) -> None:
    path = run / "metrics" / f"{role}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps({"time": 0.0, "spans": [], **record}) + "\n" for record in records)
    )


def test_the_summary_has_scores_times_weights_and_the_next_commands(tmp_path: Path) -> None:
    actor = [
        {"step": step, "timing_s/step": 10.0, "timing_s/update": 4.0, "timing_s/sync": 0.1}
        for step in range(4)
    ]
    for step, score in ((0, 0.25), (2, 0.75), (3, 0.5)):
        actor[step]["val/score/mean"] = score
    write(tmp_path / "run", "actor", *actor)
    seconds = {"timing_s/step": 5.0, "timing_s/score": 5.0}
    waits = {"timing_s/update": 2.0, "perf/idle_share": 0.4, "perf/update_tflop": 1.0}
    scores = [{"step": step, **seconds, **waits} for step in (1, 2, 3, 4)]
    write(
        tmp_path / "run",
        "critic",
        *({**line, "critic/score/mean": line["step"] / 10} for line in scores),
    )
    folder = tmp_path / "a run; of 'mine'"
    shutil.move(tmp_path / "run", folder)
    saved = folder / "checkpoints" / "step_000003"
    lines = summary(folder, parse(["--steps=4"]), saved, ["step 2: all rows"]).splitlines()
    assert lines[0].split() == ["done", "3", "of", "4", "steps", "in", "0:00:40"]
    assert "score 0.250 at step 0, 0.500 at step 3; best 0.750 at step 2" in lines[1]
    assert "score 0.100 at step 1, 0.400 at step 4; best 0.400 at step 4" in lines[2]
    assert lines[3].endswith("step_000003")
    assert lines[4] == "warning      step 2: all rows"
    assert lines[5].startswith("next ")
    commands = [shlex.split(line.removeprefix("next")) for line in lines[5:]]
    assert commands == [["splitppo", tool, str(folder)] for tool in ("report", "chat", "export")]


@pytest.mark.ranks
def test_a_run_ends_with_the_summary_and_starting_it_again_trains_nothing(
    tmp_path: Path, capfd: Any
) -> None:
    flags = [
        "--steps=1",
        f"--run-dir={tmp_path / 'run'}",
        "--log.validate-every=0",
        "--reward.workers=1",
    ]
    assert train.main(flags) == 0
    out = capfd.readouterr().out
    assert max(map(len, out.splitlines())) <= WIDTH
    assert f"splitppo export {tmp_path / 'run'}" in out.splitlines()[-1]
    assert str(tmp_path / "run" / "checkpoints" / "step_000001") in out
    metrics = tmp_path / "run" / "metrics" / "actor.jsonl"
    before = metrics.read_bytes(), sorted(tmp_path.rglob("*"))
    assert train.main(flags) == 0
    assert "done         1 of 1 steps" in capfd.readouterr().out
    assert (metrics.read_bytes(), sorted(tmp_path.rglob("*"))) == before
    assert train.main([*flags, "--ppo.lam=0.5"]) == 2  # another run
