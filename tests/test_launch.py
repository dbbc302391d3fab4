"""The Slurm script, with stand-ins for Slurm's own commands: two nodes are two torchruns on this machine."""

import os
import subprocess
from pathlib import Path

import pytest
from ranks import free_port

SCRIPT = Path(__file__).parents[1] / "launch" / "multi_node.sh"
SRUN = """#!/usr/bin/env bash
shift  # --kill-on-bad-exit=1
for node in 0 1; do SLURM_NODEID=$node "$@" & jobs="${jobs:-} $!"; done
for job in $jobs; do wait "$job" || exit 1; done
"""


@pytest.mark.parametrize(("mode", "actor"), [("per_node", [0, 2]), ("by_node", [0, 1])])
def test_two_nodes(tmp_path, mode, actor):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho localhost; echo other\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    env = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "nodes",
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_NNODES": "2",
        "RANKS_PER_NODE": "2",
    }
    argv = ["--steps=2", "--rollout.batch-size=12", f"--run-dir={tmp_path / 'run'}", f"--placement.mode={mode}"]
    done = subprocess.run(
        ["bash", SCRIPT, *argv], env=os.environ | env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"placement {mode}: 2 actor, 2 critic" in done.stdout
    roles = {int(line.split()[1]): line.split()[-1] for line in done.stdout.splitlines() if line.startswith("  rank ")}
    assert [rank for rank, role in roles.items() if role == "actor"] == actor
