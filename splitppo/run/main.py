"""From the command line to the loops, and from whatever ends them to an exit status."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch
import transformers

from splitppo.config import Config
from splitppo.config.cli import given_settings, parse
from splitppo.config.rules import check
from splitppo.config.toml import to_toml
from splitppo.data import PromptSet
from splitppo.engine.build import launch_engine
from splitppo.errors import UserError, say, to_user_error
from splitppo.job.failure import report_failure
from splitppo.job.launch import Launch
from splitppo.job.nodes import facts_of
from splitppo.job.runtime import Runtime, format_map
from splitppo.job.signals import RESUMABLE, StopSignals, keep_early_signals, mark_saved
from splitppo.placement import place, set_sizes
from splitppo.run import memory
from splitppo.run.build import all_inputs, build_sampler, check_open_rows, load_data
from splitppo.run.checkpoint import find
from splitppo.run.checks import check_inputs, preflight, warnings, without_validation
from splitppo.run.folder import check_run_folder, finished, move_aside
from splitppo.run.life import Run
from splitppo.run.resolve import Resolved, pick_device, resolve
from splitppo.run.screen import counted
from splitppo.run.sources import with_copies

SHOWN = 64  # ranks of the placement that a dry run shows
PATIENCE = 2.0  # seconds at the end for a checkpoint whose files are written


@dataclass
class Rank:
    """How far this rank has come, for the report of its failure."""

    launch: Launch
    runtime: Runtime | None = None
    run: Run | None = None


def run_rank(play: Callable[[Run], None], flags: Callable[[], Sequence[str]]) -> int:
    """Prepares the run of the command line that `flags` returns, has `play` train it, and returns
    the exit status: 0; 1 after a failure; 2 for wrong input; 75 after a stop that the run can
    resume from; 130 after Ctrl-C."""
    rank = Rank(Launch())
    try:
        return _run(rank, play, flags)
    except KeyboardInterrupt:
        saved = rank.run and rank.run.last_checkpoint(PATIENCE)
        state = f"the last good checkpoint is {saved}" if saved else "nothing is saved"
        say(f"interrupted: {state if rank.run else 'before the run began'}", error=True)
        return 128 + signal.SIGINT
    except Exception as error:
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # from here on an engine that ends is a consequence
        if not rank.run and isinstance(error, BrokenPipeError):
            raise  # nobody reads the help, or the dry run, to its end
        return _failed(rank, error)


def _run(rank: Rank, play: Callable[[Run], None], flags: Callable[[], Sequence[str]]) -> int:
    if "RANK" in os.environ:
        keep_early_signals()
    transformers.logging.disable_progress_bar()
    launch = rank.launch = Launch.from_env()
    if launch.world > 1:
        # Ctrl-C ends the rank at once: a wait in C++ would not notice it, and torchrun gives the
        # rank 30 s
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    argv = flags()
    config, unheld = without_validation(with_copies(parse(argv)))
    check(config)
    if unheld and launch.rank == 0:
        say(unheld)
    if config.dry_run:
        if launch.rank == 0:
            print(dry_run(config, launch))
        return 0
    launch.check_nodes()
    device = pick_device(config, launch)
    placement = place(
        config.placement,
        world=launch.world,
        local_world=launch.local_world,
        gpu=device.type == "cuda",
    )
    check_inputs(config)
    resolved = resolve(config, placement, launch.local_world, device, probe=launch.rank == 0)
    preflight(resolved)
    config = resolved.config
    if found := finished(config):
        if launch.rank == 0:
            print(
                f"already finished, nothing to do: {found}; raise --steps to train on", flush=True
            )
        return 0
    engine = launch_engine(resolved.engine, config, placement, launch, device)
    memory.use_expandable_segments(resolved, launch.rank)
    runtime = rank.runtime = Runtime(
        launch,
        placement,
        device,
        config.timeout,
        shard_size=config.fsdp.shard_size,
        set_sizes=set_sizes(config),
        facts=facts_of(config),
    )
    signals = StopSignals(runtime)
    if runtime.status.stopped_before_restart():
        print("stopped: a stop was requested before this restart", flush=True)
        return RESUMABLE
    run = rank.run = Run(
        *agree(replace(resolved, given=given_settings(argv)), runtime), runtime, engine
    )
    play(run)
    run.end()
    signals.close()
    if run.stopped and launch.rank == 0:
        mark_saved()
    runtime.close()
    return RESUMABLE if run.stopped else 0


def dry_run(config: Config, launch: Launch) -> str:
    """Settings, placement, models, data, and estimated memory a rank; needs no process group."""
    world = launch.world if config.world_size is None else config.world_size
    if world < 1 or world % config.nodes:
        raise UserError(
            f"world_size={world} does not cut into {config.nodes} nodes; "
            f"set --world-size to a multiple of {config.nodes}"
        )
    local_world = world // config.nodes
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.compute.device == "auto" else config.compute.device)
    placement = place(
        config.placement, world=world, local_world=local_world, gpu=device.type == "cuda"
    )
    check_inputs(config)
    resolved = resolve(config, placement, local_world, device, probe=True)
    preflight(resolved)
    resolved, (training, validation) = load_data(
        resolved
    )  # before what takes long: most mistakes are in here
    resolved, offloaded = memory.offloaded(resolved, memory.gpu_memory(resolved))
    if config.run_dir:
        check_run_folder(resolved.config, all_inputs(resolved, training, validation))
        check_open_rows(
            build_sampler(resolved, training), find(Path(config.run_dir), config.resume)
        )
    hosts = [f"node {rank // local_world}" for rank in range(min(world, SHOWN))]
    parts = [
        to_toml(resolved.config),
        format_map(placement, hosts, [device.type] * len(hosts)),
        *[f"  and {world - SHOWN:,} more ranks"] * (world > SHOWN),
        f"resolved: {resolved.to_json()}",
        *filter(None, [move_aside(config, dry=True), offloaded]),
        *(f"warning: {warning}" for warning in warnings(resolved)),
        f"data: {counted(training, validation)}",
        *training.notes,
        *validation.notes,
        *memory.table(resolved, memory.gpu_memory(resolved) or memory.GPU),
    ]
    return "\n".join(parts)


def agree(resolved: Resolved, runtime: Runtime) -> tuple[Resolved, tuple[PromptSet, PromptSet]]:
    """The same, with rank 0's answers: it alone has tried which models run on packed rows; with its
    clock when the job first came here; and with what must be offloaded to fit the smallest GPU. And
    the data, read by that clock."""
    own = {name: model.packed for name, model in resolved.models.items()}
    packed = json.loads(runtime.broadcast("packed", lambda: json.dumps(own)))
    models = {name: replace(model, packed=packed[name]) for name, model in resolved.models.items()}
    # the job's store outlives restarts: they render the same prompts
    now = runtime.broadcast(
        "now", lambda: runtime.job.compare_set("splitppo/now", "", str(resolved.now)).decode()
    )
    runtime.status.set_phase("reading the data")
    resolved, prompts = load_data(replace(resolved, models=models, now=datetime.fromisoformat(now)))
    sizes = runtime.all_gather("memory", str(memory.gpu_memory(resolved) or 0))
    resolved, line = memory.offloaded(resolved, min(map(float, sizes)))
    if line and runtime.launch.rank == 0:
        say(line)
    return resolved, prompts


def _failed(rank: Rank, error: Exception) -> int:
    saved = rank.run and rank.run.last_checkpoint(PATIENCE)
    if (users := to_user_error(error)) and users is not error:
        if rank.run:
            users.add_note(f"on {rank.run.runtime.status.describe(rank.launch.rank)}")
        error = users
    if isinstance(error, torch.OutOfMemoryError) and rank.run:
        for line in memory.out_of_memory(rank.run.build.resolved, rank.run.runtime.status.phase):
            error.add_note(line)
    if saved:
        error.add_note(f"the last good checkpoint is {saved}")
    return report_failure(error, rank.runtime, rank.launch)
