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
import yaml
from ranks import run_ranks
from runs import figures, main_rank, names
from torch.distributed.run import get_args_parser

from splitppo.config.cli import parse
from splitppo.config.rules import check

LAUNCH = Path(__file__).parents[2] / "launch"
ARGV = (
    "--rollout.batch-size=12 --ppo.mini-batches=2 --log.validate-every=0 --checkpoint.every=2"
).split()
FOUR = [*ARGV, "--placement.actor=2"]  # as many of four ranks on one node as on two


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


def submit(
    cluster: slurm.Cluster, folder: Path, *argv: str, script: str = "multi_node.sh", **options: str
) -> str:
    """Submits a job of two ranks a node; its number."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [
        "sbatch",
        "--parsable",
        f"--chdir={folder}",
        "--gpus-per-node=2",
        *given,
        str(LAUNCH / script),
    ]
    path = f"{cluster.forking}:{cluster.env['PATH']}"
    return cluster(*command, *FOUR, *argv, PYTHONPATH=str(LAUNCH.parent), PATH=path).strip()


def until_step(run: Path, step: int, limit: float = 300) -> None:
    lines, end = run / "metrics" / "critic.jsonl", time.monotonic() + limit
    while not (lines.is_file() and len(lines.read_text().splitlines()) >= step):
        assert time.monotonic() < end, f"step {step} did not come"
        time.sleep(0.05)


def processes_of(run: str) -> dict[int, int]:
    """Of torchruns and ranks: process id -> its parent's."""
    command = ["pgrep", "-f", rf"bin/torchrun --local-addr .*{run}"]
    found = map(int, subprocess.run(command, capture_output=True, text=True).stdout.split())
    return {
        pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in found
    }


@pytest.mark.slurm
def test_two_nodes_are_as_one(cluster, tmp_path):
    """by_node; per_node is in the test below."""
    (tmp_path / "preset.toml").write_text('[placement]\nmode = "by_node"\n')
    command = [
        "sbatch",
        "--parsable",
        f"--chdir={tmp_path}",
        "--gpus-per-node=2",
        str(LAUNCH / "multi_node.sh"),
    ]
    job = cluster(
        *command, "preset.toml", *FOUR, "--steps=4", PYTHONPATH=str(LAUNCH.parent)
    ).strip()
    ended = cluster.wait(job, "COMPLETED", "FAILED")
    log = (tmp_path / f"slurm-{job}.log").read_text()
    assert ended["JobState"] == "COMPLETED", log
    assert log.startswith("on each of n[0-1]: torchrun --nnodes 2 --nproc_per_node 2 ")
    assert re.search("placement +by_node: 2 actor, 2 critic", log)
    placed = (tmp_path / "runs" / f"slurm-{job}" / "placement.txt").read_text().splitlines()[1:]
    ranks = {int(line.split()[1]): line.split() for line in placed}
    assert [rank for rank, words in ranks.items() if words[-1] == "actor"] == [0, 1]
    hosts = [words[2] for words in ranks.values()]
    assert sorted(hosts) == ["n0", "n0", "n1", "n1"]
    assert hosts[0] == hosts[1]
    whole = tmp_path / "whole"
    run_ranks(4, main_rank, [*FOUR, "--steps=4", f"--run-dir={whole}"])
    for role in ("actor", "critic"):
        assert figures(tmp_path / "runs" / f"slurm-{job}", role) == figures(whole, role)


@pytest.mark.slurm
@pytest.mark.wide
def test_a_killed_rank_ends_the_job_on_both_nodes(cluster, tmp_path):
    job = submit(cluster, tmp_path, "--steps=10000")
    run = tmp_path / "runs" / f"slurm-{job}"
    until_step(run, 2)
    parents = processes_of(f"slurm-{job}")
    ranks = [pid for pid, parent in parents.items() if parent in parents]
    assert len(ranks) == 4
    os.kill(ranks[-1], signal.SIGKILL)
    began = time.monotonic()
    ended = cluster.wait(job, "COMPLETED", "FAILED", limit=40)
    assert ended["JobState"] == "FAILED"
    assert time.monotonic() - began < 30
    # torchrun of the rank's node says so, or the ranks do, if the other node has ended the job by
    # then
    assert re.search(
        "Signal 9|died without an error message", (tmp_path / f"slurm-{job}.log").read_text()
    )
    assert processes_of(f"slurm-{job}") == {}


@pytest.mark.slurm
@pytest.mark.wide
def test_a_job_that_loses_its_nodes_is_queued_again_and_goes_on(cluster, tmp_path):
    job = submit(cluster, tmp_path, "--steps=20")
    run = tmp_path / "runs" / f"slurm-{job}"
    until_step(run, 3)
    # another job, of a partition that goes before, wants the nodes
    cluster(
        "sbatch",
        "--partition=first",
        "--nodes=2",
        f"--chdir={tmp_path}",
        "--gpus-per-node=2",
        "--wrap=true",
    )
    while cluster.job(job)["Restarts"] != "1":
        assert cluster.job(job)["JobState"] not in ("FAILED", "COMPLETED"), (
            tmp_path / f"slurm-{job}.log"
        ).read_text()
        time.sleep(0.2)
    saved = names(run)
    ended = cluster.wait(job, "COMPLETED", "FAILED")
    log = (tmp_path / f"slurm-{job}.log").read_text()
    assert ended["JobState"] == "COMPLETED", log
    assert len(re.findall("placement +per_node: 2 actor, 2 critic", log)) == 2
    assert re.search(r"stopped by SIGUSR1 to rank \d: step_\d+ is saved", log)
    assert f"resuming from {Path('runs') / f'slurm-{job}' / 'checkpoints' / saved[-1]}" in log
    whole = tmp_path / "whole"
    run_ranks(4, main_rank, [*FOUR, "--steps=20", f"--run-dir={whole}"])
    for role in ("actor", "critic"):
        assert figures(run, role) == figures(whole, role)


@pytest.mark.wide
def test_one_machine_without_slurm(tmp_path):
    """The run is told to end through the script, as Slurm would."""
    (tmp_path / "preset.toml").write_text("steps = 500\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {
        "RANKS_PER_NODE": "2",
        "PATH": path,
        "PYTHONPATH": str(LAUNCH.parent),
        "OMP_NUM_THREADS": "1",
    }
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
    assert said.startswith(
        "torchrun --standalone --nproc_per_node 2 -m splitppo.train --config preset.toml "
    )
    (saved,) = re.findall(r"stopped by SIGUSR1 to rank \d: (step_\d+) is saved", said)
    assert names(tmp_path / "run")[-1] == saved


def calls_of(
    script: list[str], folder: Path, programs: dict[str, str], **env: str
) -> list[list[str]]:
    """The words of each call of a script to one of `programs`, which print the given text in place
    of their work."""
    for name, says in programs.items():
        note = f'printf "%s\\n" {name} "$@" "" >> "$CALLS"'
        (folder / name).write_text(f"#!/usr/bin/env bash\n{note}\necho {says}\n")
        (folder / name).chmod(0o755)
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
    subprocess.run(script, cwd=folder, env=os.environ | env, check=True, timeout=60)
    return [call.split("\n") for call in (folder / "calls").read_text().rstrip("\n").split("\n\n")]


@pytest.mark.parametrize("image", ["", "registry.example.com#a/splitppo:1 x"])
def test_a_container_on_every_node(image: str, tmp_path: Path) -> None:
    """With pyxis, srun itself starts the image; its flags are the only change."""
    folder = tmp_path / "a b"
    folder.mkdir()
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n0",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    script = ["bash", str(LAUNCH / "multi_node.sh"), "p.toml", "--steps=3"]
    _, (_, *words) = calls_of(
        script, folder, {"scontrol": "n0", "srun": ""}, **env, CONTAINER=image
    )
    flags = [
        f"--container-image={image}",
        f"--container-mounts={folder}:{folder}",
        f"--container-workdir={folder}",
    ]
    assert [word for word in words if word.startswith("--container")] == (flags if image else [])
    words = [word for word in words if word not in flags]
    assert words[:3] == ["--kill-on-bad-exit=1", "--cpu-bind=none", "bash"]
    assert words[-5:] == ["--run-dir", "runs/slurm-7", "--config", "p.toml", "--steps=3"]


def test_skypilot_and_kubernetes_start_the_trainer(tmp_path: Path) -> None:
    """What the files say is a torchrun that torch can read, and flags that the trainer takes."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    env = task["envs"] | {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    env["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2"
    (sky,) = calls_of(["bash", "-euc", task["run"]], tmp_path, {"torchrun": ""}, **env)
    runtime, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert job["spec"]["runtimeRef"] == {
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    for command in (sky, job["spec"]["trainer"]["command"]):
        assert command[0] == "torchrun"
        given = get_args_parser().parse_args(command[1:])
        assert given.training_script == "splitppo.train"
        config = parse(given.training_script_args)
        check(config)
        assert (config.placement.actor or 0) + (config.placement.critic or 0) == 8
    given = get_args_parser().parse_args(sky[1:])
    assert (given.nnodes, given.node_rank, given.nproc_per_node, given.master_addr) == (
        "2",
        1,
        "8",
        "10.0.0.1",
    )


@pytest.mark.parametrize(
    "file", sorted(path.name for path in LAUNCH.iterdir() if path.name != "compare.sh")
)
def test_the_files_are_short(file: str) -> None:
    assert len((LAUNCH / file).read_text().splitlines()) <= 40
