"""The dry run: what a configuration would do, told without a process group."""

import tempfile
from pathlib import Path

import torch

from splitppo.config import Config
from splitppo.config.toml import to_toml
from splitppo.engine.build import engine_kind
from splitppo.errors import UserError
from splitppo.job.device import dtype_of
from splitppo.job.nodes import Launch
from splitppo.job.runtime import format_map
from splitppo.models import build as models
from splitppo.models.tiny import build_tiny
from splitppo.placement import Placement, Role, copies, place
from splitppo.run.build import load_data, owners
from splitppo.run.checks import MODEL_KINDS, model_folders, preflight, warnings

# float32 master weight, gradient and AdamW's two moments
LEARNER_BYTES = 16
SHOWN = 64  # lines of each kind


def preview(config: Config, launch: Launch) -> str:
    """Resolved config, placement, rows and bytes per message, parameters and estimated memory a rank."""
    world = launch.world if config.world_size is None else config.world_size
    if world < 1 or world % config.nodes:
        remedy = f"set --world-size to a multiple of {config.nodes}"
        raise UserError(f"world_size={world} does not cut into {config.nodes} nodes; {remedy}")
    local_world = world // config.nodes
    placement = place(config.placement, world=world, local_world=local_world)
    hosts = [f"node {rank // local_world}" for rank in range(world)]
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = found if config.compute.device == "auto" else config.compute.device
    preflight(config, placement, device, local_world)
    parts = [to_toml(config), format_map(placement, hosts[:SHOWN], [device] * min(world, SHOWN))]
    parts += [*_more(world, "ranks"), f"engine: {engine_kind(config, device)}"]
    parts += [f"warning: {told}" for told in warnings(config, device, placement)]
    parts += ["" if placement.colocated else _messages(config, placement)]
    parts += [_memory(config, placement, device, local_world)]
    return "\n".join(parts)


def _messages(config: Config, placement: Placement) -> str:
    """The messages of step 1, at the longest rows that there can be."""
    rollout = config.rollout
    ownership = owners(config, placement, step=1)
    lines = ["messages of a step (bytes at most):"]
    row, response = rollout.max_prompt_tokens + rollout.max_new_tokens, rollout.max_new_tokens
    fields = 1 + ("reference" in model_folders(config) and config.placement.reference == "actor")
    pairs = ownership.pairs()
    for i, j in pairs[:SHOWN]:
        chunks = [rows for rows in ownership.message_rows(i, j, rollout.messages) if rows]
        n = sum(chunks)
        lines.append(
            f"  rank {placement.actor[i]} -> {placement.critic[j]}: rollouts {len(chunks)} messages of "
            f"{min(chunks)}-{max(chunks)} rows, {n * row * 4:,} B;  logprobs {n} rows, "
            f"{n * response * 4 * fields:,} B;  back: advantages {n} rows, {n * response * 4:,} B"
        )
    return "\n".join(lines + _more(len(pairs), "pairs of ranks"))


def _more(count: int, what: str) -> list[str]:
    """What is not shown of a long list."""
    return [f"  and {count - SHOWN:,} more {what}"] if count > SHOWN else []


def _memory(config: Config, placement: Placement, device: str, local_world: int) -> str:
    with tempfile.TemporaryDirectory() as tiny:
        folders, policy = model_folders(config), config.policy.path
        if "tiny" in folders.values():
            build_tiny(Path(tiny), seed=config.seed)
        training, validation = load_data(config, models.read_tokenizer(tiny if policy == "tiny" else policy))
        counts = {
            name: models.count_parameters(models.read_config(tiny if path == "tiny" else path), kind)
            for name, path in folders.items()
            for kind in (MODEL_KINDS[name],)
        }
    width = dtype_of(config, torch.device(device)).itemsize
    roles: tuple[Role, Role] = ("actor", "critic")
    sets = (copies(role, placement, config.fsdp.shard_size, local_world=local_world)[0] for role in roles)
    actors, critics = map(len, sets)
    actor = counts["policy"] * LEARNER_BYTES / actors + counts["policy"] * width / config.engine.tensor_parallel
    critic = (counts["value"] * LEARNER_BYTES + counts.get("reward", 0) * width) / critics
    reference = counts.get("reference", 0) * width
    actor += reference / actors if config.placement.reference == "actor" else 0
    critic += reference / critics if config.placement.reference == "critic" else 0
    if config.compute.gather == "mini_batch":  # whole weights, and gradients in float32
        actor += counts["policy"] * (width + 4)
        critic += counts["value"] * (width + 4)
    lengths, held_out = sorted(len(prompt.tokens) for prompt in training.prompts), len(validation.prompts)
    lines = [f"data: {len(lengths):,} prompts of {lengths[0]} to {lengths[-1]} tokens, {held_out:,} held out"]
    lines += training.told + validation.told
    lines += [f"parameters: {', '.join(f'{name} {count:,}' for name, count in counts.items())}"]
    lines.append("memory a rank, without activations and KV cache (weights, gradients, optimizer, engine's copy):")
    if placement.colocated:
        return "\n".join([*lines, f"  actor + critic {(actor + critic) / 2**30:.2f} GiB"])
    return "\n".join([*lines, f"  actor {actor / 2**30:.2f} GiB", f"  critic {critic / 2**30:.2f} GiB"])
