"""Heartbeats between hosts. A network failure closes no TCP connection: a rank would wait forever
for a lost host."""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from splitppo.job.launch import end_rank
from splitppo.job.nodes import Peer

# seconds of silence at most, however long --timeout is: a busy rank sends heartbeats, too
LONGEST = 120.0
MANY_HOSTS = 64  # with fewer than twice as many, every rank watches all


class Heartbeat:
    """Sends and watches heartbeats in two threads. A heartbeat adds 1 to the sending host's counter
    in the store.

    It runs between hosts alone: on one host, the kernel knows which ranks have died. Nobody waits
    on the connection `store`, which holds `heartbeat/RANK` = 0. `limit`: seconds of silence after
    which this rank ends.
    """

    def __init__(self, store: dist.Store, peers: Sequence[Peer], rank: int, limit: float):
        self.store = store
        self.peers = peers
        self.rank = rank
        self.limit = min(limit, LONGEST)
        self.period = min(5.0, self.limit / 8)
        self.torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        # machine -> its ranks
        self.hosts = {
            machine: [other for other, peer in enumerate(peers) if peer.machine == machine]
            for machine in dict.fromkeys(peer.machine for peer in peers)
        }
        self.store_answered = time.monotonic()
        here = self.hosts[peers[rank].machine]
        self.own_key = f"heartbeat/{here[0]}"
        # of many hosts each rank watches some, and the ranks of a host all
        share = min(len(here), max(1, len(self.hosts) // MANY_HOSTS))
        watched = [*self.hosts][here.index(rank) % share :: share]
        # machine -> its counter, and when the counter changed
        self.seen: dict[str, tuple[int, float]] = dict.fromkeys(watched, (0, self.store_answered))
        self.closed = threading.Event()  # set it when other hosts may leave

    def start(self) -> None:
        if len(self.hosts) > 1:
            for work in (self._exchange, self._watch):
                threading.Thread(target=work, daemon=True).start()

    def lost_host(self, seconds: float = 0.0) -> str | None:
        """Describes a host that has missed three heartbeats or more and was silent for `seconds`;
        None without one."""
        now = time.monotonic()
        least = max(seconds, 3 * self.period)
        here = f"{self.peers[self.rank].host} (rank {self.rank})"
        cause = "that host or the network to it has failed"
        if self.closed.is_set() or len(self.hosts) == 1:
            return None
        if (silence := now - self.store_answered) > least:
            return (
                f"the job's store on {os.environ.get('MASTER_ADDR', 'the first host')} "
                f"has not answered {here} for {silence:.0f} s: {cause}"
            )
        for machine, (_, when) in self.seen.items():
            if machine != self.peers[self.rank].machine and now - when > least:
                host = self.peers[self.hosts[machine][0]].host
                ranks = ", ".join(map(str, self.hosts[machine]))
                return (
                    f"no heartbeat of {host} (ranks {ranks}) has reached {here} "
                    f"for {now - when:.0f} s: {cause}"
                )
        return None

    def _exchange(self) -> None:
        """Sends this host's heartbeat and reads the counters of the hosts that this rank watches,
        once a period."""
        keys = {machine: f"heartbeat/{self.hosts[machine][0]}" for machine in self.seen}
        while not self.closed.wait(self.period):
            with suppress(RuntimeError, dist.DistError):  # no answer: `_watch` notices
                self.store.add(self.own_key, 1)
                counts = self.store.multi_get(list(keys.values()))
                self.store_answered = now = time.monotonic()
                for machine, count in zip(keys, map(int, counts), strict=True):
                    if count != self.seen[machine][0]:
                        self.seen[machine] = (count, now)

    def _watch(self) -> None:
        """Ends this rank when a host is lost."""
        last = time.monotonic()
        while not self.closed.wait(self.period / 2):
            now = time.monotonic()
            if (pause := now - last) > 2 * self.period:  # this rank itself was suspended
                self.store_answered = min(now, self.store_answered + pause)
                self.seen = {
                    key: (count, min(now, when + pause)) for key, (count, when) in self.seen.items()
                }
            last = now
            if message := self.lost_host(self.limit):
                store_lost = time.monotonic() - self.store_answered > self.limit
                end_rank(message, torchrun=self.torchrun if store_lost else None)
