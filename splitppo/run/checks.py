"""What files, folders, functions and the engine get wrong, found before a process group or GPU is
touched."""

import os
from pathlib import Path

from splitppo import data
from splitppo.config import OF_VALUES, Config
from splitppo.engine import build
from splitppo.envs.player import turns_of
from splitppo.envs.pool import load
from splitppo.errors import UserError
from splitppo.models.build import build as build_model
from splitppo.models.experts import check_balance
from splitppo.models.tensor import check_plan
from splitppo.models.tokenizer import TEMPLATE
from splitppo.placement import data_parallel
from splitppo.rewards.functions import check_rewards
from splitppo.run import memory
from splitppo.run.folder import check_run_folder
from splitppo.run.models import TRAINED, setting_of
from splitppo.run.parts import find_parts
from splitppo.run.resolve import Resolved, check_groups
from splitppo.run.trackers import find_tracker


def check_inputs(config: Config) -> None:
    """What is wrong with rewards, trackers and local files: found before a model is fetched."""
    some_async = check_rewards(config.reward.function)
    some_async |= check_rewards(config.reward.validation, "reward.validation")
    if config.reward.concurrency and not some_async:
        raise UserError(
            f"reward.concurrency={config.reward.concurrency} limits async functions, and there are "
            "none; write async def, or unset it"
        )
    find_parts(config)
    load(config.environment)
    if not _on_hub(config):
        data.check_files(config.data, config.seed)
    data.read_lengths(config.rollout)
    for name in config.log.trackers:
        find_tracker(name)


def _on_hub(config: Config) -> bool:
    return any(
        file.startswith("hf://") for file in (*config.data.files, *config.data.validation_files)
    )


def preflight(resolved: Resolved) -> None:
    """The other checks that need no process group; the first that fails is a UserError."""
    config = resolved.config
    placement = resolved.placement
    check_groups(resolved)
    for name, model in resolved.models.items():
        if (size := config.set_shape(name).tensor) > 1:
            check_plan(model.config, model.kind, size, f"{setting_of(name)}={model.name}")
    if config.policy.replay_routing == "on" and (why := resolved.unreplayed):
        raise UserError(f"policy.replay_routing=on: {why}; use auto")
    if coef := config.policy.router_aux_coef:
        policy = build_model(resolved.models["policy"].config, "policy")
        setting = f"policy.router_aux_coef={coef:g}: policy.path={config.policy.path}"
        check_balance(policy, setting)
    if _on_hub(config):
        data.check_files(resolved.data)
    if not (config.rollout.stop or config.rollout.lengths or {*resolved.eos.values()} - {TEMPLATE}):
        raise UserError(
            f"policy.path={config.policy.path}: config.json, generation_config.json and the "
            "tokenizer name no eos_token_id, so no response would end; name one there, or set "
            "--rollout.stop"
        )
    build.check_engine(
        config,
        placement,
        resolved.device.type,
        resolved.local_world,
        resolved.models["policy"].config,
    )
    turns_of(config, resolved.tokenizer)
    if gpu := memory.gpu_memory(resolved):
        memory.check_memory(memory.offloaded(resolved, gpu)[0], gpu)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        begun = config.run_dir and os.path.isfile(os.path.join(config.run_dir, "inputs.json"))
        check_run_folder(config, resolved.inputs() if begun else None)
    elif config.run_dir is None and config.checkpoint.every:
        raise UserError(
            f"checkpoint.every={config.checkpoint.every} under torchrun --max-restarts needs "
            "--run-dir: each restart would begin in a new folder"
        )


def check_adapters(resolved: Resolved, checkpoint: Path | None) -> None:
    """Refuses a checkpoint whose adapters are of other models."""
    for name, model in resolved.models.items():
        if checkpoint and name in TRAINED:
            model.trainable.check(model.config, checkpoint / resolved.role_of(name))


def warnings(resolved: Resolved) -> list[str]:
    """What is allowed, and deserves a warning."""
    gpu = memory.gpu_memory(resolved)
    config = resolved.config
    ppo = config.ppo
    rows = config.rollout.batch_size
    cuts = {"actor": ppo.mini_batches, "critic": ppo.value_mini_batches or ppo.mini_batches}
    unused = "reference" not in resolved.models
    counts = resolved.models["policy"].counts
    return [
        *build.warnings(config, resolved.device.type),
        *[
            f"log.validate_every={config.log.validate_every} is not used: nothing is held out; "
            "set data.validation_files"
        ]
        * (config.log.validate_every > config.validate_every),
        *filter(None, [memory.check_memory(resolved, gpu) if gpu else None]),
        *(
            f"rollout.batch_size={rows} gives {ranks} {role} ranks {rows // cuts[role]} rows in a "
            f"mini-batch, so {ranks - rows // cuts[role]} of them have no work; "
            f"use at least {ranks * cuts[role]} rows"
            for role, ranks in data_parallel(config, resolved.placement).items()
            if ranks * cuts[role] > rows
        ),
        *[
            f"rollout.window={config.rollout.window} with ppo.clip_mode=mask: "
            "the mask drops stale tokens, most of a long row; ppo.clip_mode=clip is safer"
        ]
        * (config.rollout.window > 0 and ppo.clip_mode == "mask"),
        *[f"policy.replay_routing=auto is off: {resolved.unreplayed}"]
        * (
            config.policy.replay_routing == "auto"
            and counts.active < counts.parameters
            and bool(resolved.unreplayed)
        ),
        *(
            f"policy.path={config.policy.path}: the chat template's end-of-turn token "
            f"{resolved.tokenizer.convert_ids_to_tokens(token)} (id {token}) is not an "
            "eos_token_id; it becomes a stop token"
            for token, source in resolved.eos.items()
            if source == TEMPLATE
        ),
        *(
            f"reference.{setting}={value} is not used: no reference is loaded (ppo.kl_coef and "
            "ppo.kl_loss_coef are 0, or the policy's base is the reference)"
            for setting in ("path", "tensor_parallel", "sequence_parallel")
            if unused and (value := getattr(config.reference, setting))
        ),
        *(
            f"{name} is not used: with a teacher and no rewards there is no value model"
            for name in resolved.user_settings
            if name.startswith(OF_VALUES) and ppo.baseline == "value" and not config.has_value
        ),
        *[
            "the teacher is the policy before training and reads the same prompt, so it teaches "
            "nothing; set teacher.path or teacher.prompt_key"
        ]
        * (
            config.has_teacher
            and config.teacher.path in (None, config.policy.path)
            and config.teacher.prompt_key in (None, config.data.prompt_key)
            and not config.policy.lora.path
        ),
        *(
            f"{name}.optim.warmup_steps={optim.warmup_steps}: "
            f"the learning rate does not reach its peak in {config.steps} steps"
            for name in TRAINED
            if (optim := getattr(config, name).optim).warmup_steps > config.steps
        ),
    ]
