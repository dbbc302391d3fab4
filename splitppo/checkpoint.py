"""Checkpoints: each group writes its own with torch's distributed checkpoint; a step counts when both have.

    RUN/checkpoints/step_000010/{actor,critic}/    sharded weights and optimizer state, and COMPLETE once all is there

They reshard on loading, so a run may go on under another placement. Everything else that a run needs to go on
(order of the data, noise, learning rate) is a function of the seed and the step.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from splitppo.errors import UserError
from splitppo.learner import Learner

ROLES = ("actor", "critic")


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def save(learner: Learner, state: dict[str, Any], folder: Path, role: str) -> None:
    """Writes a group's weights, optimizer state and `state` (JSON, the same on all ranks), which count once `commit`
    says so; all its ranks must call it."""
    mesh = learner.runner.mesh
    if mesh.get_local_rank() == 0:  # DCP's coordinator, too: nobody writes before its plan is out
        (folder / role / "COMPLETE").unlink(missing_ok=True)
    weights, optimizer = get_state_dict(learner.model, learner.optimizer)
    dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=folder / role, process_group=mesh.get_group())
    if mesh.get_local_rank() == 0:
        (folder / role / "state.json").write_text(json.dumps(state))


def commit(folder: Path, role: str, *, step: int) -> None:
    """Makes what `save` wrote count; called once, when the step's metrics are written, too."""
    (folder / role / "COMPLETE").write_text(json.dumps({"step": step}))


def load(learner: Learner, folder: Path, role: str) -> dict[str, Any]:
    """Reads what `save` wrote, for any number of ranks; returns its `state`."""
    mesh = learner.runner.mesh
    weights, optimizer = get_state_dict(learner.model, learner.optimizer)
    state = {"model": weights, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder / role, process_group=mesh.get_group())
    set_state_dict(
        learner.model, learner.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return json.loads((folder / role / "state.json").read_text())


def complete(run_dir: Path) -> list[Path]:
    """The checkpoints that both groups have written, oldest first."""
    folders = sorted((run_dir / "checkpoints").glob("step_*"))
    return [folder for folder in folders if all((folder / role / "COMPLETE").is_file() for role in ROLES)]


def find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to go on from.

    Raises:
        UserError: `resume` names a folder that is no complete checkpoint, or `never` would overwrite a run.
    """
    found = complete(run_dir)
    if resume == "auto":
        return found[-1] if found else None
    if resume == "never":
        if found:
            raise UserError(f"--resume never, but {run_dir} holds {found[-1].name}; choose another --run-dir")
        return None
    folder = Path(resume)
    missing = [role for role in ROLES if not (folder / role / "COMPLETE").is_file()]
    if missing:
        missed = f"no complete checkpoint there ({missing[0]}/COMPLETE is missing)"
        raise UserError(f"--resume {resume}: {missed}; name a RUN/checkpoints/step_* folder")
    if found and read_step(found[-1]) > read_step(folder):
        raise UserError(f"--resume {resume}: {run_dir} holds {found[-1].name}, a later one; choose another --run-dir")
    return folder


def read_step(folder: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(json.loads((folder / "actor" / "COMPLETE").read_text())["step"])


def prune(run_dir: Path, keep: int) -> None:
    """Removes all but the newest `keep` complete checkpoints; 0 keeps all."""
    for folder in complete(run_dir)[:-keep] if keep else []:
        shutil.rmtree(folder)
