"""The dry run: what a configuration would do, found without a process group."""

import torch

from splitppo.config import Config
from splitppo.config.toml import to_toml
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.job.runtime import format_map
from splitppo.placement import place
from splitppo.run import memory
from splitppo.run.build import load_data
from splitppo.run.checks import check_inputs, preflight, warnings
from splitppo.run.resolve import Resolved, resolve

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
    preflight(resolved)
    resolved, offloaded = memory.offloaded(resolved, memory.gpu_memory(resolved))
    config = resolved.config
    data = _data(resolved)  # before anything that takes long: most mistakes are in here
    hosts = [f"node {rank // local_world}" for rank in range(min(world, SHOWN))]
    parts = [to_toml(config), format_map(placement, hosts, [device.type] * len(hosts))]
    parts += [f"  and {world - SHOWN:,} more ranks"] * (world > SHOWN) + [f"resolved: {resolved.to_json()}"]
    parts += [offloaded] * bool(offloaded) + [f"warning: {warning}" for warning in warnings(resolved)]
    counts = [f"{name} {f'{m.number} x ' * (m.number > 1)}{m.parameters:,}" for name, m in resolved.models.items()]
    return "\n".join([*parts, *data, f"parameters: {', '.join(counts)}", *memory.table(resolved)])


def _data(resolved: Resolved) -> list[str]:
    training, validation = load_data(resolved)
    lengths, held_out = sorted(len(prompt.tokens) for prompt in training.prompts), len(validation.prompts)
    first = f"data: {len(lengths):,} prompts of {lengths[0]} to {lengths[-1]} tokens, {held_out:,} held out"
    return [first, *training.notes, *validation.notes]
