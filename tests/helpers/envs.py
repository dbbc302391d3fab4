"""Environments in threads of this process, in the place of worker processes."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from splitppo.envs import EnvFactory, Message, Turn, read_messages, read_turn
from splitppo.envs.pool import Began
from splitppo.workers import Failure


class LocalPool:
    """In the place of an `EnvPool`. `make` makes a row's environment."""

    def __init__(self, make: EnvFactory, threads: int = 1):
        self.make = make
        self.envs: dict[int, Any] = {}
        self.threads = ThreadPoolExecutor(threads, "environments")

    def begin(
        self, key: int, row: dict[str, Any], seed: int, played: Sequence[Message]
    ) -> Future[Began | Failure]:
        def work() -> Began | Failure:
            try:
                env = self.envs[key] = self.make(row, seed)
                found = env.reset()
                messages = None if found is None else read_messages(found)
                return Began(messages, [read_turn(env.step(message)) for message in played])
            except Exception as error:
                return Failure("", "error", f"{type(error).__name__}: {error}")

        return self.threads.submit(work)

    def step(self, key: int, message: Message) -> Future[Turn | Failure]:
        def work() -> Turn | Failure:
            try:
                return read_turn(self.envs[key].step(message))
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
