"""What can be told wrong about files, folders, functions and the engine before a process group or GPU is touched."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from splitppo.config import Config
from splitppo.data import prompts as data
from splitppo.data.files import read_lengths
from splitppo.engine.build import check_engine
from splitppo.engine.build import warnings as engine_warnings
from splitppo.errors import UserError
from splitppo.job.device import dtype_of
from splitppo.models import build as models
from splitppo.models import weights
from splitppo.models.probe import why_not
from splitppo.models.tiny import POSITIONS, VOCABULARY
from splitppo.placement import Placement, copies
from splitppo.rewards.functions import check_rewards
from splitppo.run import checkpoint
from splitppo.run.folder import check_same_run, has_steps
from splitppo.run.profiler import check_profiler
from splitppo.run.trackers import check_trackers

FOLDERS = ("checkpoints", "logs", "metrics", "profile", "samples", "tensorboard", "tiny", "validation")
MODEL_KINDS: dict[str, models.Kind] = {"policy": "policy", "reference": "policy", "value": "value", "reward": "reward"}


def preflight(config: Config, placement: Placement, device: str, local_world: int, *, rank: int = 0) -> None:
    """All of these checks; the first that fails is a UserError. What takes seconds is left to rank 0."""
    if placement.colocated:
        on = {"reference": config.placement.reference == "critic", "barrier": config.placement.barrier}
        for name in (name for name, value in on.items() if value):
            raise UserError(f"placement.{name} is for two groups, and every rank plays both roles; leave it unset")
    for role in ("actor", "critic"):
        copies(role, placement, config.fsdp.shard_size, local_world=local_world)
    check_rewards(config.reward.function)
    check_rewards(config.reward.validation, "reward.validation")
    if config.data.files or config.data.validation_files:
        data.check_files(config.data)
    if not config.data.files:
        data.check_task(config.data.task)
    elif config.log.validate_every and not config.data.validation_files:
        raise UserError(
            f"log.validate_every={config.log.validate_every} needs held-out data.validation_files; "
            "give them, or set it to 0"
        )
    read_lengths(config.rollout)
    check_trackers(config)
    check_profiler(config, placement)
    _check_models(config)
    for name in model_folders(config) if rank == 0 else ():
        packs(config, name, device)
    check_engine(config, placement, device, local_world)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        check_run_folder(config, config.resume)
    elif config.run_dir is None and config.checkpoint.every:
        raise UserError(
            f"checkpoint.every={config.checkpoint.every} under torchrun --max-restarts needs --run-dir: each "
            "attempt would begin in a folder of its own"
        )


def warnings(config: Config, device: str, placement: Placement) -> list[str]:
    """What is allowed, and worth a word."""
    told = engine_warnings(config, device)
    rows, ppo = config.rollout.batch_size, config.ppo
    groups = [("actor", len(placement.actor), ppo.mini_batches)]
    groups += [("critic", len(placement.critic), ppo.value_mini_batches or ppo.mini_batches)]
    for role, ranks, cuts in groups[: 1 if placement.colocated and not ppo.value_mini_batches else 2]:
        if ranks * cuts > rows:
            few = f"rollout.batch_size={rows} is {rows // cuts} rows for a mini-batch of {ranks} {role} ranks"
            told.append(f"{few}: {ranks - rows // cuts} of them without work; from {ranks * cuts} on all have some")
    if config.reference.path and "reference" not in model_folders(config):
        told.append(f"reference.path={config.reference.path} is not used: ppo.kl_coef and ppo.kl_loss_coef are 0")
    for name, optim in (("policy", config.policy.optim), ("value", config.value.optim)):
        if optim.warmup_steps > config.steps:
            peak = f"the learning rate does not reach its peak in {config.steps} steps"
            told.append(f"{name}.optim.warmup_steps={optim.warmup_steps}: {peak}")
    if not config.checkpoint.every and config.policy.path != "tiny":
        told.append("checkpoint.every=0: no weights are kept, not even the last; any other number keeps those, too")
    return told


def check_run_folder(config: Config, resume: str, inputs: Mapping[str, str] | None = None) -> None:
    """A UserError if the run can't go on in its folder, or from where `resume` says. Where torchrun may start anew,
    it is asked when the attempt is known: what the first one left is the next one's. `inputs_of` are compared if given.
    """
    if config.run_dir is not None:
        _check_run_dir(Path(config.run_dir))
        found = checkpoint.find(Path(config.run_dir), resume)
        begun = not found and has_steps(Path(config.run_dir))
        same = config.checkpoint.every and (Path(config.run_dir) / "config.toml").is_file()
        if begun and (resume == "never" or not same):
            raise UserError(f"run_dir={config.run_dir} holds a run without checkpoints; choose another or delete it")
        own = found and checkpoint.is_in(found, Path(config.run_dir))
        if (own or begun) and not config.force:
            check_same_run(config, Path(config.run_dir), inputs)
        if found and (step := checkpoint.step_of(found)) >= config.steps:
            raise UserError(f"steps={config.steps}, but {found} is of step {step}: raise --steps to go on")
    elif resume not in ("auto", "never"):
        raise UserError(f"--resume {resume} needs --run-dir: the folder in which the run goes on")


def _check_models(config: Config) -> None:
    folders = model_folders(config)
    for name, path in folders.items():
        if path != "tiny":
            weights.check_folder(path, MODEL_KINDS[name], random_init=is_drawn(config, name))
    if config.reward.model:
        models.read_tokenizer(config.reward.model)
    rollout, policy = config.rollout, folders["policy"]
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    needed = len(VOCABULARY) if policy == "tiny" else models.known_ids(models.read_tokenizer(policy))
    for name, path in ((name, path) for name, path in folders.items() if name != "reward"):
        text = models.read_config(path).get_text_config() if path != "tiny" else None
        most, setting = models.most_positions(text) if text else (POSITIONS, "max_position_embeddings")
        if longest > (most or longest):
            raise UserError(
                f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and rollout.max_new_tokens="
                f"{rollout.max_new_tokens} are {longest} together, more than the {most} ({setting}) that "
                f"{name}.path={path} can read; lower one of them, or use another model"
            )
        size = text.vocab_size if text else len(VOCABULARY)
        if size < needed:
            raise UserError(
                f"{name}.path={path}: its vocabulary of {size} is smaller than the policy's tokenizer ({needed}); "
                f"the {name} must read the policy's token ids"
            )


def packs(config: Config, name: str, device: str) -> bool:
    """Whether a model runs with packed rows. To find out takes a second or two: one rank does for all.

    Raises:
        UserError: its rows are wrong packed though `compute.packing` is on, or any way.
    """
    path, kind, setting = model_folders(config)[name], MODEL_KINDS[name], config.compute.packing
    on_gpu = device == "cuda" and dtype_of(config, torch.device(device)) != torch.float32
    wanted = name != "reward" and (setting == "on" or (setting == "auto" and on_gpu))
    if name == "reward" or path == "tiny":
        return wanted
    model = models.read_config(path)
    why = why_not(model, kind, packed=wanted)
    if why and wanted and setting == "on":
        raise UserError(f"compute.packing=on: {name}.path={path}: rows can't be packed: {why}; use auto or off")
    if why and (not wanted or why_not(model, kind, packed=False)):
        told = f"type {model.model_type!r} does not run here as in transformers: {why}"
        raise UserError(f"{name}.path={path}: {told}; use another model")
    return wanted and not why


def _check_run_dir(folder: Path) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"run_dir={folder}: {existing} is no folder that can be written to; choose another --run-dir")
    for path in (folder / name for name in FOLDERS):
        if path.exists() and not (path.is_dir() and os.access(path, os.R_OK | os.W_OK | os.X_OK)):
            raise UserError(f"run_dir={folder}: {path} is no folder that can be read and written to; move it away")


def model_folders(config: Config) -> dict[str, str]:
    """The folders of the models that the run loads."""
    folders = {"policy": config.policy.path, "value": config.value.path or config.policy.path}
    if config.ppo.kl_coef > 0 or config.ppo.kl_loss_coef > 0:
        folders["reference"] = config.reference.path or config.policy.path
    if config.reward.model:
        folders["reward"] = config.reward.model
    return folders


def is_drawn(config: Config, name: str) -> bool:
    """Whether a model's weights are drawn at random; one without a folder of its own starts as the policy does."""
    if name == "reward":
        return config.reward.model_random_init
    own = {"value": config.value.path, "reference": config.reference.path, "policy": None}[name]
    return (name == "value" and config.value.random_init) or (own is None and config.policy.random_init)
