"""Rules that a configuration must keep, checked before any file, model, GPU or process group is
touched."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from splitppo.config import Config, PPOConfig
from splitppo.config.optional import of_adapters, of_critic, of_environments, of_sets, of_teacher
from splitppo.config.toml import leaves
from splitppo.errors import UserError, unique_names

# Test of a value, the rule in words, the settings that must pass. None (off) always passes.
RULES: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (
        lambda v: v >= 1,
        "must be at least 1",
        """compute.micro_batch_tokens data.max_rows data.validation_rows engine.max_rows
        engine.tensor_parallel env.max_observation_tokens env.max_turn_tokens env.max_turns
        fsdp.sequence_parallel fsdp.tensor_parallel log.validate_samples nodes ppo.epochs
        ppo.kl_horizon ppo.mini_batches ppo.value_epochs ppo.value_mini_batches
        reference.sequence_parallel reference.tensor_parallel reward.sequence_parallel
        reward.concurrency reward.tensor_parallel reward.workers rollout.batch_size
        rollout.chunks rollout.max_context rollout.max_new_tokens rollout.max_prompt_tokens
        rollout.samples steps
        teacher.sequence_parallel teacher.tensor_parallel value.layers value.pretrain_epochs
        value.sequence_parallel value.tensor_parallel""",
    ),
    (lambda v: v == "node" or v >= 1, "must be at least 1, or node", "fsdp.shard_size"),
    (
        lambda v: v >= 0,
        "must be at least 0; it is subtracted",
        "reward.missing_eos_penalty reward.overlong_penalty",
    ),
    (
        lambda v: v >= 0,
        "must be at least 0; 0 turns it off",
        "distill.top_k rollout.top_k rollout.window policy.lora.rank value.lora.rank",
    ),
    (lambda v: 0 <= v <= 10**9, f"must lie between 0 and {10**9}", "timeout"),
    (
        lambda v: v > 0,
        "must be above 0",
        """distill.coef env.timeout policy.lora.alpha policy.optim.eps ppo.clip_high ppo.clip_low
        ppo.importance_cap ppo.kl_target ppo.lam_alpha ppo.value_clip reward.timeout timeout
        value.lora.alpha value.optim.eps""",
    ),
    (lambda v: v > 1, "must be above 1; use 3.0, or None to turn it off", "ppo.dual_clip"),
    (lambda v: v >= 1e-3, "must be at least 0.001, or logits overflow", "rollout.temperature"),
    (
        lambda v: v == 0 or v >= 1e-3,
        "must be 0 or at least 0.001, or logits overflow",
        "log.validate_temperature",
    ),
    (lambda v: v <= 10**6, "must be at most 1000000", "rollout.batch_size world_size nodes"),
    (lambda v: v <= 1024, "must be at most 1024", "reward.workers"),
    (lambda v: 1 <= v <= 9, "must lie between 1 and 9", "data.digits"),
    (lambda v: 0 <= v <= 1, "must lie between 0 and 1", "ppo.gamma ppo.lam_value"),
    (
        lambda v: 0 <= v <= 1,
        "must lie between 0 and 1",
        "policy.optim.min_lr_ratio value.optim.min_lr_ratio",
    ),
    (
        lambda v: v == "adaptive" or 0 <= v <= 1,
        "must lie between 0 and 1, or be adaptive",
        "ppo.lam",
    ),
    (lambda v: 0 < v < 1, "must lie between 0 and 1", "engine.memory_fraction"),
    (lambda v: 0 < v <= 1, "must be above 0 and at most 1; 1 turns it off", "rollout.top_p"),
    (
        lambda v: all(0 <= b < 1 for b in v),
        "must lie in [0, 1); use 0.9 0.999",
        "policy.optim.betas value.optim.betas",
    ),
    (lambda v: -(2**63) <= v < 2**63, "must fit into 64 bits, as torch's generators need", "seed"),
    (lambda v: v[0] < v[1], "must be a lower and a higher bound", "reward.clip value.range"),
    (
        lambda v: "" not in v,
        "holds an empty string, which would end every response at once; drop it",
        "rollout.stop",
    ),
    (
        lambda v: not re.fullmatch(r"(\\[nrt])*", v),
        "is empty or a spelled-out escape; for an empty line write $'\\n\\n' in a shell",
        "reward.steps",
    ),
    (
        lambda v: len({*v}) == len(v),
        "names a function twice; name it once",
        "reward.function reward.validation",
    ),
    (
        lambda v: _is_object(v),
        """must be a JSON object with distinct names, such as '{"NAME": 1}'""",
        "data.chat_kwargs data.task_settings env.settings",
    ),
)
# whether two settings contradict each other, and what is said then
Contradictions = list[tuple[object, str]]
# no other setting may be a number below 0
SIGNED = (
    *("seed", "env.format_reward", "log.stop_at", "reward.failed_score", "reward.model_weight"),
)


def check(config: Config) -> None:
    """Raises UserError if a setting breaks a rule of its own or two settings contradict each
    other."""
    values = dict(leaves(asdict(config)))
    for name, value in values.items():
        for number in value if isinstance(value, tuple) else (value,):
            _check_size(name, number)
    for holds, rule, names in RULES:
        for name in names.split():
            if values[name] is not None and not holds(values[name]):
                raise UserError(f"{name}={values[name]} {rule}")
    for name, value in values.items():
        if isinstance(value, int | float) and value < 0 and name not in SIGNED:
            raise UserError(f"{name}={value} must be at least 0")
    parts = (
        *(_of_job, _of_rollout, of_environments, of_teacher, _of_reward),
        *(_of_ppo, of_critic, of_adapters),
    )
    for message in (said for part in parts for is_wrong, said in part(config) if is_wrong):
        raise UserError(message)


def _check_size(name: str, number: Any) -> None:
    """Refuses numbers that torch or numpy could not hold."""
    if isinstance(number, float) and not math.isfinite(number):
        raise UserError(f"{name}={number} must be a finite number; its default is in --help")
    least, most = (2**-126, 2.0**127) if isinstance(number, float) else (0, 2**31 - 1)
    if (
        isinstance(number, int | float)
        and name != "seed"
        and number
        and not least <= abs(number) <= most
    ):
        raise UserError(
            f"{name}={number} must be 0, or have an absolute value from {least:g} to {most:g}"
        )


def _of_job(config: Config) -> Contradictions:
    log = config.log
    ppo = config.ppo
    return [
        (
            config.world_size is not None and not config.dry_run,
            f"world_size={config.world_size} is for --dry-run; in a run, torchrun's "
            "--nproc_per_node sets the ranks",
        ),
        (
            config.placement.reference == "critic" and (ppo.kl_loss_coef > 0 or ppo.kl_coef == 0),
            f"placement.reference=critic with ppo.kl_coef={ppo.kl_coef:g}, "
            f"ppo.kl_loss_coef={ppo.kl_loss_coef:g}: the critic group only uses the KL in the "
            "reward; set only ppo.kl_coef above 0, or placement.reference=actor",
        ),
        (
            log.validate_samples > 1 and log.validate_temperature == 0,
            f"log.validate_samples={log.validate_samples}: greedy responses are all equal; raise "
            "log.validate_temperature",
        ),
        (
            log.stop_at is not None and not config.validate_every,
            f"log.stop_at={log.stop_at} is a held-out score, and no held-out rows are scored; set "
            "--log.validate-every, and with data.files also data.validation_files",
        ),
        *of_sets(config),
    ]


def _of_rollout(config: Config) -> Contradictions:
    rollout = config.rollout
    ppo = config.ppo
    window = config.rollout.window
    rows = rollout.batch_size
    use = _use(rows, math.lcm(rollout.samples, ppo.mini_batches))
    return [
        (
            rows % rollout.samples,
            f"rollout.batch_size={rows} is not a multiple of rollout.samples={rollout.samples}; "
            f"{use}",
        ),
        (
            rows % ppo.mini_batches,
            f"rollout.batch_size={rows} is not divisible by ppo.mini_batches={ppo.mini_batches}; "
            f"{use}",
        ),
        (
            config.data.overlong != "refuse" and rollout.max_prompt_tokens is None,
            f"data.overlong={config.data.overlong} needs a limit of prompts; set "
            "rollout.max_prompt_tokens",
        ),
        (
            rollout.lengths and rollout.stop,
            "rollout.lengths fixes the length of responses; leave rollout.stop unset",
        ),
        (
            rollout.lengths and ppo.mask_truncated,
            "rollout.lengths cuts all responses, which ppo.mask_truncated drops; unset one",
        ),
        (
            window and rollout.stop,
            f"rollout.window={window} with rollout.stop: a stop string may span two "
            "windows; unset one",
        ),
        (
            window and ppo.importance == "sequence",
            f"rollout.window={window} with ppo.importance=sequence: the weight of a whole row is "
            "mostly "
            "noise; use ppo.importance=token",
        ),
        (
            window and config.old_logprobs == "trainer" and ppo.importance == "off",
            f"rollout.window={window} with ppo.old_logprobs=trainer, ppo.importance=off: "
            "older policies sampled some of a row's tokens; "
            "set ppo.importance=token, or ppo.old_logprobs=engine",
        ),
    ]


def _of_reward(config: Config) -> Contradictions:
    reward = config.reward
    rollout = config.rollout
    functions = config.reward.function
    return [
        (
            functions == ("none",)
            and reward.model is None
            and not config.has_env
            and not config.has_teacher,
            "reward.function=none leaves nothing that scores the rows; set reward.model, an "
            "environment or a teacher",
        ),
        (
            functions == ("none",)
            and config.validate_every
            and not reward.validation
            and not config.has_env,
            f"log.validate_every={config.log.validate_every}: held-out rows need a function, and "
            "reward.function is none; name one with --reward.validation",
        ),
        (
            functions != ("none",) and ("none" in functions or not functions),
            f"reward.function={' '.join(functions)}: name functions, or only none with a "
            "reward.model",
        ),
        *(
            (
                setting is not None and reward.model is None,
                f"reward.{name}={setting!r} needs a reward.model, and none is set; unset it",
            )
            for name, setting in (("label", reward.label), ("steps", reward.steps))
        ),
        (
            reward.step_token and not reward.steps,
            f"reward.step_token={reward.step_token} marks the ends of steps, and reward.steps is "
            "unset; set it to the text that ends a step",
        ),
        (
            "none" in reward.validation,
            "reward.validation=none would give every held-out row a score of 0; name a function",
        ),
        (
            reward.weights and len(reward.weights) != len(functions),
            f"reward.weights={reward.weights} for {len(functions)} functions; give one weight "
            "per function, in their order",
        ),
        (
            reward.normalize == "batch" and rollout.window,
            f"reward.normalize=batch with rollout.window={rollout.window}: "
            "a step may have one row, which would score 0; use running",
        ),
        (
            reward.overlong_tokens >= rollout.max_new_tokens,
            f"reward.overlong_tokens={reward.overlong_tokens} must be below "
            f"rollout.max_new_tokens={rollout.max_new_tokens}; lower it",
        ),
    ]


def _of_ppo(config: Config) -> Contradictions:
    ppo = config.ppo
    rollout = config.rollout
    steps = config.ppo.mini_batches
    count = ppo.value_mini_batches or steps
    return [
        (
            ppo.kl_target is not None and ppo.kl_coef == 0,
            f"ppo.kl_target={ppo.kl_target} adapts ppo.kl_coef, which is 0; start it above 0, at "
            "0.05 for example",
        ),
        (
            max(count, steps) % min(count, steps),
            f"ppo.value_mini_batches={count} must divide ppo.mini_batches={steps} or be a multiple "
            "of it",
        ),
        (
            rollout.batch_size % count,
            f"rollout.batch_size={rollout.batch_size} is not divisible by "
            f"ppo.value_mini_batches={count}; {_use(rollout.batch_size, count)}",
        ),
        (
            config.old_logprobs == "engine" and ppo.importance != "off",
            f"ppo.importance={ppo.importance} needs the trainer's old log-probs, "
            "which ppo.old_logprobs=engine (the default with rollout.window) skips; change one of "
            "them",
        ),
        (
            config.old_logprobs == "engine" and (rollout.top_p < 1 or rollout.top_k > 0),
            f"ppo.old_logprobs=engine with rollout.top_p={rollout.top_p:g}, "
            f"rollout.top_k={rollout.top_k}: the engine's log-probs are then those of a "
            "truncated distribution; use top_p 1 and top_k 0",
        ),
        (
            ppo.clip_mode == "clip" and ppo.clip_low >= 1,
            f"ppo.clip_low={ppo.clip_low} must be below 1: the ratio's lower bound is 1 - "
            "clip_low; lower it",
        ),
        (
            ppo.clip_mode == "mask" and ppo.dual_clip is not None,
            f"ppo.dual_clip={ppo.dual_clip} bounds a loss that ppo.clip_mode=mask already drops; "
            "unset one",
        ),
        *(
            (
                ppo.loss and getattr(ppo, name) != getattr(PPOConfig(), name),
                f"ppo.{name}={getattr(ppo, name)} belongs to PPO's loss, which ppo.loss={ppo.loss} "
                "replaces; unset one",
            )
            for name in ("clip_mode", "clip_low", "clip_high", "dual_clip")
        ),
        (
            ppo.advantages and ppo.baseline == "group",
            f"ppo.advantages={ppo.advantages} with ppo.baseline=group: both choose the "
            "baseline; use ppo.baseline=batch",
        ),
    ]


def _use(rows: int, unit: int) -> str:
    """The remedy for a number of rows that is no multiple of `unit`."""
    below = rows // unit * unit
    return f"use {below} or {below + unit}" if below else f"use {unit}"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, object_pairs_hook=unique_names), dict)
    except (ValueError, RecursionError):
        return False
