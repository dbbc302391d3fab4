"""Reward functions: how `reward.function` names them, how they are found and checked, and what they
may return.

Reward workers import this module: no torch, no numpy.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from splitppo.errors import UserError, need, one_line
from splitppo.rewards import rules
from splitppo.rewards.cells import write_cell
from splitppo.workers import Failure, Handler, find_in_file, is_async, read_number, read_numbers

# Takes the keyword arguments data_source, solution_str, ground_truth and extra_info, and `prompt`
# and `messages` if it has parameters of these names. Returns a number, or a dict with `score` and
# more numbers, perhaps `spans`, or an awaitable of either.
RewardFunction = Callable[..., Any]

FAST: dict[str, RewardFunction] = {  # microseconds a row: need no worker
    "exact_match": rules.exact_match,
    "last_number": rules.last_number,
    "gsm8k": rules.gsm8k,
    "gsm8k_flexible": rules.gsm8k_flexible,
    "echo": rules.echo,
}
BY_NAME = {**FAST, "math": rules.math}  # the rules that score by a row's ground truth
# all that `reward.function` may name
RULES = {**BY_NAME, "reasoning_gym": rules.reasoning_gym}
# rule -> what it imports, and what pip installs
NEEDS = {
    "math": ("math_verify", "math-verify"),
    "reasoning_gym": ("reasoning_gym", "'splitppo[reasoning-gym]'"),
}
FAST["none"] = lambda **_: 0.0  # where `auto` leaves a row to its environment
# the rule that `auto` takes for a data source, or for all that begin with this and a colon
BY_DATA_SOURCE = {
    "echo": "echo",
    "addition": "last_number",
    "guess": "none",
    "textarena": "none",
    "reasoning_gym": "reasoning_gym",
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "EleutherAI/hendrycks_math": "math",
}


Spans = list[tuple[int, float]]  # (end, reward): characters of the response, the last one counts
# a row's score, further numbers, and what of the score was paid on the way, if it was said
Outcome = tuple[float, dict[str, float], Spans | None] | Failure


def check_rewards(functions: Sequence[str], setting: str = "reward.function") -> bool:
    """Checks the functions before any model is loaded: imports their files and looks them up.
    Returns whether any is async. Raises UserError if a rule, file or function does not exist, its
    signature is wrong, the import fails, or a rule lacks its library."""
    named = [function for function in functions if function not in ("auto", "none")]
    imported = [find_function(function, setting) for function in named]
    return any(map(is_async, imported))


def scored_by(function: str, data_source: str) -> str:
    """The function that scores rows of a data source if `reward.function` is `function`."""
    return BY_DATA_SOURCE[data_source.partition(":")[0]] if function == "auto" else function


def find_function(function: str, setting: str = "reward.function") -> RewardFunction:
    """Looks up a function by name: a rule or `path/to/file.py:name`. Raises UserError as
    check_rewards does."""
    wrong = f"{setting}={function}:"
    if function in NEEDS:
        module, package = NEEDS[function]
        need(module, f"{setting}={function}", package)
    if function in RULES:
        return RULES[function]
    imported = find_in_file(function, setting, "reward", f"rule; use auto, {', '.join(RULES)}")
    try:
        inspect.signature(imported).bind(
            data_source="", solution_str="", ground_truth="", extra_info={},
            **dict.fromkeys(asks_for(imported), ""),
        )  # fmt: skip
    except (TypeError, ValueError) as error:  # those written in C have no signature
        raise UserError(
            f"{wrong} it does not take a reward function's arguments ({error}); "
            "define it with (data_source, solution_str, ground_truth, extra_info)"
        ) from error
    return imported


def handler_of(names: Sequence[str]) -> Handler:
    """A reward worker's handler: (name, keyword arguments) -> the outcome of the function."""
    functions = {name: find_function(name) for name in names}
    return lambda name, row: (
        functions[name](**row),
        partial(read_result, text=row["solution_str"]),
    )


def name_function(function: RewardFunction) -> str:
    """FILE:NAME, by which `find_function` finds a function. A notebook's cell that defines one is
    written to a file. Raises UserError unless it is defined at the top level of a .py file or a
    cell under its own name: no lambda, nested function, method or functools.partial."""
    name = getattr(function, "__qualname__", repr(function))
    module = sys.modules.get(getattr(function, "__module__", ""))
    is_there = getattr(module, name, None) is function
    file = getattr(module, "__file__", None) or ""
    if is_there and not file and inspect.isfunction(inspect.unwrap(function)):
        with suppress(OSError):  # a Python prompt may not keep its lines
            file = write_cell(function, name, vars(module))
    if not file.endswith(".py") or not is_there:
        raise UserError(
            f"reward={name}: reward workers import a function by its file and name; "
            "write it with def at the top level of a .py file or of a notebook's cell"
        )
    return f"{os.path.abspath(file)}:{name}"


def asks_for(function: RewardFunction) -> set[str]:
    """Those of `prompt` and `messages` that are parameters of the function, except those that
    functools.partial has filled."""
    parameters = inspect.signature(function).parameters.keys()
    return {"prompt", "messages"} & parameters - getattr(function, "keywords", {}).keys()


def display_names(functions: Sequence[str]) -> list[str]:
    """A short name of each function: the rule, or the function in the file. Of equal names
    `file.function`, or the whole path."""
    short = [function.rpartition(":")[2] for function in functions]
    longer = [Path(function).name.replace(".py:", ".") for function in functions]
    return [
        name if short.count(name) == 1 else with_file if longer.count(with_file) == 1 else function
        for name, with_file, function in zip(short, longer, functions, strict=True)
    ]


def read_result(result: Any, text: str = "") -> Outcome:
    """The score in a function's result, and, if the result is a dict, its other numbers and
    `spans`. Texts in a dict are ignored. Returns a Failure if there is no score, two names are the
    same text, a number is NaN or infinite in float32, or a span does not end inside `text`, the
    scored text."""
    parts = result if isinstance(result, Mapping) else {"score": result}
    # verl's functions also return the parsed answer, a text
    parts = {
        name: part
        for name, part in parts.items()
        if part is not None and (name == "spans" or not isinstance(part, str))
    }
    try:
        spans = _read_spans(parts.pop("spans"), text) if "spans" in parts else None
        numbers = read_numbers(parts)
        return numbers.pop("score"), numbers, spans
    except (KeyError, ValueError) as error:
        reason = "it has no score" if isinstance(error, KeyError) else error
    return Failure(
        "",
        "invalid",
        f"returned {one_line(repr(result)[:120])}: {reason}; "
        "return float(...), or a dict of numbers with the key 'score', perhaps with 'spans'",
    )


def _read_spans(pairs: Any, text: str) -> Spans:
    """Pairs (end, reward) of any numbers. Raises ValueError if they are none, or an end is no
    character of the text, counted from 1."""
    try:
        spans = [(read_number("end", end), read_number("reward", reward)) for end, reward in pairs]
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"spans are pairs (end, reward): {error}") from error
    for end, reward in spans:
        if not (end.is_integer() and 1 <= end <= len(text)):
            raise ValueError(
                f"the span ({end:.9g}, {reward:g}) ends at none of the {len(text)} characters of "
                "solution_str, which count from 1"
            )
    return [(int(end), reward) for end, reward in spans]
