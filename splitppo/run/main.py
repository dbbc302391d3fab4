"""From the command line to the loops, and from whatever ends them to an exit status."""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import transformers

from splitppo.config.cli import parse
from splitppo.config.rules import check
from splitppo.engine.build import launch_engine
from splitppo.errors import say, to_user_error
from splitppo.job.failure import report_failure
from splitppo.job.launch import Launch
from splitppo.job.nodes import facts_of
from splitppo.job.runtime import Runtime
from splitppo.job.signals import RESUMABLE, StopSignals, keep_early_signals, mark_saved
from splitppo.placement import place, set_sizes
from splitppo.run import memory
from splitppo.run.checks import check_inputs, finished, preflight
from splitppo.run.dry_run import dry_run
from splitppo.run.life import Run, open_run
from splitppo.run.resolve import Resolved, pick_device, resolve


@dataclass
class Rank:
    """How far this rank has come, for the report of its failure."""

    launch: Launch
    runtime: Runtime | None = None
    run: Run | None = None


def run_rank(play: Callable[[Run], None], argv: Sequence[str] | None = None) -> int:
    """Prepares a run, has `play` train it, and returns the exit status: 0; 1 after a failure; 2 for wrong input; 75
    after a stop that the run can resume from; 130 after Ctrl-C."""
    rank = Rank(Launch())
    try:
        return _run(rank, play, sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _interrupted(rank)
    except Exception as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # from here on an engine that ends is a consequence
        if not rank.run and isinstance(error, BrokenPipeError):
            raise  # nobody reads the help, or the dry run, to its end
        return _failed(rank, error)


def _run(rank: Rank, play: Callable[[Run], None], argv: Sequence[str]) -> int:
    if "RANK" in os.environ:
        keep_early_signals()
    transformers.logging.disable_progress_bar()
    launch = rank.launch = Launch.from_env()
    if launch.world > 1:
        # Ctrl-C ends the rank at once: a wait in C++ would not notice it, and torchrun gives the rank 30 s
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    config = parse(argv)
    check(config)
    if config.dry_run:
        print(dry_run(config, launch))
        return 0
    launch.check_nodes()
    device, (world, local_world) = pick_device(config, launch), (launch.world, launch.local_world)
    placement = place(config.placement, world=world, local_world=local_world, gpu=device.type == "cuda")
    check_inputs(config)
    resolved = resolve(config, placement, launch.local_world, device, probe=launch.rank == 0)
    config = resolved.config
    preflight(resolved)
    if found := finished(config):
        if launch.rank == 0:
            print(f"already finished, nothing to do: {found}; raise --steps to train on", flush=True)
        return 0
    engine = launch_engine(resolved.engine, config, placement, launch, device)
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
    run = rank.run = open_run(agree(resolved, runtime), runtime, engine)
    play(run)
    run.end()
    signals.close()
    if run.stopped and launch.rank == 0:
        mark_saved()
    runtime.close()
    return RESUMABLE if run.stopped else 0


def agree(resolved: Resolved, runtime: Runtime) -> Resolved:
    """The same, with rank 0's answers: it alone has tried which models run on packed rows; and with what must be
    offloaded to fit the smallest GPU."""
    own = {name: model.packed for name, model in resolved.models.items()}
    packed = json.loads(runtime.broadcast("packed", lambda: json.dumps(own)))
    models = {name: replace(model, packed=packed[name]) for name, model in resolved.models.items()}
    sizes = runtime.all_gather("memory", str(memory.gpu_memory(resolved) or 0))
    resolved, line = memory.offloaded(replace(resolved, models=models), min(map(float, sizes)))
    if line and runtime.launch.rank == 0:
        say(line)
    return resolved


def _interrupted(rank: Rank) -> int:
    state = "before the run began"
    if rank.run:
        rank.run.commit_written()
        saved = rank.run.last_checkpoint()
        state = f"the last good checkpoint is {saved}" if saved else "nothing is saved"
    print(f"interrupted: {state}", file=sys.stderr)
    return 128 + signal.SIGINT


def _failed(rank: Rank, error: Exception) -> int:
    if rank.run:
        rank.run.commit_written()
    if (users := to_user_error(error)) and users is not error:
        if rank.runtime and rank.run:
            users.add_note(f"on {rank.runtime.status.describe(rank.launch.rank)}")
        error = users
    if isinstance(error, torch.OutOfMemoryError) and rank.run:
        for line in memory.out_of_memory(rank.run.build.resolved, rank.run.runtime.status.phase):
            error.add_note(line)
    if rank.run and (saved := rank.run.last_checkpoint()):
        error.add_note(f"the last good checkpoint is {saved}")
    return report_failure(error, rank.runtime, rank.launch)
