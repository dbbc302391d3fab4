"""The rules that a configuration must keep, checked before any file, model, GPU or process group is touched."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from splitppo.config import Config
from splitppo.config.toml import leaves
from splitppo.errors import UserError

# What a value must do (None: the setting is off), in words, and the settings that must; `optim.`: both models'.
RULES: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (lambda v: v >= 1, "must be at least 1", "steps nodes ppo.epochs ppo.mini_batches engine.max_rows rollout.samples"),
    (lambda v: v >= 1, "must be at least 1", "rollout.batch_size rollout.chunks rollout.max_prompt_tokens"),
    (lambda v: v >= 1, "must be at least 1", "rollout.max_new_tokens data.validation_rows compute.micro_batch_tokens"),
    (lambda v: v >= 0, "must be at least 0", "ppo.kl_coef ppo.kl_loss_coef ppo.entropy_coef checkpoint.every"),
    (lambda v: v >= 0, "must be at least 0", "checkpoint.keep checkpoint.keep_every log.samples log.validate_every"),
    (lambda v: v >= 0, "must be at least 0", "optim.lr optim.warmup_steps optim.weight_decay optim.max_grad_norm"),
    (lambda v: v >= 1, "must be at least 1", "data.max_rows reward.workers ppo.value_epochs ppo.value_mini_batches"),
    (lambda v: v >= 1, "must be at least 1", "log.validate_samples ppo.kl_horizon"),
    (lambda v: v >= 0, "must be at least 0", "ppo.critic_warmup reward.overlong_tokens"),
    (lambda v: v >= 0, "must be at least 0; it is subtracted", "reward.missing_eos_penalty reward.overlong_penalty"),
    (lambda v: v > 0, "must be above 0", "reward.timeout ppo.kl_target ppo.importance_cap"),
    (lambda v: all(step >= 1 for step in v), "holds a step below 1; they count from 1", "log.profile_steps"),
    (lambda v: all(rank >= 0 for rank in v), "holds a rank below 0; they count from 0", "log.profile_ranks"),
    (
        lambda v: all(w > 0 for w in v),
        "holds a weight that is not above 0; leave that file out, or give it one",
        "data.weights",
    ),
    (lambda v: v[0] < v[1], "must be a lower and a higher bound", "reward.clip"),
    (
        lambda v: len(v) == len(set(v)),
        "holds a function twice; name it once, with another weight if it is to count more",
        "reward.function reward.validation",
    ),
    (lambda v: _is_object(v), """must be a JSON object, as '{"enable_thinking": false}'""", "data.chat_kwargs"),
    (lambda v: _is_for_template(v), "says how to tokenise; it is for the chat template alone", "data.chat_kwargs"),
    (lambda v: 0 <= v <= 1, "must lie between 0 and 1", "ppo.gamma ppo.lam ppo.lam_value optim.min_lr_ratio"),
    (lambda v: 1 <= v <= 9, "must lie between 1 and 9", "data.digits"),
    (lambda v: -(2**63) <= v < 2**63, "must fit into 64 bits, as torch's generators have it", "seed"),
    (lambda v: 0 <= v <= 10**9, f"must lie between 0 and {10**9}", "timeout"),
    (lambda v: v > 0, "must be above 0", "timeout ppo.clip_high ppo.value_clip optim.eps"),
    (lambda v: v >= 1e-3, "must be at least 0.001, or logits overflow", "rollout.temperature"),
    (lambda v: v == 0 or v >= 1e-3, "must be 0 or at least 0.001, or logits overflow", "log.validate_temperature"),
    (lambda v: v <= 10**6, "must be at most 1000000", "rollout.batch_size world_size nodes"),
    (lambda v: v <= 1024, "must be at most 1024", "reward.workers"),
    (lambda v: 0 < v < 1, "must lie between 0 and 1 (the ratio's lower bound is 1 - it)", "ppo.clip_low"),
    (lambda v: v > 1, "must be above 1; use 3.0, or None to turn it off", "ppo.dual_clip"),
    (lambda v: all(0 <= beta < 1 for beta in v), "must lie in [0, 1); use 0.9 0.999", "optim.betas"),
    (
        lambda v: "" not in v,
        "holds an empty string, which would end every response at once; leave it out",
        "rollout.stop",
    ),
    (lambda v: v >= 1, "must be at least 1", "engine.tensor_parallel"),
    (lambda v: v == "node" or v >= 1, "must be at least 1, or node", "fsdp.shard_size"),
    (lambda v: v >= 0, "must be at least 0; 0 turns it off", "rollout.top_k"),
    (lambda v: 0 < v <= 1, "must be above 0 and at most 1; 1 turns it off", "rollout.top_p"),
    (lambda v: 0 < v < 1, "must lie between 0 and 1", "engine.memory_fraction"),
)


def check(config: Config) -> None:
    """A UserError for what can be told to be wrong before any file, model, GPU or process group is touched."""
    values = dict(leaves(asdict(config)))
    for name, value in values.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{name}={number} must be a finite number; its default is in --help")
            least, most = (2**-126, 2.0**127) if isinstance(number, float) else (0, 2**31 - 1)
            if isinstance(number, int | float) and name != "seed" and number and not least <= abs(number) <= most:
                raise UserError(f"{name}={number} must be 0, or of a size between {least:g} and {most:g}")
    for holds, rule, names in RULES:
        for short in names.split():
            for name in (f"policy.{short}", f"value.{short}") if short.startswith("optim.") else (short,):
                if values[name] is not None and not holds(values[name]):
                    raise UserError(f"{name}={values[name]} {rule}")
    rows, samples, mini_batches = config.rollout.batch_size, config.rollout.samples, config.ppo.mini_batches
    unit = math.lcm(samples, mini_batches)  # what a batch size must be a multiple of, both rules together
    below = rows // unit * unit
    use = f"use {below} or {below + unit}" if below else f"use {unit}"
    if rows % samples:
        raise UserError(f"rollout.batch_size={rows} is not a multiple of rollout.samples={samples}; {use}")
    if rows % mini_batches:
        raise UserError(f"rollout.batch_size={rows} does not cut into {mini_batches} mini-batches; {use}")
    if config.rollout.lengths and config.rollout.stop:
        raise UserError("rollout.lengths says how long responses are; leave rollout.stop unset beside it")
    if config.rollout.lengths and config.ppo.mask_truncated:
        raise UserError("rollout.lengths cuts all responses, which ppo.mask_truncated would leave out; unset one")
    if config.placement.reference == "critic" and (config.ppo.kl_loss_coef > 0 or config.ppo.kl_coef == 0):
        raise UserError(
            f"placement.reference=critic with ppo.kl_coef={config.ppo.kl_coef:g}, ppo.kl_loss_coef="
            f"{config.ppo.kl_loss_coef:g}: only the KL in the reward can use it there; set kl_coef above 0 and "
            "kl_loss_coef to 0, or leave the reference with the actor"
        )
    if (size := config.world_size) is not None and not config.dry_run:
        raise UserError(f"world_size={size} is for --dry-run; in a run torchrun's --nproc_per_node says how many ranks")
    _check_reward(config)
    _check_ppo(config)
    _check_log(config)


def _check_reward(config: Config) -> None:
    reward = config.reward
    if reward.function == ("none",):
        if reward.model is None:
            raise UserError("reward.function=none needs a reward.model, or nothing scores the rows")
        if config.log.validate_every and not reward.validation:
            raise UserError(
                f"log.validate_every={config.log.validate_every}: held-out rows are scored by functions, and "
                "reward.function is none; name one in --reward.validation"
            )
    elif "none" in reward.function or not reward.function:
        raise UserError(
            f"reward.function={' '.join(reward.function)}: name functions, or none alone beside a reward.model"
        )
    if "none" in reward.validation:
        raise UserError("reward.validation=none would score every held-out row 0; name a function")
    if reward.weights and len(reward.weights) != len(reward.function):
        raise UserError(
            f"reward.weights={reward.weights} for {len(reward.function)} functions; give one each, in their order"
        )
    if reward.overlong_tokens >= config.rollout.max_new_tokens:
        raise UserError(
            f"reward.overlong_tokens={reward.overlong_tokens} must be below "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}, whose last tokens they are"
        )
    if config.data.weights and len(config.data.weights) != len(config.data.files):
        raise UserError(
            f"data.weights={config.data.weights} for {len(config.data.files)} data.files; give one each, in their order"
        )


def _check_ppo(config: Config) -> None:
    ppo, rows = config.ppo, config.rollout.batch_size
    if (count := ppo.value_mini_batches) is not None:
        if max(count, ppo.mini_batches) % min(count, ppo.mini_batches):
            raise UserError(
                f"ppo.value_mini_batches={count} must divide ppo.mini_batches={ppo.mini_batches} or be a multiple of it"
            )
        if rows % count:
            low = rows // count * count
            use = f"use {low} or {low + count}" if low else f"use {count}"
            raise UserError(f"rollout.batch_size={rows} does not cut into ppo.value_mini_batches={count}; {use}")
    if ppo.old_logprobs == "engine":
        if ppo.importance != "off":
            raise UserError(
                f"ppo.importance={ppo.importance} weighs by the trainer's old log-probs, which "
                "ppo.old_logprobs=engine leaves out; set one of them back"
            )
        rollout = config.rollout
        if rollout.top_p < 1 or rollout.top_k > 0:
            raise UserError(
                f"ppo.old_logprobs=engine with rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: the "
                "engine's log-probs are then of a part of the distribution; use top_p 1 and top_k 0"
            )
    if ppo.kl_target is not None and ppo.kl_coef == 0:
        raise UserError(f"ppo.kl_target={ppo.kl_target} steers ppo.kl_coef, which is 0; start it at 0.05, say")
    if ppo.critic_warmup >= config.steps:
        raise UserError(
            f"ppo.critic_warmup={ppo.critic_warmup} leaves none of {config.steps} steps for the policy; "
            "lower it or raise steps"
        )


def _check_log(config: Config) -> None:
    log = config.log
    if log.validate_samples > 1 and log.validate_temperature == 0:
        raise UserError(
            f"log.validate_samples={log.validate_samples}: greedy ones are the same; "
            "set log.validate_temperature above 0"
        )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_for_template(text: str) -> bool:
    """Whether a JSON object holds none of the other arguments of transformers' apply_chat_template."""
    names = ("conversation", "tokeniz", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_")
    return not any(name.startswith(names) for name in json.loads(text))
