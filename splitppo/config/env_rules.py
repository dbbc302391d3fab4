"""Rules between settings of rows with turns."""

from splitppo.config import Config


def of_environments(config: Config) -> list[tuple[object, str]]:
    """Whether two settings contradict each other, and what is said then."""
    env = config.env
    rollout = config.rollout
    return [
        (
            env.path and env.tools,
            f"env.path={env.path} with env.tools: an environment runs its own tools; unset one",
        ),
        (
            env.format_reward and not env.tools,
            f"env.format_reward={env.format_reward:g} rewards calls of env.tools, and there are "
            "none; name some",
        ),
        (
            rollout.max_context and not config.has_env,
            f"rollout.max_context={rollout.max_context} is for rows that env.path or env.tools "
            "answer; set rollout.max_new_tokens",
        ),
        (
            rollout.lengths and config.has_env,
            "rollout.lengths fixes the length of responses, and an environment (env.path, "
            "env.tools, data.task=guess) ends them; unset one",
        ),
    ]
