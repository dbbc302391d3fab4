"""Rule rewards: pure functions of the response's text, with verl's signature.

A rule takes (data_source, solution_str, ground_truth, extra_info) and returns a score.
`solution_str` is the decoded response without special tokens. A ground truth that the rule can't
use raises UserError.
"""

import functools
import importlib
import json
import logging
import re
from decimal import Decimal
from typing import Any

from splitppo.errors import UserError

# A number as people write it: 7, -7, 1,234.50, .5, $12, -$12, $-12. A minus right after a letter, a
# digit or a closing bracket is a subtraction, not a sign: the last number of "7-3" is 3.
_NUMBER = (
    r"(?P<sign>(?<![\w.)\]])[-+−])?\$?(?P<inner_sign>(?<=\$)[-+−])?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"
    r"|[0-9]+(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
_ANY_NUMBER = re.compile(_NUMBER)
_MARKED_NUMBER = re.compile(rf"#### +{_NUMBER}")
_BOXED = "\\boxed"
# whole seconds per formula or comparison (9^9^9^9); after that the answer counts as wrong
_MATH_TIMEOUT = 3


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """1 if the response equals the ground truth, ignoring white space at both ends; else 0."""
    return float(
        solution_str.strip() == _text("exact_match", "a text", data_source, ground_truth).strip()
    )


def last_number(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """1 if the last number on the response's first non-empty line equals the ground truth as a
    number (7 = 7.0); else 0."""
    first_line = next((line for line in solution_str.splitlines() if line.strip()), "")
    return _last_equals(
        "last_number", list(_ANY_NUMBER.finditer(first_line)), data_source, ground_truth
    )


def gsm8k(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """1 if the number after the response's last `####` equals the ground truth; else 0, also
    without a marker."""
    return _last_equals(
        "gsm8k", list(_MARKED_NUMBER.finditer(solution_str)), data_source, ground_truth
    )


def gsm8k_flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """1 if the last number of the response equals the ground truth, as in verl's flexible GSM8K;
    else 0."""
    return _last_equals(
        "gsm8k_flexible", list(_ANY_NUMBER.finditer(solution_str)), data_source, ground_truth
    )


def math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """1 if the library math-verify finds the answer equal to the ground truth; else 0.

    The answer is the last `\\boxed{}`, or else what the library finds: the text after "the answer
    is", the last formula, or the last number. The ground truth is LaTeX, alone or in a solution
    with a `\\boxed{}`. Only for the main thread, because the library's time limits use signals.
    """
    truth = _text("math", "LaTeX", data_source, ground_truth).strip()
    if not solution_str.strip():
        return 0.0
    from math_verify import parse, verify  # an optional dependency, and slow to import

    # or it prints every response that takes too long
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # the last box alone: the library would read two as a set
    gold = truth[truth.rindex(_BOXED) :] if _BOXED in truth else f"{_BOXED}{{{truth.strip('$')}}}"
    answer = solution_str[solution_str.rindex(_BOXED) :] if _BOXED in solution_str else solution_str
    truth_parsed, answer_parsed = (
        parse(text, parsing_timeout=_MATH_TIMEOUT) for text in (gold, answer)
    )
    return float(verify(truth_parsed, answer_parsed, timeout_seconds=_MATH_TIMEOUT))


def echo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """Fraction of correct characters by position, in [0, 1].

    It is relative to the longer text, so extra and missing characters count as wrong. White space
    is not stripped.
    """
    truth = _text("echo", "a text", data_source, ground_truth)
    right = sum(a == b for a, b in zip(solution_str, truth, strict=False))
    return right / max(len(solution_str), len(truth), 1)


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """The score by the row's reasoning_gym task, of the text in the last <answer>...</answer>, or
    else of the whole response."""
    task = _gym_task(data_source.partition(":")[2], json.dumps(extra_info["settings"]))
    extract = importlib.import_module("reasoning_gym.utils").extract_answer
    return task.score_answer(extract(solution_str) or solution_str.strip(), extra_info["entry"])


@functools.cache
def _gym_task(name: str, settings: str) -> Any:
    """A task that scores answers; it makes no rows."""
    gym = importlib.import_module("reasoning_gym")
    return gym.create_dataset(name, **json.loads(settings) | {"size": 1, "seed": 0})


def _text(rule: str, need: str, data_source: str, ground_truth: Any) -> str:
    """The ground truth of a rule that needs `need`. Raises UserError if it is not there, or
    empty."""
    truth = "" if ground_truth is None else str(ground_truth)
    if not truth.strip():
        raise UserError(
            f"ground truth {ground_truth!r} of data_source {data_source!r}: the reward rule {rule} "
            f"needs {need}; set --reward.function or --data.answer-key"
        )
    return truth


def _value(match: re.Match[str]) -> Decimal:
    """The number that _NUMBER matched, exactly."""
    value = Decimal(match["digits"].replace(",", ""))
    return -value if (match["sign"] or match["inner_sign"] or "+") != "+" else value


def _last_equals(
    rule: str, numbers: list[re.Match[str]], data_source: str, ground_truth: Any
) -> float:
    """1 if the last of the numbers is the truth; else 0."""
    # GSM8K's own column holds the whole solution, which ends in "#### NUMBER"
    truth = _ANY_NUMBER.fullmatch(str(ground_truth).rpartition("####")[2].strip())
    if truth is None:
        raise UserError(
            f"ground truth {str(ground_truth)[:60]!r} of data_source {data_source!r}: the reward "
            f"rule {rule} needs a number; set --reward.function or --data.answer-key"
        )
    return float(bool(numbers) and _value(numbers[-1]) == _value(truth))
