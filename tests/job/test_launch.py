"""The launch scripts: on a real Slurm of two nodes (tests/helpers/slurm.py), and without one."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm
from ranks import run_ranks
from runs import figures, main_rank, names

LAUNCH = Path(__file__).parents[2] / "launch"
ARGV = ["--rollout.batch-size=12", "--ppo.mini-batches=2", "--log.validate-every=0", "--checkpoint.every=2"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, request):
    if why := slurm.missing():
        pytest.skip(why)
    with slurm.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture(autouse=True)
def no_job_is_left(request):
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").cancel_all()


def submit(cluster: slurm.Cluster, folder: Path, *argv: str, script: str = "multi_node.sh", **options: str) -> str:
    """Submits a job of two ranks a node; its number."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = ["sbatch", "--parsable", f"--chdir={folder}", "--gpus-per-node=2", *given, str(LAUNCH / script)]
    return cluster(*command, *ARGV, *argv, PYTHONPATH=str(LAUNCH.parent)).strip()


def until_step(run: Path, step: int, limit: float = 300) -> None:
    lines, end = run / "metrics" / "critic.jsonl", time.monotonic() + limit
    while not (lines.is_file() and len(lines.read_text().splitlines()) >= step):
        assert time.monotonic() < end, f"step {step} did not come"
        time.sleep(0.05)


def ranks_of(run: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", rf"[-]u -m splitppo.train .*{run}"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.slurm
def test_two_nodes_are_as_one(cluster, tmp_path):
    """by_node; per_node is in the test below."""
    (tmp_path / "preset.toml").write_text('[placement]\nmode = "by_node"\n')
    command = ["sbatch", "--parsable", f"--chdir={tmp_path}", "--gpus-per-node=2", str(LAUNCH / "multi_node.sh")]
    job = cluster(*command, "preset.toml", *ARGV, "--steps=4", PYTHONPATH=str(LAUNCH.parent)).strip()
    ended = cluster.wait(job, "COMPLETED", "FAILED")
    log = (tmp_path / f"slurm-{job}.log").read_text()
    assert ended["JobState"] == "COMPLETED", log
    assert log.startswith("on each of n[0-1]: torchrun --nnodes 2 --nproc_per_node 2 ")
    assert "placement by_node: 2 actor, 2 critic" in log
    ranks = {int(line.split()[1]): line.split() for line in log.splitlines() if line.startswith("  rank ")}
    assert [rank for rank, words in ranks.items() if words[-1] == "actor"] == [0, 1]
    hosts = [words[2] for words in ranks.values()]
    assert sorted(hosts) == ["n0", "n0", "n1", "n1"]
    assert hosts[0] == hosts[1]
    whole = tmp_path / "whole"
    run_ranks(4, main_rank, [*ARGV, "--steps=4", f"--run-dir={whole}"])
    for role in ("actor", "critic"):
        assert figures(tmp_path / "runs" / f"slurm-{job}", role) == figures(whole, role)


@pytest.mark.slurm
def test_a_killed_rank_ends_the_job_on_both_nodes(cluster, tmp_path):
    job = submit(cluster, tmp_path, "--steps=10000")
    run = tmp_path / "runs" / f"slurm-{job}"
    until_step(run, 2)
    ranks = ranks_of(f"slurm-{job}")
    assert len(ranks) == 4
    os.kill(ranks[-1], signal.SIGKILL)
    began = time.monotonic()
    ended = cluster.wait(job, "COMPLETED", "FAILED", limit=40)
    assert ended["JobState"] == "FAILED"
    assert time.monotonic() - began < 30
    assert "Signal 9" in (tmp_path / f"slurm-{job}.log").read_text()
    assert ranks_of(f"slurm-{job}") == []


@pytest.mark.slurm
def test_a_job_that_loses_its_nodes_is_queued_again_and_goes_on(cluster, tmp_path):
    job = submit(cluster, tmp_path, "--steps=20")
    run = tmp_path / "runs" / f"slurm-{job}"
    until_step(run, 3)
    # another job, of a partition that goes before, wants the nodes
    cluster("sbatch", "--partition=first", "--nodes=2", f"--chdir={tmp_path}", "--gpus-per-node=2", "--wrap=true")
    while cluster.job(job)["Restarts"] != "1":
        assert cluster.job(job)["JobState"] not in ("FAILED", "COMPLETED"), (tmp_path / f"slurm-{job}.log").read_text()
        time.sleep(0.2)
    saved = names(run)
    ended = cluster.wait(job, "COMPLETED", "FAILED")
    log = (tmp_path / f"slurm-{job}.log").read_text()
    assert ended["JobState"] == "COMPLETED", log
    assert log.count("placement per_node: 2 actor, 2 critic") == 2
    assert re.search(r"stopped by SIGUSR1 to rank \d: step_\d+ is saved", log)
    assert f"going on from {Path('runs') / f'slurm-{job}' / 'checkpoints' / saved[-1]}" in log
    whole = tmp_path / "whole"
    run_ranks(4, main_rank, [*ARGV, "--steps=20", f"--run-dir={whole}"])
    for role in ("actor", "critic"):
        assert figures(run, role) == figures(whole, role)


def test_one_machine_without_slurm(tmp_path):
    """The run is told to end through the script, as Slurm would."""
    (tmp_path / "preset.toml").write_text("steps = 500\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"RANKS_PER_NODE": "2", "PATH": path, "PYTHONPATH": str(LAUNCH.parent), "OMP_NUM_THREADS": "1"}
    command = [LAUNCH / "single_node.sh", "preset.toml", *ARGV, "--run-dir=run"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
    try:
        until_step(tmp_path / "run", 2)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(200) == 1
    finally:
        process.kill()
    said = (tmp_path / "log").read_text()
    assert said.startswith("torchrun --standalone --nproc_per_node 2 -m splitppo.train --config preset.toml ")
    (saved,) = re.findall(r"stopped by SIGUSR1 to rank \d: (step_\d+) is saved", said)
    assert names(tmp_path / "run")[-1] == saved


@pytest.mark.parametrize("script", ["multi_node.sh", "single_node.sh"])
def test_the_scripts_are_short(script):
    assert len((LAUNCH / script).read_text().splitlines()) <= 30
