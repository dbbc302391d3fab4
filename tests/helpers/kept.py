"""What each process of the tests would work out anew for each run: once for all here.

tyro takes 40 ms to make the flags of the settings, and the tests read 1,500 command lines. Trying
whether the embedded model runs on packed rows takes 30 ms for each of a run's models, and what the
model holds another 20.
"""

from typing import Any

from tyro import _parsers

from splitppo.config import Config

_flags_of: Any = _parsers.ParserSpecification.from_callable_or_type
_flags: list[Any] = []
_mismatches: dict[tuple, str] = {}


def _kept_flags(wanted: Any, **how: Any) -> Any:
    if wanted is not Config:
        return _flags_of(wanted, **how)
    if not _flags:
        _flags.append(_flags_of(wanted, **how))
    return _flags[0]


def keep_flags() -> None:
    _parsers.ParserSpecification.from_callable_or_type = staticmethod(_kept_flags)  # pyright: ignore


def shape(config: Any) -> dict[str, Any]:
    aside = ("_name_or_path", "architectures", "dtype")
    return {name: value for name, value in config.to_dict().items() if name not in aside}


def keep_costs() -> None:
    """Of the embedded model, trained whole and not at all, before any run."""
    from torch import float32

    from splitppo.models.tiny import model_config
    from splitppo.models.trainable import NotTrained, Trainable
    from splitppo.run import models, resolve

    tiny = shape(model_config())

    def once(function: Any) -> Any:
        made: dict[Any, Any] = {}

        def kept(config: Any, trainable: Any, *rest: Any, **named: Any) -> Any:
            if type(trainable) not in (Trainable, NotTrained) or shape(config) != tiny:
                return function(config, trainable, *rest, **named)
            key = (type(trainable), trainable, *rest, *named.items())
            if key not in made:
                made[key] = function(config, trainable, *rest, **named)
            return made[key]

        return kept

    models.count = once(models.count)
    resolve.cost_of = once(resolve.cost_of)
    how = {"compiled": False, "shared": False}
    for trainable in (Trainable("policy"), Trainable("value"), NotTrained("policy")):
        counts = models.count(model_config(), trainable)
        resolve.cost_of(model_config(), trainable, counts, float32, **how)


def keep_mismatches() -> None:
    """Of the embedded model, before any run."""
    from splitppo.models.probe import find_mismatch
    from splitppo.models.tiny import model_config
    from splitppo.run import models

    def kept_mismatch(config: Any, kind: Any, *, packed: bool, cut: bool = False) -> str:
        if not cut and (kind, packed) in _mismatches and shape(config) == tiny:
            return _mismatches[kind, packed]
        return find_mismatch(config, kind, packed=packed, cut=cut)

    tiny = shape(model_config())
    for kind in ("policy", "value"):
        _mismatches[kind, True] = find_mismatch(model_config(), kind, packed=True)
    models.find_mismatch = kept_mismatch
