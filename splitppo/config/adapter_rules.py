"""Rules for LoRA (`policy.lora`, `value.lora`, `value.share_base`), part of those of rules.py."""

from splitppo.config import Config, LoraConfig


def of_adapters(config: Config) -> list[tuple[object, str]]:
    """Whether settings of adapters contradict each other or other settings, and what is said
    then."""
    value = config.value
    plain = LoraConfig()
    shares = f"value.share_base={value.share_base}"
    models = {"policy": config.policy, "value": value}
    unshared = {
        "value.ensemble": value.ensemble > 1 and value.ensemble,
        "value.layers": value.layers,
        "value.path": value.path != config.policy.path and value.path,
        "value.random_init": value.random_init,
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
                f"{model.lora.rank}: adapters are trained, and all else is frozen anyway; "
                "unset one",
            )
            for owner, model in models.items()
        ),
        (
            value.share_base and not (config.policy.lora.rank and value.lora.rank),
            f"{shares} needs adapters of both models; set policy.lora.rank and value.lora.rank",
        ),
        *(
            (
                value.share_base and setting,
                f"{shares} with {name}={setting}: policy and value model have one "
                "base, which stays on the device; unset one",
            )
            for name, setting in unshared.items()
        ),
        (
            value.share_base and sets["policy"] != sets["value"],
            f"{shares} with {sets['policy']} for the policy and {sets['value']} for the value "
            "model: one base is cut one way; leave value.tensor_parallel and "
            "value.sequence_parallel unset",
        ),
    ]
