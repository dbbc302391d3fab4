"""Reward functions in worker processes: results, order, functions that fail, and what is left of
the workers."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from devices import needs
from tiers import wide

from splitppo.config import RewardConfig
from splitppo.errors import UserError
from splitppo.rewards.scorer import Scored, Scorer, say_failures
from splitppo.rollout import Prompt
from splitppo.workers import Failure, describe, find_in_file

pytestmark = pytest.mark.ranks  # its workers are processes

# what each response makes the functions do
FILE = """
import asyncio, math, os, subprocess, sys, time

def as_float(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, ground_truth, extra_info) == ("echo", "314", {"index": 7})
    return float(len(solution_str))

def as_dict(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 2, "acc": True, "pred": solution_str, "pid": os.getpid()}

def trouble(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "sleep":
        time.sleep(60)
    if solution_str == "raise":
        return {}["absent"]
    if solution_str == "exit":
        sys.exit("bye")
    if solution_str == "die":
        os._exit(3)
    if solution_str == "killed":
        os.kill(os.getpid(), 9)
    if solution_str == "child":
        subprocess.run(["sleep", "60.25"])
    if solution_str == "fork and die" and os.fork():
        os._exit(3)
    if solution_str == "fork and die":
        time.sleep(60)
    found = {"nan": math.nan, "text": "1.0", "none": None, "empty": {}}
    return found.get(solution_str, len(solution_str))

async def waits(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "block":
        time.sleep(60)
    if solution_str == "raise":
        raise TimeoutError("mine")
    if solution_str == "cancelled":
        raise asyncio.CancelledError
    await asyncio.sleep(60 if solution_str == "sleep" else 0)
    if solution_str == "stubborn":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            time.sleep(60)
    if solution_str == "die":
        os._exit(3)
    return len(solution_str)

ENTERED = []

async def meets(solution_str, **row):
    ENTERED.append(solution_str)
    while len(ENTERED) < 30:
        await asyncio.sleep(0.01)
    return len(solution_str)

LOOPS = set()  # kept, so that no two have the same address

def wrapped(**row):
    return waits(**row)

async def twice(**row):
    LOOPS.add(asyncio.get_running_loop())
    if row["solution_str"] == "exit":
        sys.exit("bye")
    return waits(**row)
late = lambda **row: twice(**row)
loops = lambda **row: asyncio.sleep(0, len(LOOPS))

def asks(data_source, solution_str, ground_truth, extra_info, prompt="none"):
    return len(prompt)

def any_name(**row):
    return "prompt" in row

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

def measure(text):
    if text == "killed":
        os.kill(os.getpid(), 9)
    if text == "die":
        os.write(2, b"no space for the tables\\n")
        os._exit(3)
    return len(text)

def refuse():
    raise LookupError("no licence file")

class Unread:
    def __reduce__(self):
        return int, ("of no use",)

def in_process(method):
    def function(solution_str, **_):
        initializer = refuse if solution_str == "refuse" else None
        with ProcessPoolExecutor(1, get_context(method), initializer) as pool:
            given = Unread() if solution_str == "unread" else solution_str
            return pool.submit(measure, given).result()
    return function
spawned = in_process("spawn")
forkserver = in_process("forkserver")
forked = in_process("fork")

def halves(solution_str, **_):
    return {"score": 1, "spans": [(1, 0.5), (3, len(solution_str))]}

halved = halves

class Judge:
    async def __call__(self, *, data_source, solution_str, ground_truth, extra_info):
        return 7
judge = Judge()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "my_reward.py").write_text(FILE)
    return tmp_path / "my_reward.py"


@contextlib.contextmanager
def scorer(
    *functions: str, weights: Sequence[float] = (), workers: int = 1, timeout: float = 20
) -> Iterator[Scorer]:
    how: Any = {"workers": workers, "timeout": timeout, "failed_score": -1.0}
    made = Scorer(RewardConfig(functions, tuple(weights), **how), {"echo"})
    try:
        yield made
    finally:
        made.close()


def rows(*texts: str, source: str = "echo", truth: Any = "314") -> list[tuple[Prompt, str]]:
    return [(Prompt("314=", [1, 2], source, truth, {"index": 7}), text) for text in texts]


@pytest.mark.parametrize("method", ["spawned", wide("forked"), wide("forkserver")])
def test_what_ended_a_process_that_a_function_started_is_said(file: Path, method: str) -> None:
    with scorer(f"{file}:{method}") as one:
        found = one.submit(rows("abc", "die", "refuse", "unread", "abcd", "killed"))()
    assert kinds(found) == ["3", "error", "error", "error", "4", "error"]
    causes = ("no space for the tables", "LookupError: no licence file", "ValueError: invalid lit")
    for row, cause in zip(found[1:4], causes, strict=True):
        assert f"; it printed {cause}" in row.failures[0].text
    assert "it printed" not in found[5].failures[0].text, "nor what others printed"


def kinds(scored: Sequence[Scored]) -> list[str]:
    """The kind of each row's only failure, or its score as a text."""
    return [row.failures[0].kind if row.failures else f"{row.score:g}" for row in scored]


STRAYS: set[int] = set()  # workers of this process that other tests left behind


@pytest.fixture(autouse=True)
def know_strays() -> None:
    STRAYS.clear()
    STRAYS.update(worker_pids(os.getpid()))


def worker_pids(of: int) -> set[int]:
    """The workers of a process, as Linux knows them, without the processes that keep them, and what
    they started; none that were there when the test began."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            command = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            ours = b"splitppo.workers.main" in command and str(of).encode() in command
            if ours and parent != of:
                found.add(int(folder.name))
    return found - STRAYS


def wait_until(true: Any, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(true())


def test_a_float_a_dict_and_their_weighted_sum(file: Path) -> None:
    with scorer(f"{file}:as_float", f"{file}:as_dict", "exact_match", weights=[1, 0.5, 10]) as both:
        first, second = both.submit(rows("abc", "314"))()
    pid = first.figures.pop("as_dict/pid")
    assert pid != os.getpid()
    assert second.figures.pop("as_dict/pid") == pid
    numbers = {"as_float/score": 3.0, "as_dict/score": 2.0, "as_dict/acc": 1.0}
    assert first == Scored(3 + 0.5 * 2, {**numbers, "exact_match/score": 0.0}, ())
    assert second == Scored(3 + 0.5 * 2 + 10, {**numbers, "exact_match/score": 1.0}, ())


def test_what_is_paid_on_the_way_has_the_functions_weight(file: Path) -> None:
    """A span behind the text is an invalid result, with its end and the text's length; the spans of
    the other function count."""
    with scorer(f"{file}:halves", f"{file}:as_float", weights=[2, 1]) as both:
        good, bad, plain = both.submit(rows("abc", "ab", "abc"))()
    assert good.spans == plain.spans == [(1, 1.0), (3, 6.0)]
    assert (good.score, bad.score, bad.spans) == (2 + 3, -2 + 2, None)
    (failure,) = bad.failures
    assert (failure.function, failure.kind) == ("halves", "invalid")
    assert "(3, 2)" in failure.text
    assert "the 2 characters" in failure.text
    with scorer(f"{file}:halves", f"{file}:halved", weights=[2, 1]) as both:
        (row,) = both.submit(rows("abc"))()
    assert row.spans == [(1, 1.0), (3, 6.0), (1, 0.5), (3, 3.0)]


def test_one_function_keeps_the_names_of_its_figures(file: Path) -> None:
    with scorer(f"{file}:as_dict") as one:
        (row,) = one.submit(rows("abc"))()
    assert row.score == 2
    assert row.figures.keys() == {"acc", "pid"}


def test_rules_alone_start_no_process() -> None:
    with scorer("exact_match", "last_number") as rules:
        good, bad = rules.submit(rows("314", "so 314"))()
        assert not worker_pids(os.getpid())
    assert good == Scored(2.0, {"exact_match/score": 1.0, "last_number/score": 1.0}, ())
    assert bad == Scored(1.0, {"exact_match/score": 0.0, "last_number/score": 1.0}, ())


@pytest.mark.parametrize("weights", [(), (2.0,)])
def test_none_scores_nothing(weights: Sequence[float]) -> None:
    with scorer("none", weights=weights) as nothing:
        assert nothing.submit(rows("314", "x"))() == [Scored(0.0, {}, ())] * 2
        assert nothing.submit([])() == []


@needs("math_verify", "math")
def test_auto_sends_mathematics_to_a_worker_and_the_rest_nowhere() -> None:
    made = Scorer(RewardConfig(), {"echo", "HuggingFaceH4/MATH-500"})
    with contextlib.closing(made):
        given = rows("314") + rows(
            r"\boxed{0.5}", r"\boxed{2}", source="HuggingFaceH4/MATH-500", truth=r"\frac12"
        )
        assert [row.score for row in made.submit(given)()] == [1, 1, 0]


def test_each_failure_is_named_and_costs_no_other_row_its_score(file: Path) -> None:
    texts = [
        "a",
        "sleep",
        "bb",
        "raise",
        "exit",
        "ccc",
        "die",
        "killed",
        "nan",
        "text",
        "none",
        "empty",
        "dddd",
    ]
    with scorer(f"{file}:trouble", timeout=2) as one:
        scored = one.submit(rows(*texts))()
    expected = ["1", "timeout", "2", "error", "error", "3", "crash", "crash"]
    assert kinds(scored) == [*expected, "invalid", "invalid", "invalid", "invalid", "4"]
    messages = {
        text: row.failures[0].text for text, row in zip(texts, scored, strict=True) if row.failures
    }
    assert "2 s" in messages["sleep"]
    line = FILE.splitlines().index('        return {}["absent"]') + 1
    assert messages["raise"] == f"KeyError: 'absent' ({file}, line {line}, in trouble)"
    assert "SystemExit: bye" in messages["exit"]
    assert "status 3" in messages["die"]
    assert "SIGKILL" in messages["killed"]
    assert "returned nan" in messages["nan"]
    assert all(row.score == -1 for row in scored if row.failures)
    assert {failure.function for row in scored for failure in row.failures} == {"trouble"}
    assert not any("\n" in text for text in messages.values())


def test_what_a_function_started_ends_with_its_worker(file: Path) -> None:
    def sleepers() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found += [path.parent.name] if path.read_bytes() == b"sleep\x0060.25\x00" else []
        return found

    with scorer(f"{file}:trouble", timeout=2) as one:
        assert kinds(one.submit(rows("child", "a"))()) == ["timeout", "1"]
        assert wait_until(lambda: not sleepers())


def test_a_crash_is_seen_though_a_fork_holds_the_socket(file: Path) -> None:
    with scorer(f"{file}:trouble", timeout=60) as one:
        assert kinds(one.submit(rows("fork and die", "a"))()) == ["crash", "1"]


def test_order_is_kept_by_several_workers(file: Path) -> None:
    with scorer(f"{file}:trouble", workers=3, timeout=2) as three:
        texts = ["x" * n for n in range(60)]
        texts[1] = "sleep"  # its neighbours are done long before
        first, second = three.submit(rows(*texts)), three.submit(rows("a", "bb"))
        expected = [str(n) for n in range(60)]
        expected[1] = "timeout"
        assert kinds(second()) == ["1", "2"]
        assert kinds(first()) == expected
        # the killed one's place is filled
        assert wait_until(lambda: len(worker_pids(os.getpid())) == 3)
        pids = worker_pids(os.getpid())
    assert not worker_pids(os.getpid())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a zombie"


def test_async_rows_wait_at_the_same_time(file: Path) -> None:
    with scorer(f"{file}:meets", timeout=60) as one:
        first = one.submit(rows(*["x" * n for n in range(28)]))
        second = one.submit(rows("a", "bb"))
        assert [row.score for row in first()] == list(range(28))
        assert [row.score for row in second()] == [1, 2]


def test_an_async_function_that_fails_costs_no_other_row_its_score(file: Path) -> None:
    texts = ["a", "sleep", "bb", "raise", "cancelled", "die", "ccc", "block", "dddd", "stubborn"]
    with scorer(f"{file}:waits", timeout=2) as one:
        scored = one.submit(rows(*texts))()
    expected = ["1", "timeout", "2", "error", "error", "crash", "3", "timeout", "4", "timeout"]
    assert kinds(scored) == expected
    assert "TimeoutError: mine" in scored[3].failures[0].text
    assert (
        "s, and never awaited: await what takes long, or write a plain def"
        in scored[7].failures[0].text
    )


@pytest.mark.parametrize("name", [wide("wrapped"), wide("late"), "twice"])
def test_an_async_function_that_is_hidden_is_awaited_with_the_same_limit(
    file: Path, name: str
) -> None:
    texts = ["a", "sleep", "bb", "raise", "cancelled", "die", "ccc"]
    with scorer(f"{file}:{name}", timeout=2) as one:
        scored = one.submit(rows(*texts))()
    assert kinds(scored) == ["1", "timeout", "2", "error", "error", "crash", "3"]
    assert "longer than reward.timeout=2 s" in scored[1].failures[0].text


def test_hidden_async_calls_of_a_worker_share_an_event_loop(file: Path) -> None:
    with scorer(f"{file}:late", f"{file}:loops", weights=[0, 1]) as both:
        scored = both.submit(rows("a", "exit", "bb"))()
    assert [row.score for row in scored] == [1, 1, 1]
    assert "SystemExit: bye" in scored[1].failures[0].text


def test_the_prompt_is_passed_as_the_row_has_it_to_functions_that_name_it(file: Path) -> None:
    columns = ["twelve chars", [{"role": "user", "content": "a"}]]
    given = [(Prompt("<|user|>", [1], "echo", "1", {}, column=column), "x") for column in columns]
    with scorer(f"{file}:asks", f"{file}:any_name") as both:
        text, messages = both.submit(given)()
    assert text.figures == {"asks/score": 12.0, "any_name/score": 0.0}
    assert messages.figures == {"asks/score": 1.0, "any_name/score": 0.0}


def test_rows_behind_several_async_ones_that_block_keep_their_scores(file: Path) -> None:
    with scorer(f"{file}:waits", timeout=2) as one:
        scored = one.submit(rows(*["block", "a", "bb", "ccc"] * 2))()
    assert kinds(scored) == ["timeout", "1", "2", "3"] * 2


def test_a_row_that_fills_the_pipe_to_a_blocked_worker_does_not_stop_the_others(file: Path) -> None:
    with scorer(f"{file}:waits", timeout=2) as one:
        scored = one.submit(rows("block", "x" * 2_000_000, "x" * 2_000_000, "a"))()
    assert kinds(scored) == ["timeout", "2e+06", "2e+06", "1"]


def test_a_line_of_failures_does_not_depend_on_the_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    late, early = Failure("judge", "error", "late"), Failure("judge", "error", "early")
    say_failures("[critic] ", [(24, late), (4, early), (7, Failure("judge", "crash", "gone"))])
    say_failures("[critic] ", [])
    assert (
        capsys.readouterr().out
        == "[critic] rewards that failed: judge: 1 x crash, first of row 7: gone; "
        "judge: 2 x error, first of row 4: early\n"
    )


def test_async_and_other_functions_side_by_side(file: Path) -> None:
    with scorer(f"{file}:judge", f"{file}:as_float", "echo") as mixed:
        (row,) = mixed.submit(rows("31"))()
    assert row.figures == {
        "judge/score": 7.0,
        "as_float/score": 2.0,
        "echo/score": pytest.approx(2 / 3),
    }
    assert row.score == pytest.approx(9 + 2 / 3)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise OSError('no GPU')", r"OSError: no GPU .*only_here.py, line 3"),
        ("os._exit(3)", "status 3"),
    ],
)
def test_a_file_that_fails_in_the_worker_alone_ends_the_run(
    code: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "only_here.py"
    path.write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    {code}\ndef score(**row): return 1\n"
    )
    with scorer(f"{path}:score", workers=2) as broken:
        pending = broken.submit(rows("x"))
        with pytest.raises(UserError, match=message):
            pending()
        with pytest.raises(UserError, match=message):  # and it stays so
            broken.submit(rows("x"))()
    assert not worker_pids(os.getpid())


def test_close_ends_a_worker_that_is_busy_and_rows_that_wait(file: Path) -> None:
    with scorer(f"{file}:trouble") as busy:
        pending = busy.submit(rows("sleep", "a"))
        assert wait_until(lambda: worker_pids(os.getpid()))
    assert not worker_pids(os.getpid())
    with pytest.raises(CancelledError):
        pending()


def test_a_worker_that_ends_between_rows_costs_no_row_its_score(file: Path) -> None:
    with scorer(f"{file}:trouble") as one:
        assert kinds(one.submit(rows("a"))()) == ["1"]
        (first,) = worker_pids(os.getpid())
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: worker_pids(os.getpid()) - {first})
        assert kinds(one.submit(rows("bb"))()) == ["2"]


def test_workers_do_not_see_the_ranks_variables_but_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("NUMBER = 5\n")
    code = (
        "import os, beside\ndef score(**row):\n    assert not {'MASTER_PORT', 'RANK'} & "
        "os.environ.keys()\n"
    )
    (tmp_path / "env.py").write_text(
        code + "    return float(os.environ['MY_NUMBER']) + beside.NUMBER\n"
    )
    for name in ("RANK", "MASTER_PORT", "MY_NUMBER"):
        monkeypatch.setenv(name, "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    with scorer(f"{tmp_path}/env.py:score") as one:
        assert kinds(one.submit(rows("x"))()) == ["6"]


@pytest.mark.parametrize("text", [wide("a"), "sleep"])
def test_a_killed_parent_leaves_no_worker(file: Path, text: str) -> None:
    code = f"""
import signal
from splitppo.config import RewardConfig
from splitppo.rewards.scorer import Scorer
from splitppo.rollout import Prompt
scorer = Scorer(RewardConfig(("{file}:trouble",), workers=2), {{"echo"}})
pending = scorer.submit([(Prompt("", [1], "echo", "1", {{}}), "{text}")])
print("asked" if "{text}" == "sleep" else pending()[0].score, flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as lines:
        assert lines.readline().strip() == ("1.0" if text == "a" else "asked")
        assert wait_until(lambda: len(worker_pids(parent.pid)) == 2)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert wait_until(lambda: not worker_pids(parent.pid))


def test_a_worker_starts_without_torch(file: Path) -> None:
    heavy = "{'torch', 'numpy', 'transformers'}"
    code = (
        "import sys, splitppo.workers.main, splitppo.rewards.functions, splitppo.envs.pool; "
        f"print({heavy} & {{*sys.modules}} or '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_infinities_do_not_reach_the_sum(tmp_path: Path) -> None:
    (tmp_path / "inf.py").write_text(
        "def score(**row): return {'score': 1, 'extra': float('inf')}\n"
    )
    with scorer(f"{tmp_path}/inf.py:score") as one:
        (row,) = one.submit(rows("x"))()
    assert kinds([row]) == ["invalid"]
    assert "'extra' is not a finite number" in row.failures[0].text
    assert row.score == -1


def test_an_exception_of_the_users_file_has_the_name_that_it_has_there(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text("class Busy(Exception): ...\ndef score(**_):\n    raise Busy('429')\n")
    score = find_in_file(f"{file}:score", "reward.function", "reward", "function")
    with pytest.raises(Exception, match="429") as caught:
        score()
    assert describe(caught.value) == f"Busy: 429 ({file}, line 3, in score)"
