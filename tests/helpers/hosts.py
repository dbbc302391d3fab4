"""Two hosts on one machine: network, host-name and mount namespaces, joined by a cable. Needs
root."""

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where daemons are
COMMANDS = ("unshare", "nsenter", "ip", "mount")
NAMES = {"east": "10.77.0.1", "west": "10.77.0.2"}


def missing() -> str:
    """Why there can be no such hosts here, or ""."""
    return lacks(COMMANDS, "iproute2 util-linux", "--net", "--uts", "--mount")


def lacks(commands: Sequence[str], packages: str, *namespaces: str) -> str:
    """What is not there of commands, root's rights and namespaces, or ""."""
    if absent := [command for command in commands if not shutil.which(command, path=PATH)]:
        return f"needs {', '.join(absent)} (apt-get install {packages})"
    if os.geteuid() != 0:
        return "needs root"
    made = subprocess.run(["unshare", *namespaces, "true"], check=False, capture_output=True)
    return "may not make namespaces here" if made.returncode else ""


class Host:
    """One of them.

    Args:
        pid: of the process that holds its namespaces.
    """

    def __init__(self, name: str, pid: int):
        self.name, self.pid = name, pid
        self.inside = ["nsenter", "--net", "--uts", "--mount", f"--target={pid}"]

    def __call__(self, *command: str) -> None:
        subprocess.run(
            [*self.inside, *command],
            check=True,
            capture_output=True,
            env=os.environ | {"PATH": PATH},
        )


def enter(pid: int) -> None:
    """This process, of one thread, goes to the host of another one. (os.setns is new in Python
    3.12.)"""
    libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}")
    os.chdir(folder)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """The hosts east and west. Each knows its own name by a loopback address, as Debian sets it
    up."""
    holders = [
        subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sleep", "infinity"])
        for _ in NAMES
    ]
    try:
        for holder in holders:
            while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "sleep":
                time.sleep(0.01)
        first, second = (holder.pid for holder in holders)
        cable = [shutil.which("ip", path=PATH) or "ip", "link", "add", "cable", "netns", str(first)]
        subprocess.run(
            [*cable, "type", "veth", "peer", "name", "cable", "netns", str(second)], check=True
        )
        hosts = [Host(name, holder.pid) for name, holder in zip(NAMES, holders, strict=True)]
        for host in hosts:
            others = "".join(
                f"{address} {name}\n" for name, address in NAMES.items() if name != host.name
            )
            (folder / f"{host.name}.hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{others}"
            )
            host("mount", "--bind", str(folder / f"{host.name}.hosts"), "/etc/hosts")
            host("hostname", host.name)
            host("ip", "link", "set", "lo", "up")
            host("ip", "address", "add", f"{NAMES[host.name]}/24", "dev", "cable")
            host("ip", "link", "set", "cable", "up")
        yield hosts[0], hosts[1]
    finally:
        for holder in holders:
            for pid in _inside(holder.pid):
                os.kill(pid, signal.SIGKILL)
            holder.kill()
            holder.wait()


def _inside(holder: int) -> list[int]:
    """The processes of a host."""
    theirs = os.readlink(f"/proc/{holder}/ns/net")
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if os.readlink(path) == theirs:
                found.append(int(path.parts[2]))
        except OSError:  # it has ended
            continue
    return found
