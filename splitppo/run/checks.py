"""What files, folders, functions and the engine get wrong, found before a process group or GPU is
touched."""

import os
from pathlib import Path

from splitppo import data
from splitppo.config import Config
from splitppo.engine import build
from splitppo.engine.vllm.plan import kv_bytes_per_token
from splitppo.envs.player import turns_of
from splitppo.envs.pool import load
from splitppo.errors import UserError
from splitppo.models.sequence import check_heads
from splitppo.models.tensor import check_plan
from splitppo.models.tokenizer import TEMPLATE
from splitppo.placement import check_sets, data_parallel
from splitppo.rewards.functions import check_rewards
from splitppo.run import memory
from splitppo.run.folder import check_run_folder
from splitppo.run.resolve import Resolved
from splitppo.run.trackers import check_trackers


def check_inputs(config: Config) -> None:
    """What is wrong with rewards, trackers and local files: found before a model is fetched."""
    check_rewards(config.reward.function)
    check_rewards(config.reward.validation, "reward.validation")
    load(config.environment)
    if not _on_hub(config):
        data.check_files(config.data)
    data.read_lengths(config.rollout)
    check_trackers(config)


def _on_hub(config: Config) -> bool:
    return any(
        file.startswith("hf://") for file in (*config.data.files, *config.data.validation_files)
    )


def preflight(resolved: Resolved) -> None:
    """The other checks that need no process group; the first that fails is a UserError."""
    config = resolved.config
    placement = resolved.placement
    _check_groups(resolved)
    check_sets(config, placement, local_world=resolved.local_world)
    for name, model in resolved.models.items():
        setting = f"{'reward.model' if name == 'reward' else f'{name}.path'}={model.name}"
        shape = config.set_shape(name)
        if shape.tensor > 1:
            check_plan(model.config, model.kind, shape.tensor, setting)
        if shape.sequence > 1:
            check_heads(model.config, shape.sequence, shape.tensor, setting)
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
            "--run-dir: each restart would begin in a folder of its own"
        )


def check_adapters(resolved: Resolved, checkpoint: Path | None) -> None:
    """Refuses a checkpoint whose adapters are of other models."""
    for name, model in resolved.models.items():
        if checkpoint:
            model.trainable.check(model.config, checkpoint / resolved.role_of(name))


def _check_groups(resolved: Resolved) -> None:
    """Refuses settings of two groups where there is one, and a critic group without a model."""
    if resolved.config.placement.reference == "critic" and resolved.placement.colocated:
        raise UserError(
            "placement.reference is for two groups, and every rank plays both roles; leave it unset"
        )
    if resolved.config.value.share_base and not resolved.placement.colocated:
        raise UserError(
            "value.share_base=True: policy and value model are on different ranks "
            f"(placement.mode={resolved.placement.mode}); use placement.mode=colocated"
        )
    if not (resolved.placement.colocated or "critic" in map(resolved.role_of, resolved.models)):
        raise UserError(
            f"ppo.baseline={resolved.config.ppo.baseline} has no value model, so placement's "
            "critic ranks would hold no model; use placement.mode=colocated, or give them a "
            "reward.model, or the reference of ppo.kl_coef (placement.reference=critic)"
        )


def warnings(resolved: Resolved) -> list[str]:
    """What is allowed, and deserves a warning."""
    gpu = memory.gpu_memory(resolved)
    config = resolved.config
    ppo = config.ppo
    rows = config.rollout.batch_size
    cuts = {"actor": ppo.mini_batches, "critic": ppo.value_mini_batches or ppo.mini_batches}
    unused = (
        () if "reference" in resolved.models else ("path", "tensor_parallel", "sequence_parallel")
    )
    why = (
        "the reference is the policy with its adapters off"
        if config.base_is_reference
        else "ppo.kl_coef and ppo.kl_loss_coef are 0"
    )
    return [
        *build.warnings(config, resolved.device.type),
        *[
            f"log.validate_every={config.log.validate_every} is not used: nothing is held out; "
            "set data.validation_files"
        ]
        * (config.log.validate_every > config.validate_every),
        *filter(
            None, [memory.check_memory(resolved, gpu), _queue_warning(resolved, gpu)] if gpu else []
        ),
        *(
            f"rollout.batch_size={rows} is {rows // cuts[role]} rows for a mini-batch of {ranks} "
            f"{role} ranks: {ranks - rows // cuts[role]} of them have no work; "
            f"from {ranks * cuts[role]} rows on all have"
            for role, ranks in data_parallel(config, resolved.placement).items()
            if ranks * cuts[role] > rows
        ),
        *[
            f"rollout.window={config.rollout.window} with ppo.clip_mode=mask: "
            "long rows lose the loss of most tokens; ppo.clip_mode=clip is safer"
        ]
        * (config.rollout.window > 0 and ppo.clip_mode == "mask"),
        *(
            f"policy.path={config.policy.path}: the chat template ends a turn in "
            f"{resolved.tokenizer.convert_ids_to_tokens(token)} (id {token}), which no "
            "eos_token_id names; it ends responses, too"
            for token, source in resolved.eos.items()
            if source == TEMPLATE
        ),
        *(
            f"reference.{setting}={value} is not used: {why}"
            for setting in unused
            if (value := getattr(config.reference, setting))
        ),
        *(
            f"{name}.optim.warmup_steps={optim.warmup_steps}: "
            f"the learning rate does not reach its peak in {config.steps} steps"
            for name, optim in {"policy": config.policy.optim, "value": config.value.optim}.items()
            if optim.warmup_steps > config.steps
        ),
    ]


def _queue_warning(resolved: Resolved, gpu: float) -> str | None:
    """A warning if rows go on, and at full length would not all be in a vLLM engine at once: a row
    that queues leaves its slot empty. `gpu`: bytes of a GPU."""
    config = resolved.config
    if not config.rollout.window or build.engine_kind(config, "cuda") != "vllm":
        return None
    model = resolved.models["policy"].config
    size = config.engine.tensor_parallel
    tokens = config.rollout.max_row_tokens
    slots = build.most_rows(config, len(resolved.placement.groups["actor"])) * size
    held = build.kv_cache(config, model, resolved.dtype, rows=slots, tokens=tokens, total=int(gpu))
    held //= kv_bytes_per_token(model, resolved.dtype, size)
    if held >= slots * tokens:
        return None
    return (
        f"rollout.window={config.rollout.window}: {slots} slots of an engine hold up to "
        f"{slots * tokens:,} tokens, its KV cache {held:,}; beyond that rows queue and slots are "
        "empty; use a smaller rollout.batch_size, or more actor ranks or engine.tensor_parallel"
    )
