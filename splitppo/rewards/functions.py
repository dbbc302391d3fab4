"""Reward functions by name, by file and by data source; what they may return; what is said of one that fails.

Workers import this: it must stay light (no torch, no numpy).
"""

import functools
import hashlib
import importlib.util
import inspect
import math
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from splitppo.errors import UserError, one_line
from splitppo.rewards import rules

if TYPE_CHECKING:
    from splitppo.rollout import Prompt


FLOAT32_MAX = 3.4028234663852886e38
SLOW_IMPORT = 5.0  # seconds after which reward files that are still being imported are named


class RewardFunction(Protocol):
    """What scores a row; called with keyword arguments. Returns a number, or a dict with `score` and more numbers; an
    async function returns that when it is awaited."""

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> Any: ...


_FAST = (rules.exact_match, rules.last_number, rules.gsm8k, rules.gsm8k_flexible, rules.echo, rules.addition)
FAST: dict[str, RewardFunction] = {rule.__name__: rule for rule in _FAST}  # microseconds a row: need no worker
BY_NAME: dict[str, RewardFunction] = {**FAST, "math": rules.math}  # those that `reward.function` may name
# What `auto` takes for the rows of a data source.
BY_DATA_SOURCE = {"echo": "echo", "addition": "addition", "gsm8k": "gsm8k", "openai/gsm8k": "gsm8k"}
BY_DATA_SOURCE |= dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval"), "math")
BY_DATA_SOURCE |= dict.fromkeys(("HuggingFaceH4/MATH-500", "EleutherAI/hendrycks_math"), "math")

Kind = Literal["timeout", "error", "invalid", "crash"]


@dataclass(frozen=True)
class Fault:
    """Why a function gave no score for a row, in a line of text."""

    kind: Kind
    text: str


# what a function made of a row: its score and its further numbers, or why there are none
Outcome = tuple[float, dict[str, float]] | Fault


class InvalidResult(ValueError):
    """A reward function returned what is no score."""


def check_rewards(functions: Sequence[str], setting: str = "reward.function") -> None:
    """Check the functions before any model is loaded: files are imported, their functions looked up.

    Args:
        functions: as `setting` names them.

    Raises:
        UserError: no such rule, file or function, or it can't be called as rewards are, or the import fails (chained),
            or `math` without its library.
    """
    told = f"still importing {setting}={','.join(functions)} ..."
    slow = threading.Timer(SLOW_IMPORT, print, [told], {"file": sys.stderr})
    slow.daemon = True
    if os.environ.get("RANK", "0") == "0":  # one of all ranks is enough
        slow.start()
    try:
        for function in functions:
            if function not in ("auto", "none"):
                find_function(function, setting)
    finally:
        slow.cancel()


def check_prompts(functions: Sequence[str], prompts: Sequence["Prompt"], setting: str = "reward.function") -> None:
    """Try the rows that will be scored on the functions that are rules of ours, which needs no response for that.

    Raises:
        UserError: `auto` has no rule for a row's data_source, or a rule can't use a row's ground truth; the row is
            named by its number, from 1.
    """
    check_sources(functions, {prompt.data_source for prompt in prompts}, setting)
    for number, prompt in enumerate(prompts, 1):
        for name in rules_of(functions, {prompt.data_source}):
            try:
                BY_NAME[name](**row_of(prompt, ""))
            except UserError as error:
                raise UserError(f"prompt {number} of {len(prompts)}: {error}") from error


def check_sources(functions: Sequence[str], data_sources: Set[str], setting: str = "reward.function") -> None:
    """Raises UserError if `auto` is among the functions and has no rule for one of the data sources, or its rule is
    `math` without its library."""
    if "auto" not in functions:
        return
    if unknown := sorted(data_sources - BY_DATA_SOURCE.keys()):
        raise UserError(
            f"{setting}=auto: no rule for data_source {', '.join(map(repr, unknown))} (known: "
            f"{', '.join(BY_DATA_SOURCE)}); set --{setting} to {', '.join(BY_NAME)} or path/to/file.py:name"
        )
    if "math" in rules_of(["auto"], data_sources):
        _check_math_verify(f"{setting}=auto: of a data_source here,")


def rules_of(functions: Iterable[str], data_sources: Set[str]) -> list[str]:
    """The rules of ours among the functions, with those that `auto` takes for the data sources; each once."""
    chosen = [[BY_DATA_SOURCE[s] for s in sorted(data_sources)] if f == "auto" else [f] for f in functions]
    return list(dict.fromkeys(name for names in chosen for name in names if name in BY_NAME))


def find_function(function: str, setting: str = "reward.function") -> RewardFunction:
    """The function that `setting` names: a rule or `path/to/file.py:name`. Raises UserError as check_rewards does."""
    wrong = f"{setting}={function}:"
    if function == "math":
        _check_math_verify(wrong)
    if function in BY_NAME:
        return BY_NAME[function]
    path, _, name = function.rpartition(":")
    if not path.endswith(".py") or not name:
        raise UserError(f"{wrong} no such rule; use auto, {', '.join(BY_NAME)} or path/to/file.py:name")
    file = Path(os.path.realpath(path))  # of a link to itself, too
    if not file.is_file():
        raise UserError(f"{wrong} no such file {file}; give a path that every rank can read")
    module = _import_file(file)
    if not hasattr(module, name):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(f"{wrong} {path} has no {name}; functions there: {', '.join(defined) or 'none'}")
    found = getattr(module, name)
    if not callable(found):
        raise UserError(f"{wrong} it is a {type(found).__name__}; name a function")
    if (signature := _signature(found)) is not None:
        try:
            signature.bind(data_source="", solution_str="", ground_truth="", extra_info={})
        except TypeError as error:
            raise UserError(
                f"{wrong} it does not take what rewards are called with ({error}); "
                "define it with (data_source, solution_str, ground_truth, extra_info)"
            ) from error
    return found


def is_async(function: RewardFunction) -> bool:
    """Whether it is defined with `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def display_names(functions: Sequence[str]) -> list[str]:
    """A short name for each: a rule's own, a file's function's; if two are alike, `file.function`, or as given."""
    forms = []
    for function in functions:
        path, _, name = function.rpartition(":")
        forms.append((name, f"{Path(path).stem}.{name}" if path else name, function))
    shortest, longer, _ = (list(column) for column in zip(*forms, strict=True)) if forms else ([], [], [])
    return [
        name if shortest.count(name) == 1 else with_file if longer.count(with_file) == 1 else function
        for name, with_file, function in forms
    ]


def row_of(prompt: "Prompt", response: str) -> dict[str, Any]:
    """The keyword arguments of a reward function; `response` is decoded, without special tokens."""
    source, truth, extra = prompt.data_source, prompt.ground_truth, prompt.extra_info
    return {"data_source": source, "solution_str": response, "ground_truth": truth, "extra_info": extra}


def read_result(result: Any) -> tuple[float, dict[str, float]]:
    """The score, and the further numbers if the function returned a dict, all finite; texts beside them are left out.

    Raises:
        InvalidResult: it is something else, or NaN, or infinity as a float32, which scores become.
    """
    parts = result if isinstance(result, Mapping) else {"score": result}
    # verl's own functions return the parsed answer, too: a text, of which there is no mean
    numbers = {str(k): _number(v) for k, v in parts.items() if k == "score" or not isinstance(v, str | None)}
    bad = [key for key, value in numbers.items() if not abs(value) <= FLOAT32_MAX]  # NaN is not, either
    if bad or "score" not in numbers:
        reason = f"{bad[0]!r} is not a finite number" if bad else "it has no score"
        advice = "return a number, or a dict of numbers with the key 'score'"
        raise InvalidResult(f"returned {_line(repr(result), 120)}: {reason}; {advice}")
    return numbers.pop("score"), numbers


def error_fault(error: BaseException, function: str) -> Fault:
    """An exception's type, message, and the last line of the function's own file where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    path, _, name = function.rpartition(":")
    own = [frame for frame in frames if path and frame.filename == os.path.realpath(path)] or frames
    where = f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else f" (in {name})"
    return Fault("error", _line("".join(traceback.format_exception_only(error)), 300) + where)


def timeout_fault(timeout: float, *, blocks: bool = False) -> Fault:
    """A row took too long; `blocks`: an async one, and all others that its process had begun waited for it."""
    why = ", and never awaited: await what takes long, or write a plain def" if blocks else ""
    return Fault("timeout", f"took longer than reward.timeout={timeout:g} s{why}")


def _check_math_verify(wrong: str) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(f"{wrong} the rule math needs the library math-verify; pip install math-verify")


@functools.cache  # one import, however often a run asks: a file's top level may load a model
def _import_file(file: Path) -> ModuleType:
    # The name is the file's own, so that two rewards called reward.py do not meet in sys.modules.
    name = f"splitppo_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"the reward file {file} cannot be imported as Python; give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, UserError):  # it says what to do by itself
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"importing the reward file {file} failed: {message}{where}; mend the file") from error
    return module


def _signature(function: Any) -> inspect.Signature | None:
    """None for some callables written in C, which have none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _number(value: Any) -> float:
    """`value` as a float if it is one number: of Python, or of numpy or torch without axes; else NaN."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    try:
        return float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:  # an int beyond floats
        return math.nan


def _line(text: str, length: int) -> str:
    """`text` as one line, cut to a length in characters."""
    line = one_line(text)
    return line if len(line) <= length else line[: length - 3] + "..."
