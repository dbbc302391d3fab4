"""One thread a process: the tests run up to four ranks on two cores, and forked children must not
inherit threads. No GPU either, where tests do not ask for it."""

import gc
import os
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from devices import choose
from kept import keep_flags
from tiers import install_guard, run_guarded, set_tier

keep_flags()
install_guard()
gc.disable()  # till the modules are imported: what they hold stays


def pytest_configure(config: pytest.Config) -> None:
    choose(config.option.markexpr)


# before `-m` chooses
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        set_tier(item)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from run_guarded(item)
