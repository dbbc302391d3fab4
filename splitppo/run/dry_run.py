"""The dry run: what a configuration would do, found without a process group."""

import torch

from splitppo.config import Config
from splitppo.config.toml import to_toml
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.job.runtime import format_map
from splitppo.placement import Role, place, replicas
from splitppo.run.build import load_data
from splitppo.run.checks import check_inputs, preflight, warnings
from splitppo.run.resolve import Resolved, resolve

LEARNER_BYTES = 16  # a trained parameter: float32 master weight, gradient and AdamW's two moments
MASTER_BYTES = 4  # a frozen one
SHOWN = 64  # ranks of the placement


def dry_run(config: Config, launch: Launch) -> str:
    """Settings, placement, data, parameters, and estimated memory a rank."""
    world = launch.world if config.world_size is None else config.world_size
    if world < 1 or world % config.nodes:
        remedy = f"set --world-size to a multiple of {config.nodes}"
        raise UserError(f"world_size={world} does not cut into {config.nodes} nodes; {remedy}")
    local_world = world // config.nodes
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.compute.device == "auto" else config.compute.device)
    placement = place(config.placement, world=world, local_world=local_world, gpu=device.type == "cuda")
    check_inputs(config)
    resolved = resolve(config, placement, local_world, device, probe=True)
    config = resolved.config
    preflight(resolved)
    data = _data(resolved)  # before anything that takes long: most mistakes are in here
    hosts = [f"node {rank // local_world}" for rank in range(min(world, SHOWN))]
    parts = [to_toml(config), format_map(placement, hosts, [device.type] * len(hosts))]
    parts += [f"  and {world - SHOWN:,} more ranks"] * (world > SHOWN) + [f"resolved: {resolved.to_json()}"]
    parts += [f"warning: {warning}" for warning in warnings(resolved)]
    return "\n".join([*parts, *data, *_memory(resolved)])


def _data(resolved: Resolved) -> list[str]:
    training, validation = load_data(resolved)
    lengths, held_out = sorted(len(prompt.tokens) for prompt in training.prompts), len(validation.prompts)
    first = f"data: {len(lengths):,} prompts of {lengths[0]} to {lengths[-1]} tokens, {held_out:,} held out"
    return [first, *training.notes, *validation.notes]


def _memory(resolved: Resolved) -> list[str]:
    """Parameters, and what each group's ranks hold of them."""
    config, models = resolved.config, resolved.models
    counts, width = {name: model.parameters for name, model in models.items()}, resolved.dtype.itemsize
    held: dict[Role, float] = dict.fromkeys(resolved.placement.groups, 0.0)
    for name, model in models.items():
        role, count = resolved.role_of(name), counts[name]
        sets = replicas(role, resolved.placement, config.fsdp.shard_size, local_world=resolved.local_world)
        if name not in ("policy", "value"):
            held[role] += count * width / len(sets[0])
            continue
        trained = model.trained
        held[role] += model.number * (trained * LEARNER_BYTES + (count - trained) * MASTER_BYTES) / len(sets[0])
        if config.compute.gather == "mini_batch":  # whole weights, and gradients in float32
            held[role] += count * width + trained * 4
    held["actor"] += counts["policy"] * width / config.engine.tensor_parallel  # the engine's
    sizes = [f"{name} {f'{model.number} x ' * (model.number > 1)}{counts[name]:,}" for name, model in models.items()]
    lines = [f"parameters: {', '.join(sizes)}"]
    lines.append("memory a rank, without activations and KV cache (weights, gradients, optimizer, engine's weights):")
    if resolved.placement.colocated:
        return [*lines, f"  {' + '.join(held)} {sum(held.values()) / 2**30:.2f} GiB"]
    return [*lines, *(f"  {role} {size / 2**30:.2f} GiB" for role, size in held.items())]
