"""Rules of sets: the ranks that run a model's rows together."""

from collections.abc import Iterator

from splitppo.config import Config


def of_sets(config: Config) -> Iterator[tuple[object, str]]:
    """Contradictions, as in rules.py."""
    groups = {
        "reference": "policy" if config.placement.reference == "actor" else "value",
        "reward": "value",
    }
    for model, group in groups.items():
        own = config.set_shape(model)
        least = config.set_shape(group)
        if model == "reward" and config.reward.sequence_parallel == 1:
            least = least._replace(sequence=1)
        what = f"{model}.tensor_parallel={own.tensor}"
        remedy = "leave it unset"
        if max(own.sequence, least.sequence) > 1:
            what += f" and sequence_parallel={own.sequence} make sets of {own.size} ranks, which"
            remedy = "leave both unset"
        yield (
            own.size % least.size,
            f"{what} is no multiple of the {group}'s, {least.size}; {remedy}",
        )
    for setting in ("tensor_parallel", "sequence_parallel"):
        size = getattr(config.reward, setting)
        yield (
            size and config.reward.model is None,
            f"reward.{setting}={size} cuts a reward.model, and none is set; unset it",
        )
    for model, setting in (("policy", "fsdp"), ("value", "value")):
        ranks = config.set_shape(model).sequence
        yield (
            ranks > 1 and config.compute.packing == "off",
            f"{setting}.sequence_parallel={ranks} cuts packed rows, and "
            "compute.packing=off; leave that unset",
        )
