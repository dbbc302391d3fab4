"""One rank's place in the job: the store, the process groups, what the ranks tell each other beside their work."""

import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from splitppo.config import ShardSize
from splitppo.errors import UserError
from splitppo.job.failure import end_rank
from splitppo.job.heartbeat import Watch
from splitppo.job.nodes import Launch, Peer, attempt, check_alike, choose_interface, connect, started, state_of
from splitppo.placement import Placement, Role, copies

TO_MEET = 300.0  # seconds at most until all ranks are there: torchrun starts them at once


class Runtime:
    """The process group and what is cut out of it.

    Attributes:
        launch, placement, device: as given.
        mesh: role -> the group's DeviceMesh, for the roles that this rank plays.
        shards: role -> the mesh that its weights are sharded over: the same, or one of copies x ranks of a copy.
        saving: role -> process group of the same ranks over Gloo, for the threads that write checkpoints.
        wire: process group of all ranks, for the channels alone.
        job, store: key-value store of the job, and the same in a namespace of this attempt.
        alarm, post: the same, for the thread that hears signals, and for the channels.
        hosts: host name of each rank.
        last_good: gives the run's newest checkpoint that counts, once there is a run.
        over: whether all ranks have done their work: from then on some may be gone.
    """

    def __init__(
        self,
        launch: Launch,
        placement: Placement,
        device: torch.device,
        timeout: float,
        *,
        shard_size: ShardSize = None,
        facts: Mapping[str, str] | None = None,
    ):
        self.launch, self.placement, self.device, self.timeout = launch, placement, device, timeout
        self.over = False
        self.last_good: Callable[[], Path | None] = lambda: None
        self.to_meet = min(max(timeout, 60.0), TO_MEET)  # a start takes longer than a short wait may
        self.hosts: list[str] = []
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._make_groups(self._connect(facts or {}), shard_size)

    def _connect(self, facts: Mapping[str, str]) -> dist.Store:
        """Makes the store and hears who the others are; returns the store for the process groups."""
        limit, rank = timedelta(seconds=self.to_meet), self.launch.rank
        soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):  # Gloo has a file handle for each rank of each group
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, 65536)), most))
        job: Any = connect(limit)
        with attempt(job, self.launch, limit) as self.attempt:
            # connections of their own: a wait here must not hold up what others want of the store
            alone = not isinstance(job, dist.TCPStore)
            clones = [job if alone else job.clone() for _ in range(3)]
            self.job = clones[0]
            self.store, self.alarm, self.post = (self._of_attempt(self.attempt, clone) for clone in clones)
            self.store.set(f"beat/{rank}", "0")
            self.store.set_timeout(limit)
            if rank == 0:
                self.store.set("facts", json.dumps(facts))
            own = Peer.of_this_process(self.device)
            peers = [Peer.from_text(text) for text in self.everyone("peer", own.to_text())]
        wrong = ""
        try:
            check_alike(json.loads(self.store.get("facts")), facts, peers, rank)
            choose_interface(peers, rank)
        except UserError as error:
            wrong = str(error)
        for told in self.everyone("ready", wrong):
            if told:  # on all nodes, or the others would wait for this one
                raise UserError(told)
        self.store.set_timeout(timedelta(seconds=self.timeout))
        self.hosts, self.devices = [peer.host for peer in peers], [peer.device for peer in peers]
        # of this machine, by rank; a stopped or zombie process is still there
        self.pids = {r: peer.pid for r, peer in enumerate(peers) if peer.machine == own.machine}
        launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.watch = Watch(self.alarm, peers, rank, self.timeout, partial(end_rank, launcher))
        self.watch.start()
        return dist.PrefixStore(f"attempt_{self.attempt}", job)

    def _make_groups(self, store: dist.Store, shard_size: ShardSize) -> None:
        launch, limit = self.launch, timedelta(seconds=self.timeout)
        # NCCL for tensors on GPUs, Gloo for those in host memory, in one group
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world, timeout=limit)
        # longer than the wire's own waits, which name the ranks
        self.wire: Any = dist.new_group(backend=backend, timeout=2 * limit)
        self.mesh: dict[Role, DeviceMesh] = {}
        self.shards: dict[Role, DeviceMesh] = {}
        self.saving: dict[Role, Any] = {}
        groups: dict[Role, tuple[int, ...]] = {"actor": self.placement.actor, "critic": self.placement.critic}
        for role, ranks in groups.items():
            group: Any = dist.new_group(list(ranks), backend=backend, timeout=limit)
            if launch.rank in ranks:
                mesh = DeviceMesh.from_group(group, self.device.type, mesh=list(ranks), mesh_dim_names=(role,))
                self.mesh[role] = self.shards[role] = mesh
            sets = copies(role, self.placement, shard_size, local_world=launch.local_world)
            if len(sets) > 1:
                shards = self._sharding(sets, lambda ranks: dist.new_group(ranks, backend=backend, timeout=limit))
                self.shards |= {role: shards} if shards else {}
            self.saving[role] = dist.new_group(list(ranks), backend="gloo", timeout=limit)

    def _of_attempt(self, number: int, job: Any) -> dist.Store:
        return dist.PrefixStore(f"splitppo/attempt_{number}", job)

    def _sharding(self, sets: list[list[int]], new_group: Callable[[list[int]], Any]) -> DeviceMesh | None:
        """The mesh of copies x ranks of a copy, for the ranks in it; all ranks of the job call it."""
        within, across = ([new_group(list(ranks)) for ranks in cut] for cut in (sets, zip(*sets, strict=True)))
        me = self.launch.rank
        for copy, ranks in enumerate(sets):
            if me in ranks:
                groups = [across[ranks.index(me)], within[copy]]
                return DeviceMesh.from_group(groups, self.device.type, mesh=sets, mesh_dim_names=("copy", "shard"))
        return None

    def share(self, key: str, value: Callable[[], str], *, patience: float = 0.0) -> str:
        """Rank 0's value, made by it alone and known to all; the others wait for it, so many seconds longer."""
        if self.launch.rank == 0:
            self.store.set(key, value())
        self.store.wait([key], timedelta(seconds=self.timeout + patience))
        return self.store.get(key).decode()

    def phase(self, text: str) -> None:
        """Tells the other ranks what this one is doing, for their errors."""
        self.store.set(f"phase/{self.launch.rank}", text)

    def describe(self, rank: int, store: dist.Store | None = None) -> str:
        """A rank as an error should name it, with what it was doing."""
        roles = "+".join(self.placement.roles(rank))
        return f"{roles} rank {rank} on {self.hosts[rank]} (in {self._doing(rank, store or self.store)!r})"

    def _doing(self, rank: int, store: dist.Store) -> str:
        return store.get(f"phase/{rank}").decode() if store.check([f"phase/{rank}"]) else "starting"

    def stopped(self) -> str:
        """The ranks of this machine that a signal or a debugger holds, for the errors of those that wait for them."""
        held = [rank for rank, pid in self.pids.items() if state_of(pid)[0] in "Tt"]
        return ", ".join(f"{self.describe(rank, self.alarm)} is stopped" for rank in held)

    def phases(self) -> str:
        """What every rank is doing, by phase: who did not come to a collective is seen from it."""
        ranks: dict[str, list[int]] = {}
        for rank in range(self.launch.world):
            ranks.setdefault(self._doing(rank, self.store), []).append(rank)
        told = ((", ".join(map(str, held[:8])) + ", ..." * (len(held) > 8), doing) for doing, held in ranks.items())
        return "; ".join(f"rank {held} in {doing!r}" for held, doing in told)

    def ask_to_stop(self, why: str) -> None:
        """Asks all ranks to stop after the step that they are in, or the next; any of them may."""
        self.alarm.set("stop/asked", f"{why} to rank {self.launch.rank}")

    def stopped_before(self) -> bool:
        """Whether this is an attempt after one that was to end the job: torchrun --max-restarts takes it for a
        failure."""
        if self.attempt == 1 or not self._of_attempt(self.attempt - 1, self.job).check(["stop/after"]):
            return False
        self.store.set("stop/after", "0")  # for the next one
        return True

    def asked_to_stop(self) -> bool:
        return self.store.check(["stop/asked"])

    def stop_after(self, step: int) -> None:
        """Says which step is the last. One rank does, before any other can be through with that step."""
        self.store.set("stop/after", str(step))
        self.store.get("stop/after")  # once it is answered, all can see it

    def stops_after(self) -> tuple[int, str] | None:
        """The last step, and who asked for it."""
        if not self.store.check(["stop/after"]):
            return None
        return int(self.store.get("stop/after")), self.store.get("stop/asked").decode()

    def lost(self) -> str | None:
        """None while no rank has failed, and none of this machine is gone without a word: then which, the first time
        that a rank of this job asks, else ""."""
        me = str(self.launch.rank)
        try:
            if self.alarm.check(["failed"]):
                return ""
            gone = [rank for rank, pid in self.pids.items() if not started(pid)]
            if not gone:
                return None
            first = self.alarm.compare_set("gone", "", me).decode() == me
            return self.describe(gone[0], self.alarm) if first else ""  # one of them tells it
        except (RuntimeError, dist.DistError):  # the store is gone, with the rank or the launcher that held it
            return ""

    def end_work(self) -> None:
        """Returns when no rank has work left; from here on some may be gone."""
        self.meet("end of the work")
        self.over = True
        self.watch.close()

    def wait_for_all(self) -> None:
        """Returns when every rank is here: the end of the run, where no column has work left."""
        me = self.launch.rank
        self.meet("end of the run")
        self.store.set(f"left/{me}", "1")
        for rank in range(self.launch.world if me == 0 else 0):
            self.store.get(f"left/{rank}")  # rank 0 may hold the store: it goes last

    def meet(self, where: str) -> None:
        """Returns when every rank is here, without a word to the GPUs."""
        self.everyone(f"meet/{where}", "", answer=lambda _: "[]")

    def failed(self, error: BaseException) -> bool:
        """Notes that this rank failed; returns whether it was the first, whose traceback is the one to show."""
        mine = f"{self.launch.rank}"
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # a stopped one could not hear torchrun's SIGTERM, which then waits 30 s
        try:
            return self.store.compare_set("failed", "", mine).decode() == mine
        except (RuntimeError, dist.DistError):
            # the store is gone with the rank that held it: that one has told its own story
            return False

    def close(self) -> None:
        dist.destroy_process_group()

    def everyone(self, key: str, value: str, *, answer: Callable[[list[str]], str] = json.dumps) -> list[str]:
        """Every rank's small text, in order of ranks; all must call it, once for each key.

        Rank 0 reads them all and passes them on: a rank's part does not grow with their number.

        Raises:
            RuntimeError: names a rank that did not come in time.
        """
        self.store.set(f"{key}/{self.launch.rank}", value)
        try:
            if self.launch.rank == 0:
                texts = [self.store.get(f"{key}/{rank}").decode() for rank in range(self.launch.world)]
                self.store.set(key, answer(texts))
            return json.loads(self.store.get(key))
        except dist.DistStoreError as error:
            raise RuntimeError(self._who_is_absent(key)) from error

    def _who_is_absent(self, key: str) -> str:
        """Which ranks did not come to an `everyone`; rank 0 knows, the others say only whether it did."""
        me, ranks = self.launch.rank, range(self.launch.world) if self.launch.rank == 0 else [0]
        absent = [rank for rank in ranks if not self.store.check([f"{key}/{rank}"])]
        where, seconds = key.removeprefix("meet/"), self.timeout if self.hosts else self.to_meet
        waited = f"{where}: rank {me} on {socket.gethostname()} waited {seconds:g} s"
        if self.hosts:
            told = ", ".join(self.describe(rank) for rank in absent[:8]) or "ranks that rank 0 names"
            return f"{waited} for {told}; raise --timeout if that is only slow"
        came = [rank for rank in ranks if rank not in absent]
        found = [f"{rank} on {Peer.from_text(self.store.get(f'peer/{rank}').decode()).host}" for rank in came]
        return f"{waited} for ranks {absent}, which did not start; those that did: {', '.join(found)}"


def format_map(placement: Placement, hosts: list[str], devices: list[str]) -> str:
    """The table of ranks, hosts, devices and roles."""
    lines = [f"placement {placement.mode}: {len(placement.actor)} actor, {len(placement.critic)} critic"]
    for rank, (host, device) in enumerate(zip(hosts, devices, strict=True)):
        lines.append(f"  rank {rank:>3}  {host:<24} {device:<8} {' + '.join(placement.roles(rank))}")
    return "\n".join(lines)
