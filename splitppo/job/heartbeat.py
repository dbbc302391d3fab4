"""Hosts that fall silent: a cable that is pulled closes no connection, and a wait for an answer would not end."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from splitppo.job.nodes import Peer

LONGEST = 120.0  # seconds of silence, however long a wait for a rank may take: who is alive beats


class SilenceError(RuntimeError):
    """Nothing was heard of a host."""


class Watch:
    """The ranks of each host count up a number in the store, and every rank looks whether the others do.

    Between hosts alone: on one, the kernel tells who has died.

    Args:
        store: a connection for this alone; holds `beat/RANK` = 0 for every rank already.
        peers: by rank.
        limit: seconds of silence after which the rank is ended.
        end: told why, in a thread, when it is to end, and whether torchrun's store is lost; not to return.
    """

    def __init__(self, store: dist.Store, peers: Sequence[Peer], rank: int, limit: float, end: Callable[..., Any]):
        self.store, self.peers, self.rank, self.end = store, peers, rank, end
        self.limit = min(limit, LONGEST)
        self.period = min(5.0, self.limit / 8)
        self.hosts: dict[int, list[int]] = {}  # first rank -> all
        first: dict[str, int] = {}
        for other, peer in enumerate(peers):
            self.hosts.setdefault(first.setdefault(peer.machine, other), []).append(other)
        self.home = first[peers[rank].machine]
        self.answered = time.monotonic()
        self.heard: dict[int, tuple[int, float]] = dict.fromkeys(self.hosts, (0, self.answered))
        self.over = threading.Event()

    def start(self) -> None:
        if len(self.hosts) > 1:
            for work in (self._listen, self._judge):
                threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """From here on others may be gone."""
        self.over.set()

    def silent(self, seconds: float = 0.0) -> str | None:
        """Of whom nothing was heard for so long, three beats at least; None if there is no one."""
        now, least = time.monotonic(), max(seconds, 3 * self.period)
        mine = f"{self.peers[self.rank].host} (rank {self.rank})"
        lost = "that host, or the network to it, is gone"
        if self.over.is_set() or len(self.hosts) == 1:
            return None
        if (silence := now - self.answered) > least:
            where = os.environ.get("MASTER_ADDR", "the first host")
            return f"the job's store on {where} has not answered {mine} for {silence:.0f} s: {lost}"
        for first, (_, when) in self.heard.items():
            if first != self.home and now - when > least:
                host, ranks = self.peers[first].host, ", ".join(map(str, self.hosts[first]))
                return f"nothing was heard of {host} (ranks {ranks}) for {now - when:.0f} s by {mine}: {lost}"
        return None

    def _listen(self) -> None:
        firsts = list(self.hosts)
        while not self.over.wait(self.period):
            with suppress(RuntimeError, dist.DistError):  # no answer, which `_judge` sees
                self.store.add(f"beat/{self.home}", 1)
                counts = [int(count) for count in self.store.multi_get([f"beat/{first}" for first in firsts])]
                self.answered = now = time.monotonic()
                for first, count in zip(firsts, counts, strict=True):
                    if count != self.heard[first][0]:
                        self.heard[first] = (count, now)

    def _judge(self) -> None:
        looked = time.monotonic()
        while not self.over.wait(self.period / 2):
            now = time.monotonic()
            if (slept := now - looked) > 2 * self.period:  # it was this rank that was stopped, or held
                self.answered = min(now, self.answered + slept)
                self.heard = {first: (count, min(now, when + slept)) for first, (count, when) in self.heard.items()}
            looked = now
            if told := self.silent(self.limit):
                with suppress(OSError):  # the screen may be gone, too
                    print(told, file=sys.stderr, flush=True)
                self.end(SilenceError(told), store_lost=time.monotonic() - self.answered > self.limit)
