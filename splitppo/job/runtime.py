"""One rank's connection to the others: the store, the process groups, and small values that all
ranks agree on."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from splitppo.errors import UserError
from splitppo.job.collectives import SHARDED, Group, GroupMaker, ModelSet
from splitppo.job.heartbeat import Heartbeat
from splitppo.job.launch import Launch
from splitppo.job.nodes import Peer, check_alike, choose_interface, connect, join
from splitppo.job.status import Status
from splitppo.placement import Placement, Role, SetShape, ShardSize, replicas

# seconds at most until all ranks are there: torchrun starts them at the same time
STARTUP_LIMIT = 300.0


class Runtime:
    """Connects this rank to the others. `broadcast` and `all_gather` are for the main thread alone.

    Attributes:
        job: key-value store of the job. store, wire_store: its part for this start, for the main
            thread and the wire.
        hosts, devices: of each rank.
        groups: role -> its group, for the roles that this rank plays.
        shards: role -> the mesh over which its weights are sharded: the group's, or one of replica
            x shard.
        sets: role -> shape of a set -> the set that holds this rank.
        saving: role -> process group over Gloo of this rank's replica of the weights, for reading
            and writing checkpoints. writes: role -> whether it is the first replica, which writes
            them.
        wire: process group of all ranks, for the channels alone.
        last_checkpoint: returns the newest complete checkpoint; None while there is none.
        work_done: event: all ranks have finished their work, and ranks may end.
    """

    def __init__(
        self,
        launch: Launch,
        placement: Placement,
        device: torch.device,
        timeout: float,
        *,
        shard_size: ShardSize = None,
        set_shapes: Mapping[Role, Sequence[SetShape]] | None = None,
        facts: Mapping[str, str] | None = None,
    ):
        self.launch = launch
        self.placement = placement
        self.device = device
        self.timeout = timeout
        self.last_checkpoint: Callable[[], Path | None] = lambda: None
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # starting takes longer than a message
        startup = timedelta(seconds=min(max(timeout, 60.0), STARTUP_LIMIT))
        shared: Any = connect(launch, startup)
        restart, peers = join(shared, launch, Peer.of_this_process(device), startup)
        self.hosts = [peer.host for peer in peers]
        self.devices = [peer.device for peer in peers]
        # each use has a connection of its own: a wait on a connection blocks all other calls on it
        stores = [
            shared if isinstance(shared, dist.HashStore) else shared.clone() for _ in range(3)
        ]
        prefix = f"splitppo/restart_{restart}"
        self.job = stores[0]
        self.store, self.wire_store, control = (dist.PrefixStore(prefix, store) for store in stores)
        self.status = Status(control, launch.rank, peers, placement, timeout)
        self.store.set_timeout(timedelta(seconds=timeout))
        # rank 0: keys that all ranks will have read when they gather again
        self._check_nodes(peers, facts or {})
        self.heartbeat = Heartbeat(control, peers, launch.rank, timeout)
        self.heartbeat.start()
        self.work_done = self.heartbeat.closed
        self._make_groups(
            dist.PrefixStore(f"{prefix}/groups", shared), shard_size, set_shapes or {}
        )

    def _check_nodes(self, peers: list[Peer], facts: Mapping[str, str]) -> None:
        """Raises UserError on all ranks if one rank's node cannot take part: the others would wait
        for it."""
        rank = self.launch.rank
        problem = ""
        self.store.set(f"heartbeat/{rank}", "0")
        try:
            check_alike(
                json.loads(self.broadcast("facts", lambda: json.dumps(facts))), facts, peers, rank
            )
            choose_interface(peers, rank)
        except UserError as error:
            problem = str(error)
        if problems := [text for text in self.all_gather("node problems", problem) if text]:
            raise UserError(problems[0])

    def _make_groups(
        self,
        store: dist.Store,
        shard_size: ShardSize,
        set_shapes: Mapping[Role, Sequence[SetShape]],
    ) -> None:
        maker = GroupMaker(self.launch, self.device.type, store, self.timeout)
        # longer than the channels' waits, which name the ranks
        self.wire = maker.new_group(timeout=timedelta(seconds=2 * self.timeout))
        self.groups: dict[Role, Group] = {}
        self.shards: dict[Role, DeviceMesh] = {}
        self.sets: dict[Role, dict[SetShape, ModelSet]] = {}
        self.saving: dict[Role, Any] = {}
        self.writes: dict[Role, bool] = {}
        for role, ranks in self.placement.groups.items():
            least, *_ = shapes = set_shapes.get(role, [SetShape()])
            held = torch.tensor(
                replicas(role, self.placement, shard_size, local_world=self.launch.local_world)
            ).squeeze(0)
            group = maker.group(torch.tensor([ranks]), **least._asdict())
            mesh = maker.mesh(held[None], *SHARDED[-held.ndim :])
            made = {shape: maker.model_set(held, shape, least) for shape in dict.fromkeys(shapes)}
            if group and mesh:
                self.groups[role], self.shards[role] = group, mesh
                self.sets[role] = made
            of_replicas = held.reshape(-1, held.shape[-1])
            self.saving[role] = maker.line(of_replicas, backend="gloo")
            maker.made.clear()
            self.writes[role] = self.launch.rank in of_replicas[0]

    def broadcast(self, key: str, value: Callable[[], str], *, patience: float = 0.0) -> str:
        """Rank 0's value, which it alone computes. The others wait for it, `patience` seconds
        longer than usual."""
        if self.launch.rank == 0:
            self.store.set(key, value())
        with self._naming_ranks(key, patience):
            self.store.wait([key], timedelta(seconds=self.timeout + patience))
        return self.store.get(key).decode()

    def all_gather(self, key: str, value: str) -> list[str]:
        """Every rank's small text, in order of ranks. All ranks call it, once for each key. Rank 0
        publishes all texts together, so another rank's work does not grow with their number."""
        self._gather(key, value)
        with self._naming_ranks(key):
            return json.loads(self.store.get(key))

    def wait_for_all(self) -> None:
        """Keeps rank 0 until every other rank has called this: rank 0's process may hold the
        store."""
        self._gather("end of the run", "")

    def close(self) -> None:
        dist.destroy_process_group()

    def _gather(self, key: str, value: str) -> None:
        self.store.set(f"{key}/{self.launch.rank}", value)
        if self.launch.rank == 0:
            names = [f"{key}/{rank}" for rank in range(self.launch.world)]
            with self._naming_ranks(key):
                texts = [self.store.get(name).decode() for name in names]
            self.store.set(key, json.dumps(texts))

    @contextmanager
    def _naming_ranks(self, key: str, patience: float = 0.0) -> Iterator[None]:
        """Turns a time-out into a RuntimeError that names the missing ranks. Only rank 0 knows all
        of them."""
        try:
            yield
        except dist.DistStoreError as error:
            me = self.launch.rank
            senders = range(self.launch.world) if me == 0 else [0]
            missing = [rank for rank in senders if not self.store.check([f"{key}/{rank}"])]
            names = ", ".join(map(self.status.describe, missing[:8])) or "ranks that rank 0 names"
            raise RuntimeError(
                f"{key}: rank {me} on {self.hosts[me]} waited {self.timeout + patience:g} s for "
                f"{names}; raise --timeout if that is only slow"
            ) from error


def format_map(placement: Placement, hosts: list[str], devices: list[str]) -> str:
    """The table of ranks, hosts, devices and roles."""
    sizes = ", ".join(f"{len(ranks)} {role}" for role, ranks in placement.groups.items())
    ranks = (
        f"  rank {rank:>3}  {host:<24} {device:<8} {' + '.join(placement.roles(rank))}"
        for rank, (host, device) in enumerate(zip(hosts, devices, strict=True))
    )
    return "\n".join([f"placement {placement.mode}: {sizes}", *ranks])
