"""Rules of sets: the ranks that run a model's rows together."""

from collections.abc import Iterator

from splitppo.config import Config


def of_sets(config: Config) -> Iterator[tuple[object, str]]:
    """Contradictions, as in rules.py."""
    tensor = config.tensor_parallel
    sequence = config.sequence_parallel
    groups = {
        "reference": "policy" if config.placement.reference == "actor" else "value",
        "reward": "value",
    }
    for model, group in groups.items():
        alone = model == "reward" and config.reward.sequence_parallel == 1
        pieces = (sequence(model), 1 if alone else sequence(group))
        size = tensor(model) * pieces[0]
        least = tensor(group) * pieces[1]
        what = f"{model}.tensor_parallel={tensor(model)}"
        remedy = "leave it unset"
        if max(pieces) > 1:
            what += f" and sequence_parallel={pieces[0]} make sets of {size} ranks, which"
            remedy = "leave both unset"
        yield size % least, f"{what} is no multiple of the {group}'s, {least}; {remedy}"
    for setting in ("tensor_parallel", "sequence_parallel"):
        size = getattr(config.reward, setting)
        yield (
            size and config.reward.model is None,
            f"reward.{setting}={size} cuts a reward.model, and none is set; unset it",
        )
    for model, setting in (("policy", "fsdp"), ("value", "value")):
        yield (
            sequence(model) > 1 and config.compute.packing == "off",
            f"{setting}.sequence_parallel={sequence(model)} cuts packed rows, and "
            "compute.packing=off; leave that unset",
        )
