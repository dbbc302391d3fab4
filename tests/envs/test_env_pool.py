"""Environments in worker processes: results, faults, and what is left of the workers."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiers import wide

from splitppo.config import EnvConfig
from splitppo.envs import Call, Message, Turn
from splitppo.envs.pool import EnvPool
from splitppo.errors import UserError
from splitppo.workers import Failure

pytestmark = pytest.mark.ranks  # its workers are processes

# each environment counts; the message "trouble" makes those do something whose row says so
FILE = """
import asyncio, os, random, subprocess, sys, time
from splitppo.envs import Message, Turn

LEFT = []

class Count:
    def __init__(self, row, seed):
        self.row = row
        self.rng = random.Random(seed)
        self.number = seed
        if row.get("does") == "make":
            raise OSError("no board")

    def reset(self):
        return [Message("user", f"from {self.number}")] if "prompt" in self.row else None

    def step(self, message):
        time.sleep(self.row.get("delay", 0) * random.random())
        self.number += len(message.content)
        if message.content == "trouble":
            found = getattr(self, self.row.get("does", "nothing"))()
            if found is not None:
                return found
        said = f"{self.number} {self.rng.random():.3f} {[*{*'abcdefghij'}]}"
        return Turn([Message("user", said)], self.number, metrics={"at": time.time()})

    def close(self):
        if "closed" in self.row:
            open(self.row["closed"], "a").write("x")

    def nothing(self): pass
    def raises(self): return {}["absent"]
    def exits(self): sys.exit("bye")
    def dies(self): os._exit(3)
    def segfaults(self): os.kill(os.getpid(), 11)
    def hangs(self): time.sleep(60)
    def prints(self): print("x" * 1_000_000); print("y" * 1_000_000, file=sys.stderr)
    def wrong(self): return {"messages": []}
    def speaks(self): return Turn([Message("assistant", "I")])
    def much(self): return Turn(reward="much")
    def grows(self): self.kept = bytearray(1 << 30)
    def leaks(self): LEFT.append(bytearray(3 << 26))
    def keeps(self): self.kept = bytearray(3 << 26)
    def forks(self): os.fork()
    def leaves(self): subprocess.Popen(["sleep", "61.25"], start_new_session=True)
    def leaves_and_hangs(self): self.leaves(); time.sleep(60)
    def changes(self): self.number = os.getpid()

class Mine(Message):
    pass

class Odd(Count):
    def step(self, message):
        turn = super().step(message)
        return Turn([Mine(**vars(m)) for m in turn.messages], turn.reward)

class Waits(Count):
    async def step(self, message):
        await asyncio.sleep(60 if message.content == "sleep" else 0)
        return super().step(message)

ENTERED = []

class Meets(Count):
    async def step(self, message):
        ENTERED.append(self)
        while len(ENTERED) < 30:
            await asyncio.sleep(0.01)
        return super().step(message)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("envs") / "my_env.py"
    path.write_text(FILE)
    return path


@contextlib.contextmanager
def pool(
    file: Path, name: str = "Count", workers: int = 1, *, timeout: float = 20, **how: Any
) -> Iterator[EnvPool]:
    made = EnvPool(EnvConfig(path=f"{file}:{name}", timeout=timeout), workers, **how)
    try:
        yield made
    finally:
        made.close()


def said(*texts: str) -> list[Message]:
    return [Message("assistant", text) for text in texts]


def play(envs: EnvPool, rows: list[dict[str, Any]], messages: list[str]) -> list[Any]:
    """Plays all rows at once, each with its number as the seed: their turns without metrics, or
    the failure."""
    found: dict[int, Any] = {key: [] for key in range(len(rows))}
    for count in range(len(messages) + 1):
        going = [key for key, heard in found.items() if not isinstance(heard, Failure)]
        waiting = {key: envs.play(key, rows[key], key, said(*messages[:count])) for key in going}
        for key, future in waiting.items():
            heard = future.result()
            if isinstance(heard, Failure):
                found[key] = heard
            elif count:  # also of a new process, which tells all
                found[key].append((heard[-1].messages[0].content, heard[-1].reward))
    for key in found:
        envs.end(key)
    return list(found.values())


def processes(*words: bytes) -> list[int]:
    """Those whose command has all the words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            command = (folder / "cmdline").read_bytes().split(b"\0")
            found += [int(folder.name)] if {*words} <= {*command} else []
    return found


def workers_of(pid: int) -> list[int]:
    return processes(b"splitppo.workers.main", str(pid).encode())


def gone(*words: bytes) -> bool:
    end = time.monotonic() + 60
    while processes(*words) and time.monotonic() < end:
        time.sleep(0.02)
    return not processes(*words)


TALK = ["a", "trouble", "bb"]
FAULTS = {  # what the environment does: the kind, and what the text says
    "make": ("error", "OSError: no board .*my_env.py, line 13, in __init__"),
    "raises": ("error", "KeyError: 'absent' .*my_env.py, line [0-9]+, in raises"),
    "exits": ("error", "SystemExit: bye"),
    "dies": ("crash", "its process ended with status 3"),
    "segfaults": ("crash", "its process was killed by SIGSEGV"),
    "hangs": ("timeout", "took longer than env.timeout=3 s"),
    "wrong": ("invalid", r"step returned \{'messages': \[\]\}; return splitppo.envs.Turn"),
    "speaks": ("invalid", "is not a message of an environment"),
    "much": ("invalid", "'reward' is not a finite number .'much'."),
    "grows": ("memory", r"MemoryError \(.*: its process may have 0.25 GiB"),
    "leaves_and_hangs": ("timeout", "took longer"),
}
HARMLESS = ["prints", "forks", "leaves"]


@pytest.mark.parametrize("workers", [1, wide(3)])
def test_each_fault_costs_its_row_alone(
    file: Path, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    does = ["nothing", *FAULTS, "nothing", *HARMLESS, "nothing"]
    with pool(file, workers=workers, timeout=3, memory=1 << 28) as envs:
        found = play(envs, [{"does": what} for what in does], TALK)
        with pool(file) as other:
            healthy = play(other, [{}] * len(does), TALK)
    for what, heard, expected in zip(does, found, healthy, strict=True):
        if what in FAULTS:
            kind, text = FAULTS[what]
            assert (heard.function, heard.kind) == ("Count", kind), heard
            assert re.search(text, heard.text), heard
        else:
            assert heard == expected, what
    assert len(capfd.readouterr().out) < 500_000
    assert not workers_of(os.getpid())
    assert gone(b"sleep", b"61.25")


def test_an_environment_is_closed_once(file: Path, tmp_path: Path) -> None:
    does = {"ended": "nothing", "failed": "raises", "open": "nothing"}
    with pool(file) as envs:
        for key, (name, what) in enumerate(does.items()):
            row = {"does": what, "closed": f"{tmp_path}/{name}"}
            envs.play(key, row, 0, said("trouble")).result()
        envs.end(0)
        envs.end(1)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(does, "x")


def test_close_ends_what_is_under_way(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    def begin_and_close() -> None:
        with pool(file) as envs:
            step = envs.play(0, {"does": "hangs"}, 0, said("trouble"))
            step.add_done_callback(lambda _: envs.end(0))
            envs.play(1, {}, 0, [])  # waits for the step
        assert step.cancelled()

    begin_and_close()
    assert not workers_of(os.getpid())
    gc.collect()
    assert not caplog.records, "a task is left over"


def test_what_is_nested_too_deep_to_be_sent_fails_its_row_alone(file: Path) -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    call = Message("assistant", "a", (Call("f", {"x": deep}),))
    with pool(file) as envs:
        failure = envs.play(0, {}, 0, [call]).result()
        assert play(envs, [{}], ["a"]) == play(envs, [{}], ["a"])
    assert isinstance(failure, Failure)
    assert failure.kind == "invalid"
    assert "RecursionError" in failure.text


def test_results_are_the_same_for_any_number_of_workers_and_any_delays(file: Path) -> None:
    found = []
    for workers, delay in ((1, 0), (4, 0.02)):
        rows = [{"delay": delay, "prompt": 1}] * 8
        with pool(file, workers=workers) as envs:
            found.append(play(envs, rows, ["a", "bb", "ccc"]))
    assert found[0] == found[1]
    assert len({str(row) for row in found[0]}) == 8


def test_an_environment_goes_on_in_another_process_where_it_was(file: Path) -> None:
    began = [Message("user", "from 5")]
    with pool(file) as envs:
        assert envs.play(0, {"prompt": 1}, 5, []).result() == [began]
        first = envs.play(0, {"prompt": 1}, 5, said("a")).result()
        before = workers_of(os.getpid())
        os.kill(max(before), signal.SIGKILL)
        second = envs.play(0, {"prompt": 1}, 5, said("a", "bb")).result()
        assert not {*before} & {*workers_of(os.getpid())}
        # what another rank gets that takes the row over
        again = envs.play(1, {"prompt": 1}, 5, said("a", "bb")).result()
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert again == second == [began, *first, second[-1]]
    assert first[0] != second[-1]


def test_memory_that_others_of_a_worker_hold_fails_no_row(file: Path) -> None:
    with pool(file, memory=1 << 28) as envs:
        found = play(envs, [{"does": "keeps"}, {"does": "keeps"}, {"does": "leaks"}], TALK)
    with pool(file) as healthy:
        assert found == play(healthy, [{}] * 3, TALK)


def test_async_steps_wait_at_the_same_time_and_a_fault_costs_its_row_alone(file: Path) -> None:
    faults = {"does": "dies"}, {"does": "hangs"}
    with pool(file, "Meets", timeout=60) as envs:
        found = play(envs, [{}] * 30, ["a"])
    with pool(file, "Waits", timeout=3) as envs:
        mixed = play(envs, [{}, *faults], ["trouble"])
        slow = play(envs, [{}], ["sleep"])
    with pool(file) as plain:
        assert found == play(plain, [{}] * 30, ["a"])
        assert mixed[:1] == play(plain, [{}], ["trouble"])
    assert [heard.kind for heard in mixed[1:]] == ["crash", "timeout"]
    assert "never awaited" in mixed[2].text
    assert slow[0].kind == "timeout"


def test_what_a_user_s_class_says_arrives_as_plain_values(file: Path) -> None:
    with pool(file, "Odd") as odd, pool(file) as plain:
        assert play(odd, [{}], ["a"]) == play(plain, [{}], ["a"])


def test_tools_and_built_in_environments(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("class Half: pass\n")
    with pytest.raises(UserError, match="lacks reset"):
        EnvPool(EnvConfig(path=f"{tmp_path}/wrong.py:Half"), 1)
    for env, prompt in (
        (EnvConfig(path="guess"), "A number"),
        (EnvConfig(tools=("calculator",), format_reward=0.5), "[]"),
    ):
        with contextlib.closing(EnvPool(env, 1)) as envs:
            began, turn = envs.play(0, {}, 0, said("7")).result()  # type: ignore
            assert prompt in str(began)
            assert isinstance(turn, Turn)


@pytest.mark.parametrize("does", [wide("nothing"), "leaves_and_hangs"])
def test_a_killed_trainer_leaves_nothing(file: Path, does: str) -> None:
    code = f"""
import signal
from splitppo.config import EnvConfig
from splitppo.envs import Message
from splitppo.envs.pool import EnvPool
envs = EnvPool(EnvConfig(path="{file}:Count", timeout=60), 2)
waiting = envs.play(0, {{"does": "{does}"}}, 0, [Message("assistant", "trouble")])
if "{does}" == "nothing":
    waiting.result()
print("asked", flush=True)
signal.pause()
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    with trainer.stdout as lines:
        assert lines.readline() == "asked\n"
        while does != "nothing" and not processes(b"sleep", b"61.25"):
            time.sleep(0.02)
        assert len(workers_of(trainer.pid)) > 2  # with the processes that keep them
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert gone(b"splitppo.workers.main", str(trainer.pid).encode())
    assert gone(b"sleep", b"61.25")


def test_a_flood_stops_no_row_if_nobody_reads_it(file: Path) -> None:
    code = f"""
import os
from splitppo.config import EnvConfig
from splitppo.envs import Message
from splitppo.envs.pool import EnvPool
envs = EnvPool(EnvConfig(path="{file}:Count"), 1)
said = [Message("assistant", "trouble")] * 2
turn = envs.play(0, {{"does": "prints"}}, 0, said).result()[-1]
os.write(2, repr(turn.reward).encode())
envs.close()
"""
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-c", code], stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert done.stderr.endswith(b"14.0")
