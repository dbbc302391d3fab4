"""What the ranks publish in the job's store: phases, failures, requests to stop. Only `stopped_by`
waits for a rank."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from splitppo.job.nodes import Peer, process_state
from splitppo.job.wire import WireError
from splitppo.placement import Placement


class Status:
    """What each rank is doing, whether it lives, and whether the run is to stop. `store`: the part
    of the store for this start, on a connection where nobody waits.
    `timeout`: the longest wait for rank 0's answer, in seconds. `pids`: of this machine's ranks."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        peers: Sequence[Peer],
        placement: Placement,
        timeout: float,
    ):
        self.timeout = timeout
        self.store = store
        self.rank = rank
        self.peers = peers
        self.placement = placement
        self.phase = "starting"  # what this rank is doing
        self.pids = {
            r: peer.pid for r, peer in enumerate(peers) if peer.machine == peers[rank].machine
        }

    def set_phase(self, phase: str) -> None:
        """Publishes what this rank is doing."""
        self.phase = phase
        self.store.set(f"phase/{self.rank}", phase)

    def _phase(self, rank: int) -> str:
        key = f"phase/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else "starting"

    def describe(self, rank: int) -> str:
        """A rank's name in error messages: its roles, host and phase."""
        roles = "+".join(self.placement.roles(rank))
        return f"{roles} rank {rank} on {self.peers[rank].host} (in {self._phase(rank)!r})"

    def phases(self) -> str:
        """The ranks of each phase: a rank that did not come to a collective is in another phase
        than the others."""
        by_rank = {str(rank): self._phase(rank) for rank in range(len(self.peers))}
        ranks = {
            phase: [rank for rank, current in by_rank.items() if current == phase]
            for phase in dict.fromkeys(by_rank.values())
        }
        return "; ".join(
            f"rank {', '.join(held[:8])}{', ...' * (len(held) > 8)} in {phase!r}"
            for phase, held in ranks.items()
        )

    def suspended_ranks(self) -> str:
        """Describes the ranks of this machine that SIGSTOP or a debugger holds; "" if there are
        none."""
        return ", ".join(
            f"{self.describe(rank)} is suspended (SIGSTOP or a debugger)"
            for rank, pid in self.pids.items()
            if process_state(pid) in "Tt"
        )

    def dead_rank(self) -> str | None:
        """Describes a rank of this machine that died without reporting a failure; None while all
        ranks live. It is to be printed once, so the first rank that asks gets the description, and
        the others "". Every rank gets "" after a reported failure, or if the store is lost."""
        try:
            if self.store.check(["failed"]):
                return ""
            if not (dead := [r for r, pid in self.pids.items() if process_state(pid) in "ZX"]):
                return None
            return self.describe(dead[0]) if self._is_first("dead") else ""
        except (RuntimeError, dist.DistError):
            return ""

    def report_failure(self) -> bool:
        """Publishes that this rank failed; returns whether it is the first rank that did."""
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                # a suspended rank cannot hear torchrun's SIGTERM, which then waits 30 s
                os.kill(pid, signal.SIGCONT)
        try:
            return self._is_first("failed")
        except (RuntimeError, dist.DistError):
            # the store ended with the process that held it, which reports its own failure
            return False

    def has_failure(self) -> bool:
        """Whether a rank has reported a failure."""
        return self.store.check(["failed"])

    def _is_first(self, key: str) -> bool:
        return self.store.compare_set(key, "", str(self.rank)).decode() == str(self.rank)

    def request_stop(self, why: str) -> None:
        """Asks for an early end of the run, after a whole step. Any rank may; one rank chooses the
        step."""
        self.store.set("stop/requested", f"{why} to rank {self.rank}")

    def answer_stop(self, step: int, why: str = "") -> None:
        """Makes this step the last if there is a reason `why`, or a stop was requested. Actor ranks
        call it, and rank 0 answers; no rank ends the step before it has the answer
        (`stopped_by`)."""
        if self.rank == 0:
            if why:
                self.store.set("stop/requested", why)
            if self.store.check(["stop/requested"]):
                self.store.set("stop/step", str(step))
            # after the answer: the store keeps the order
            self.store.set("stop/answered", str(step))

    def stopped_by(self, step: int) -> str | None:
        """Who requested the stop that makes this step the last; None if the run goes on. Waits
        until rank 0 has answered for the step: in a step without rows nothing else would. Raises
        WireError when the time is over."""
        deadline = time.monotonic() + self.timeout
        # the last step that rank 0 has answered for
        while self.store.add("stop/answered", 0) < step:
            if time.monotonic() > deadline:
                raise WireError(
                    f"step {step}: {self.describe(self.rank)} waited {self.timeout:g} s until "
                    f"{self.describe(0)} says whether the run stops; "
                    "raise --timeout if that rank is only slow"
                )
            # no wait in the store: it would block the heartbeats on this connection; all ranks
            # together ask 10,000 times a second at most
            time.sleep(max(0.01, 1e-4 * len(self.peers)))
        return (
            self.store.get("stop/requested").decode()
            if self.store.check(["stop/step"]) and int(self.store.get("stop/step")) <= step
            else None
        )
