"""Rules of optional features: environments, adapters, a critic, a teacher, parallel groups. Part of
the rules of rules.py."""

from collections.abc import Iterator
from dataclasses import asdict

from splitppo.config import OF_VALUES, Config, LoraConfig
from splitppo.config.toml import leaves

TASKS = ("echo", "addition", "guess")


def of_environments(config: Config) -> list[tuple[object, str]]:
    """Whether two settings contradict each other, and what is said then."""
    env = config.env
    rollout = config.rollout
    task = config.data.task
    package, _, name = task.partition(":")
    packaged = {"reasoning_gym": config.data.task_settings, "textarena": env.settings}
    return [
        (
            task not in TASKS and not (name and package in packaged),
            f"data.task={task}: there is no such task; use {', '.join(TASKS)}, "
            "reasoning_gym:NAME or textarena:GAME",
        ),
        *(
            (
                settings != "{}" and (config.data.files or package != of),
                f"{setting}={settings} is only for --data.task {of}:NAME; unset it",
            )
            for setting, (of, settings) in zip(
                ("data.task_settings", "env.settings"), packaged.items(), strict=True
            )
        ),
        (
            package == "textarena" and not config.data.files and (env.path or env.tools),
            f"data.task={task} brings its own environment; unset env.path and env.tools",
        ),
        (
            (env.path or "").startswith("textarena:"),
            f"env.path={env.path}: a game is chosen as a task; set --data.task {env.path} instead",
        ),
        (
            env.path and env.tools,
            f"env.path={env.path} with env.tools: an environment runs its own tools; unset one",
        ),
        (
            env.format_reward and not env.tools,
            f"env.format_reward={env.format_reward:g} rewards tool calls, and there are no "
            "env.tools; name some",
        ),
        (
            rollout.max_context and not config.has_env,
            f"rollout.max_context={rollout.max_context} is only for environments and tools; "
            "set rollout.max_new_tokens",
        ),
        (
            rollout.lengths and config.has_env,
            "rollout.lengths fixes the length of responses, and an environment (env.path, "
            "env.tools, data.task) ends them; unset one",
        ),
        (
            env.network and "python" not in env.tools,
            "env.network is for the tool python, which env.tools does not have; unset it",
        ),
        *(
            (
                not config.has_env and getattr(env, name) != default,
                f"env.{name}={getattr(env, name)}: there is no environment; set env.path or "
                f"env.tools, or unset env.{name}",
            )
            for name, default in vars(type(env)()).items()
        ),
    ]


def of_adapters(config: Config) -> list[tuple[object, str]]:
    """Whether settings of adapters contradict each other or other settings, and what is said
    then."""
    value = config.value
    plain = LoraConfig()
    shares = f"value.share_base={value.share_base}"
    models = {"policy": config.policy, "value": value}
    unshared = {
        "value.layers": value.layers,
        "value.path": value.path != config.policy.path and value.path,
        "policy.offload": config.policy.offload == "all" and "all",
        "value.offload": value.offload == "all" and "all",
    }
    sets = {
        name: f"tensor_parallel={config.set_shape(name).tensor} and "
        f"sequence_parallel={config.set_shape(name).sequence}"
        for name in models
    }
    return [
        *(
            (
                not model.lora.rank and getattr(model.lora, name) != getattr(plain, name),
                f"{owner}.lora.{name}={getattr(model.lora, name)} without adapters: "
                f"set {owner}.lora.rank, or unset it",
            )
            for owner, model in models.items()
            for name in ("alpha", "targets", "path")
        ),
        *(
            (
                model.lora.rank and model.freeze,
                f"{owner}.freeze={' '.join(model.freeze)} with {owner}.lora.rank="
                f"{model.lora.rank}: LoRA already freezes everything but the adapters; "
                "unset one",
            )
            for owner, model in models.items()
        ),
        (
            value.share_base and not (config.policy.lora.rank and value.lora.rank),
            f"{shares} needs LoRA for both models; set policy.lora.rank and value.lora.rank",
        ),
        *(
            (
                value.share_base and setting,
                f"{shares} with {name}={setting}: policy and value model share one "
                "base, which stays on the GPU; unset one",
            )
            for name, setting in unshared.items()
        ),
        (
            value.share_base and sets["policy"] != sets["value"],
            f"{shares} with {sets['policy']} for the policy and {sets['value']} for the value "
            "model: a shared base is split only one way; leave value.tensor_parallel and "
            "value.sequence_parallel unset",
        ),
    ]


def of_critic(config: Config) -> list[tuple[object, str]]:
    """Whether settings of the critic contradict each other or other settings, and what is said
    then."""
    ppo = config.ppo
    value = config.value
    samples = config.rollout.samples
    lam_value = ppo.lam if ppo.lam_value is None else ppo.lam_value
    default = dict(leaves(asdict(Config())))
    return [
        (
            value.pretrain_steps > config.steps,
            f"value.pretrain_steps={value.pretrain_steps} is more than steps={config.steps}; "
            "raise steps",
        ),
        *(
            (
                ppo.baseline != "value" and setting != default[name],
                f"{name}={setting}: ppo.baseline={ppo.baseline} has no value model; unset {name}",
            )
            for name, setting in leaves(asdict(config))
            if name.startswith(OF_VALUES)
        ),
        (
            value.range and ppo.kl_coef > 0,
            f"value.range={value.range} with ppo.kl_coef={ppo.kl_coef:g}: "
            "a return that includes the KL has no bound; use ppo.kl_loss_coef, or unset "
            "value.range",
        ),
        (
            value.range and (ppo.gamma != 1 or lam_value != 1),
            f"value.range={value.range} needs undiscounted returns, but ppo.gamma={ppo.gamma:g}, "
            f"ppo.lam_value={lam_value}; set both to 1",
        ),
        (
            not config.has_value and ppo.lam == "adaptive",
            f"ppo.lam=adaptive: ppo.baseline={ppo.baseline} uses no values"
            f"{' where nothing is rewarded' * (ppo.baseline == 'value')}; use ppo.lam=1",
        ),
        (
            ppo.baseline == "group" and samples == 1,
            "ppo.baseline=group averages a prompt's other responses, and rollout.samples=1 "
            "leaves none; use rollout.samples=8, or ppo.baseline=batch",
        ),
        (
            ppo.baseline == "group" and config.rollout.window,
            f"ppo.baseline=group with rollout.window={config.rollout.window}: "
            "a prompt's responses end in different steps; use ppo.baseline=batch, or "
            "rollout.window=0",
        ),
    ]


def of_teacher(config: Config) -> list[tuple[object, str]]:
    """Whether settings of a teacher contradict each other or other settings, and what is said
    then."""
    teacher = config.teacher
    distill = config.distill
    unused = {"teacher": (teacher, type(teacher)()), "distill": (distill, type(distill)())}
    return [
        *(
            (
                not config.has_teacher and getattr(table, name) != default,
                f"{owner}.{name}={getattr(table, name)}: there is no teacher; set teacher.path, or "
                f"unset {owner}.{name}",
            )
            for owner, (table, plain) in unused.items()
            for name, default in vars(plain).items()
        ),
        (
            distill.divergence != "forward" and not distill.top_k,
            f"distill.divergence={distill.divergence} is over the teacher's most likely tokens; "
            "set distill.top_k 8",
        ),
        (
            teacher.prompt_key and config.has_env,
            f"teacher.prompt_key={teacher.prompt_key}: an environment (env.path, env.tools, "
            "data.task) writes the prompts for policy and teacher; unset one",
        ),
        (
            teacher.prompt_key and not config.data.files,
            f"teacher.prompt_key={teacher.prompt_key} is a column of data.files, and there are "
            "none; name some",
        ),
        (
            config.ppo.baseline == "value" and not config.has_value and config.value.pretrain_steps,
            f"value.pretrain_steps={config.value.pretrain_steps}: nothing is rewarded, so there is "
            "no value model to wait for; unset it",
        ),
    ]


def of_sets(config: Config) -> Iterator[tuple[object, str]]:
    """Contradictions, as in rules.py."""
    groups = {
        "reference": "policy" if config.placement.reference == "actor" else "value",
        "reward": "value",
        "teacher": "value",
    }
    for model, group in groups.items():
        shape = config.set_shape(model)
        least = config.set_shape(group)
        if model == "reward" and config.reward.sequence_parallel == 1:
            least = least._replace(sequence=1)
        yield (
            shape.size % least.size,
            f"{model}.tensor_parallel={shape.tensor} and sequence_parallel={shape.sequence} make "
            f"parallel groups of {shape.size} ranks, not a multiple of the {group}'s {least.size}; "
            "leave both unset",
        )
    for setting in ("tensor_parallel", "sequence_parallel"):
        size = getattr(config.reward, setting)
        yield (
            size and config.reward.model is None,
            f"reward.{setting}={size} splits a reward.model, and none is set; unset it",
        )
    for model, setting in (("policy", "fsdp"), ("value", "value")):
        ranks = config.set_shape(model).sequence
        yield (
            ranks > 1 and config.compute.packing == "off",
            f"{setting}.sequence_parallel={ranks} needs packed rows, but "
            "compute.packing=off; unset that",
        )
