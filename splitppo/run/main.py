"""From the command line to the loops, and from whatever ends them to an exit status."""

import functools
import json
import os
import signal
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from splitppo import data
from splitppo.config import Config, rules, toml
from splitppo.config.cli import given_settings, kept_rates, parse
from splitppo.engine.vllm.process import ALLOCATOR
from splitppo.envs.player import check_turns, rehearse, room_for_turns, turns_of
from splitppo.errors import UserError, command, say, to_user_error
from splitppo.job.ends import RESUMABLE, StopSignals, keep_early_signals, mark_saved, report_failure
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime, format_map
from splitppo.models import build
from splitppo.placement import holders, place, set_shapes
from splitppo.rewards.scorer import check_prompts
from splitppo.run import checkpoint, checks, folder, memory, screen, sources
from splitppo.run.build import build_sampler
from splitppo.run.life import STOPPED, Run, check_open_rows
from splitppo.run.models import check_prompt_tokens, check_sizes
from splitppo.run.resolve import Resolved, pick_device, resolve

SHOWN = 64  # ranks of the placement that a dry run shows


@dataclass
class Rank:
    """How far this rank has come, for the report of its failure."""

    launch: Launch
    runtime: Runtime | None = None
    run: Run | None = None

    def saved(self) -> str:
        """What a restart resumes from; "" if nothing is saved."""
        checkpoint = self.run and self.run.last_checkpoint()
        return f"the last good checkpoint is {checkpoint}" if checkpoint else ""


@command
def run_rank(play: Callable[[Run], None], flags: Callable[[], Sequence[str]]) -> int:
    """Prepares the run of the command line that `flags` returns, has `play` train it, and returns
    the exit status: 0; 1 after a failure; 2 for wrong input; 75 after a stop that the run can
    resume from; 130 after Ctrl-C before the first step, or a second one."""
    rank = Rank(Launch())
    try:
        return _run(rank, play, flags)
    except KeyboardInterrupt:
        say("interrupted", rank.saved(), error=True)
        return 128 + signal.SIGINT
    except Exception as error:
        if not rank.run and isinstance(error, BrokenPipeError):
            raise  # nobody reads the help, or the dry run, to its end
        return _failed(rank, error)


def _run(rank: Rank, play: Callable[[Run], None], flags: Callable[[], Sequence[str]]) -> int:
    if "RANK" in os.environ:
        keep_early_signals()
    transformers.logging.disable_progress_bar()
    launch = rank.launch = Launch.from_env()
    if launch.world > 1:
        # until the ranks have joined, Ctrl-C ends the rank at once: a wait in C++ would not notice
        # it, and torchrun gives the rank 30 s
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    argv = flags()
    config = parse(argv)
    rules.check(config)
    for line in kept_rates(config, argv) if launch.rank == 0 else ():
        say(line)
    if config.dry_run:
        if launch.rank == 0:
            print(dry_run(config, launch, given_settings(argv)))
        return 0
    launch.check_nodes()
    device = pick_device(config, launch)
    resolved = _prepare(config, launch.world, launch.local_world, device, launch.rank == 0)
    config = resolved.config
    placement = resolved.placement
    use_expandable_segments(resolved, launch.rank)
    runtime = rank.runtime = Runtime(
        launch,
        placement,
        device,
        config.timeout,
        shard_size=config.fsdp.shard_size,
        set_shapes=set_shapes(config),
        facts=folder.facts_of(config),
    )
    signals = StopSignals(runtime)
    # before torchrun, which takes a stop for a failure, restarted the ranks
    if runtime.job.check([STOPPED]):
        say("stopped: a stop was requested before this restart")
        return RESUMABLE
    resolved = replace(resolved, user_settings=given_settings(argv))
    run = rank.run = Run(*agree(resolved, runtime), runtime)
    play(run)
    run.end()
    signals.close()
    if run.stopped and launch.rank == 0:
        mark_saved()
    runtime.close()
    return RESUMABLE if run.stopped else 0


def _prepare(
    config: Config, world: int, local_world: int, device: torch.device, probe: bool
) -> Resolved:
    """The run, resolved and checked as far as it can be without a process group."""
    groups = [holders(config)[model] for model in sources.model_paths(config)]
    placement = place(
        config.placement,
        world=world,
        local_world=local_world,
        gpu=device.type == "cuda",
        critic_models="critic" in groups,
    )
    checks.check_inputs(config)
    resolved = resolve(config, placement, local_world, device, probe=probe)
    checks.preflight(resolved)
    return resolved


def use_expandable_segments(resolved: Resolved, rank: int) -> None:
    """Lets PyTorch's allocator extend its segments, which leaves fewer fragments; before the rank
    allocates on its GPU. Not with settings of the user's own. Not on a rank that shares memory with
    vLLM by CUDA IPC: PyTorch shares such segments through `pidfd_getfd`, which containers
    forbid."""
    shares = resolved.engine == "vllm" and "actor" in resolved.placement.roles(rank)
    if shares or resolved.device.type != "cuda" or ALLOCATOR & os.environ.keys():
        return
    # for those who ask which settings hold
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    cast(Any, torch._C)._accelerator_setAllocatorSettings("expandable_segments:True")


def dry_run(config: Config, launch: Launch, user_settings: Sequence[str] = ()) -> str:
    """Settings, placement, models, data, and estimated memory a rank; needs no process group."""
    world = launch.world if config.world_size is None else config.world_size
    if world < 1 or world % config.nodes:
        raise UserError(
            f"world_size={world} is not divisible by {config.nodes} nodes; "
            f"set --world-size to a multiple of {config.nodes}"
        )
    local_world = world // config.nodes
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.compute.device == "auto" else config.compute.device)
    resolved = replace(
        _prepare(config, world, local_world, device, probe=True), user_settings=user_settings
    )
    # before what takes long: most mistakes are in here
    resolved, (training, validation) = load_data(resolved)
    gpu = memory.gpu_memory(resolved)
    resolved, offloaded = memory.offloaded(resolved, gpu)
    if config.run_dir:
        folder.check_run_folder(resolved.config, resolved.inputs(training, validation))
        resumed_from = checkpoint.find(Path(config.run_dir), config.resume)
        check_open_rows(build_sampler(resolved, training), resumed_from)
        checks.check_adapters(resolved, resumed_from)
    warnings = [*checks.warnings(resolved), *rehearse(resolved.config, training.prompts[0])]
    hosts = [f"node {rank // local_world}" for rank in range(min(world, SHOWN))]
    return "\n".join(
        [
            toml.to_toml(resolved.config),
            format_map(resolved.placement, hosts, [device.type] * len(hosts)),
            *[f"  and {world - SHOWN:,} more ranks"] * (world > SHOWN),
            f"resolved: {resolved.to_json()}",
            *filter(None, [offloaded]),
            *(f"warning: {warning}" for warning in warnings),
            *resolved.notes,
            f"data: {screen.counted(training, validation)}",
            *training.notes,
            *validation.notes,
            *memory.table(resolved, gpu or memory.GPU),
        ]
    )


def load_data(resolved: Resolved) -> tuple[Resolved, tuple[data.PromptSet, data.PromptSet]]:
    """The run, in which the longest prompt of the data stands for an unset
    `rollout.max_prompt_tokens`, and what the models can read for an unset `rollout.max_context`;
    training prompts and held-out prompts, checked against what scores them, and against the chat
    template if rows have turns."""
    config = resolved.config
    reward = config.reward
    turns = turns_of(config, resolved.tokenizer)
    scored: dict[data.Split, str] = {
        "train": "function",
        "validation": "validation" if reward.validation else "function",
    }
    teacher = resolved.models.get("teacher", resolved.models["policy"])
    positions, _ = build.most_positions(teacher.config.get_text_config())
    training, validation = (
        data.load_prompts(
            resolved.data,
            resolved.tokenizer,
            seed=config.seed,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            now=resolved.now,
            split=split,
            check=functools.partial(check_prompts, getattr(reward, name), setting=f"reward.{name}"),
            render=turns and turns.render,
            teacher_key=config.teacher.prompt_key if split == "train" else None,
            teacher_most=(positions or 2**31) - config.rollout.max_new_tokens,
        )
        for split, name in scored.items()
    )
    check_prompt_tokens(resolved.models, resolved.tokenizer, training, validation)
    longest = max(len(prompt.tokens) for prompt in training.prompts + validation.prompts)
    if config.rollout.max_prompt_tokens is None:
        check_sizes(config, resolved.models, resolved.vocabulary_size, longest)
        resolved = memory.with_setting(resolved, "rollout", "max_prompt_tokens", longest)
    taught = max(len((prompt.teacher or prompt).tokens) for prompt in training.prompts)
    resolved = replace(resolved, teacher_prompt=taught)
    training.notes.extend(check_turns(config, turns, training.prompts[0].messages))
    context = room_for_turns(config, longest, resolved.longest)
    return memory.with_setting(resolved, "rollout", "max_context", context), (training, validation)


def agree(
    resolved: Resolved, runtime: Runtime
) -> tuple[Resolved, tuple[data.PromptSet, data.PromptSet]]:
    """The same, with rank 0's answers: it alone has tried which models run on packed rows; with its
    clock when the job first came here; and with what must be offloaded to fit the smallest GPU. And
    the data, read by that clock."""

    def answer() -> str:
        # the job's store outlives restarts: they render the same prompts
        now = runtime.job.compare_set("splitppo/now", "", str(resolved.now)).decode()
        return json.dumps([now, [model.packed for model in resolved.models.values()]])

    now, packed = json.loads(runtime.broadcast("resolved", answer))
    models = {
        name: replace(model, packed=is_packed)
        for (name, model), is_packed in zip(resolved.models.items(), packed, strict=True)
    }
    runtime.status.set_phase("reading the data")
    resolved, prompts = load_data(replace(resolved, models=models, now=datetime.fromisoformat(now)))
    texts = "\0".join(prompt.text for split in prompts for prompt in split.prompts)
    if len({*runtime.all_gather("prompts", str(zlib.crc32(texts.encode())))}) > 1:
        raise UserError(
            "the ranks have different prompts: give all nodes the same files; some tasks of "
            "reasoning_gym need PYTHONHASHSEED=0 in the environment of all ranks"
        )
    sizes = runtime.all_gather("memory", str(memory.gpu_memory(resolved) or 0))
    resolved, line = memory.offloaded(resolved, min(map(float, sizes)))
    if line and runtime.launch.rank == 0:
        say(line)
    return resolved, prompts


def _failed(rank: Rank, error: Exception) -> int:
    if (users := to_user_error(error)) and users is not error:
        if rank.run:
            users.add_note(f"on {rank.run.runtime.status.describe(rank.launch.rank)}")
        error = users
    if isinstance(error, torch.OutOfMemoryError) and rank.run:
        for line in memory.out_of_memory(rank.run.build.resolved, rank.run.runtime.status.phase):
            error.add_note(line)
    if saved := rank.saved():
        error.add_note(saved)
    return report_failure(error, rank.runtime, rank.launch)
