"""The nodes of a job: whether they are alike, the interface between them, restarts, and heartbeats
between hosts.

The tests with two hosts (tests/helpers/hosts.py) run torchrun once on each, with the arguments that
its users give.
"""

import contextlib
import io
import os
import re
import socket
import threading
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import hosts
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from runs import Torchrun, figures, main_rank

from splitppo import train
from splitppo.config import PlacementConfig
from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.job import heartbeat, nodes, runtime
from splitppo.job.launch import Launch
from splitppo.job.nodes import Peer, check_alike, choose_interface, join
from splitppo.job.runtime import Runtime
from splitppo.placement import place
from splitppo.run import folder as run_folder
from splitppo.run.folder import facts_of

ARGV = ["--rollout.batch-size=12", "--ppo.mini-batches=2", "--log.validate-every=0", "--timeout=8"]
SHORT = timedelta(seconds=10)


def peer(host: str, machine: str = "", master: str = "10.0.0.1") -> Peer:
    return Peer(
        host=host,
        device="cuda:0",
        pid=1,
        network=machine or host,
        machine=machine or host,
        master=master,
    )


@pytest.fixture
def watched(monkeypatch):
    """n0's view of two hosts; a thread sends n1's heartbeats: (what ended n0's rank, its Heartbeat,
    n1's stop)."""
    stop, ended = threading.Event(), []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    store = dist.HashStore()
    for rank in range(2):
        store.set(f"heartbeat/{rank}", "0")

    def end(message: str, *, torchrun: int | None) -> None:
        ended.append((message, torchrun))
        ours.closed.set()

    def send() -> None:
        while not stop.wait(0.05):
            store.add("heartbeat/1", 1)

    monkeypatch.setattr(heartbeat, "end_rank", end)
    ours = heartbeat.Heartbeat(store, [peer("n0"), peer("n1")], 0, 1.2)
    threads = [threading.Thread(target=send)]
    threads[0].start()
    ours.start()
    yield ended, ours, stop
    ours.closed.set()
    stop.set()
    threads[0].join()


def test_a_host_that_falls_silent_ends_the_rank(watched):
    ended, _, stop = watched
    time.sleep(1.5)
    assert not ended
    stop.set()
    end = time.monotonic() + 20
    while not ended and time.monotonic() < end:
        time.sleep(0.05)
    ((message, torchrun),) = ended
    assert re.match(r"no heartbeat of n1 \(ranks 1\) has reached n0 \(rank 0\) for \d s: ", message)
    assert torchrun is None, "its store answers: torchrun can end by itself"


@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (127, 127), (128, 64), (512, 256)])
def test_the_ranks_of_a_host_watch_all_hosts(hosts, each):
    peers = [peer(f"n{host}") for host in range(hosts) for _ in range(2)]
    beats = [heartbeat.Heartbeat(dist.HashStore(), peers, rank, 8.0) for rank in (2, 3)]
    assert [len(beat.seen) for beat in beats] == [each, each]
    assert {machine for beat in beats for machine in beat.seen} == {p.machine for p in peers}
    assert {beat.own_key for beat in beats} == {"heartbeat/2"}


def test_a_lost_store_ends_the_rank_and_its_torchrun(watched):
    ended, ours, _ = watched

    def no_answer(*_: Any) -> Any:
        raise dist.DistNetworkError("closed")

    ours.store = types.SimpleNamespace(add=no_answer)
    end = time.monotonic() + 20
    while not ended and time.monotonic() < end:
        time.sleep(0.05)
    ((message, torchrun),) = ended
    assert re.match(r"the job's store on .* has not answered n0 \(rank 0\) for \d s: ", message)
    assert torchrun == os.getppid()


def test_a_rank_that_was_suspended_takes_no_host_for_dead_and_notices_one_that_dies_later(
    monkeypatch,
):
    """The watching thread, period by period; the clock goes on as given between two of them."""
    clock, ended, store = types.SimpleNamespace(now=100.0), [], dist.HashStore()
    monkeypatch.setattr(heartbeat, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(heartbeat, "end_rank", lambda *_, **__: ended.append(clock.now))

    def looks(*seconds: float) -> float:
        """Seconds until the rank is ended, if it is."""
        ours = heartbeat.Heartbeat(store, [peer("n0"), peer("n1")], 0, 8.0)
        began, left = clock.now, list(seconds)

        def wait(_: float) -> bool:
            clock.now += left.pop(0) if left else 0.0
            ours.store_answered = clock.now
            return not left or bool(ended)

        ours.closed = cast(Any, types.SimpleNamespace(wait=wait, is_set=lambda: False))
        ours._watch()
        return ended.pop() - began if ended else 0.0

    assert looks(1, 1, 1000, 1, 1, 1) == 0  # as after SIGSTOP and SIGCONT
    assert looks(1, 1, 1000, 1, 1, 1, 1, 1, 1, 1, 1, 1) == 1009  # 8 s of silence beside it
    assert looks(*[1] * 12) == 9


def test_nodes_of_unlike_sizes_are_refused_by_name(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "n7")
    Launch(rank=0, world=6, local_world=3, nodes=2).check_nodes()
    with pytest.raises(
        UserError, match="6 ranks on 2 nodes, 4 of them on n7: all nodes need the same number"
    ):
        Launch(rank=0, world=6, local_world=4, nodes=2).check_nodes()


def test_nodes_with_gpus_must_have_the_same_vllm(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28))
    monkeypatch.setattr(
        run_folder, "installed", lambda package: {"vllm": "0.26.0"}.get(package, "1")
    )
    first = facts_of(parse([]))
    with pytest.raises(
        UserError,
        match=r"differ in vLLM: 0\.26\.0 on n0 .*, not installed on n1 .*; give all nodes",
    ):
        check_alike(
            first, first | {"vLLM": "not installed"}, [peer("n0"), peer("n0"), peer("n1")], 2
        )


def test_what_differs_is_named_with_the_hosts():
    first = facts_of(parse(["--seed=3"]))
    assert {"torch", "splitppo", "transformers", "--seed"} < first.keys()
    peers = [peer("n0"), peer("n0"), peer("n1")]
    check_alike(first, facts_of(parse(["--seed=3", "--run-dir=elsewhere"])), peers, 2)
    with pytest.raises(
        UserError, match=r"nodes differ in --seed: 3 on n0 \(rank 0\), 4 on n1 \(rank 2\); give all"
    ):
        check_alike(first, facts_of(parse(["--seed=4"])), peers, 2)
    with pytest.raises(
        UserError,
        match=r"nodes differ in torch: .* on n0 \(rank 0\), 1\.0 on n1 .*; give all nodes",
    ):
        check_alike(first, first | {"torch": "1.0"}, peers, 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "eth9",
            r"=eth9 on n1 .* does not lead to .*, n0; set it to .* one of lo \(127\.0\.0\.1\)",
        ),
        ("lo", r"GLOO_SOCKET_IFNAME=lo on n1 \(rank 1\) does not lead to the other nodes, n0; "),
        ("", ""),
    ],
)
def test_the_interface_leads_to_the_other_nodes(monkeypatch, given, says):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    monkeypatch.setattr(nodes, "interfaces", lambda: {"lo": "127.0.0.1", "ib0": "10.0.0.2"})
    monkeypatch.setattr(nodes, "_interface_to_others", lambda *_: "ib0")
    peers = [peer("n0"), peer("n1")]
    if says:
        with pytest.raises(UserError, match=says):
            choose_interface(peers, 1)
    else:
        choose_interface(peers, 1)
        assert nodes.os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_one_machine_keeps_its_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "any")
    choose_interface([peer("n0", "same"), peer("n1", "same")], 1)
    assert nodes.os.environ["GLOO_SOCKET_IFNAME"] == "any"


def test_this_machine_has_a_loopback():
    assert nodes.interfaces()["lo"] == "127.0.0.1"


def test_all_ranks_of_a_start_get_the_same_restart_count():
    """Also after a start that some ranks never reached, although torchrun's own count differs by
    node."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client() -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=SHORT)

    def together(ranks: list[int]) -> list[int]:
        found: dict[int, int] = {}

        def play(rank: int) -> None:
            found[rank], peers = join(client(), Launch(rank=rank, world=3), peer(f"n{rank}"), SHORT)
            assert [other.host for other in peers] == ["n0", "n1", "n2"]

        threads = [threading.Thread(target=play, args=[rank]) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in ranks]

    client().add("splitppo/tickets", 1)  # a rank of a start that ended before its rank 0 came
    assert together([0, 1, 2]) == [0, 0, 0]
    assert together([2, 1, 0]) == [1, 1, 1]


def absent_rank(rank: int) -> str:
    if rank == 1:
        time.sleep(5)
        return ""
    runtime.STARTUP_LIMIT = 2.0
    try:
        Runtime(
            Launch(0, 2, 0, 2),
            place(PlacementConfig(), world=2, local_world=2),
            torch.device("cpu"),
            2.0,
        )
    except RuntimeError as error:
        return str(error)
    return "it came"


def test_a_rank_that_does_not_start_is_named():
    said = run_ranks(2, absent_rank)[0]
    assert re.fullmatch(
        r"rank 0 on .* waited 2 s for ranks \[1\], which did not start; those that did: 0 on .*",
        said,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_a_variable_of_the_shell_makes_ends_in_one_line(rank, monkeypatch):
    """No torchrun: RANK and WORLD_SIZE are those that some images set."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if rank:
            taken.close()
        for name, value in {"RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(
            UserError, match=f"rank {rank} of 2: .*127.0.0.1:{port} .*; or start all"
        ):
            nodes.connect(Launch(rank, 2, rank, 2), timedelta(seconds=1))


def test_without_torchrun_a_rank_that_does_not_come_ends_in_one_line():
    with pytest.raises(UserError, match=r"for ranks \[1\], .*; start all ranks with torchrun"):
        join(dist.HashStore(), Launch(0, 2, 0, 2), peer("n0"), timedelta(0))


def unlike_rank(rank: int, run_dir: str) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = train.main(
            [*ARGV, "--steps=1", f"--run-dir={run_dir}", f"--seed={5 if rank else 0}"]
        )
    return status, said.getvalue()


def test_other_settings_on_one_rank_end_the_run_before_it_begins(tmp_path):
    both = run_ranks(2, unlike_rank, str(tmp_path / "run"))
    assert [status for status, _ in both] == [2, 2]
    for _, said in both:
        assert re.search(
            r"^error: nodes differ in --seed: 0 on .* \(rank 0\), 5 on .* \(rank 1\); give all "
            r"nodes",
            said,
        )


# Two hosts


@pytest.fixture
def pair(tmp_path):
    if why := hosts.missing():
        pytest.skip(why)
    with hosts.two_hosts(tmp_path) as both:
        yield both


def start(
    pair, folder: Path, *argv: str, restarts: int = 0, **env: str
) -> tuple[Torchrun, Torchrun]:
    """The job on both, two ranks each, the rendezvous at the first host; `env` is for the second
    alone."""

    def begin(host: hosts.Host, env: dict[str, str]) -> Torchrun:
        line = ("--nnodes=2", "--rdzv_id=job", "--rdzv_endpoint=east:29501")
        out = folder / f"{host.name}.log"
        given = {"out": out, "restarts": restarts, "rendezvous": line, "host": host.pid, "env": env}
        return Torchrun(2, train.main, [*ARGV, *argv], **given)

    return begin(pair[0], {}), begin(pair[1], env)


def ended(jobs: tuple[Torchrun, Torchrun], limit: float = 300) -> list[int]:
    found = [job.wait(limit) for job in jobs]
    assert 124 not in found, f"still there after {limit} s:\n{jobs[0].said()}\n{jobs[1].said()}"
    return found


@pytest.mark.hosts
def test_a_cut_cable_ends_both_sides_in_time_with_the_host_named(pair, tmp_path):
    jobs = start(pair, tmp_path, "--steps=10000", f"--run-dir={tmp_path / 'run'}")
    lines, end = tmp_path / "run" / "metrics" / "critic.jsonl", time.monotonic() + 300
    while not (lines.is_file() and len(lines.read_text().splitlines()) >= 2):
        assert time.monotonic() < end, jobs[0].said()
        time.sleep(0.05)
    pair[0]("ip", "link", "set", "cable", "down")
    cut = time.monotonic()
    while any(job.ranks() for job in jobs):  # torchrun itself may wait a minute for the rendezvous
        assert time.monotonic() - cut < 25, jobs[0].said() + jobs[1].said()
        time.sleep(0.05)
    for job in jobs:
        job.wait(0)
    # the rendezvous, and so the store, is on one of them
    said = [
        re.search(r"(no heartbeat of|the job's store on) (east|west)", job.said()) for job in jobs
    ]
    assert [found and found[2] for found in said] == ["west", "east"], (
        jobs[0].said() + jobs[1].said()
    )


@pytest.mark.hosts
def test_a_wrong_interface_is_explained(pair, tmp_path):
    jobs = start(
        pair, tmp_path, "--steps=2", f"--run-dir={tmp_path / 'run'}", GLOO_SOCKET_IFNAME="lo"
    )
    assert 0 not in ended(jobs)
    due = "error: GLOO_SOCKET_IFNAME=lo on west (rank 2) does not lead to the other nodes, east; "
    for job in jobs:
        assert (
            due
            + "set it to the interface of their network, one of lo (127.0.0.1), cable (10.77.0.2)"
            in job.said()
        )


REWARD = """
import os, pathlib, socket
here = pathlib.Path(__file__).parent
def score(data_source, solution_str, ground_truth, extra_info):
    if socket.gethostname() == "west" and (here / "run/checkpoints/step_000002").exists():
        if not (here / "seen").exists():
            (here / "seen").touch()
            keeper = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(keeper.rpartition(")")[2].split()[1]), 9)  # its critic's rank
    return float(len(solution_str))
"""


@pytest.mark.hosts
def test_two_hosts_are_as_one_also_when_a_rank_of_one_is_killed(pair, tmp_path):
    """Each host knows itself by a loopback address; the interface between them is found all the
    same."""
    (tmp_path / "reward.py").write_text(REWARD)
    argv = [
        "--steps=3",
        f"--reward.function={tmp_path / 'reward.py'}:score",
        "--checkpoint.every=1",
    ]
    argv += ["--timeout=30", "--placement.actor=2"]  # as many of four ranks on one host as on two
    flags = [f"--run-dir={tmp_path / 'run'}", "--fsdp.shard-size=node"]
    jobs = start(pair, tmp_path, *argv, *flags, restarts=2)
    assert ended(jobs) == [0, 0], jobs[0].said() + jobs[1].said()
    assert re.search(r"^steps +[12] to 3", jobs[0].said(), re.MULTILINE), jobs[0].said()
    run_ranks(
        4, main_rank, [*ARGV, *argv, "--fsdp.shard-size=1", f"--run-dir={tmp_path / 'whole'}"]
    )
    for role in ("actor", "critic"):
        assert figures(tmp_path / "run", role) == figures(tmp_path / "whole", role)
