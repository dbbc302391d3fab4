"""Environments in threads of this process, in the place of worker processes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from splitppo.envs import Message, read_messages, read_turn
from splitppo.workers import Failure


class LocalPool:
    """In the place of an `EnvPool`. `make` makes a row's environment."""

    name = "local"

    def __init__(self, make: Callable[[dict[str, Any], int], Any], threads: int = 1):
        self.make = make
        self.envs: dict[int, Any] = {}
        self.threads = ThreadPoolExecutor(threads, "environments")

    def play(
        self, key: int, row: dict[str, Any], seed: int, messages: Sequence[Message]
    ) -> Future[list[Any] | Failure]:
        given = [*messages]

        def work() -> list[Any] | Failure:
            try:
                if key in self.envs:
                    return [read_turn(self.envs[key].step(given[-1]))]
                env = self.envs[key] = self.make(row, seed)
                began = read_messages(env.reset())
                return [began, *(read_turn(env.step(message)) for message in given)]
            except Exception as error:
                return Failure("", "error", f"{type(error).__name__}: {error}")

        return self.threads.submit(work)

    def end(self, key: int) -> None:
        def work() -> None:
            if env := self.envs.pop(key, None):
                env.close()

        self.threads.submit(work)

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
