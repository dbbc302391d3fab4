"""A policy's held-out rows, generated and scored without a run: no critic, no optimizer. For
`splitppo eval`, which imports this when it must, since torch takes seconds."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from splitppo.config import (
    Config,
    LoraConfig,
    PlacementConfig,
    PPOConfig,
    ReferenceConfig,
    TeacherConfig,
    rules,
)
from splitppo.config.cli import parse
from splitppo.config.toml import flag
from splitppo.errors import UserError, say
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models import lora
from splitppo.placement import place
from splitppo.run import checks, files, screen
from splitppo.run.build import Builder
from splitppo.run.checkpoint import is_complete, step_of
from splitppo.run.folder import new_folder
from splitppo.run.main import load_data
from splitppo.run.resolve import pick_device, resolve
from splitppo.run.sources import model_folder
from splitppo.tools.saved import load_model, open_run

SHOWN = 3  # prompts on the screen, each with its first response
NORMAL_95 = 1.96  # standard errors of a 95 % interval
# of a run's settings those that follow from its data, where the user has set none
DERIVED = ("rollout.max_prompt_tokens", "rollout.max_context")

Weights = Callable[[], Mapping[str, Any]]  # by name


def evaluate(name: str, flags: Sequence[str], out: Path | None) -> None:
    """Scores the held-out rows of a model's folder or hub name, an adapter, a run or a checkpoint,
    with the trainer's `flags`. Each rank generates a part of the rows. Prints a table and writes
    `out`/metrics.json and `out`/rows.jsonl."""
    config, weights = _of_run(Path(name), flags) or _of_model(name, flags)
    config = replace(config, log=replace(config.log, trackers=(), validate_every=1))
    rules.check(config)
    if not config.validate_every:
        raise UserError("data.files without data.validation_files: nothing is held out; name some")
    # what a run has beside the policy and what scores its rows
    config = replace(
        config,
        run_dir=None,
        resume="auto",
        placement=PlacementConfig(mode="colocated"),
        engine=replace(config.engine, kind="hf"),
        reference=ReferenceConfig(),
        teacher=TeacherConfig(),
        ppo=PPOConfig(baseline="batch", kl_coef=0.0),
        reward=replace(config.reward, model=None),
    )
    launch = Launch.from_env()
    device = pick_device(config, launch)
    placement = place(config.placement, world=launch.world, local_world=launch.local_world)
    checks.check_inputs(config)
    resolved = resolve(config, placement, launch.local_world, device, probe=False)
    resolved, prompts = load_data(resolved)
    runtime = Runtime(launch, placement, device, config.timeout)
    lines: list[Mapping[str, Any]] = []
    generator = Builder(resolved, runtime, Path(), prompts).generator()
    validator = replace(
        generator.validator,
        write=lambda _, rows: lines.extend(rows),
        most_written=len(prompts[1].prompts) * config.log.validate_samples,
    )
    generator.engine.load_weights(weights().items())
    metrics = validator.run(0)
    generator.close()
    if launch.rank == 0:
        _show(metrics, lines, config.log.validate_samples, out or new_folder("eval"))
    runtime.work_done.set()
    runtime.wait_for_all()
    runtime.close()


def _of_run(folder: Path, flags: Sequence[str]) -> tuple[Config, Weights] | None:
    """Of a run or one of its checkpoints; None if the folder is neither."""
    folder = folder.absolute() if is_complete(folder) else folder.resolve()
    step = step_of(folder) if folder.parent.name == "checkpoints" else 0
    run = folder.parents[1] if step else folder
    if not (run / "config.toml").is_file():
        return None
    before, _, saved = open_run(run, step or None)
    user_settings = files.read_if_there(run / "given.json", json.loads) or ()
    unset = [word for name in DERIVED if name not in user_settings for word in (flag(name), "None")]
    config = parse(["--config", str(run / "config.toml"), *unset, *flags], recorded=True)
    # the checkpoint has the weights
    source = str(model_folder(before, run, "policy"))
    policy = replace(config.policy, path=source, random_init=True, lora=LoraConfig())
    return (
        replace(config, policy=policy),
        lambda: load_model(before, run, "policy", saved).state_dict(),
    )


def _of_model(name: str, flags: Sequence[str]) -> tuple[Config, Weights]:
    """Of a model, or of an adapter over the base that it names."""
    base = name
    if Path(name, lora.SETTINGS).is_file():
        base = str(lora.read_settings(Path(name)).get("base_model_name_or_path"))
    config = parse(["--policy.path", base, *flags])
    if config.policy.path == "tiny":
        raise UserError(
            "the model tiny has new random weights in each run; name a run, or a model's folder"
        )
    frozen = replace(config, teacher=TeacherConfig(path=name))
    return config, lambda: load_model(frozen, Path(), "teacher", None).state_dict()


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
    texts = [json.dumps(line, ensure_ascii=False, default=str) for line in lines]
    files.write_whole(out / "rows.jsonl", "\n".join([*texts, ""]))
    say(f"score {metrics['val/score/mean']:.4f} ± {half:.4f} (95 %, {len(by_prompt)} prompts)")
    for name, value in metrics.items():
        say(f"{name.removeprefix('val/'):<28} {value:.4g}")
    for line in lines[: SHOWN * samples : samples]:
        say(f"question  {screen.cut(str(line['question']), 100)}")
        say(f"answer    {screen.cut(line['response'], 100)}  (score {line['score']:g})")
    say(f"written: {out}/metrics.json, {out}/rows.jsonl")
