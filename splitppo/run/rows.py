"""The rows of a run: what the sampler generates, and who owns which slot in a step."""

import functools
import json
from pathlib import Path

from splitppo import data
from splitppo.envs.player import Player
from splitppo.job.runtime import Runtime
from splitppo.placement import StepPlan, data_parallel, own
from splitppo.run.files import read_file
from splitppo.run.resolve import Resolved
from splitppo.sampler import Sampler


def build_sampler(
    resolved: Resolved, training: data.PromptSet, player: Player | None = None
) -> Sampler:
    """The rows of all slots, from the training prompts."""
    config = resolved.config
    rollout = config.rollout
    prompts = training.prompts
    index = functools.partial(data.prompt_index, len(prompts), seed=config.seed)
    return Sampler(
        rollout.batch_size,
        lambda row: prompts[index(row // rollout.samples)],
        limit=rollout.max_new_tokens,
        context=rollout.max_context,
        window=rollout.window,
        lengths=data.read_lengths(rollout),
        player=player,
    )


def plan_step(resolved: Resolved, runtime: Runtime, sampler: Sampler, step: int) -> StepPlan:
    """Who owns which slot in a step; every rank asks at the step's beginning. With windows it
    depends on the open rows: rank 0, an actor, tells all others over the store how long they
    are."""
    config = resolved.config
    rollout = config.rollout
    sizes = data_parallel(config, resolved.placement)
    contexts: list[int] = []
    if rollout.window and sizes["actor"] > 1:
        contexts = json.loads(
            runtime.broadcast(f"contexts/{step}", lambda: json.dumps(sampler.contexts()))
        )
        # all ranks have read that one: to send its rows of a step, rank 0 needs the critic there
        runtime.store.delete_key(f"contexts/{step - 3}")
    return own(
        seed=config.seed,
        step=step,
        batch_size=rollout.batch_size,
        samples=rollout.samples,
        mini_batches=config.ppo.mini_batches,
        sizes=sizes,
        contexts=contexts,
    )


def check_open_rows(sampler: Sampler, found: Path | None) -> None:
    """Raises UserError if rows of this checkpoint go on, and can't in this run."""
    if found:
        read_file(
            found / "actor" / "state.json",
            lambda text: sampler.load_state(json.loads(text).get("open", ())),
            f"remove {found}",
        )
