"""What each process of the tests would work out anew for each run: once for all here.

tyro takes 40 ms to make the flags of the settings, and the tests read 1,500 command lines. Trying
whether the embedded model runs on packed rows takes 30 ms for each of a run's models.
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


def keep_mismatches() -> None:
    """Of the embedded model, before any run."""
    from splitppo.models.probe import find_mismatch
    from splitppo.models.tiny import model_config
    from splitppo.run import models

    aside = ("_name_or_path", "architectures", "dtype")

    def shape(config: Any) -> dict[str, Any]:
        return {name: value for name, value in config.to_dict().items() if name not in aside}

    def kept_mismatch(config: Any, kind: Any, *, packed: bool, cut: bool = False) -> str:
        if not cut and (kind, packed) in _mismatches and shape(config) == tiny:
            return _mismatches[kind, packed]
        return find_mismatch(config, kind, packed=packed, cut=cut)

    tiny = shape(model_config())
    for kind in ("policy", "value"):
        _mismatches[kind, True] = find_mismatch(model_config(), kind, packed=True)
    models.find_mismatch = kept_mismatch
