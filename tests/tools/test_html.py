"""The page of a run: what goes into it (pure functions), and what headless Chromium makes of it."""

import json
import math
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from splitppo.config import Config
from splitppo.config.toml import to_toml
from splitppo.errors import UserError
from splitppo.tools import page as html
from splitppo.tools.page import build_comparison, build_page, curve, embed, groups, thin
from splitppo.tools.runs import COLOURS, Column, Run, Span, Step, differences, flat, read_column
from splitppo.tools.timeline import build_timeline

ROOT = Path(__file__).parents[2]
EVIL = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>"
WHY = "needs Chromium and playwright: apt-get install -y chromium && pip install playwright"


def spans_of(step: int, length: float = 4.0) -> dict[str, list[Span]]:
    """A step of both columns, 4 s after the one before; the critic's update of it ends 1 s into the
    next step."""
    t = 1000.0 + 4.0 * step
    actor = [
        ("rollout", t, t + 2),
        ("wait_advantages", t + 2, t + 2.5),
        ("update", t + 2.5, t + length),
    ]
    critic = [
        ("wait_rollouts", t + 1, t + 1.5),
        ("score", t + 1.5, t + 2.5),
        ("novel_work", t + 2.5, t + 3),
    ]
    return {"actor": actor, "critic": [*critic, ("update", t + 3, t + 5)]}


def columns(steps: int) -> tuple[Column, Column]:
    actor, critic = (
        {n: Step({}, spans_of(n)[role]) for n in range(1, steps + 1)}
        for role in ("actor", "critic")
    )
    return actor, critic


def write_run(run: Path, steps: int = 12) -> Path:
    """A made-up run with two training samples a step and a validation whose last sample is an
    attack."""
    figures = {
        "actor": lambda n: {
            "actor/pg_loss": -0.1 / n,
            "actor/ppo_kl": math.nan if n == 5 else 0.01 * n,
            "tokens": 9.0,
        },
        "critic": lambda n: {"critic/score/mean": 0.1 * n, "critic/vf_loss": 1.0 / n},
    }
    (run / "metrics").mkdir(parents=True)
    for role, values in figures.items():
        rows = [
            {
                "step": n,
                "time": 1000.0 + n,
                **values(n),
                "timing_s/step": 4.0,
                "spans": spans_of(n)[role],
            }
            for n in range(1, steps + 1)
        ]
        if role == "actor":
            rows = [{"step": 0, "time": 1.0, "val/score/mean": 0.1, "spans": []}, *rows]
            rows[-1]["val/score/mean"] = 0.9
        (run / "metrics" / f"{role}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    for folder, chosen in (("samples", range(1, steps + 1)), ("validation", [steps])):
        (run / folder).mkdir()
        for n in chosen:
            texts = [f"answer {n}", EVIL if folder == "validation" else "a line\u2028and another"]
            rows = [
                {"step": n, "row": i, "score": 0.5, "prompt": "1+1=", "response": text}
                for i, text in enumerate(texts)
            ]
            rows[0] |= {"tokens": tokens_of(5, n)} if folder == "samples" else {}
            path = run / folder / f"step_{n:06d}.jsonl"
            path.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
                encoding="utf-8",
            )
    (run / "config.toml").write_text(to_toml(Config(steps=steps, run_dir="</script><b>")))
    (run / "versions.json").write_text(json.dumps({"torch": "9.9", "command": EVIL}))
    return run


def page_of(run: Path, chosen: int | None) -> str:
    actor, critic = (read_column(run / "metrics" / f"{name}.jsonl") for name in ("actor", "critic"))
    return build_page(run, actor, critic, chosen)


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
    assert found["rows"][0]["response"] == "x" * html.TEXT_CHARS + " … (3000 more characters)"
    assert found["rows"][0]["extra"] == '{"a": [1]}'
    assert html.read_samples(tmp_path / "none") == {"steps": 0, "rows": []}


def tokens_of(count: int, value: float) -> dict[str, list[Any]]:
    """Tokens of a row whose last one the environment said."""
    numbers = [value + i for i in range(count - 1)]
    texts = ["x", EVIL, "\n", *["é"] * (count - 4), ""]
    return {
        "text": texts,
        "value": [*numbers, None],
        "advantage": [*numbers, None],
        "reward": [*numbers, None],
    }


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
    assert len(rows) == 270
    assert rows[0].keys() == {"step", "question", "tokens"}
    lit = [row["step"] for row in rows if "tokens" in row]
    assert len(lit) == html.TOKEN_STEPS * html.TOKEN_ROWS
    assert (lit[0], lit[-1]) == (1, 30)
    assert {len(cells) for cells in rows[0]["tokens"].values()} == {html.TOKENS}
    assert rows[0]["tokens"]["value"][:3] == [1, "NaN", 3]
    assert len(embed(rows)) < 3_000_000


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
    assert data["runs"] == [
        {"name": "long", "colour": COLOURS[0]},
        {"name": EVIL, "colour": COLOURS[1]},
    ]
    (_, heads, results), (_, names, settings) = data["tables"]
    assert [dict(zip(heads, row, strict=True))["steps"] for row in results] == ["10", "4"]
    assert (names, settings) == (["setting", "long", EVIL], [["seed", "1", "2"]])
    points = {n: float(n % 7) for n in range(9000)}
    many = data_of(build_comparison([Run(str(i), "", {"x": points}, {}) for i in range(10)]))
    ((_, ((_, lines),)),) = many["groups"]
    assert sum(len(steps) for _, steps, _ in lines) <= html.CURVE_POINTS


def test_page_is_one_file_with_the_run_in_it(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run"), chosen=7)
    assert len(Scripts(page).found) == 2, "the data and the page's own"
    assert not re.search(r"""(src|href)=["'](?!#|data:)|@import|url\((?!#)""", page), (
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
    assert data["tables"][0][2] == [["steps", "12", "60"], ["run_dir", '"</script><b>"', "unset"]]
    assert data["chosen"] == 7
    assert [timeline["step"] for timeline in data["timelines"]] == [*range(1, 13)]
    assert data["colours"]["novel_work"].startswith("#")
    assert data["placement"] == ["no placement.txt in the run's folder"]
    assert data["samples"]["held-out"]["rows"][-1]["response"] == EVIL


def test_page_of_a_bare_run(tmp_path: Path):
    data = data_of(
        build_page(tmp_path, {1: Step({"step": 1.0, "actor/pg_loss": 1.0}, [])}, {}, None)
    )
    assert ([rows for *_, rows in data["tables"]], data["timelines"], data["time"]) == (
        [None, None],
        [],
        None,
    )
    (tmp_path / "placement.txt").write_text("placement per_node: 1 actor, 1 critic\n  rank 0\n")
    (tmp_path / "config.toml").write_text("steps = ")
    with pytest.raises(UserError, match=r"config.toml can't be read .*; fix or remove it"):
        build_page(tmp_path, {1: Step({}, [])}, {}, None)
    (tmp_path / "config.toml").unlink()
    data = data_of(build_page(tmp_path, {1: Step({}, [])}, {}, None))
    assert data["placement"] == ["placement per_node: 1 actor, 1 critic", "  rank 0"]


def test_page_of_a_long_run_is_bounded(tmp_path: Path):
    names = [f"critic/thing{i}/mean" for i in range(5)]
    actor, critic = columns(6000)
    actor = {n: Step(dict.fromkeys(names, math.sin(n)), step.spans) for n, step in actor.items()}
    page = build_page(tmp_path, actor, critic, 3000)
    data = data_of(page)
    kept = [timeline["step"] for timeline in data["timelines"]]
    assert kept == [3000, *range(6000 - html.TIMELINES + 2, 6001)], "the chosen step and the last"
    assert all(
        len(line[1]) <= html.CURVE_POINTS for _, metrics in data["groups"] for _, [line] in metrics
    )
    assert len(page) < 1_500_000


# ---- in a browser


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason=WHY)
    if (path := find_chromium()) is None:
        pytest.skip(WHY)
    with api.sync_playwright() as playwright:
        # root, as CI is, has no sandbox; the pages are this test's own
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("page") / "run")
    path = run / "report.html"
    path.write_text(page_of(run, chosen=7), encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Any, report_page: Path) -> Iterator[Any]:
    """The page, opened; whatever a test does with it, it logs no error and asks for nothing but
    itself."""
    opened = browser.new_page(viewport={"width": 1300, "height": 900})
    told: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: told.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: told.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(report_page.as_uri())
    yield opened
    assert told == []
    assert asked == [report_page.as_uri()]
    opened.close()


@pytest.mark.browser
def test_curves_are_drawn(page: Any):
    charts = page.locator(".chart")
    metrics = [
        "actor/pg_loss",
        "actor/ppo_kl",
        "tokens",
        "critic/score/mean",
        "critic/vf_loss",
        "val/score/mean",
    ]
    metrics += ["timing_s/step", "critic/timing_s/step"]
    assert sorted(charts.evaluate_all("all => all.map(one => one.dataset.metric)")) == sorted(
        metrics
    )
    paths = page.locator(".chart path.curve")
    assert paths.count() == len(metrics)
    assert page.locator('[data-metric="actor/ppo_kl"] path').get_attribute("d").count("M") == 2, (
        "a gap at the NaN"
    )
    line = page.locator('[data-metric="critic/score/mean"] path')
    ends = line.evaluate(
        "p => [0, p.getTotalLength()].map(at => p.getPointAtLength(at)).map(({x, y}) => "
        "[Math.round(x), Math.round(y)])"
    )
    assert ends[1][0] - ends[0][0] > 150, "step 1 to step 12 of an axis from 0"
    assert ends[0][1] - ends[1][1] > 80, "the score rises"
    page.evaluate(
        "s => { const e = byId('smoothing'); e.value = s; e.dispatchEvent(new Event('input')); }",
        0.9,
    )
    assert paths.count() == 2 * len(metrics), "the raw curve stays behind the smooth one"
    page.fill("#metric-filter", "loss")
    assert page.locator(".chart:visible").count() == 2


@pytest.mark.browser
def test_hover_reads_the_same_step_in_every_chart(page: Any):
    score, loss = (
        page.locator(f'[data-metric="{name}"]') for name in ("critic/score/mean", "actor/pg_loss")
    )
    assert score.locator("output").inner_text() == "step 12: 1.2"
    box = score.locator("> svg").bounding_box()
    left, right = box["x"] + 50, box["x"] + box["width"] - 10  # the plot: steps 0 to 12
    page.mouse.move(left + (right - left) * 4 / 12 + 1, box["y"] + 40)
    assert score.locator("output").inner_text() == "step 4: 0.4"
    assert loss.locator("output").inner_text() == "step 4: -0.025"
    assert loss.locator("g[visibility=visible] circle").count() == 1
    page.mouse.move(2, 2)
    assert score.locator("output").inner_text() == "step 12: 1.2"
    assert page.locator("g[visibility=visible]").count() == 0


@pytest.mark.browser
def test_timeline_follows_the_chosen_step(page: Any):
    title, bars = page.locator("#timeline-title"), page.locator("#timeline-svg rect[data-span]")
    own = page.locator("#timeline-svg rect[data-span]:not(.other-step)")
    assert title.inner_text() == "Step 7: both columns worked at once for 3.00 s of 4.00 s (75%)"
    spans = own.evaluate_all(
        "all => all.map(one => [one.dataset.lane, one.dataset.span, one.dataset.step])"
    )
    assert spans == [
        [lane, name, "7"] for lane, column in spans_of(7).items() for name, *_ in column
    ]
    assert page.locator("#timeline-svg rect.both").count() == 4
    assert bars.count() > len(spans), "the neighbours' spans are there"
    tops = own.evaluate_all(
        "all => all.map(one => [one.dataset.lane, one.getBoundingClientRect().top])"
    )
    assert max(y for lane, y in tops if lane == "actor") < min(
        y for lane, y in tops if lane == "critic"
    )
    rollout = page.locator('rect[data-span="rollout"]:not(.other-step)')
    wait = page.locator('rect[data-span="wait_advantages"]:not(.other-step)')
    assert rollout.bounding_box()["width"] == pytest.approx(
        4 * wait.bounding_box()["width"], rel=0.02
    ), "2 and 0.5 s"
    assert "hatch" in wait.evaluate("one => getComputedStyle(one).fill")
    rollout.hover()
    assert (
        page.locator("#span-readout").inner_text()
        == "actor: rollout of step 7, 2.00 s, from 0.000 s to 2.000 s"
    )
    page.select_option("#step-select", label="1")
    assert title.inner_text() == "Step 1: both columns worked at once for 2.00 s of 4.00 s (50%)"
    assert set(own.evaluate_all("all => all.map(one => one.dataset.step)")) == {"1"}
    page.locator("#step-slider").press("ArrowRight")
    assert title.inner_text().startswith("Step 2:")
    assert page.locator("#step-select").evaluate("one => one.selectedOptions[0].text") == "2"
    assert "score\t\t1.00 s" in page.locator("#span-sums").inner_text()


@pytest.mark.browser
def test_samples_filter_and_stay_text(page: Any):
    lines = page.locator("#samples tr:visible:has(td)")
    assert lines.count() == 26
    page.select_option("#sample-step", "12")
    assert lines.count() == 4
    page.select_option("#sample-kind", "training")
    assert lines.count() == 2
    page.fill("#sample-search", "ANSWER 12")
    assert lines.count() == 1
    assert page.locator("#sample-count").inner_text() == "1 of 26 rows"
    page.fill("#sample-search", "window.hacked")
    assert lines.count() == 0
    page.select_option("#sample-kind", "held-out")
    assert lines.count() == 1
    assert EVIL in lines.first.inner_text()
    assert page.locator("#facts").inner_text().count("</script><b>") == 1
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, #samples script, #facts b").count() == 0


@pytest.mark.browser
def test_tokens_are_shaded_by_value_or_advantage(page: Any):
    assert page.locator("#token-step").inner_text().splitlines()[:2] == ["12", "11"]
    spans = page.locator(".tokens").first.locator("span")
    assert spans.all_inner_texts() == ["x", EVIL, "↵\n", "é", "▯"]
    shades = (
        "all => all.map(one => getComputedStyle(one).backgroundColor.match(/[\\d.]+/g).map(Number))"
    )
    low, *_, high, observed = spans.evaluate_all(shades)
    assert low[2] > low[0], "advantages have their middle at 0, and all of these are above"
    assert high[3] > low[3] > 0 == observed[3]
    page.check("[name=figure][value=value]")
    page.select_option("#token-step", "1")
    low, *_, high, _ = spans.evaluate_all(shades)
    assert low[0] > low[2], "values have theirs between the extremes of all steps"
    spans.nth(1).hover()
    assert (
        page.locator("#token-readout").inner_text()
        == f"{json.dumps(EVIL)}: value 2, advantage 2, reward 2"
    )
    spans.nth(4).hover()
    assert (
        page.locator("#token-readout").inner_text() == '"": value none, advantage none, reward none'
    )


@pytest.mark.browser
def test_runs_lie_over_each_other(browser: Any, tmp_path: Path):
    told: list[str] = []
    (tmp_path / "both.html").write_text(compared(), encoding="utf-8")
    opened = browser.new_page(viewport={"width": 1300, "height": 900})
    opened.on("console", lambda message: told.append(message.text))
    opened.on("pageerror", lambda error: told.append(str(error)))
    opened.goto((tmp_path / "both.html").as_uri())
    score = opened.locator('[data-metric="critic/score/mean"]')
    colours = "all => all.map(one => one.getAttribute('stroke'))"
    assert score.locator("path").evaluate_all(colours) == list(COLOURS[:2])
    assert opened.locator('[data-metric="val/score/mean"] path').evaluate_all(colours) == [
        COLOURS[0]
    ]
    assert score.locator("output").inner_text().split() == ["last:", "1", "0.5"]
    box = score.locator("> svg").bounding_box()
    opened.mouse.move(box["x"] + 50 + (box["width"] - 60) * 2 / 10, box["y"] + 40)
    assert score.locator("output").inner_text().split() == ["step", "2:", "0.2", "not", "finite"]
    opened.locator("#run-tools input").nth(1).uncheck()
    assert score.locator("path").evaluate_all(colours) == [COLOURS[0]]
    assert opened.locator("#facts").inner_text().count(EVIL) == 2
    assert not opened.locator("#one-run").is_visible()
    assert opened.evaluate("window.hacked") is None
    assert told == []
    opened.close()


@pytest.mark.browser
def test_light_and_dark(browser: Any, report_page: Path):
    colours: list[str] = []
    for scheme in ("light", "dark"):
        opened = browser.new_page(color_scheme=scheme)
        opened.goto(report_page.as_uri())
        colours.append(opened.evaluate("getComputedStyle(document.body).backgroundColor"))
        opened.close()
    light, dark = (sum(map(int, re.findall(r"\d+", colour))) for colour in colours)
    assert light > 600 > 150 > dark


@pytest.mark.browser
def test_run_without_spans_and_samples(browser: Any, tmp_path: Path):
    told: list[str] = []
    path = tmp_path / "bare.html"
    path.write_text(
        build_page(tmp_path, {1: Step({"actor/pg_loss": 1.0}, [])}, {}, None), encoding="utf-8"
    )
    opened = browser.new_page()
    opened.on("pageerror", lambda error: told.append(str(error)))
    opened.goto(path.as_uri())
    assert opened.locator("#timeline-title").inner_text() == "No step has recorded spans."
    assert opened.locator("#sample-count").inner_text() == "0 of 0 rows"
    assert opened.locator(".chart circle").count() == 2, "one point, and the cursor's"
    assert told == []
    opened.close()
