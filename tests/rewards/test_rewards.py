"""Reward rules, and rewards by name, by file and by data source."""

import math
import re
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import needs

from splitppo.config import RewardConfig
from splitppo.errors import UserError
from splitppo.rewards import rules, scorer
from splitppo.rewards.functions import (
    BY_NAME,
    Failure,
    check_rewards,
    display_names,
    find_function,
    read_result,
)
from splitppo.rewards.scorer import check_prompts, row_of
from splitppo.rollout import Prompt


def _prompt(data_source: str = "echo", truth: Any = "314") -> Prompt:
    return Prompt("314=", [1, 2], data_source, truth, {"index": 7})


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("7", "7", 1),
        ("3 + 4 = 7\n\nThis is 8", "7", 1),
        ("\n  \n3 + 4 = 7.", "7", 1),
        ("7 is 3+4", "7", 0),
        ("7-3", "3", 1),
        ("7-3", "-3", 0),
        ("it is -3", "-3", 1),
        ("x=-3", "-3", 1),
        ("(−3)", -3, 1),
        ("+3", "3", 1),
        ("1,234", "1234", 1),
        ("1234", "1,234", 1),
        ("1,2345", "2345", 1),
        ("3,4", "4", 1),
        ("$1,234.50", "1234.5", 1),
        ("-$5", "-5", 1),
        ("$-5", "-5", 1),
        (".5", "0.5", 1),
        ("7.0", 7, 1),
        ("7.01", 7, 0),
        ("0.1", "0.10000000000000000001", 0),
        ("no number", "7", 0),
        ("no number\n7", "7", 0),
        ("", "7", 0),
    ],
)
def test_last_number(text: str, truth: Any, expected: float) -> None:
    assert rules.last_number("x", text, truth, {}) == expected


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("48/2 = 24\n#### 72", "72", 1),
        ("#### 71 no, #### 72", "72", 1),
        ("#### 72 no, #### 71", "72", 0),
        ("#### $1,072.00", "1072", 1),
        ("#### -3", "-3", 1),
        ("#### 72.", "72", 1),
        ("The answer is 72", "72", 0),
        ("#### about 72", "72", 0),
        ("### 72", "72", 0),
        ("#### 720", "72", 0),
    ],
)
def test_gsm8k(text: str, truth: str, expected: float) -> None:
    assert rules.gsm8k("openai/gsm8k", text, truth, {}) == expected


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("48/2 = 24\n#### 72", 1, 1),
        ("The answer is 72", 0, 1),
        ("It costs $72.00.", 0, 1),
        ("It is **72**", 0, 1),
        ("#### 72 dollars, and 5 left", 1, 0),
        ("#### 71, no: 72", 0, 1),
        ("72 of 100", 0, 0),
        ("7 2", 0, 0),
        ("1,072", 0, 0),
        ("80-72", 0, 1),
        ("it is -72", 0, 0),
        ("no number", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_strict_and_flexible(text: str, strict: float, flexible: float) -> None:
    assert rules.gsm8k("gsm8k", text, "72", {}) == strict
    assert rules.gsm8k_flexible("gsm8k", text, "72", {}) == flexible
    assert rules.gsm8k_flexible("gsm8k", text, "6*12 = 72\n#### 72", {}) == flexible


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        (r"\boxed{1/2}", "0.5", 1),
        (r"So the answer is $\boxed{\frac{1}{2}}$.", "1/2", 1),
        (r"The answer is 0.5", r"\frac{1}{2}", 1),
        (r"\boxed{0.51}", r"\frac{1}{2}", 0),
        (r"\boxed{0.5}", r"$\frac{1}{2}$", 1),
        (r"\boxed{0.5}", r"It is half: \boxed{1}, no \boxed{\frac12}", 1),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1),
        (r"\boxed{\{2, 3\}}", r"\{1,2\}", 0),
        (r"\boxed{(1,2)}", "(1,2)", 1),
        (r"\boxed{(2,1)}", "(1,2)", 0),
        (r"\boxed{[0,1)}", "[0,1)", 1),
        (r"\boxed{[0,1]}", "[0,1)", 0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{x^2+2x}", "(x+1)^2", 0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
        (r"\boxed{\text{Carla}}", r"\text{Evelyn}", 0),
        (r"\boxed{18.90}", r"\$18.90", 1),
        (r"First \boxed{3}. No: \boxed{4}", "4", 1),
        (r"First \boxed{3}. No: \boxed{4}", "3", 0),
        (r"\boxed{4}. Check: 2 + 1 = 3", 4, 1),
        (r"\boxed{4", "4", 0),
        (r"\boxed{}", "4", 0),
        ("I do not know", "4", 0),
        ("", "4", 0),
    ],
)
@needs("math_verify", "math")
def test_math(text: str, truth: Any, expected: float) -> None:
    assert rules.math("lighteval/MATH", text, truth, {}) == expected


@needs("math_verify", "math")
def test_mathematics_that_takes_too_long_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_MATH_TIMEOUT", 1)
    assert rules.math("lighteval/MATH", r"\boxed{9^{9^{9^{9}}}}", "3", {}) == 0


@pytest.mark.parametrize("rule", [rules.last_number, rules.gsm8k, rules.gsm8k_flexible])
def test_number_rules_refuse_a_truth_that_is_no_number(rule: Any) -> None:
    with pytest.raises(
        UserError, match=r"'blue' of data_source 'colours'.*needs a number; set --reward\.function"
    ):
        rule("colours", "7", "blue", {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("314", 1),
        ("315", 2 / 3),
        ("31", 2 / 3),
        ("3149", 3 / 4),
        ("314314", 1 / 2),
        (" 314", 0),
        ("431", 0),
        ("", 0),
    ],
)
def test_echo_gives_a_share_and_one_only_for_the_truth(text: str, expected: float) -> None:
    assert rules.echo("echo", text, "314", {}) == pytest.approx(expected)


def test_exact_match_strips_both_ends() -> None:
    assert rules.exact_match("x", " yes\n", "yes", {}) == 1
    assert rules.exact_match("x", "yes", 1, {}) == 0
    assert rules.exact_match("x", "1", 1, {}) == 1
    assert rules.exact_match("x", "Yes", "yes", {}) == 0


def test_auto_names_the_data_source_without_a_rule() -> None:
    some, mine = {0: _prompt("echo"), 1: _prompt("addition")}, {2: _prompt("mine")}
    with pytest.raises(
        UserError,
        match=r"reward\.function=auto: no rule for data_source 'mine'.*set --reward\.function",
    ):
        check_prompts(["exact_match", "auto"], some | mine)
    with pytest.raises(UserError, match=r"reward\.validation=auto: .*--reward\.validation"):
        check_prompts(["auto"], mine, "reward.validation")
    for functions, prompts in ((["auto"], some), (["exact_match"], mine)):
        assert check_prompts(functions, prompts) == {}


@pytest.mark.parametrize("function", ["auto", "gsm8k", "gsm8k_flexible", "last_number"])
def test_a_truth_that_a_rule_cannot_use_is_found_before_training(function: str) -> None:
    prompts = {3: _prompt("gsm8k", "7"), 8: _prompt("gsm8k", "blue"), 9: _prompt("gsm8k", None)}
    errors = check_prompts(["exact_match", function], prompts)
    assert list(errors) == [8, 9]
    assert str(errors[8]).startswith("ground truth 'blue' of data_source 'gsm8k'")
    assert list(check_prompts(["exact_match"], prompts)) == [9]


@pytest.mark.parametrize("function", sorted(BY_NAME))
@pytest.mark.parametrize("truth", ["", " \n", None])
def test_a_truth_that_is_not_there_is_found_before_training(
    function: str, truth: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(scorer, "find_function", lambda *_: None)  # or math would need its library
    errors = check_prompts([function], {3: _prompt("mine", truth), 4: _prompt("mine", "7")})
    assert list(errors) == [3]
    assert f"the reward rule {function} needs " in str(errors[3])


@needs("math_verify", "math")
def test_mathematics_needs_a_truth() -> None:
    assert check_prompts(["auto", "math"], {0: _prompt("lighteval/MATH", "x^2")}) == {}
    errors = check_prompts(["auto"], {0: _prompt("lighteval/MATH", None)})
    assert str(errors[0]).startswith(
        "ground truth None of data_source 'lighteval/MATH': the reward rule math"
    )


def test_mathematics_names_its_library_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"reward\.function=math: .*pip install math-verify"):
        check_rewards(["exact_match", "math"])
    with pytest.raises(UserError, match="pip install math-verify"):
        check_prompts(["auto"], {0: _prompt("lighteval/MATH", "1")})
    assert check_prompts(["auto"], {0: _prompt("echo")}) == {}


def test_function_by_file_is_called_with_verls_keywords(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(
        "count = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    global count\n"
        "    count += 1\n"
        "    assert (data_source, solution_str, ground_truth, extra_info) == ('echo', 'yes', "
        "'314', {'index': 7})\n"
        "    return {'score': len(solution_str), 'calls': count}\n"
    )
    check_rewards([f"{file}:compute_score"])
    row = row_of(_prompt(), "yes")
    assert read_result(find_function(f"{file}:compute_score")(**row)) == (3.0, {"calls": 1.0}, None)
    again = find_function(f"{file}:compute_score")
    assert read_result(again(**row)) == (3.0, {"calls": 2.0}, None), "the file was imported twice"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "gms8k",
            r"reward\.function=gms8k: no such rule; use auto, exact_match.*path/to/file\.py:name",
        ),
        ("rewards.py", "no such rule"),
        ("{tmp}/absent.py:f", "no such file .*absent.py"),
        ("{tmp}/good.py:g", "has no g when it is imported"),
        ("{tmp}/good.py:number", "does not take .*3 is not a callable object.*define it with"),
        ("{tmp}/good.py:one", "missing a required argument|does not take"),
    ],
)
def test_check_rewards_refuses_early(function: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info): return 1\ndef one(text): "
        "return 1\nnumber = 3\n"
    )
    check_rewards(["auto", "none", "gsm8k", f"{tmp_path}/good.py:f"])
    with pytest.raises(UserError, match=message) as caught:
        check_rewards(["exact_match", function.format(tmp=tmp_path)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "cause", "message"),
    [
        (
            "import no_such_module_at_all\n",
            ModuleNotFoundError,
            "no_such_module_at_all.*bad.py, line 1",
        ),
        ("x = 1\nx/0\n", ZeroDivisionError, "ZeroDivisionError: division by zero .*bad.py, line 2"),
        ("def f(:\n", SyntaxError, "SyntaxError"),
        ("import sys\nsys.exit('bye')\n", SystemExit, "SystemExit: bye"),
    ],
)
def test_a_reward_file_that_fails_to_import_shows_its_cause(
    code: str, cause: type[BaseException], message: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(UserError, match=message) as caught:
        check_rewards([f"{tmp_path}/bad.py:f"])
    assert isinstance(caught.value.__cause__, cause)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (0.5, (0.5, {})),
        (2, (2.0, {})),
        (True, (1.0, {})),
        (np.float32(0.5), (0.5, {})),
        (np.bool_(True), (1.0, {})),
        (np.array(0.5), (0.5, {})),
        (torch.tensor(0.5), (0.5, {})),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), (0.5, {})),
        (Decimal("0.5"), (0.5, {})),
        (Fraction(1, 2), (0.5, {})),
        ([0.5], (0.5, {})),
        ((0.5,), (0.5, {})),
        (np.array([[0.5]]), (0.5, {})),
        (torch.tensor([0.5], requires_grad=True), (0.5, {})),
        ([torch.tensor([[0.5]])], (0.5, {})),
        ({"score": 1, "acc": np.int64(0), "ok": False}, (1.0, {"acc": 0.0, "ok": 0.0})),
        (
            {"score": [Fraction(1, 2)], "acc": Decimal(3), "ok": np.array([True])},
            (0.5, {"acc": 3.0, "ok": 1.0}),
        ),
        ({"score": 1, "acc": True, "pred": "[INVALID]", "why": None}, (1.0, {"acc": 1.0})),
    ],
)
def test_numbers_of_all_kinds_are_results(
    result: Any, expected: tuple[float, dict[str, float]]
) -> None:
    outcome = read_result(result)
    assert outcome == (*expected, None)
    assert not isinstance(outcome, Failure)
    value, extra, _ = outcome
    assert type(value) is float
    assert all(type(number) is float for number in extra.values())


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1.0",
        math.nan,
        math.inf,
        10**400,
        1e300,  # as a float32 it is infinite
        1j,
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("1e999"),
        Fraction(10**400),
        [],
        ["1.0"],
        [1.0, 2.0],
        (1.0, {"acc": 1}),
        np.array([1.0, 2.0]),
        torch.tensor([]),
        torch.tensor(math.nan),
        {},
        {"acc": 1.0},
        {"score": None},
        {"score": 1.0, "acc": math.nan},
        {"score": 1.0, "acc": 1e300},
        {"score": 1.0, "acc": [1.0, 2.0]},
        {"score": 1.0, 1: 0.5, "1": 0.7},
        {"score": 1.0, "a\nb": 0.5, "a b": 0.7},
    ],
)
def test_anything_else_is_an_invalid_result(result: Any) -> None:
    failure = read_result(result)
    assert isinstance(failure, Failure)
    assert failure.kind == "invalid"
    assert re.match(r"returned .*: .*; return float\(\.\.\.\), or a dict", failure.text)
    assert "\n" not in failure.text
    assert len(failure.text) < 300


SPANS = [(3, -0.5), (1, 2.0)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (SPANS, SPANS),
        (tuple(map(list, SPANS)), SPANS),
        (np.array(SPANS), SPANS),
        (torch.tensor(SPANS), SPANS),
        (iter(SPANS), SPANS),
        ([(np.int64(3), Fraction(1, 2)), (torch.tensor(3), [True])], [(3, 0.5), (3, 1.0)]),
        ([(4, 1)], [(4, 1.0)]),
        ([], []),
        (None, None),
    ],
)
def test_what_is_paid_on_the_way_is_pairs_of_an_end_and_a_reward(spans: Any, expected: Any) -> None:
    outcome = read_result({"score": 1, "spans": spans, "acc": 1}, "a🙂bc")
    assert outcome == (1.0, {"acc": 1.0}, expected)
    assert not isinstance(outcome, Failure)
    assert all((type(end), type(reward)) == (int, float) for end, reward in outcome[2] or ())


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([(1, 1.0), (5, 0.25)], r"\(5, 0\.25\) .* the 4 characters"),
        ([(0, 0.25)], r"\(0, 0\.25\) .* the 4 characters"),
        ([(-1, 0.25)], r"\(-1, 0\.25\) .* the 4 characters"),
        ([(2.5, 0.25)], r"\(2\.5, 0\.25\) .* the 4 characters"),
        ([(1234567, 1)], r"\(1234567, 1\) .* the 4 characters"),
        ([(1, math.nan)], "'reward' is not a finite number"),
        ([(1, 1e300)], "'reward' is not a finite number"),
        ([(math.inf, 1)], "'end' is not a finite number"),
        ([("1", 1)], "'end' is not a finite number"),
        ([1, 2], r"pairs \(end, reward\)"),
        ([(1, 2, 3)], r"pairs \(end, reward\)"),
        ({1: 0.5}, r"pairs \(end, reward\)"),
        (0.5, r"pairs \(end, reward\)"),
        ("1:0.5", r"pairs \(end, reward\)"),
    ],
)
def test_a_wrong_span_is_an_invalid_result(spans: Any, says: str) -> None:
    failure = read_result({"score": 1.0, "spans": spans}, "a🙂bc")
    assert isinstance(failure, Failure)
    assert failure.kind == "invalid"
    assert re.search(says, failure.text), failure.text


@pytest.mark.parametrize("spans", [None, [(1, 3e38), (2, 3e38)]])
def test_weighted_rewards_beyond_float32_fail_their_row_alone(spans: Any) -> None:
    made = scorer.Scorer(RewardConfig(("exact_match", "last_number"), (2.0, 1.0)), {"echo"})
    good = made._combine([(1.0, {}, None), (3e38, {}, None)])
    assert (good.score, good.failures) == (2.0 + 3e38, ())
    bad = made._combine([(1.0 if spans else 3e38, {}, spans), (1.0, {}, None)])
    assert (bad.score, bad.spans) == (0.0, None)
    assert [failure.kind for failure in bad.failures] == ["invalid"]


def test_a_reward_file_imports_a_module_beside_it_that_hides_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_my_reward.py").write_text("WEIGHT = 3\n")
    (tmp_path / "json.py").write_text("raise OSError('the wrong module')\n")
    code = "import json\nfrom beside_my_reward import WEIGHT\ndef score(**row): return WEIGHT\n"
    (tmp_path / "reward.py").write_text(code)
    check_rewards([f"{tmp_path}/reward.py:score"])
    assert sys.path[-1] == str(tmp_path)


def test_a_function_that_names_the_prompt_passes_the_check(tmp_path: Path) -> None:
    known = "data_source, solution_str, ground_truth, extra_info"
    (tmp_path / "asks.py").write_text(
        f"def good({known}, prompt): return 1\ndef bad({known}, prompts): return 1\n"
    )
    check_rewards([f"{tmp_path}/asks.py:good"])
    with pytest.raises(UserError, match="missing a required argument: 'prompts'"):
        check_rewards([f"{tmp_path}/asks.py:bad"])


@pytest.mark.parametrize(
    ("functions", "names"),
    [
        (["auto"], ["auto"]),
        (["gsm8k", "my/a.py:f"], ["gsm8k", "f"]),
        (["my/a.py:f", "my/b.py:f", "my/b.py:g"], ["a.f", "b.f", "g"]),
        (["my/a.py:f", "your/a.py:f"], ["my/a.py:f", "your/a.py:f"]),
        (["math", "math.py:math"], ["math", "math.math"]),
        ([], []),
    ],
)
def test_display_names(functions: list[str], names: list[str]) -> None:
    assert display_names(functions) == names
