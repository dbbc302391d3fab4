"""Reward functions: how `reward.function` names them, how they are found and checked, and what they may return.

Reward workers import this module: no torch, no numpy.
"""

import functools
import hashlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from splitppo.errors import UserError, one_line
from splitppo.rewards import rules

if TYPE_CHECKING:
    from splitppo.rollout import Prompt

FLOAT32_MAX = 3.4028234663852886e38


class RewardFunction(Protocol):
    """Scores a row. Returns a number, or a dict with `score` and more numbers, or an awaitable of either."""

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> Any: ...


_FAST = (rules.exact_match, rules.last_number, rules.gsm8k, rules.gsm8k_flexible, rules.echo)
FAST: dict[str, RewardFunction] = {rule.__name__: rule for rule in _FAST}  # microseconds a row: need no worker
BY_NAME: dict[str, RewardFunction] = {**FAST, "math": rules.math}  # the rules that `reward.function` may name
# the rule that `auto` takes for a data source
BY_DATA_SOURCE = {"echo": "echo", "addition": "last_number", "gsm8k": "gsm8k", "openai/gsm8k": "gsm8k"}
BY_DATA_SOURCE |= dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval"), "math")
BY_DATA_SOURCE |= dict.fromkeys(("HuggingFaceH4/MATH-500", "EleutherAI/hendrycks_math"), "math")


@dataclass(frozen=True)
class Failure:
    """A function that gave no score for a row. Kinds: `timeout`; `error`: it raised; `invalid`: its result is no finite
    number; `crash`: its process ended."""

    function: str
    kind: Literal["timeout", "error", "invalid", "crash"]
    text: str  # one line: the exception and its place, or how the process ended


Outcome = tuple[float, dict[str, float]] | Failure  # a row's score and further numbers


class InvalidResult(ValueError):
    """A reward function's result is no score."""


def check_rewards(functions: Sequence[str], setting: str = "reward.function") -> None:
    """Checks the functions before any model is loaded: imports their files and looks them up. Raises UserError if there
    is no such rule, file or function, its signature is wrong, the import fails, or `math` lacks its library."""
    for function in functions:
        if function not in ("auto", "none"):
            find_function(function, setting)


def check_prompts(
    functions: Sequence[str], prompts: Mapping[int, "Prompt"], setting: str = "reward.function"
) -> dict[int, UserError]:
    """Applies the rules among the functions to every prompt with an empty response. Returns the errors of the ground
    truths that a rule can't use. Raises UserError if `auto` has no rule for a data source, or `math` lacks its
    library."""
    sources = {prompt.data_source for prompt in prompts.values()}
    if "auto" in functions and (unknown := sorted(sources - BY_DATA_SOURCE.keys())):
        raise UserError(
            f"{setting}=auto: no rule for data_source {', '.join(map(repr, unknown))} (known: "
            f"{', '.join(BY_DATA_SOURCE)}); set --{setting} to {', '.join(BY_NAME)} or path/to/file.py:name"
        )
    if "math" in (scored_by(function, source) for function in functions for source in sources):
        find_function("math", setting)  # it needs a library
    errors: dict[int, UserError] = {}
    for index, prompt in prompts.items():
        try:
            for function in functions:
                if rule := BY_NAME.get(scored_by(function, prompt.data_source)):
                    rule(**row_of(prompt, ""))
        except UserError as error:
            errors[index] = error
    return errors


def scored_by(function: str, data_source: str) -> str:
    """The function that scores rows of a data source where `reward.function` has `function`."""
    return BY_DATA_SOURCE[data_source] if function == "auto" else function


def find_function(function: str, setting: str = "reward.function") -> RewardFunction:
    """The function of a name: a rule or `path/to/file.py:name`. Raises UserError as check_rewards does."""
    wrong = f"{setting}={function}:"
    if function == "math" and importlib.util.find_spec("math_verify") is None:
        raise UserError(f"{wrong} the rule math needs the library math-verify; pip install math-verify")
    if function in BY_NAME:
        return BY_NAME[function]
    path, _, name = function.rpartition(":")
    if not path.endswith(".py") or not name:
        raise UserError(f"{wrong} no such rule; use auto, {', '.join(BY_NAME)} or path/to/file.py:name")
    file = Path(os.path.realpath(path))  # Path.resolve raises on a link to itself
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
    except ValueError:  # some callables written in C have no signature
        pass
    except TypeError as error:
        use = "define it with (data_source, solution_str, ground_truth, extra_info)"
        raise UserError(f"{wrong} it does not take a reward function's arguments ({error}); {use}") from error
    return found


@functools.cache  # imports a file once: its top level may load a model
def _import_file(file: Path) -> ModuleType:
    # a name of its own in sys.modules, where dataclasses and pickle look it up: two files may be called reward.py
    name = f"splitppo_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec: Any = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, UserError):  # names its remedy itself
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"importing the reward file {file} failed: {message}{where}; fix the file") from error
    return module


def is_async(function: RewardFunction) -> bool:
    """Whether the function, or the `__call__` of an object, is defined with `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def display_names(functions: Sequence[str]) -> list[str]:
    """A short name for each: the rule or the function in the file; if two are equal `file.function`, or the whole."""
    parts = [function.rpartition(":") for function in functions]
    short = [name for _, _, name in parts]
    longer = [f"{Path(path).stem}.{name}" if path else name for path, _, name in parts]
    return [
        name if short.count(name) == 1 else with_file if longer.count(with_file) == 1 else function
        for name, with_file, function in zip(short, longer, functions, strict=True)
    ]


def row_of(prompt: "Prompt", response: str) -> dict[str, Any]:
    """The keyword arguments of a reward function; `response` is decoded, without special tokens."""
    source, truth, extra = prompt.data_source, prompt.ground_truth, prompt.extra_info
    return {"data_source": source, "solution_str": response, "ground_truth": truth, "extra_info": extra}


def read_result(result: Any) -> tuple[float, dict[str, float]]:
    """The score in a function's result, and the other numbers if the result is a dict. Texts in a dict are left out.
    Raises InvalidResult if there is no score, or a number is NaN or infinite in float32."""
    parts = result if isinstance(result, Mapping) else {"score": result}
    # verl's functions also return the parsed answer, a text
    numbers = {str(k): _number(v) for k, v in parts.items() if k == "score" or not isinstance(v, str | None)}
    bad = [key for key, value in numbers.items() if not abs(value) <= FLOAT32_MAX]  # true for NaN, too
    if bad or "score" not in numbers:
        reason = f"{bad[0]!r} is not a finite number" if bad else "it has no score"
        use = "return a number, or a dict of numbers with the key 'score'"
        raise InvalidResult(f"returned {_shorten(repr(result), 120)}: {reason}; {use}")
    return numbers.pop("score"), numbers


def _number(value: Any) -> float:
    """`value` as a float if it is one number of Python, numpy or torch; else NaN."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    try:
        return float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:
        return math.nan


def failure_of(function: str, error: BaseException) -> Failure:
    """The failure of a function that raised `error`. Names the last line of the function's own file, if any."""
    if isinstance(error, InvalidResult):
        return Failure(function, "invalid", str(error))
    frames = traceback.extract_tb(error.__traceback__)
    path, _, name = function.rpartition(":")
    own = [frame for frame in frames if path and frame.filename == os.path.realpath(path)] or frames
    where = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else f" (in {name})"
    return Failure(function, "error", _shorten("".join(traceback.format_exception_only(error)), 300) + where)


def timeout_failure(function: str, timeout: float, *, blocks: bool = False) -> Failure:
    """The failure of a function that took too long. `blocks`: an async function that blocked its event loop."""
    why = ", and never awaited: await what takes long, or write a plain def" if blocks else ""
    return Failure(function, "timeout", f"took longer than reward.timeout={timeout:g} s{why}")


def _shorten(text: str, length: int) -> str:
    """`text` as one line of at most `length` characters."""
    line = one_line(text)
    return line if len(line) <= length else line[: length - 3] + "..."
