"""What headless Chromium makes of a report's page: the curves and what one does with them, the
timeline, the rows, and a page that is loaded again."""

import csv
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import (
    EVIL,
    TURNS,
    bare_run,
    page_of,
    spans_of,
    tokens_of,
    write_metrics,
    write_rows,
    write_run,
)

from splitppo.tools.page import build_comparison, build_page
from splitppo.tools.runs import COLOURS, read_runs

pytestmark = pytest.mark.browser
WHY = "needs Chromium and playwright: apt-get install -y chromium && pip install playwright"
SCORE = '[data-metric="critic/score/mean"]'


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason=WHY)
    if (path := find_chromium()) is None:
        pytest.skip(WHY)
    with api.sync_playwright() as playwright:
        # root, as CI is, has no sandbox; the pages are this test's own
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        # one tab for all: each has a process of its own
        yield started.new_page(viewport={"width": 1300, "height": 900})
        started.close()


class Opener:
    """Opens one page after another in a tab. Whatever a test does with them, they log no error and
    ask for nothing but themselves."""

    def __init__(self, tab: Any, folder: Path):
        self.tab = tab
        self.folder = folder
        self.opened: list[str] = []
        self.wrong: list[str] = []
        self.listeners: dict[str, Any] = {
            "console": lambda message: self.wrong.append(f"{message.type}: {message.text}"),
            "pageerror": lambda error: self.wrong.append(str(error)),
            "request": lambda asked: self.wrong.append(asked.url) if self.strange(asked) else None,
        }
        for event, listener in self.listeners.items():
            tab.on(event, listener)

    def strange(self, request: Any) -> bool:
        return request.url != self.opened[-1]

    def __call__(self, text: str) -> Any:
        path = self.folder / f"page{len(self.opened)}.html"
        path.write_text(text, encoding="utf-8")
        self.close()
        self.opened.append(path.as_uri())
        self.tab.goto(self.opened[-1])
        return self.tab

    def close(self) -> None:
        """Leaves the page."""
        if self.opened:
            assert self.tab.evaluate("window.hacked") is None
            self.tab.mouse.move(0, 0)
        assert self.wrong == []


@pytest.fixture
def show(tab: Any, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tab, tmp_path)
    yield opener
    opener.close()
    for event, listener in opener.listeners.items():
        tab.remove_listener(event, listener)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(write_run(tmp_path_factory.mktemp("page") / "run"), chosen=7)


@pytest.fixture
def page(show: Opener, text: str) -> Any:
    return show(text)


def drawn(page: Any, metric: str) -> Any:
    """Of the first card of a metric: its scales, and [x, y] of its curve."""
    return page.evaluate(
        """metric => {
            const {plot, lines} = charts.find((chart) => chart.name === metric);
            const {x, y} = plot.scales, at = plot.series.findIndex((series) => series.line);
            return {
                x: [x.min, x.max], y: [y.min, y.max], log: [x.distr === 3, y.distr === 3],
                points: plot.data[0].map((x, i) => [x, plot.data[at][i]]), lines: lines.length,
            };
        }""",
        metric,
    )


def drag(page: Any, plot: Any, start: float, end: float) -> None:
    """Drags over these shares of a plot's width."""
    box = plot.bounding_box()
    page.mouse.move(box["x"] + start * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()


def test_overview_is_on_top_and_constants_are_folded_away(page: Any):
    cards = page.locator(".chart:visible")
    names = "all => all.map(one => one.dataset.metric)"
    overview = ["critic/score/mean", "val/score/mean", "actor/ppo_kl", "timing_s/step"]
    assert cards.evaluate_all(names) == overview
    sizes = [card.bounding_box() for card in cards.all()]
    assert [size["width"] > 600 for size in sizes] == [True, True, False, False]
    assert all(size["height"] > 230 and size["y"] + size["height"] < 900 for size in sizes)
    page.click("#open-all")
    small = page.locator("#groups .chart:visible")
    assert small.evaluate_all(names) == [
        "critic/score/mean",
        "val/score/mean",
        "actor/pg_loss",
        "actor/ppo_kl",
        "critic/vf_loss",
    ]
    constants = page.locator(".constants td").all_inner_texts()
    assert dict(zip(constants[::2], constants[1::2], strict=True)) == {
        "actor/lr": "0.001",
        "critic/timing_s/step": "4",
        "timing_s/step": "4",
        "tokens": "9",
    }
    page.fill("#metric-filter", "loss")
    assert small.count() == 2
    page.fill("#metric-filter", "lr")
    assert (small.count(), page.locator(".constants tr:visible").count()) == (0, 2)


def test_curves_are_drawn(page: Any):
    found = drawn(page, "critic/score/mean")
    assert found["points"] == [[n, pytest.approx(0.1 * n)] for n in range(1, 13)]
    assert (found["x"], found["log"]) == ([0, 12], [False, False])
    assert dict(drawn(page, "actor/ppo_kl")["points"])[5] is None, "a gap at the NaN"
    inked = page.locator(f"#overview {SCORE} canvas").evaluate(
        """canvas => {
            const {width, height} = canvas, columns = new Set();
            const found = canvas.getContext("2d").getImageData(0, 0, width, height).data;
            for (let i = 0; i < found.length; i += 4) {
                // the curve's blue
                const blue = found[i + 2] - found[i] > 80 && found[i + 3] > 200;
                if (blue) columns.add((i / 4) % width);
            }
            return columns.size / width;
        }"""
    )
    assert inked > 0.75, "steps 1 to 12 of an axis from 0"
    page.evaluate(
        "s => { const e = byId('smoothing'); e.value = s; "
        "e.dispatchEvent(new Event('input', {bubbles: true})); }",
        0.9,
    )
    smooth = dict(drawn(page, "critic/score/mean")["points"])
    assert smooth[1] > 0.1 * 1.1 or smooth[1] == pytest.approx(0.1)
    assert 0.5 < smooth[12] < 1.1, "it lags behind"
    assert "smooth" in page.locator(f"#overview {SCORE} output").inner_text()


def test_hover_reads_the_same_step_in_every_chart(page: Any):
    page.click("#open-all")
    score = page.locator(f"#overview {SCORE}")
    loss = page.locator('[data-metric="actor/pg_loss"]')
    page.evaluate("window.scrollTo(0, 0)")
    assert score.locator("output").inner_text() == "1.2 step 12, from 0.1 to 1.2"
    box = score.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 4 / 12 + 1, box["y"] + 40)
    assert score.locator("output").inner_text() == "0.4 step 4"
    assert loss.locator("output").inner_text() == "-0.025 step 4"
    page.mouse.move(2, 2)
    assert score.locator("output").inner_text() == "1.2 step 12, from 0.1 to 1.2"


def test_a_drag_zooms_every_chart(page: Any):
    plot = page.locator(f"#overview {SCORE} .u-over")
    drag(page, plot, 3 / 12, 9 / 12)
    for metric in ("critic/score/mean", "val/score/mean"):
        assert drawn(page, metric)["x"] == pytest.approx([3, 9], abs=0.05)
    low, high = drawn(page, "critic/score/mean")["y"]
    assert 0.2 < low < 0.4 < 0.8 < high < 1.0, "the values in view set the scale"
    assert page.locator("#curve-note").inner_text() == "step 3 to step 9"
    drag(page, plot, 0.5, 0.6)
    assert drawn(page, "actor/ppo_kl")["x"] == pytest.approx([6, 6.6], abs=0.05)
    page.click("#unzoom")
    assert drawn(page, "actor/ppo_kl")["x"] == [0, 12]
    drag(page, plot, 0.5, 0.6)
    plot.dblclick()
    assert drawn(page, "actor/ppo_kl")["x"] == [0, 12]


def test_log_axes(page: Any):
    page.click("#open-all")
    kl = page.locator('#overview [data-metric="actor/ppo_kl"] [data-do=log]')
    kl.click()
    assert drawn(page, "actor/ppo_kl")["log"] == [False, True]
    assert drawn(page, "critic/score/mean")["log"] == [False, False]
    assert kl.get_attribute("aria-pressed") == "true"
    loss = page.locator('[data-metric="actor/pg_loss"] [data-do=log]')
    assert loss.is_disabled(), "it has no value above 0"
    page.check("#log-y")
    assert drawn(page, "actor/ppo_kl")["log"] == [False, False], "its button says otherwise"
    assert drawn(page, "critic/score/mean")["log"] == [False, True]
    assert drawn(page, "actor/pg_loss")["log"] == [False, False]
    page.check("#log-x")
    found = drawn(page, "val/score/mean")
    assert (found["log"], found["points"]) == ([True, True], [[12, 0.9]]), "without step 0"
    assert found["x"] == [1, 12]


def test_the_x_axis_in_tokens_and_hours(page: Any):
    drag(page, page.locator(f"#overview {SCORE} .u-over"), 0.5, 0.6)
    page.select_option("#unit", "tokens")
    assert drawn(page, "critic/score/mean")["points"][1] == [18, pytest.approx(0.2)]
    assert drawn(page, "val/score/mean")["x"] == [0, 108], "zoomed out, as the units differ"
    assert "108 tokens" in page.locator(f"#overview {SCORE} output").inner_text()
    page.select_option("#unit", "hours")
    assert drawn(page, "val/score/mean")["x"] == [0, pytest.approx(12 * 4 / 3600, rel=1e-4)]


def test_a_card_as_csv(page: Any):
    with page.expect_download() as saved:
        page.locator('#overview [data-metric="actor/ppo_kl"] [data-do=csv]').click()
    assert saved.value.suggested_filename == "actor_ppo_kl.csv"
    heads, *rows = csv.reader(Path(saved.value.path()).read_text().splitlines())
    assert heads == ["run", "step", "tokens", "hours", "actor/ppo_kl"]
    assert len(rows) == 12
    assert rows[3][:3] == ["run", "4", "36"]
    assert float(rows[3][3]) == pytest.approx(16 / 3600, rel=1e-4)
    assert (rows[3][4], rows[4][4]) == ("0.04", "nan")


def test_a_card_is_enlarged_and_put_back(page: Any):
    button = page.locator('[data-metric="actor/ppo_kl"] [data-do=enlarge]').first
    before = page.locator("#overview .chart").evaluate_all("all => all.map(one => one.className)")
    button.click()
    large = page.locator("dialog .chart")
    assert large.locator(".u-over").bounding_box()["height"] > 500
    drag(page, large.locator(".u-over"), 0.25, 0.75)
    assert drawn(page, "actor/ppo_kl")["x"] == pytest.approx([3, 9], abs=0.05)
    page.keyboard.press("Escape")
    large.wait_for(state="detached")
    after = page.locator("#overview .chart").evaluate_all("all => all.map(one => one.className)")
    assert after == before
    assert page.locator('#overview [data-metric="actor/ppo_kl"] canvas').count() == 1


def test_seeds_are_a_mean_and_a_band(show: Opener, tmp_path: Path):
    folders = [
        write_run(tmp_path / f"seed{seed}", 12 + seed, seed=seed, scale=1 + seed)
        for seed in range(3)
    ]
    other = write_run(tmp_path / "other", 6)
    (other / "config.toml").unlink()
    page = show(build_comparison(read_runs([*folders, other])))
    found = drawn(page, "critic/score/mean")
    assert found["lines"] == 2, "the seeds, and the run beside them"
    step, mean, low, high = page.evaluate(
        "(({x, y, low, high}) => [x, y, low, high].map((all) => all[4]))(charts[0].lines[0])"
    )
    assert (step, mean) == (5, pytest.approx(1.0))
    assert (low, high) == (pytest.approx(0.5), pytest.approx(1.5))
    ends = page.evaluate("charts[0].lines[0].y.slice(11)")
    assert ends == [pytest.approx(2.4), None, None], "where all of them have a value"
    texts = page.locator(f"#overview {SCORE} output").inner_text()
    page.uncheck("#band")
    assert drawn(page, "critic/score/mean")["lines"] == 4
    page.uncheck("#run-1")
    assert page.evaluate("charts[0].lines.map(({colour}) => colour)") == [
        COLOURS[0],
        COLOURS[2],
        COLOURS[3],
    ]
    assert "last" in texts
    assert not page.locator("#one-run").is_visible()
    with page.expect_download() as saved:
        page.locator(f"#overview {SCORE} [data-do=csv]").click()
    names = [line.split(",")[0] for line in Path(saved.value.path()).read_text().splitlines()]
    assert {*names} == {"run", "seed0", "seed2", "other"}


def test_the_parts_of_a_reward_are_one_card(show: Opener, tmp_path: Path):
    names = ["judge/score/mean", "judge/length/mean", "digits/mean", "digits/max"]
    folders = [write_run(tmp_path / f"seed{seed}", seed=seed) for seed in range(2)]
    for folder in folders:
        write_metrics(folder, 12, more=[f"reward/{name}" for name in names])
    page = show(page_of(folders[0], 7))
    card = page.locator('#overview [data-metric="critic/reward"]')
    assert card.locator("output span").all_inner_texts() == ["judge", "digits", "judge/length"]
    lines = "charts.find((chart) => chart.name === 'critic/reward').lines"
    found = page.evaluate(f"{lines}.map(({{part, colour, y}}) => [part, colour, y[0]])")
    assert [line[0] for line in found] == ["judge", "digits", "judge/length"]
    assert len({line[1] for line in found}) == 3
    assert [line[2] for line in found] == [pytest.approx(math.sin(i), 1e-4) for i in (1, 3, 2)]
    with page.expect_download() as saved:
        card.locator("[data-do=csv]").click()
    heads, first, *_ = csv.reader(Path(saved.value.path()).read_text().splitlines())
    assert (heads[4:], first[5]) == (["critic/reward", "part"], "judge")
    page = show(build_comparison(read_runs(folders)))
    assert page.evaluate(f"{lines}.map(({{label}}) => label)") == [
        f"mean of 2 seeds {part}" for part in ("judge", "digits", "judge/length")
    ]
    assert show(page_of(write_run(tmp_path / "plain"), 7)).locator(".parts").count() == 0
    constant = {f"critic/reward/{part}/mean": 1.0 for part in "ab"}
    page = show(build_page(tmp_path, bare_run(constant), None))
    assert page.locator(".constants tr td:first-child").all_text_contents() == [*constant]


def test_a_phase_is_named_once_in_a_lane(page: Any):
    page.evaluate(
        """drawTimeline({step: 7, title: "", length: 9, view: [0, 9], shared: [], lanes: [
            ["actor", [[7, "score", 0, 3], [7, "score", 3, 7], [8, "score", 7, 9]]],
            ["critic", [[7, "score", 0, 2]]],
        ]})"""
    )
    labels = page.locator("#timeline-svg .label").all_text_contents()
    assert labels == ["score", "4.00 s", "score", "of step 8", "score", "2.00 s"]


def test_timeline_follows_the_chosen_step(page: Any):
    title, bars = page.locator("#timeline-title"), page.locator("#timeline-svg rect[data-span]")
    own = page.locator("#timeline-svg rect[data-span]:not(.other-step)")
    assert (
        title.inner_text()
        == "Step 7: both groups worked at the same time for 3.00 s of 4.00 s (75%)"
    )
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
    assert (
        title.inner_text()
        == "Step 1: both groups worked at the same time for 2.00 s of 4.00 s (50%)"
    )
    assert set(own.evaluate_all("all => all.map(one => one.dataset.step)")) == {"1"}
    page.locator("#step-slider").press("ArrowRight")
    assert title.inner_text().startswith("Step 2:")
    assert page.locator("#step-select").evaluate("one => one.selectedOptions[0].text") == "2"
    assert "score\t\t1.00 s" in page.locator("#span-sums").inner_text()


def test_rows_of_a_prompt_stand_side_by_side_and_stay_text(page: Any):
    answers = page.locator("#prompts .answer:visible")
    page.select_option("#row-step", "12")
    assert page.locator(".prompt").count() == 1
    left, right = (answer.bounding_box() for answer in answers.all())
    assert (left["y"], right["x"] > left["x"] + 300) == (right["y"], True)
    page.select_option("#row-kind", "held-out")
    page.select_option("#row-step", "")
    first, second = (card.bounding_box() for card in page.locator(".prompt").all())
    assert (first["y"], second["x"] > first["x"] + 300) == (second["y"], True), "prompts do, too"
    page.select_option("#row-kind", "training")
    width = page.locator(".prompt").first.bounding_box()["width"]
    assert width > 550, "one of two rows has the room of two"
    page.select_option("#row-step", "")
    page.fill("#row-search", "ANSWER 12")
    assert answers.count() == 1
    assert page.locator("#row-count").inner_text() == "1 of 26 rows, 1 prompts"
    page.fill("#row-search", "window.hacked")
    assert answers.count() == 0
    page.select_option("#row-kind", "held-out")
    assert answers.count() == 1
    assert EVIL in answers.first.text_content()
    assert page.locator("#facts").text_content().count("</script><b>") == 1
    assert page.locator("main img, #prompts script, #facts b").count() == 0


def test_rows_by_surprise(page: Any):
    """The score is 0.5, the first value an eighth of the step."""
    facts = page.locator("#prompts .answer p").first
    steps = "all => all.slice(0, 3).map(one => Number(one.closest('.answer').dataset.step))"
    answers = page.locator(".surprise")
    for order, first, told in (
        ("surprise: score less first value", [12, 11, 10], "surprise −1"),
        ("better than expected", [1, 2, 3], "surprise +0.38"),
        ("worse than expected", [12, 11, 10], "surprise −1"),
    ):
        page.select_option("#row-order", order)
        assert answers.evaluate_all(steps) == first
        assert told in facts.text_content()  # out of view, it has no inner text
    assert page.locator(".prompt").count() == 10
    page.click("#more-rows")
    assert page.locator(".prompt").count() == 12
    assert not page.locator("#more-rows").is_visible()


def test_tokens_are_shaded_by_value_or_advantage(page: Any):
    spans = page.locator(".tokens").first.locator("span")
    assert spans.all_text_contents() == ["x", EVIL, "↵\n", "é", "▯"]
    shades = (
        "all => all.map(one => getComputedStyle(one).backgroundColor.match(/[\\d.]+/g).map(Number))"
    )
    low, *_, high, observed = spans.evaluate_all(shades)
    assert low[2] > low[0], "advantages have their middle at 0, and all of these are above"
    assert high[3] > low[3] > 0 == observed[3]
    page.select_option("#shade", "reward")
    low, *_ = spans.evaluate_all(shades)
    assert low[2] > low[0], "so have rewards"
    page.select_option("#shade", "value")
    page.select_option("#row-step", "1")
    low, *_, high, _ = spans.evaluate_all(shades)
    assert low[0] > low[2], "values have theirs between the extremes of all steps"
    spans.nth(1).hover()
    readout = page.locator("#token-readout")
    told = f"{json.dumps(EVIL)}: value 1.125, advantage 1.125, reward 1.125"
    assert readout.inner_text() == told
    spans.nth(4).hover()
    assert readout.inner_text() == '"": value none, advantage none, reward none'
    page.select_option("#shade", "none")
    assert page.locator(".tokens").count() == 0
    assert "answer 1" in page.locator("#prompts").text_content()


def test_dialogues_show_who_spoke(show: Opener, tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    tokens = tokens_of(5, 1.0)
    tokens["advantage"][1] = tokens["value"][1] = None
    row = {"step": 3, "row": 6, "score": 0.25, "question": "1+1?", "response": "x", "turns": TURNS}
    write_rows(run / "samples" / "step_000003.jsonl", [row | {"tokens": tokens}, row | {"row": 7}])
    page = show(page_of(run, 2))
    page.select_option("#row-step", "3")
    asked = page.locator(".question .turn")
    assert asked.locator("pre").all_text_contents() == ["You may call add.", "1+1?"]
    turns = page.locator(".answer").nth(1).locator(".turn")
    assert turns.evaluate_all("all => all.map(one => one.dataset.role)") == [
        "assistant",
        "tool",
        "assistant",
    ]
    assert turns.locator(".who").all_text_contents() == [
        "policy · value 0.5 · reward 0.25",
        "tool · error",
        "policy · value 0.125 · reward 0",
    ]
    assert turns.nth(2).locator("pre").text_content() == EVIL
    shaded = page.locator(".answer").first.locator(".turn")
    assert shaded.nth(0).locator("span").all_text_contents() == ["x"]
    assert shaded.nth(2).locator("span").all_text_contents() == ["↵\n", "é"]
    page.fill("#row-search", "missing a required argument")
    assert page.locator(".answer").count() == 2


@pytest.mark.wide
def test_a_page_that_is_loaded_again_keeps_the_view(show: Opener, tmp_path: Path):
    run = write_run(tmp_path / "run")
    page = show(page_of(run, 7))
    path = tmp_path / "page0.html"
    page.evaluate("window.mark = 1")
    page.click("#open-all")
    page.select_option("#unit", "tokens")
    drag(page, page.locator(f"#overview {SCORE} .u-over"), 0.25, 0.75)
    page.locator(f"#overview {SCORE} [data-do=log]").click()
    page.select_option("#row-order", "worse than expected")
    page.select_option("#step-select", "3")
    page.evaluate("window.scrollTo(0, 700)")
    write_metrics(run, 13)
    path.write_text(page_of(run, 7), encoding="utf-8")
    page.reload()
    page.get_by_text("run: 13 steps").wait_for()
    page.locator("#prompts .answer").first.wait_for()  # the last part that is drawn
    assert page.evaluate("window.mark") is None
    found = drawn(page, "critic/score/mean")
    assert found["x"] == pytest.approx([27, 81], abs=0.5)
    assert (found["log"], len(found["points"])) == ([False, True], 13)
    assert page.locator("#groups details:not([open])").count() == 0
    assert page.locator("#timeline-title").inner_text().startswith("Step 3:")
    assert page.locator("#row-order").input_value() == "worse than expected"
    assert page.evaluate("window.scrollY") == 700


@pytest.mark.wide
def test_5000_steps_are_small_and_open_fast(show: Opener, tmp_path: Path):
    run = write_run(tmp_path / "run")
    write_metrics(run, 5000, more=[f"thing{i}/mean" for i in range(45)])
    for folder in ("samples", "validation"):
        for step in range(200, 5001, 200):
            row = {"step": step, "question": "why? " * 60, "response": "so " * 600, "score": 1.0}
            rows = [row | {"row": i, "tokens": tokens_of(600, 0.1234)} for i in range(8)]
            for row in rows:
                row["tokens"]["text"] = ["word "] * 600
            write_rows(run / folder / f"step_{step:06d}.jsonl", rows)
    text = page_of(run, 4000)
    assert len(text) < 3_000_000
    page = show(text)
    loaded = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    times = [page.evaluate(loaded)]
    for _ in range(2):  # other processes may have the processors
        page.reload()
        times.append(page.evaluate(loaded))
    assert min(times) < 2000
    assert len(drawn(page, "critic/score/mean")["points"]) > 600
    assert page.evaluate("metrics.size") > 95


def test_light_and_dark(show: Opener, tab: Any, text: str):
    colours: list[str] = []
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        page = show(text)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    tab.emulate_media(color_scheme="null")
    light, dark = (sum(map(int, re.findall(r"\d+", colour))) for colour in colours)
    assert light > 600 > 150 > dark


def test_run_without_spans_and_samples(show: Opener, tmp_path: Path):
    page = show(build_page(tmp_path, bare_run({"actor/entropy": 1.0}), None))
    assert page.locator("#timeline-title").inner_text() == "No step has recorded spans."
    assert page.locator("#row-count").inner_text() == "0 of 0 rows, 0 prompts"
    assert page.locator("#overview .chart:visible").count() == 1
    page.evaluate("byId('unit').options[1].disabled || (() => { throw 'tokens'; })()")
    assert show(build_page(tmp_path, bare_run({}), None)).locator(".chart").count() == 0
