"""A test's tier follows from what it does (tests/helpers/tiers.py)."""

import os

import pytest
import ranks
import tiers
from ranks import run_ranks


def directly() -> list:
    return run_ranks(1, int)


def through_another() -> list:
    return directly()


def through_a_module() -> list:
    return ranks.run_ranks(1, int)


def in_threads() -> list:
    return ranks.run_threads(1, id)


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("directly", True),
        ("through_another", True),
        ("through_a_module", True),
        ("in_threads", False),
    ],
)
def test_what_names_processes_is_found(name: str, starts: bool) -> None:
    assert tiers._starts(globals()[name], set()) == starts


def test_this_test_is_fast_and_may_start_nothing(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("fast")
    with pytest.raises(RuntimeError, match=r"os\.system: a fast test starts a process; mark it"):
        os.system("true")
    assert tiers._guard["started"] == ["os.system"]
    tiers._guard["started"].clear()  # it would fail this test, though the error was caught
