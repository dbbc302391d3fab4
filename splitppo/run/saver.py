"""Writes a group's part of a checkpoint while the group trains on, and reads it again."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from splitppo.errors import UserError
from splitppo.models import offload, sharding
from splitppo.models.learner import Learner
from splitppo.placement import Role
from splitppo.run.checkpoint import (
    PARTIAL,
    measure,
    read_tensors,
    step_folder,
    step_of,
    write_manifest,
)
from splitppo.run.files import read_file, sync_folder, write_whole

# kind (model, exp_avg, ...) -> Hugging Face name -> tensor, sharded
Tensors = dict[str, dict[str, torch.Tensor]]


def tensors_of(learners: Sequence[Learner]) -> Tensors:
    """The weights and AdamW's state: the tensors themselves, not copies. Of a model with adapters,
    only what is trained."""
    held: Tensors = {}
    for learner in learners:
        for name, parameter in learner.sharded(learner.trainable.saved).items():
            state = learner.state_of(parameter) if parameter.requires_grad else {}
            for kind, tensor in {"model": parameter.detach(), **state}.items():
                held.setdefault(kind, {})[name] = sharding.described(learner.model, name, tensor)
    return held


def load(
    learners: Sequence[Learner],
    part: Path,
    set_states: Sequence[Callable[[dict[str, Any]], object]],
    group: Any,
) -> None:
    """Loads a part into a group's learners, on any number of ranks; all ranks of the group call it.
    Each of `set_states` gets the `state` that `Saver.begin` got. `group`: as of `Saver`. Raises
    UserError if the part is damaged, or of other models."""
    read_tensors(tensors_of(learners), part, process_group=group)
    for learner in learners:
        learner.release_memory(changed=True)
        learner.updates = step_of(part.parent)
    read_file(
        part / "state.json",
        lambda text: [set_state(json.loads(text)) for set_state in set_states],
        f"remove {part.parent}",
    )


class Saver:
    """Writes a group's parts of checkpoints, one at a time, in a thread. Training waits only until
    `begin` has copied the tensors to host memory. The thread writes the files, then waits for
    `commit`: the step's metrics are on disk before its checkpoint is complete. `group`: Gloo
    process group of the ranks that hold the weights once; after `load`, this thread alone uses it.
    `writes`: whether these ranks write; of several replicas one does, since the first rank plans
    for all that write. `committed`: the group's first rank calls it after each complete part.
    `learners`: the one that the group trains, if any."""

    def __init__(
        self,
        learners: Sequence[Learner],
        role: Role,
        run_dir: Path,
        group: Any,
        *,
        committed: Callable,
        writes: bool = True,
    ):
        self.learners = learners
        self.role = role
        self.run_dir = run_dir
        self.group = group
        self.rank = dist.get_rank(group)
        self.committed = committed
        self.writes = writes
        self.copies: Tensors = {}
        self.files: dict[str, torch.Tensor] = {}
        self.thread: threading.Thread | None = None
        self.step = 0
        self.may_commit = threading.Event()
        self.error: BaseException | None = None

    def allocate(self) -> None:
        """Allocates the host memory: pinned for a GPU. This takes seconds, so call it before the
        first step."""
        for kind, tensors in self._tensors().items():
            self.copies[kind] = {
                name: offload.host_copy(tensor) for name, tensor in tensors.items()
            }
        for learner in self.learners:
            learner.release_memory()

    def begin(self, step: int, state: dict[str, Any]) -> None:
        """Starts to write the part of a step, as soon as the previous part is written. `state`, the
        same on all ranks, goes into state.json. Raises FloatingPointError if a weight is not
        finite; then nothing is written."""
        self.wait()
        for learner in self.learners:
            learner.check_finite()
        if not self.copies:
            self.allocate()
        for kind, tensors in self._tensors().items():
            for name, tensor in tensors.items():
                sharding.local(self.copies[kind][name]).copy_(
                    sharding.local(tensor), non_blocking=True
                )
        for learner in self.learners:
            self.files = learner.trainable.gather_files(learner.model)
            if learner.runner.device.type == "cuda":
                torch.cuda.synchronize(learner.runner.device)
            learner.release_memory()
        self.step = step
        if not self.writes:
            return
        self.may_commit = threading.Event()
        self.thread = threading.Thread(target=self._write, args=(json.dumps(state),), daemon=True)
        self.thread.start()

    def commit(self, step: int) -> None:
        """Lets the part of this step, if there is one, become complete. Raises the thread's error,
        if it has failed."""
        if step == self.step:
            self.may_commit.set()
        if self.error is not None:
            self.wait()

    def wait(self) -> None:
        """Waits until the part is complete. Raises UserError if the disk refused it, or
        RuntimeError if it could not be written for another reason, the `__cause__`."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        if self.error is not None:
            # torch's error holds each rank's error
            cause = next(iter(getattr(self.error, "failures", {}).values()), (self.error,))[0]
            raise (UserError if isinstance(cause, OSError) else RuntimeError)(
                f"the {self.role}'s part of checkpoint {step_folder(self.run_dir, self.step)} "
                f"could not be written; earlier checkpoints are intact ({cause})"
            ) from self.error

    def _tensors(self) -> Tensors:
        """What this rank writes."""
        return tensors_of(self.learners) if self.writes else {}

    def _write(self, state: str) -> None:
        part = step_folder(self.run_dir, self.step) / self.role
        partial = part.with_name(f"{part.name}{PARTIAL}")
        try:
            if self.rank == 0:
                partial.mkdir(parents=True, exist_ok=True)
                write_whole(partial / "state.json", state)
            # 0: the tensors are in host memory; to copy ahead, the writer would open the first GPU
            writer = dcp.FileSystemWriter(partial, per_thread_copy_ahead=0)
            dcp.save(self.copies, storage_writer=writer, process_group=self.group)
            names = [path.name for path in partial.glob(f"__{self.rank}_*")]
            names += [".metadata", "state.json"] * (self.rank == 0)
            for learner in self.learners if self.rank == 0 else ():
                names += learner.trainable.write(partial, learner.model, self.files)
            measured = {name: measure(partial / name) for name in names}
            files: list[Any] = [{}] * dist.get_world_size(self.group)
            dist.all_gather_object(files, measured, group=self.group)
            if self.rank == 0:
                write_manifest(
                    partial, self.step, {k: v for held in files for k, v in held.items()}
                )
                self.may_commit.wait()
                partial.rename(part)
                sync_folder(part.parent)
                self.committed()
        except BaseException as error:
            self.error = error
