"""A Slurm of two nodes on one machine: real daemons, in a mount namespace of their own, where the
nodes' names resolve.

Needs root, and Debian's slurm-wlm and munge.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hosts
from hosts import PATH
from ranks import free_port

TORCHRUN = Path(sys.executable).parent
COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "unshare", "nsenter")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
FirstJobId={first}
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=10
NodeName=n0 NodeHostname=n0 NodeAddr=127.0.0.1 Port={n0} CPUs=2 Gres=gpu:2
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port={n1} CPUs=2 Gres=gpu:2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=2,sched_min_interval=100000,bf_interval=2
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=first Nodes=n0,n1 MaxTime=60 State=UP PriorityTier=10
"""

# torchrun with the arguments that the launch scripts give it, but its ranks are forked: nothing is
# imported anew
FORKING = """#!{python}
import sys
sys.path.insert(0, "{helpers}")
import warm
from runs import forking_torchrun
at = sys.argv.index("splitppo.train")
forking_torchrun(sys.argv[1 : at - 1], sys.modules["splitppo.train"].main, sys.argv[at + 1 :])
"""


def missing() -> str:
    """Why there can be no such Slurm here, or ""."""
    return hosts.lacks(COMMANDS, "slurm-wlm munge", "--uts", "--mount")


class Cluster:
    """Commands to it.

    Args:
        folder: for its configuration, state and logs.
        inside: what precedes a command to run it in the cluster's namespace.

    Attributes:
        forking: a folder with a torchrun that forks its ranks; what comes first in the PATH is
            used.
    """

    def __init__(self, folder: Path, inside: Sequence[str]):
        self.folder, self.inside = folder, list(inside)
        self.forking = folder / "bin"
        self.forking.mkdir()
        script = self.forking / "torchrun"
        script.write_text(FORKING.format(python=sys.executable, helpers=Path(__file__).parent))
        script.chmod(0o755)
        self.env = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{TORCHRUN}:{PATH}",
        }

    def __call__(self, *command: str, **extra: str) -> str:
        """What a command prints; one that fails is an error with what it said."""
        done = subprocess.run(
            [*self.inside, *command],
            env=self.env | extra,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job."""
        return dict(
            item.split("=", 1)
            for item in self("scontrol", "show", "job", number).split()
            if "=" in item
        )

    def cancel_all(self) -> None:
        """Ends all jobs."""
        self("scancel", "--user=root")
        _until(lambda: not self("squeue", "--noheader").strip(), "jobs do not end")

    def wait(self, number: str, *states: str, limit: float = 300) -> dict[str, str]:
        """Waits until a job is in one of the states."""
        end = time.monotonic() + limit
        while (job := self.job(number))["JobState"] not in states:
            if time.monotonic() > end:
                raise TimeoutError(f"job {number} is still {job['JobState']} after {limit:g} s")
            time.sleep(0.2)
        return job


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A running Slurm of the nodes n0 and n1."""
    folder.mkdir()
    (folder / "state").mkdir()
    # the hosts file of its namespace
    (folder / "hosts").write_text("127.0.0.1 localhost n0 n1\n")
    ports = {name: free_port() for name in ("ctld", "n0", "n1")}
    # several of these may run at once, and a job's number says which port it meets at
    first = free_port() - 20000
    (folder / "slurm.conf").write_text(
        CONF.format(folder=folder, host=socket.gethostname(), first=first, **ports)
    )
    # what jobs ask for; any two devices pass for GPUs
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    holder = subprocess.Popen(
        ["unshare", "--mount", "sleep", "infinity"], env=os.environ | {"PATH": PATH}
    )
    try:
        _until(
            lambda: Path(f"/proc/{holder.pid}/comm").read_text().strip() == "sleep",
            "unshare did not start",
        )
        slurm = Cluster(folder, ["nsenter", "--mount", f"--target={holder.pid}"])
        slurm("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
        files = {
            name: f"--{name}={folder}/munge.{name}"
            for name in ("socket", "log-file", "pid-file", "seed-file")
        }
        slurm("munged", "--force", f"--key-file={folder}/munge.key", *files.values())
        slurm("slurmctld")
        for node in ("n0", "n1"):
            slurm("unshare", "--uts", "sh", "-c", f"hostname {node} && exec slurmd -N {node}")
        _until(
            lambda: slurm("sinfo", "-h", "-o", "%t %D").split() == ["idle", "2"],
            "the nodes do not come up",
        )
        yield slurm
        slurm.cancel_all()
    finally:
        for pid_file in folder.glob("*pid*"):
            subprocess.run(["kill", "-KILL", pid_file.read_text().strip()], check=False)
        holder.kill()
        holder.wait()


def _until(true, otherwise: str, limit: float = 100) -> None:
    end = time.monotonic() + limit
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(otherwise)
        time.sleep(0.1)
