"""The page of a run: what goes into it. tests/tools/test_browser.py has what a browser makes of
it."""

import json
import math
import re
import tomllib
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pages import EVIL, TURNS, bare_run, columns, page_of, tokens_of, write_run

from splitppo.config import Config
from splitppo.config.toml import to_toml
from splitppo.errors import UserError
from splitppo.tools import page as html
from splitppo.tools.page import build_comparison, build_page, clocks, curve, embed, groups, thin
from splitppo.tools.runs import COLOURS, Run, Step, differences, flat
from splitppo.tools.timeline import build_timeline


class Scripts(HTMLParser):
    """The scripts of a page as a browser cuts them."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.found.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.found[-1] = (self.found[-1][0], self.found[-1][1] + data)


def data_of(page: str) -> dict[str, Any]:
    return json.loads(
        next(text for attributes, text in Scripts(page).found if attributes.get("id") == "data")
    )


def test_thinning_is_even_and_keeps_both_ends():
    assert thin(range(5), 5) == [0, 1, 2, 3, 4]
    assert thin(range(9), 3) == [0, 4, 8]
    assert thin(range(9), 2) == [0, 8]
    assert len(thin(range(1000), 75)) == len(set(thin(range(1000), 75))) == 75


def test_thinned_curve_keeps_its_spikes():
    points = {n: math.sin(n / 900) for n in range(10_000)}
    points |= {4321: 50.0, 7777: -50.0, 2500: math.nan}
    steps, values = curve(points, 300)
    assert len(steps) <= 300
    kept = dict(zip(steps, values, strict=True))
    assert (kept[4321], kept[7777], kept[2500]) == (50.0, -50.0, None)
    assert {0, 9999} <= set(steps)
    assert steps == sorted(set(steps))
    assert max(b - a for a, b in pairwise(steps)) <= 2 * 10_000 / 99 + 2, "no stretch is left out"
    assert curve({2: 0.5, 1: math.inf}, 7) == ([1, 2], [None, 0.5])


def test_layout_of_a_step_has_its_neighbours_spans_that_are_in_view():
    actor, critic = columns(3)
    drawn = build_timeline(actor, critic, 2)
    lanes = dict(drawn.lanes)
    assert drawn.view == pytest.approx((-0.24, 5.2))
    assert [name for step, name, *_ in lanes["actor"] if step == 2] == [
        "rollout",
        "wait_advantages",
        "update",
    ]
    assert (1, "update", -1.0, 1.0) in lanes["critic"], (
        "the update of the step before is under this rollout"
    )
    assert (1, "score", -2.5, -1.5) not in lanes["critic"], "out of view"
    assert drawn.shared == [(0.0, 1.0), (1.5, 2.0), (2.5, 3.0), (3.0, 4.0)]


def test_a_metric_is_in_the_group_of_its_name_and_scores_come_first():
    known = [
        "tokens",
        "actor/pg_loss",
        "critic/lr",
        "critic/timing_s/score",
        "val/score/mean",
        "actor/entropy",
        "time",
    ]
    found = groups([{name: {1: 0.5} for name in names} for names in (known[:5], known[3:])])
    assert {title: [name for name, _ in metrics] for title, metrics in found} == {
        "val/score": ["val/score/mean"],
        "actor": ["actor/entropy", "actor/pg_loss"],
        "critic": ["critic/lr"],
        "critic/timing_s": ["critic/timing_s/score"],
        "others": ["tokens"],
    }
    assert [title for title, _ in found] == [
        "val/score",
        "actor",
        "critic",
        "critic/timing_s",
        "others",
    ]


def test_settings_that_differ():
    defaults = flat(asdict(Config()))
    assert differences([flat(tomllib.loads(to_toml(Config()))), defaults]) == []
    settings = tomllib.loads(to_toml(Config(steps=7)))
    settings["ppo"] |= {"lam": 0.9}
    settings["older"] = {"flag": "now"}
    del settings["ppo"]["value_clip"]
    assert differences([flat(settings), defaults]) == [
        ("steps", "7", "60"),
        ("ppo.lam", "0.9", "1.0"),
        ("ppo.value_clip", "-", "0.2"),
        ("older.flag", '"now"', "-"),
    ]


def test_embedded_data_ends_no_script():
    data = {"a": EVIL, "b": "<!-- <script>", "c": "\ud800 \u2028 &amp;"}
    text = embed(data)
    assert json.loads(text) == data
    assert not set("<>&") & set(text)
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed([math.nan])


def test_samples_are_bounded_and_thinned_by_step(tmp_path: Path):
    for n in range(1, 201):
        rows = [
            {"step": n, "row": i, "response": "x" * 5000, "extra": {"a": [n]}} for i in range(9)
        ]
        (tmp_path / f"step_{n:06d}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    found = html.read_samples(tmp_path)
    steps = [row["step"] for row in found["rows"]]
    assert found["steps"] == 200
    assert len(steps) == html.SAMPLE_ROWS
    assert (steps[0], steps[-1], len(set(steps))) == (1, 200, html.SAMPLE_STEPS)
    assert found["rows"][0]["response"] == "x" * html.TEXT_CHARS + " … (3500 more characters)"
    assert found["rows"][0]["extra"] == '{"a": [1]}'
    assert html.read_samples(tmp_path / "none") == {"steps": 0, "rows": []}


def test_samples_show_the_question_and_a_few_rows_their_tokens(tmp_path: Path):
    for n in range(1, 31):
        row = {
            "step": n,
            "question": "1+1?",
            "prompt": "<|user|>1+1?",
            "tokens": tokens_of(1200, n),
        }
        row["tokens"]["value"][1] = math.nan
        (tmp_path / f"step_{n:06d}.jsonl").write_text((json.dumps(row) + "\n") * 9)
    rows = html.read_samples(tmp_path)["rows"]
    assert len(rows) == html.SAMPLE_ROWS
    assert rows[0].keys() == {"step", "question", "tokens", "first_value"}
    assert all(row["first_value"] == row["step"] for row in rows), "also without their tokens"
    lit = [row["step"] for row in rows if "tokens" in row]
    assert len(lit) == html.TOKEN_STEPS * html.TOKEN_ROWS
    assert (lit[0], lit[-1]) == (1, 30)
    assert {len(cells) for cells in rows[0]["tokens"].values()} == {html.TOKENS}
    assert rows[0]["tokens"]["value"][:3] == [1, "NaN", 3]
    assert len(embed(rows)) < 1_500_000


def test_turns_stand_in_the_place_of_the_response(tmp_path: Path):
    row = {"step": 1, "response": "all of it", "turns": TURNS}
    long = [{"role": "tool", "content": "x" * 900}] * 100
    lines = [json.dumps(row), json.dumps(row | {"turns": long})]
    (tmp_path / "step_000001.jsonl").write_text("\n".join(lines) + "\n")
    first, second = html.read_samples(tmp_path)["rows"]
    assert first == {"step": 1, "turns": TURNS}
    assert len(second["turns"]) == html.TURNS
    assert second["turns"][0]["content"] == "x" * 200 + " … (700 more characters)"


def compared() -> str:
    """Two runs, the second shorter and without validation."""
    long = {
        "val/score/mean": {0: 0.0, 10: 1.0},
        "critic/score/mean": {n: n / 10 for n in range(1, 11)},
    }
    short = {"critic/score/mean": {n: math.nan if n == 2 else 0.5 for n in range(1, 5)}}
    return build_comparison(
        [Run("long", COLOURS[0], long, {"seed": "1"}), Run(EVIL, COLOURS[1], short, {"seed": "2"})]
    )


def test_page_of_two_runs():
    data = data_of(compared())
    curves = {name: lines for _, metrics in data["groups"] for name, lines in metrics}
    assert curves["val/score/mean"] == [[0, [0, 10], [0.0, 1.0]]]
    assert [line[0] for line in curves["critic/score/mean"]] == [0, 1]
    assert curves["critic/score/mean"][1] == [1, [1, 2, 3, 4], [0.5, None, 0.5, 0.5]]
    assert [[run["name"], run["colour"]] for run in data["runs"]] == [
        ["long", COLOURS[0]],
        [EVIL, COLOURS[1]],
    ]
    (_, heads, results), (_, names, settings) = data["tables"]
    assert [dict(zip(heads, row, strict=True))["steps"] for row in results] == ["10", "4"]
    assert (names, settings) == (["setting", "long", EVIL], [["seed", "1", "2"]])
    points = {n: float(n % 7) for n in range(9000)}
    series = {f"x{i}": points for i in range(20)}
    many = data_of(build_comparison([Run(str(i), "", series, {}) for i in range(10)]))
    lines = [line for _, metrics in many["groups"] for _, found in metrics for line in found]
    assert len(lines) == 200
    assert sum(len(steps) for _, steps, _ in lines) <= html.POINTS


def test_seeds_are_runs_whose_settings_differ_in_nothing_else():
    settings = [{"seed": "0", "lr": "1"}, {"seed": "0", "lr": "2"}, {"seed": "1", "lr": "2"}]
    settings += [{"seed": "1", "lr": "1", "run_dir": "x"}, {}, {}]
    runs = [Run(str(i), "", {}, found) for i, found in enumerate(settings)]
    assert html.seeds(runs) == [0, 1, 1, 0, 4, 5], "without settings nobody knows"


def test_tokens_and_hours_are_sums_over_the_steps():
    found = clocks({"tokens": {2: 5.0, 1: 4.0}, "timing_s/step": {0: 1800.0, 1: 3600.0}})
    assert found == {"tokens": ([1, 2], [4.0, 9.0]), "hours": ([0, 1], [0.5, 1.5])}
    assert clocks({}) == {}


def test_page_is_one_file_with_the_run_in_it(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run"), chosen=7)
    assert len(Scripts(page).found) == 3, "the data, uPlot, and the page's own"
    assert "Copyright (c) 2022 Leon Sorokin" in page
    assert not re.search(r"""\s(src|href)=["'](?!#|data:)|@import|url\((?!#)""", page), (
        "it loads nothing"
    )
    data = data_of(page)
    curves = {
        name: (steps, values)
        for _, metrics in data["groups"]
        for name, [[_, steps, values]] in metrics
    }
    assert curves["actor/ppo_kl"][0] == [*range(1, 13)]
    assert curves["actor/ppo_kl"][1][3:6] == [0.04, None, 0.06], "what isn't finite is a gap"
    assert curves["val/score/mean"] == ([0, 12], [0.1, 0.9])
    assert not {"step", "time", "critic/step"} & curves.keys()
    assert data["tables"][0][2] == [
        ["steps", "12", "60"],
        ["run_dir", '"</script><b>"', "unset"],
        ["rollout.samples", "2", "1"],
    ]
    assert data["chosen"] == 7
    assert [timeline["step"] for timeline in data["timelines"]] == [*range(1, 13)]
    assert data["colours"]["novel_work"].startswith("#")
    assert data["placement"] == ["no placement.txt in the run's folder"]
    assert data["samples"]["held-out"]["rows"][-1]["response"] == EVIL
    assert [found["per_prompt"] for found in data["samples"].values()] == [2, 1]


def test_page_of_a_bare_run(tmp_path: Path):
    run = bare_run({"step": 1.0, "actor/pg_loss": 1.0})
    data = data_of(build_page(tmp_path, run, None))
    tables = [rows for *_, rows in data["tables"]]
    assert (tables, data["timelines"], data["time"]) == ([None, None], [], None)
    (tmp_path / "placement.txt").write_text("placement per_node: 1 actor, 1 critic\n  rank 0\n")
    (tmp_path / "versions.json").write_text("steps = ")
    with pytest.raises(UserError, match=r"versions.json can't be read .*; fix or remove it"):
        build_page(tmp_path, run, None)
    (tmp_path / "versions.json").unlink()
    data = data_of(build_page(tmp_path, run, None))
    assert data["placement"] == ["placement per_node: 1 actor, 1 critic", "  rank 0"]


def test_page_of_a_long_run_is_bounded(tmp_path: Path):
    names = [f"critic/thing{i}/mean" for i in range(5)]
    actor, critic = columns(6000)
    actor = {n: Step(dict.fromkeys(names, math.sin(n)), step.spans) for n, step in actor.items()}
    series = {name: {n: math.sin(n) for n in actor} for name in names}
    run = Run("long", "", series, {}, (actor, critic))
    page = build_page(tmp_path, run, 3000)
    data = data_of(page)
    kept = [timeline["step"] for timeline in data["timelines"]]
    assert kept == [3000, *range(6000 - html.TIMELINES + 2, 6001)], "the chosen step and the last"
    assert all(
        len(line[1]) <= html.CURVE_POINTS for _, metrics in data["groups"] for _, [line] in metrics
    )
    assert len(page) < 600_000
