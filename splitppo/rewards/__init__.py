"""Rewards: one number a row, from a function of verl's signature.

A function is named in `reward.function`: a rule of `splitppo.rewards.rules`, `path/to/file.py:name`, or `auto`.
"""

import functools
import hashlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from splitppo.errors import UserError
from splitppo.rewards import rules
from splitppo.rollout import Prompt


class RewardFunction(Protocol):
    """What scores a row; called with keyword arguments. Returns a number, or a dict with `score` and more numbers."""

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> Any: ...


_RULES = (rules.exact_match, rules.last_number, rules.gsm8k, rules.echo, rules.addition)
BY_NAME = {rule.__name__: rule for rule in _RULES}  # those that `reward.function` may name
# What `auto` takes for the rows of a data source.
BY_DATA_SOURCE = {"echo": rules.echo, "addition": rules.addition, "gsm8k": rules.gsm8k, "openai/gsm8k": rules.gsm8k}


def check_reward(function: str) -> None:
    """Check `reward.function` before any model is loaded: a file is imported, its function looked up.

    Raises:
        UserError: no such rule, file or function, or it can't be called as rewards are, or the import fails (chained).
    """
    _find_function(function)


def load_reward(function: str, data_sources: Set[str]) -> RewardFunction:
    """The function that `reward.function` names; `auto` chooses a rule for each row by its data_source.

    `data_sources` are those of all rows that will be scored: for `auto`, one without a rule is a UserError, so that it
    is found before training. The other errors are check_reward's.
    """
    if function == "auto" and (unknown := sorted(data_sources - BY_DATA_SOURCE.keys())):
        raise UserError(
            f"reward.function=auto: no rule for data_source {', '.join(map(repr, unknown))} (known: "
            f"{', '.join(BY_DATA_SOURCE)}); set --reward.function to {', '.join(BY_NAME)} or path/to/file.py:name"
        )
    return _find_function(function)


def check_truths(function: RewardFunction, prompts: Sequence[Prompt]) -> None:
    """Try each prompt's ground truth on a rule of ours, which needs no response for that.

    One that the rule can't use is a UserError, which names the prompt by its number, from 1.
    """
    if function is not _score_by_data_source and function not in BY_NAME.values():
        return
    for number, prompt in enumerate(prompts, 1):
        try:
            score(function, prompt, "")
        except UserError as error:
            raise UserError(f"prompt {number} of {len(prompts)}: {error}") from error


def score(function: RewardFunction, prompt: Prompt, response_text: str) -> tuple[float, dict[str, float]]:
    """Score one row, of which `response_text` is the decoded response without special tokens.

    Returns:
        The score, and the further numbers if the function gave a dict, all finite; texts beside them are left out.

    Raises:
        UserError: it returned something else, or NaN or infinity. What the function itself raises comes through
            as it is, with a note that names the function and the data source.
    """
    source, truth, extra = prompt.data_source, prompt.ground_truth, prompt.extra_info
    try:
        result = function(data_source=source, solution_str=response_text, ground_truth=truth, extra_info=extra)
    except Exception as error:
        error.add_note(f"raised in the reward {_describe(function)} for a row of data_source {source!r}")
        raise
    parts = result if isinstance(result, dict) else {"score": result}
    # verl's own functions return the parsed answer, too: a text, of which there is no mean
    numbers = {str(k): _number(v) for k, v in parts.items() if k == "score" or not isinstance(v, str | None)}
    bad = [key for key, value in numbers.items() if not math.isfinite(value)]
    if bad or "score" not in numbers:
        text = " ".join(repr(result).split())
        shown = text if len(text) <= 120 else text[:117] + "..."
        reason = f"{bad[0]!r} is not a finite number" if bad else "it has no score"
        raise UserError(
            f"reward {_describe(function)} returned {shown} for a row of data_source {source!r}: {reason}; "
            "return a number, or a dict of numbers with the key 'score'"
        )
    return numbers.pop("score"), numbers


def _score_by_data_source(*, data_source: str, **row: Any) -> Any:
    return BY_DATA_SOURCE[data_source](data_source=data_source, **row)


def _find_function(function: str) -> RewardFunction:
    if function == "auto":
        return _score_by_data_source
    if function in BY_NAME:
        return BY_NAME[function]
    wrong = f"reward.function={function}:"
    path, _, name = function.rpartition(":")
    if not path.endswith(".py") or not name:
        raise UserError(f"{wrong} no such rule; use auto, {', '.join(BY_NAME)} or path/to/file.py:name")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{wrong} no such file {file}; give a path that every rank can read")
    module = _import_file(file)
    if not hasattr(module, name):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(f"{wrong} {path} has no {name}; functions there: {', '.join(defined) or 'none'}")
    found = getattr(module, name)
    if not callable(found):
        raise UserError(f"{wrong} it is a {type(found).__name__}; name a function")
    try:
        inspect.signature(found).bind(data_source="", solution_str="", ground_truth="", extra_info={})
    except ValueError:
        pass  # some callables written in C have no signature to look at
    except TypeError as error:
        raise UserError(
            f"{wrong} it does not take what rewards are called with ({error}); "
            "define it with (data_source, solution_str, ground_truth, extra_info)"
        ) from error
    return found


@functools.cache  # one import, however often a run asks: a file's top level may load a model
def _import_file(file: Path) -> ModuleType:
    # The name is the file's own, so that two rewards called reward.py do not meet in sys.modules.
    name = f"splitppo_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"reward.function: {file} cannot be imported as Python; give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"reward.function: importing {file} failed: {message}{where}; mend the file") from error
    return module


def _number(value: Any) -> float:
    """`value` as a float if it is one number: of Python, numpy, or torch without axes; else NaN."""
    if isinstance(value, np.generic | np.ndarray | Tensor) and value.ndim == 0:
        value = value.item()
    try:
        return float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:  # an int beyond floats
        return math.nan


def _describe(function: Any) -> str:
    """Name of a function and the file it is in."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{name}" if code else name
