"""Which tests are fast: those that start no process. It follows from what a test's code and its
fixtures name; a test that starts one by way of the package carries the mark `ranks` itself."""

import functools
import multiprocessing.process
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import pytest

TESTS = Path(__file__).parents[1]
# what starts a process, by the names that tests and their helpers use
STARTERS = {
    "Popen", "Process", "Torchrun", "check_output", "fresh_process", "run_ranks", "subprocess",
}  # fmt: skip
MARKED = {"browser", "campaign", "families", "gpu", "hosts", "slurm", "vllm", "wide"}
WRONG = (
    "{event}: a fast test starts a process; mark it `ranks` (pytest.mark.ranks) or do without "
    "(run_threads in tests/helpers/ranks.py)"
)
# the test that runs is a fast one; and what it started
_guard: dict[str, Any] = {"on": False, "started": []}


def wide(*case: Any) -> Any:
    """A case of a parametrized test for the step `wide`: another placement or option of what the
    cases beside it prove."""
    return pytest.param(*case, marks=pytest.mark.wide)


def set_tier(item: pytest.Item) -> None:
    """Marks a test that has no tier yet `ranks` or `fast`."""
    marks = {mark.name for mark in item.iter_markers()}
    if marks & (MARKED | {"ranks"}):
        return
    item.add_marker("ranks" if starts_processes(item) else "fast")


def starts_processes(item: pytest.Item) -> bool:
    found = getattr(item, "_fixtureinfo", None)
    fixtures = (
        [made.func for defs in found.name2fixturedefs.values() for made in defs] if found else []
    )
    seen: set[Any] = set()
    return any(_starts(function, seen) for function in [getattr(item, "obj", None), *fixtures])


def _starts(value: Any, seen: set[Any]) -> bool:
    """Whether a function or class of the tests names what starts a process, or calls one that
    does."""
    if isinstance(value, type):
        return any(_starts(part, seen) for part in vars(value).values())
    value = getattr(value, "hypothesis", value)
    value = getattr(value, "inner_test", getattr(value, "__wrapped__", value))
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType) or value in seen:
        return False
    seen.add(value)
    if not _in_tests(value.__code__.co_filename):
        return False
    names = set(_names(value.__code__))
    if names & STARTERS:
        return True
    named = [value.__globals__[name] for name in names if name in value.__globals__]
    modules = [vars(one) for one in named if isinstance(one, ModuleType) and _of_the_tests(one)]
    named += [members[name] for members in modules for name in names if name in members]
    return any(_starts(one, seen) for one in named if _of_the_tests(one))


def _of_the_tests(value: Any) -> bool:
    """Whether a function, class or module stands in tests/."""
    if not isinstance(value, ModuleType):
        value = sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(value, "__file__", None)
    return file is not None and _in_tests(file)


@functools.cache
def _in_tests(file: str) -> bool:
    return Path(file).is_relative_to(TESTS)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def install_guard() -> None:
    """Notices processes that a fast test starts, but git, which a run's folder asks for the commit.

    An audit hook stays for ever: once a process.
    """
    start: Callable[..., None] = multiprocessing.process.BaseProcess.start

    def noticed_start(process: Any) -> None:
        _notice("multiprocessing")
        start(process)

    mock.patch.object(multiprocessing.process.BaseProcess, "start", noticed_start).start()
    events = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}

    def noticed_event(event: str, args: tuple) -> None:
        if event in events and not (event == "subprocess.Popen" and args[1][:1] == ["git"]):
            _notice(event)

    sys.addaudithook(noticed_event)


def _notice(event: str) -> None:
    if _guard["on"]:
        _guard["started"].append(event)
        raise RuntimeError(WRONG.format(event=event))


def run_guarded(item: pytest.Item) -> Iterator[None]:
    """Around a test: a fast one that starts a process fails, also where it catches the error."""
    started: list[str] = []
    _guard.update(on=item.get_closest_marker("fast") is not None, started=started)
    try:
        yield
    finally:
        _guard["on"] = False
    if started:
        pytest.fail(WRONG.format(event=started[0]), pytrace=False)
