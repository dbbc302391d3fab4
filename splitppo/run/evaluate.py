"""A policy's held-out rows, generated and scored without a run: no critic, no optimizer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from splitppo.config import (
    Config,
    PlacementConfig,
    PPOConfig,
    ReferenceConfig,
    TeacherConfig,
    rules,
)
from splitppo.context import Context
from splitppo.data import PromptSet
from splitppo.engine.hf import HFEngine
from splitppo.envs.player import players_of
from splitppo.errors import UserError, say
from splitppo.generator.validation import Validator
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.placement import place
from splitppo.rewards.scorer import Scorer
from splitppo.run import checks, files, screen
from splitppo.run.main import load_data
from splitppo.run.resolve import Resolved, pick_device, resolve

SHOWN = 3  # rows on the screen
NORMAL_95 = 1.96  # standard errors of a 95 % interval


def evaluate(config: Config, weights: Callable[[], Mapping[str, Any]], out: Path) -> None:
    """Scores the held-out rows of the policy of a configuration, whose `weights` by name are
    loaded on every rank, each of which generates a part of the rows; prints a table and writes
    `out`/metrics.json and `out`/rows.jsonl."""
    rules.check(config)
    # what a run has beside the policy and what scores its rows
    config = replace(
        config,
        run_dir=None,
        resume="auto",
        placement=PlacementConfig(mode="colocated"),
        reference=ReferenceConfig(),
        teacher=TeacherConfig(),
        ppo=PPOConfig(baseline="batch", kl_coef=0.0),
        log=replace(config.log, trackers=()),
        reward=replace(config.reward, model=None),
    )
    launch = Launch.from_env()
    device = pick_device(config, launch)
    local = launch.local_world
    placement = place(config.placement, world=launch.world, local_world=local)
    if (config.reward.validation or config.reward.function) == ("none",) and not config.has_env:
        raise UserError("reward.function=none: nothing scores the rows; set --reward.validation")
    checks.check_inputs(config)
    resolved, (_, held_out) = load_data(resolve(config, placement, local, device, probe=False))
    if not held_out.prompts:
        raise UserError("data.files without data.validation_files: nothing is held out; name some")
    runtime = Runtime(launch, placement, device, config.timeout)
    lines: list[Mapping[str, Any]] = []
    validator = _validator(resolved, held_out, runtime, weights, lines)
    try:
        metrics = validator.run(0)
    finally:
        validator.player.close()
        validator.scorer.close()
    if launch.rank == 0:
        _show(metrics, lines, config.log.validate_samples, out)
    runtime.work_done.set()
    runtime.wait_for_all()
    runtime.close()


def _validator(
    resolved: Resolved,
    held_out: PromptSet,
    runtime: Runtime,
    weights: Callable[[], Mapping[str, Any]],
    lines: list[Mapping[str, Any]],
) -> Validator:
    """What generates and scores the rows, and appends them to `lines`."""
    config = resolved.config
    policy = resolved.models["policy"]
    tokenizer = resolved.tokenizer
    engine = HFEngine(
        policy.config,
        tokenizer,
        device=runtime.device,
        dtype=resolved.dtype,
        max_rows=config.engine.max_rows,
        folder=Path(policy.path),
    )
    engine.load_weights(weights().items())
    reward = config.reward
    functions = reward.validation or reward.function
    return Validator(
        Context(
            config,
            held_out.prompts.__getitem__,
            held_out.prompts,
            lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
            resolved.vocabulary_size,
        ),
        engine,
        runtime.groups["actor"],
        Scorer(
            replace(
                reward, function=functions, weights=() if reward.validation else reward.weights
            ),
            {prompt.data_source for prompt in held_out.prompts},
        ),
        lambda _, rows: lines.extend(rows),
        players_of(config, tokenizer)[1],
        most_written=len(held_out.prompts) * config.log.validate_samples,
    )


def _show(
    metrics: Mapping[str, float], lines: Sequence[Mapping[str, Any]], samples: int, out: Path
) -> None:
    """Writes what came of it, and prints a table and the first rows."""
    scores = [line["score"] for line in lines]
    by_prompt = [fmean(scores[i : i + samples]) for i in range(0, len(scores), samples)]
    # responses to one prompt are alike, so prompts are what is counted
    spread = stdev(by_prompt) if len(by_prompt) > 1 else 0.0
    half = NORMAL_95 * spread / len(by_prompt) ** 0.5
    out.mkdir(parents=True, exist_ok=True)
    measured = {**metrics, "val/score/half_interval_95": half}
    files.write_whole(out / "metrics.json", json.dumps(measured, indent=1) + "\n")
    rows = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
    files.write_whole(out / "rows.jsonl", rows)
    say(f"score {metrics['val/score/mean']:.4f} ± {half:.4f} (95 %, {len(by_prompt)} prompts)")
    for name, value in metrics.items():
        say(f"{name.removeprefix('val/'):<28} {value:.4g}")
    for line in lines[:SHOWN]:
        say(f"question  {screen.cut(str(line['question']), 100)}")
        say(f"answer    {screen.cut(line['response'], 100)}  (score {line['score']:g})")
    say(f"written: {out}/metrics.json, {out}/rows.jsonl")
