"""Judges behind a server: what docs/judges.md shows, refusals, and the limit of calls."""

import asyncio
import json
import re
import threading
import urllib.error
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ranks import run_ranks
from runs import main_rank, records

from splitppo import envs
from splitppo.config import EnvConfig, RewardConfig
from splitppo.config.cli import parse
from splitppo.envs.pool import EnvPool
from splitppo.errors import UserError
from splitppo.rewards.scorer import Scorer
from splitppo.rollout import Prompt
from splitppo.run.checks import check_inputs
from splitppo.workers import Failure, retry_after
from splitppo.workers.main import call

PAGE = (Path(__file__).parents[2] / "docs" / "judges.md").read_text(encoding="utf-8")
JUDGE, BUSY = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
NEVER = float("inf")


class Server(ThreadingHTTPServer):
    """Speaks OpenAI's protocol. It refuses each question once and one with "later" for an hour; all
    answers wait until no more than `most` can come."""

    daemon_threads = True

    def __init__(self, most: int = 1):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.asked = Counter[str]()
        self.under_way = 0
        self.highest = 0
        self.barrier = threading.Barrier(most)


class Handler(BaseHTTPRequestHandler):
    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][0]["content"]
        with self.server.lock:
            self.server.asked[content] += 1
            refused = self.server.asked[content] == 1 or "later" in content
            self.server.under_way += 1
            self.server.highest = max(self.server.highest, self.server.under_way)
        if not refused:
            self.server.barrier.wait(20)
        with self.server.lock:
            self.server.under_way -= 1
        said = "Yes." if "Student: 7" in content else "No"
        text = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(429 if refused else 200)
        if refused:
            self.send_header("Retry-After", "3600" if "later" in content else "0")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    servers = []

    def start(most: int) -> Server:
        server = Server(most)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("JUDGE_MODEL", "judge")
        (tmp_path / "judge.py").write_text(JUDGE)
        monkeypatch.chdir(tmp_path)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.ranks
def test_the_pages_judge_keeps_the_limit_and_comes_back_when_it_may(serve: Any):
    """Eight questions, four at a time: the server answers only four at once."""
    server = serve(4)
    config = RewardConfig(("judge.py:judge",), concurrency=4)
    scorer = Scorer(config, {"addition"})
    texts = ["7", "8", "7!", "9", "7", "9", "7", "later"]
    rows = [
        (Prompt("", [1], "addition", "7", {}, column=f"{n} 3+4?"), text)
        for n, text in enumerate(texts[:7])
    ]
    rows.append((Prompt("", [1], "addition", "7", {}, column="3+4?"), "later"))
    rows.append((Prompt("", [1], "addition", "7", {}, column="again 3+4?"), "8"))
    scored = scorer.submit(rows)()
    scorer.close()
    assert [row.score for row in scored] == [1, 0, 1, 0, 1, 0, 1, 0, 0]
    failures = [failure for row in scored for failure in row.failures]
    assert [failure.kind for failure in failures] == ["error"]
    assert "HTTPStatusError" in failures[0].text
    assert "429" in failures[0].text
    assert server.highest == 4
    assert sorted(server.asked.values()) == [1, *[2] * 8]


@pytest.mark.ranks
def test_no_more_calls_than_the_limit_are_under_way(tmp_path: Path):
    """Each call lasts long enough for the others to come, and scores how many are there."""
    (tmp_path / "mine.py").write_text(
        "import asyncio\n"
        "here = 0\n"
        "async def count(**row):\n"
        "    global here\n"
        "    here += 1\n"
        "    among = here\n"
        "    await asyncio.sleep(0.2)\n"
        "    here -= 1\n"
        "    return among\n"
    )
    for limit, most in ((3, 3), (None, 9)):
        config = RewardConfig((f"{tmp_path}/mine.py:count",), concurrency=limit)
        scorer = Scorer(config, {"addition"})
        scored = scorer.submit([(Prompt("", [1], "addition", "7", {}), "7")] * 9)()
        scorer.close()
        assert not any(row.failures for row in scored)
        assert (max(row.score for row in scored) <= 3) == (most == 3)


@pytest.mark.ranks
def test_the_pages_command_trains(serve: Any, tmp_path: Path):
    serve(1)
    (command,) = re.findall(r"^    splitppo train --nproc_per_node 2 (.*)$", PAGE, re.M)
    small = "--steps=1 --rollout.batch-size=8 --log.validate-every=0 --run-dir=run".split()
    run_ranks(2, main_rank, [*command.split(), *small])
    (line,) = records(tmp_path / "run", "critic")
    assert line["critic/reward_failures"] == 0


def refusal(**names: Any) -> Exception:
    error = Exception("busy")
    vars(error).update(names)
    return error


def by_urllib(wait: str) -> Exception:
    headers = Message()
    headers["Retry-After"] = wait
    return urllib.error.HTTPError("http://a", 429, "busy", headers, None)


class Falsy(SimpleNamespace):
    """As a response of requests with an error's status is."""

    def __bool__(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("error", "due"),
    [
        (refusal(retry_after=3), 3),
        (refusal(retry_after=1.5), 1.5),
        (refusal(retry_after=1e-05), 1e-05),
        (refusal(retry_after=-1), -1),
        (refusal(retry_after=float("nan")), NEVER),
        (refusal(headers={"retry-after": "20"}), 20),
        (refusal(headers={"RETRY-AFTER": "20"}, retry_after=3), 20),
        (refusal(headers={"Retry-After": "soon"}, retry_after=3), 3),
        (refusal(headers={"Retry-After": "nan"}, retry_after=3), 3),
        (refusal(response=SimpleNamespace(headers=httpx.Headers({"Retry-After": "7"}))), 7),
        (refusal(response=Falsy(headers={"Retry-After": "7"})), 7),
        (refusal(response=None, headers={"Retry-After": "8"}), 8),
        (refusal(response=SimpleNamespace(headers={}), retry_after=9), 9),
        (by_urllib("0"), 0),
        (refusal(headers=None), NEVER),
        (refusal(headers={"Retry-After": "soon"}), NEVER),
        (refusal(headers={"Retry-After": ""}), NEVER),
        (refusal(headers={"Retry-After": "nan"}), NEVER),
        (refusal(headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), NEVER),
        (refusal(headers=7, retry_after=3), 3),
        (refusal(retry_after=None), NEVER),
        (refusal(retry_after=refusal), NEVER),
        (ValueError("no"), NEVER),
        (None, NEVER),
    ],
)
def test_when_a_refused_request_may_come_again(error: Any, due: float):
    assert retry_after(error) == due
    if error:
        outer = RuntimeError("the judge is busy")
        outer.__cause__ = error
        assert retry_after(outer) == due


def test_the_pages_own_refusal():
    names: dict[str, Any] = {}
    exec(BUSY, names)
    assert retry_after(names["Busy"]()) == 2


@pytest.mark.ranks
def test_an_environment_does_not_hear_a_message_again(tmp_path: Path):
    (tmp_path / "env.py").write_text(
        "from splitppo.envs import Turn\n"
        "class Busy(Exception): retry_after = 0\n"
        "class Env:\n"
        "    def __init__(self, row, seed): self.heard = 0\n"
        "    def reset(self): return None\n"
        "    def close(self): ...\n"
        "    async def step(self, message):\n"
        "        self.heard += 1\n"
        "        if self.heard == 1: raise Busy\n"
        "        return Turn()\n"
    )
    with closing(EnvPool(EnvConfig(path=f"{tmp_path}/env.py:Env"), 1)) as pool:
        said = pool.play(0, {}, 0, [envs.Message("assistant", "a")]).result()
    assert isinstance(said, Failure)
    assert "Busy" in said.text


def test_waits_grow_and_end_at_the_limit():
    """On a clock that the test moves: .1, .2 and .4 s, then the server's own, then no more."""
    waits = [0, 0, 0, 5, 60]
    slept: list[float] = []

    def handler(*_: Any) -> Any:
        raise refusal(retry_after=waits[len(slept)])

    async def played(end: float) -> None:
        loop = asyncio.get_running_loop()
        now = 100.0
        real = asyncio.sleep

        async def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds
            slept.append(seconds)
            await real(0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "time", lambda: now)
            patch.setattr(asyncio, "sleep", sleep)
            await call(handler, (), end)

    with pytest.raises(Exception, match="busy"):
        asyncio.run(played(160.0))
    assert slept == [0.1, 0.2, 0.4, 5]
    slept.clear()
    with pytest.raises(Exception, match="busy"):
        asyncio.run(played(0.0))
    assert slept == []


def test_the_limit_is_for_async_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text("def plain(**row): ...\nasync def waits(**row): ...\n")
    monkeypatch.chdir(tmp_path)
    for names in ("mine.py:plain", "auto", "mine.py:plain exact_match"):
        argv = ["--reward.concurrency=4", "--reward.function", *names.split()]
        with pytest.raises(UserError, match=r"reward\.concurrency=4 limits async functions"):
            check_inputs(parse(argv))
    check_inputs(parse([*argv, "--reward.validation=mine.py:waits"]))
    check_inputs(parse(["--reward.concurrency=4", "--reward.function=mine.py:waits"]))
