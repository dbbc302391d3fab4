"""The dry run: what a configuration would do, found without a process group."""

import torch

from splitppo.config import Config
from splitppo.config.toml import to_toml
from splitppo.context import ownership
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.job.runtime import format_map
from splitppo.placement import Role, chunk_sizes, place, replicas
from splitppo.run.build import load_data
from splitppo.run.checks import preflight, warnings
from splitppo.run.resolve import Resolved, resolve

LEARNER_BYTES = 16  # a parameter: float32 master weight, gradient and AdamW's two moments
SHOWN = 64  # lines of each kind


def dry_run(config: Config, launch: Launch) -> str:
    """Settings, placement, messages of a step, data, parameters, and estimated memory a rank."""
    world = launch.world if config.world_size is None else config.world_size
    if world < 1 or world % config.nodes:
        remedy = f"set --world-size to a multiple of {config.nodes}"
        raise UserError(f"world_size={world} does not cut into {config.nodes} nodes; {remedy}")
    local_world = world // config.nodes
    placement = place(config.placement, world=world, local_world=local_world)
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.compute.device == "auto" else config.compute.device)
    resolved = resolve(config, placement, local_world, device, probe=True)
    preflight(resolved)
    data = _data(resolved)  # before anything that takes long: most mistakes are in here
    hosts = [f"node {rank // local_world}" for rank in range(min(world, SHOWN))]
    parts = [to_toml(config), format_map(placement, hosts, [device.type] * len(hosts))]
    parts += [*_more(world, "ranks"), f"resolved: {resolved.to_json()}"]
    parts += [f"warning: {warning}" for warning in warnings(resolved)]
    parts += [] if placement.colocated else _messages(resolved)
    return "\n".join([*parts, *data, *_memory(resolved)])


def _messages(resolved: Resolved) -> list[str]:
    """The messages of step 1, if all rows were as long as they may be."""
    config, groups = resolved.config, resolved.placement.groups
    rollout, owned = config.rollout, ownership(resolved.config, resolved.placement, 1)
    lines = ["messages of a step (bytes at most):"]
    row, response = rollout.max_prompt_tokens + rollout.max_new_tokens, rollout.max_new_tokens
    fields = 1 + ("reference" in resolved.models and config.placement.reference == "actor")
    pairs = owned.pairs("actor", "critic")
    for i, j in pairs[:SHOWN]:
        n = len(owned.between("actor", i, "critic", j))
        chunks = [rows for rows in chunk_sizes(n, rollout.messages) if rows]
        lines.append(
            f"  rank {groups['actor'][i]} -> {groups['critic'][j]}: rollouts {len(chunks)} messages of "
            f"{min(chunks)}-{max(chunks)} rows, {n * row * 4:,} B;  logprobs {n} rows, "
            f"{n * response * 4 * fields:,} B;  back: advantages {n} rows, {n * response * 4:,} B"
        )
    return lines + _more(len(pairs), "pairs of ranks")


def _more(count: int, what: str) -> list[str]:
    """How many lines of a long list are not shown."""
    return [f"  and {count - SHOWN:,} more {what}"] if count > SHOWN else []


def _data(resolved: Resolved) -> list[str]:
    training, validation = load_data(resolved.config, resolved.tokenizer)
    lengths, held_out = sorted(len(prompt.tokens) for prompt in training.prompts), len(validation.prompts)
    first = f"data: {len(lengths):,} prompts of {lengths[0]} to {lengths[-1]} tokens, {held_out:,} held out"
    return [first, *training.notes, *validation.notes]


def _memory(resolved: Resolved) -> list[str]:
    """Parameters, and what each group's ranks hold of them."""
    config, models = resolved.config, resolved.models
    counts, width = {name: model.parameters for name, model in models.items()}, resolved.dtype.itemsize
    held: dict[Role, float] = dict.fromkeys(resolved.placement.groups, 0.0)
    for name, count in counts.items():
        role, trained = resolved.role_of(name), name in ("policy", "value")
        sets = replicas(role, resolved.placement, config.fsdp.shard_size, local_world=resolved.local_world)
        held[role] += count * (LEARNER_BYTES if trained else width) / len(sets[0])
        if trained and config.compute.gather == "mini_batch":  # whole weights, and gradients in float32
            held[role] += count * (width + 4)
    held["actor"] += counts["policy"] * width / config.engine.tensor_parallel  # the engine's
    lines = [f"parameters: {', '.join(f'{name} {count:,}' for name, count in counts.items())}"]
    lines.append("memory a rank, without activations and KV cache (weights, gradients, optimizer, engine's weights):")
    if resolved.placement.colocated:
        return [*lines, f"  {' + '.join(held)} {sum(held.values()) / 2**30:.2f} GiB"]
    return [*lines, *(f"  {role} {size / 2**30:.2f} GiB" for role, size in held.items())]
