"""Writing a group's part of a checkpoint while it trains on, and reading it again."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from splitppo.errors import UserError
from splitppo.learner import Learner
from splitppo.models.sharding import local
from splitppo.placement import Role
from splitppo.run.checkpoint import PARTIAL, measure, read_tensors, step_folder, write_manifest
from splitppo.run.files import read_file, sync_folder, write_whole


def tensors_of(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """The weights and AdamW's state, by kind and Hugging Face name; the tensors themselves, sharded as they are."""
    named = learner.sharded()
    held: dict[str, dict[str, Tensor]] = {"model": {name: p.detach() for name, p in named.items()}}
    for name, parameter in named.items():
        state = learner.optimizer.state[parameter]
        if not state:  # what AdamW's first step would make
            state |= {kind: torch.zeros_like(parameter.detach()) for kind in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.zeros((), dtype=torch.float32, device=learner.runner.device)
        for kind, tensor in state.items():
            held.setdefault(kind, {})[name] = tensor
    return held


def load(learner: Learner, part: Path, take: Callable[[dict[str, Any]], object]) -> None:
    """Reads a part, for any number of ranks, all of which must call it; `take` gets its `state`.

    Raises:
        UserError: it is of other models, or made by hand.
    """
    read_tensors(tensors_of(learner), part, process_group=learner.runner.mesh.get_group())
    read_file(part / "state.json", lambda text: take(json.loads(text)), f"remove {part.parent}")


class Saver:
    """Writes the checkpoints of a role's learner, one at a time, in a thread.

    `begin` copies the tensors to host memory, which is all that training waits for; the thread writes them. The part
    counts once `commit` has said that the step's metrics are written, too: a resumed run has every line.

    Args:
        group: process group of the role's ranks over Gloo, for this thread alone.
        committed: called by the group's first rank with each step whose part counts.
    """

    def __init__(self, learner: Learner, role: Role, run_dir: Path, group: Any, *, committed: Callable[[int], object]):
        self.learner, self.role, self.run_dir, self.group = learner, role, run_dir, group
        self.rank, self.committed = learner.runner.mesh.get_local_rank(), committed
        self.hosts: dict[DeviceMesh, DeviceMesh] = {}
        self.copies: dict[str, dict[str, Tensor]] = {}
        self.thread: threading.Thread | None = None
        self.step = 0
        self.written = threading.Event()
        self.error: BaseException | None = None

    def allocate(self) -> None:
        """Takes the host memory for the copies: pinned, for a GPU, which takes seconds and is best done before the
        first step."""
        pinned = self.learner.runner.device.type == "cuda"
        for kind, tensors in tensors_of(self.learner).items():
            shards = {name: local(tensor) for name, tensor in tensors.items()}
            self.copies[kind] = {
                name: torch.empty(shard.shape, dtype=shard.dtype, pin_memory=pinned) for name, shard in shards.items()
            }

    def begin(self, step: int, state: dict[str, Any]) -> None:
        """Starts to write the part of a step; waits for the one before it.

        Args:
            state: goes into the part as JSON, the same on all ranks.

        Raises:
            FloatingPointError: a weight is not finite; nothing is written.
        """
        self.wait()
        self.learner.check_finite()
        if not self.copies:
            self.allocate()
        staged = {
            kind: {name: self._copy(tensor, self.copies[kind][name]) for name, tensor in tensors.items()}
            for kind, tensors in tensors_of(self.learner).items()
        }
        if self.learner.runner.device.type == "cuda":
            torch.cuda.synchronize(self.learner.runner.device)
        self.step, self.written = step, threading.Event()
        self.thread = threading.Thread(target=self._run, args=(step, staged, dict(state)), daemon=True)
        self.thread.start()

    def commit(self, step: int) -> None:
        """Lets the part of this step count, if there is one. Raises what the thread failed by, if it has."""
        if step == self.step:
            self.written.set()
        if self.error is not None:
            self.wait()

    def settle(self, seconds: float) -> None:
        """Waits at most so long for a part that has been let count."""
        if self.thread is not None and self.written.is_set():
            self.thread.join(seconds)

    def wait(self) -> None:
        """Until what `begin` began is written.

        Raises:
            UserError: the disk did not take it.
            RuntimeError: it could not be written; the cause is behind it.
        """
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        if self.error is not None:
            folder = step_folder(self.run_dir, self.step)
            why = f"the {self.role}'s part of checkpoint {folder} could not be written; earlier ones are whole"
            # torch's own error holds that of each rank
            cause = next(iter(getattr(self.error, "failures", {}).values()), (self.error,))[0]
            kind = UserError if isinstance(cause, OSError) else RuntimeError
            raise kind(f"{why} ({cause})") from self.error

    def _copy(self, tensor: Tensor, to: Tensor) -> Tensor:
        """The same tensor in host memory, sharded as it is."""
        to.copy_(local(tensor), non_blocking=True)
        if not isinstance(tensor, DTensor):
            return to
        mesh = tensor.device_mesh
        if mesh not in self.hosts:  # to say who holds what, of which copies are written once; not to communicate
            self.hosts[mesh] = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
        whole: Any = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(to, self.hosts[mesh], tensor.placements, run_check=False, **whole)

    def _run(self, step: int, staged: dict[str, Any], state: dict[str, Any]) -> None:
        try:
            self._write(step_folder(self.run_dir, step) / self.role, step, staged, state)
        except BaseException as error:
            self.error = error

    def _write(self, part: Path, step: int, staged: dict[str, Any], state: dict[str, Any]) -> None:
        partial = part.with_name(f"{part.name}{PARTIAL}")
        if self.rank == 0:
            partial.mkdir(parents=True, exist_ok=True)
            write_whole(partial / "state.json", json.dumps(state))
        # nothing is to be copied from a GPU, of which it would take the first one
        writer = dcp.FileSystemWriter(partial, per_thread_copy_ahead=0)
        dcp.save(staged, storage_writer=writer, process_group=self.group)
        own = {path.name: measure(path) for path in partial.glob(f"__{self.rank}_*")}
        if self.rank == 0:
            own |= {name: measure(partial / name) for name in (".metadata", "state.json")}
        parts: list[Any] | None = [None] * dist.get_world_size(self.group) if self.rank == 0 else None
        dist.gather_object(own, parts, group=self.group, group_dst=0)
        if parts is not None:
            write_manifest(partial, step, {name: file for files in parts for name, file in files.items()})
            self.written.wait()
            partial.rename(part)
            sync_folder(part.parent)
            self.committed(step)
