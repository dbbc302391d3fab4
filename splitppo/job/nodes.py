"""A job's nodes before there is a process group: the ranks find each other, compare, and choose a
network interface."""

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from splitppo.errors import UserError, say
from splitppo.job.launch import Launch

START = "start all ranks with torchrun, or unset RANK and WORLD_SIZE for a single process"


@dataclass(frozen=True)
class Peer:
    """What a rank tells the others about itself when it starts."""

    host: str
    device: str
    pid: int
    network: str  # the same for ranks that share a kernel and a network namespace
    machine: str  # the same for ranks that also see each other's processes
    master: str  # the address to which MASTER_ADDR resolves there

    @classmethod
    def of_this_process(cls, device: torch.device) -> "Peer":
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network, pids = (
            f"{kernel} {Path(f'/proc/self/ns/{kind}').readlink()}" for kind in ("net", "pid")
        )
        master = ""
        with suppress(OSError):
            master = socket.gethostbyname(os.environ.get("MASTER_ADDR", ""))
        return cls(
            socket.gethostname(), str(device), os.getpid(), network, f"{network} {pids}", master
        )


def is_by_torchrun() -> bool:
    """Whether torchrun started this rank, and holds the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(launch: Launch, timeout: timedelta) -> dist.Store:
    """The job's key-value store: torchrun's, or rank 0's where another launcher, or a variable of
    the shell, gives the ranks; a process alone has its own. Raises UserError if it can't be
    reached."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        if is_by_torchrun():
            return next(rendezvous("env://", timeout=timeout))[0]
        if launch.rank == 0 and launch.world > 1:
            say(
                f"WORLD_SIZE={launch.world} without torchrun: waits up to "
                f"{timeout.total_seconds():g} s for the other ranks"
            )
        # `join` waits for the ranks, and names those that do not come
        return dist.TCPStore(
            host, port, launch.world, launch.rank == 0, timeout,
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except dist.DistError as error:
        raise UserError(
            f"rank {launch.rank} of {launch.world}: can't open or reach the store at "
            f"MASTER_ADDR:MASTER_PORT={host}:{port} ({str(error).partition(chr(10))[0]}); check "
            "that rank 0 runs at that address, and that the port is free and open"
            f"{'' if is_by_torchrun() else '; or ' + START}"
        ) from error


def join(
    store: dist.Store, launch: Launch, this_peer: Peer, timeout: timedelta
) -> tuple[int, list[Peer]]:
    """Waits for all ranks to start. Returns how often they have been restarted, and all peers.
    Raises an error that names the ranks that did not start in time: RuntimeError if torchrun starts
    them, else UserError.

    torchrun's store outlives a restart, and TORCHELASTIC_RESTART_COUNT differs between nodes. So
    rank 0 counts the starts and answers every ticket that another rank draws with its count.
    Tickets of an earlier start do no harm: all of its ranks have ended before the first rank of
    this start begins.
    """
    text = json.dumps(asdict(this_peer))
    seconds = timeout.total_seconds()
    waited = f"rank {launch.rank} on {this_peer.host} waited {seconds:g} s for"
    kind, remedy = (RuntimeError, "") if is_by_torchrun() else (UserError, f"; {START}")
    if launch.rank:
        ticket = f"splitppo/ticket/{store.add('splitppo/tickets', 1)}"
        try:
            store.wait([ticket], timeout)
            count = int(store.get(ticket))
            store.set(f"splitppo/start_{count}/{launch.rank}", text)
            store.wait([f"splitppo/start_{count}"], timeout)
        except dist.DistStoreError as error:
            raise kind(
                f"{waited} rank 0 to find all ranks; see the output of rank 0{remedy}"
            ) from error
    else:
        count = store.add("splitppo/starts", 1) - 1
        answered = 0
        end = time.monotonic() + seconds
        keys = [f"splitppo/start_{count}/{rank}" for rank in range(launch.world)]
        store.set(keys[0], text)
        while not store.check(keys):
            if time.monotonic() > end:
                came = [rank for rank, key in enumerate(keys) if store.check([key])]
                hosts = (f"{rank} on {json.loads(store.get(keys[rank]))['host']}" for rank in came)
                raise kind(
                    f"{waited} ranks {sorted({*range(len(keys))} - {*came})}, which did not start; "
                    f"those that did: {', '.join(hosts)}{remedy}"
                )
            while answered < store.add("splitppo/tickets", 0):
                answered += 1
                store.set(f"splitppo/ticket/{answered}", str(count))
            time.sleep(0.02)
        store.set(
            f"splitppo/start_{count}", json.dumps([json.loads(store.get(key)) for key in keys])
        )
    return count, [Peer(**peer) for peer in json.loads(store.get(f"splitppo/start_{count}"))]


def installed(package: str) -> str:
    """A package's version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def check_alike(
    first: Mapping[str, str], facts: Mapping[str, str], peers: Sequence[Peer], rank: int
) -> None:
    """Raises UserError, which names the hosts, if the facts of rank 0 (`first`) and of this rank
    (`facts`) differ."""
    for name in sorted(first.keys() | facts.keys()):
        there = first.get(name, "none")
        here = facts.get(name, "none")
        if there != here:
            raise UserError(
                f"nodes differ in {name}: {there} on {peers[0].host} (rank 0), {here} on "
                f"{peers[rank].host} (rank {rank}); give all nodes the same flags and packages"
            )


def process_state(pid: int) -> str:
    """The letter of a process's state on this machine (proc(5)); Z also if it is there no more."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def choose_interface(peers: Sequence[Peer], rank: int) -> None:
    """Sets GLOO_SOCKET_IFNAME to the interface that leads to the other nodes. Gloo's own choice,
    the interface of the host's name, is often the loopback. Raises UserError if the variable is set
    to one that leads to no other node."""
    others = sorted({peer.host for peer in peers if peer.network != peers[rank].network})
    if not others:
        return
    addresses = interfaces()
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        if addresses.get(interface, "127.").startswith("127."):
            shown = ", ".join(f"{name} ({address})" for name, address in addresses.items())
            raise UserError(
                f"GLOO_SOCKET_IFNAME={interface} on {peers[rank].host} (rank {rank}) does not lead "
                f"to the other nodes, {', '.join(others)}; set it to the interface of their "
                f"network, one of {shown}"
            )
    elif interface := _interface_to_others(peers, rank, addresses):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def interfaces() -> dict[str, str]:
    """name -> IPv4 address of this host's network interfaces; "" without an address."""
    addresses = {name: "" for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name in addresses:
            with suppress(OSError):  # no address
                # SIOCGIFADDR
                answer = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", name.encode()))
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def _interface_to_others(
    peers: Sequence[Peer], rank: int, addresses: Mapping[str, str]
) -> str | None:
    """The interface over which packets leave for the master's address, as this node or another
    resolves it."""
    for master in [peers[rank].master, *sorted({peer.master for peer in peers})]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((master, 9))  # sends nothing
            address_here = probe.getsockname()[0]
            for name, address in addresses.items():
                if address == address_here and not address_here.startswith("127."):
                    return name
    return None
