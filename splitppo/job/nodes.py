"""A job's nodes before there is a process group: the store, whether all are alike, the interface between them."""

import fcntl
import hashlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from splitppo.config import Config
from splitppo.config.toml import leaves
from splitppo.errors import UserError

# settings that nodes may differ in: each rank's own view of them is not asked for, or only the first rank's counts
OWN = ("config", "run_dir", "resume", "force")


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a process; a process that it didn't start is a world of one."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    nodes: int = 1

    @classmethod
    def from_env(cls) -> "Launch":
        """Raises UserError where RANK is set, and the others are not as torchrun sets them."""
        if "RANK" not in os.environ:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT")
        usual = {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": os.environ.get("WORLD_SIZE", "")}
        env = {**usual, "GROUP_WORLD_SIZE": "1", **os.environ}
        given = [env.get(name, "") for name in names]
        if not all(map(str.isdecimal, given)) or int(given[0]) >= int(given[1]) or "MASTER_ADDR" not in env:
            told = " ".join(f"{name}={env.get(name, 'unset')}" for name in (*names, "MASTER_ADDR"))
            raise UserError(f"{told}: torchrun sets all of them; start with it, or unset RANK for one process alone")
        return cls(*map(int, given[:5]))

    def check_nodes(self) -> None:
        """Refuses nodes of unlike numbers of ranks; nothing else may have told how many the others have.

        Raises:
            UserError: this node has more or fewer than the average.
        """
        if self.nodes > 1 and self.local_world * self.nodes != self.world:
            raise UserError(
                f"{self.world} ranks on {self.nodes} nodes, {self.local_world} of them on {socket.gethostname()}: all "
                "nodes need as many; give every torchrun the same --nproc_per_node"
            )


@dataclass(frozen=True)
class Peer:
    """What a rank tells the others of itself before anything else.

    Attributes:
        network: the same for ranks that share a kernel and its network.
        machine: the same for those that see each other's processes, too.
        master: the address that MASTER_ADDR has there.
    """

    host: str
    device: str
    pid: int
    network: str
    machine: str
    master: str

    @classmethod
    def of_this_process(cls, device: torch.device) -> "Peer":
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network, pids = (f"{kernel} {Path(f'/proc/self/ns/{kind}').readlink()}" for kind in ("net", "pid"))
        master = ""
        with suppress(OSError):
            master = socket.gethostbyname(os.environ.get("MASTER_ADDR", ""))
        return cls(socket.gethostname(), str(device), os.getpid(), network, f"{network} {pids}", master)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Peer":
        return cls(**json.loads(text))


def facts_of(config: Config) -> dict[str, str]:
    """What must be alike on all nodes: versions, the code itself, the settings."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    found = {"torch": torch.__version__, "splitppo": f"{installed('splitppo')} (code {code.hexdigest()[:8]})"}
    found["transformers"] = installed("transformers")
    if torch.cuda.is_available():
        found["vLLM"] = installed("vllm")
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[attr-defined]
    settings = {name: str(value) for name, value in leaves(asdict(config)) if name not in OWN}
    return found | {f"--{name}": value for name, value in settings.items()}


def started(pid: int) -> str:
    """When a process of this machine began, in ticks of its kernel's clock; "" if it has ended."""
    state, began = state_of(pid)
    return "" if state in "ZX" else began


def state_of(pid: int) -> tuple[str, str]:
    """The state of a process of this machine, a letter of proc(5), X if it has ended, and when it began."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    return fields[0], fields[19]


def installed(package: str) -> str:
    """A package's version, as far as it is known."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def check_alike(first: Mapping[str, str], mine: Mapping[str, str], peers: Sequence[Peer], rank: int) -> None:
    """Refuses a rank that would not do the same as rank 0.

    Args:
        first, mine: `facts_of` rank 0 and of this rank.

    Raises:
        UserError: names the first thing that differs, and the hosts.
    """
    for name in sorted(first.keys() | mine.keys()):
        here, there = first.get(name, "none"), mine.get(name, "none")
        if here != there:
            remedy = "give all nodes the same flags" if name.startswith("--") else "install the same on all nodes"
            hosts = f"{here} on {peers[0].host} (rank 0), {there} on {peers[rank].host} (rank {rank})"
            raise UserError(f"nodes differ in {name}: {hosts}; {remedy}")


@contextmanager
def attempt(job: dist.Store, launch: Launch, timeout: timedelta) -> Iterator[int]:
    """The number, from 1, of this attempt to run the job; on leaving, all ranks must have got it.

    torchrun's store outlives the ranks that it starts anew (--max-restarts), and TORCHELASTIC_RESTART_COUNT differs
    between nodes. But all ranks of an attempt are gone before any of the next begins, so rank 0 counts, and answers
    those who ask it, also those of before, who no longer hear it.
    """
    if launch.rank:
        asked = job.add("splitppo/asked", 1)
        job.wait([f"splitppo/answer/{asked}"], timeout)
        yield int(job.get(f"splitppo/answer/{asked}"))
        return
    number, over = job.add("splitppo/attempts", 1), threading.Event()
    if launch.world == 1:
        yield number
        return
    line = cast(Any, job).clone()

    def answer() -> None:
        answered = 0
        while not over.wait(0.02):
            while answered < line.add("splitppo/asked", 0):
                answered += 1
                line.set(f"splitppo/answer/{answered}", str(number))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield number
    finally:
        over.set()
        thread.join()


def connect(timeout: timedelta) -> dist.Store:
    """torchrun's store, or one of this process alone."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


def choose_interface(peers: Sequence[Peer], rank: int) -> None:
    """Makes Gloo use the interface that leads to the other nodes, unless GLOO_SOCKET_IFNAME names one. By itself it
    takes the one that the host's name has, which is often the loopback. Where none is found, it is left to that.

    Raises:
        UserError: the variables name an interface that isn't here or leads nowhere.
    """
    if len({peer.network for peer in peers}) == 1:
        return
    addresses, host = interfaces(), peers[rank].host
    shown = ", ".join(f"{name} ({address})" for name, address in addresses.items())
    on_gpu = peers[rank].device.startswith("cuda")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if on_gpu else ("GLOO_SOCKET_IFNAME",):
        if (given := os.environ.get(variable)) and not _matches(variable, given, addresses):
            raise UserError(f"{variable}={given} names no interface of {host}; it has {shown}")
    if given := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        if addresses[given].startswith("127."):
            others = ", ".join(sorted({peer.host for peer in peers if peer.network != peers[rank].network}))
            raise UserError(
                f"GLOO_SOCKET_IFNAME={given} on {host} (rank {rank}) names no way to the other nodes, {others}; set it "
                f"to the one in their network, of {shown}"
            )
    elif found := _toward_others(peers, rank, addresses):
        os.environ["GLOO_SOCKET_IFNAME"] = found


def interfaces() -> dict[str, str]:
    """name -> IPv4 address of this host's network interfaces; "" of those that have none."""
    found = {name: "" for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name in found:
            with suppress(OSError):  # no address
                answer = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _toward_others(peers: Sequence[Peer], rank: int, addresses: Mapping[str, str]) -> str | None:
    """The interface over which packets leave for the master, or that other nodes know the master by."""
    known = [peers[rank].master, *sorted({peer.master for peer in peers})]
    for master in (master for master in known if master and not master.startswith("127.")):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((master, 9))  # sends nothing
            own = probe.getsockname()[0]
            for name, address in addresses.items():
                if address == own:
                    return name
    return None


def _matches(variable: str, given: str, names: Mapping[str, Any]) -> bool:
    """Gloo wants names, the first of which counts here; NCCL prefixes, `=` names and `^` what is left out."""
    if variable.startswith("GLOO"):
        return given.split(",")[0] in names
    words = given.lstrip("^=").split(",")
    hits = {name for name in names if any(name == w if "=" in given[:2] else name.startswith(w) for w in words)}
    return bool(set(names) - hits if given.startswith("^") else hits)
