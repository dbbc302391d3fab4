"""vLLM's engines, which take their time to start: one process of the tests has two of them, for
test_engine.py and test_vllm.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devices import skip_without_vllm


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share engines come first, so that one process of two has them all: xdist cuts the
    list in halves. Those with vLLM run on GPUs, too."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.gpu)


class VLLMPool:
    """An engine of 64 rows, with the tokenizer; and one of two with tied embeddings. They start
    when they are asked for, again if a test has ended them."""

    def __init__(self, folder: Path):
        self.folder, self.engines = folder, {}

    def __call__(self, config: Any, *_: Any) -> Any:
        """The one with tied embeddings or without, as the configuration has them; without
        weights."""
        # not by the process that only hands out tests
        from test_engine import make_tokenizer, start_vllm

        tied = config.tie_word_embeddings
        engine = self.engines.get(tied)
        if engine is None or getattr(engine, "_conn", self) is None:
            folder = self.folder / f"{tied}_{len(list(self.folder.iterdir()))}"
            engine = self.engines[tied] = start_vllm(
                folder, config, make_tokenizer(), 2 if tied else 64
            )
        engine.loaded = False
        return engine


@pytest.fixture(scope="session")
def vllm_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMPool]:
    skip_without_vllm()
    pool = VLLMPool(tmp_path_factory.mktemp("vllm"))
    yield pool
    for engine in pool.engines.values():
        engine.close()
