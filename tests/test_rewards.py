"""Reward rules, and rewards by name, by file and by data source."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splitppo.errors import UserError
from splitppo.rewards import check_reward, load_reward, rules, score
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
    assert rules.addition("addition", text, truth, {}) == expected


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


@pytest.mark.parametrize("rule", [rules.last_number, rules.gsm8k])
def test_number_rules_refuse_a_truth_that_is_no_number(rule: Any) -> None:
    with pytest.raises(UserError, match=r"'blue' of data_source 'colours'.*needs a number; set --reward\.function"):
        rule("colours", "7", "blue", {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("314", 1), ("315", 2 / 3), ("31", 2 / 3), ("3149", 3 / 4), ("314314", 1 / 2), (" 314", 0), ("431", 0), ("", 0)],
)
def test_echo_gives_a_share_and_one_only_for_the_truth(text: str, expected: float) -> None:
    assert rules.echo("echo", text, "314", {}) == pytest.approx(expected)


def test_exact_match_strips_both_ends() -> None:
    assert rules.exact_match("x", " yes\n", "yes", {}) == 1
    assert rules.exact_match("x", "yes", 1, {}) == 0
    assert rules.exact_match("x", "1", 1, {}) == 1
    assert rules.exact_match("x", "Yes", "yes", {}) == 0


def test_auto_scores_each_row_by_its_data_source() -> None:
    function = load_reward("auto", {"echo", "addition", "openai/gsm8k", "gsm8k"})
    assert score(function, _prompt("echo", "314"), "31") == (pytest.approx(2 / 3), {})
    assert score(function, _prompt("addition", "7"), "3+4=7") == (1.0, {})
    assert score(function, _prompt("openai/gsm8k", "7"), "7") == (0.0, {})
    assert score(function, _prompt("gsm8k", "7"), "#### 7") == (1.0, {})


def test_auto_names_the_data_source_without_a_rule() -> None:
    with pytest.raises(UserError, match=r"no rule for data_source 'mine'.*set --reward\.function"):
        load_reward("auto", {"echo", "mine"})
    assert load_reward("exact_match", {"mine"}) is rules.exact_match


def test_function_by_file_is_called_with_verls_keywords(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(
        "count = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    global count\n"
        "    count += 1\n"
        "    assert (data_source, solution_str, ground_truth, extra_info) == ('echo', 'yes', '314', {'index': 7})\n"
        "    return {'score': len(solution_str), 'calls': count}\n"
    )
    check_reward(f"{file}:compute_score")
    function = load_reward(f"{file}:compute_score", {"anything"})
    assert score(function, _prompt(), "yes") == (3.0, {"calls": 1.0})
    again = load_reward(f"{file}:compute_score", {"anything"})
    assert score(again, _prompt(), "yes") == (3.0, {"calls": 2.0}), "the file was imported twice"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("gms8k", r"reward\.function=gms8k: no such rule; use auto, exact_match.*path/to/file\.py:name"),
        ("rewards.py", "no such rule"),
        ("{tmp}/absent.py:f", "no such file .*absent.py"),
        ("{tmp}/good.py:g", "has no g; functions there: f, one"),
        ("{tmp}/good.py:number", "it is a int; name a function"),
        ("{tmp}/good.py:one", "missing a required argument|does not take"),
    ],
)
def test_check_reward_refuses_early(function: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info): return 1\ndef one(text): return 1\nnumber = 3\n"
    )
    check_reward(f"{tmp_path}/good.py:f")
    with pytest.raises(UserError, match=message) as caught:
        check_reward(function.format(tmp=tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "cause", "message"),
    [
        ("import no_such_module_at_all\n", ModuleNotFoundError, "no_such_module_at_all.*bad.py, line 1"),
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
        check_reward(f"{tmp_path}/bad.py:f")
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
        ({"score": 1, "acc": np.int64(0), "ok": False}, (1.0, {"acc": 0.0, "ok": 0.0})),
        ({"score": 1, "acc": True, "pred": "[INVALID]", "why": None}, (1.0, {"acc": 1.0})),
    ],
)
def test_score_accepts_numbers_of_all_kinds(result: Any, expected: tuple[float, dict[str, float]]) -> None:
    value, extra = score(lambda **row: result, _prompt(), "x")
    assert (value, extra) == expected
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
        1j,
        [1.0],
        np.array([1.0]),
        torch.tensor([1.0]),
        torch.tensor(math.nan),
        {},
        {"acc": 1.0},
        {"score": None},
        {"score": 1.0, "acc": math.nan},
        {"score": 1.0, "acc": [1.0]},
    ],
)
def test_score_refuses_anything_else_and_says_what_came_back(result: Any) -> None:
    def my_reward(**row: Any) -> Any:
        return result

    with pytest.raises(UserError, match=r"test_rewards\.py:.*my_reward returned .* data_source 'echo'") as caught:
        score(my_reward, _prompt(), "x")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_an_exception_in_the_reward_comes_through_with_a_note() -> None:
    def my_reward(**row: Any) -> float:
        raise KeyError("absent")

    with pytest.raises(KeyError, match="absent") as caught:
        score(my_reward, _prompt("mine"), "x")
    assert any("my_reward" in note and "'mine'" in note for note in caught.value.__notes__)
