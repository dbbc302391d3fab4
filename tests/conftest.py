"""One thread a process: the tests run up to four ranks on two cores, and forked children must not
inherit threads. No GPU either, where tests do not ask for it."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from devices import choose
from kept import keep_flags

keep_flags()


def pytest_configure(config: pytest.Config) -> None:
    choose(config.option.markexpr)
