"""tyro works out the flags of the settings for each command line anew, in 40 ms. The tests read 1,500 of them, so one
process does it once."""

from typing import Any

from tyro import _parsers

from splitppo.config import Config

_of: Any = _parsers.ParserSpecification.from_callable_or_type
_kept: list[Any] = []


def _flags_of(wanted: Any, **how: Any) -> Any:
    if wanted is not Config:
        return _of(wanted, **how)
    if not _kept:
        _kept.append(_of(wanted, **how))
    return _kept[0]


def keep_flags() -> None:
    _parsers.ParserSpecification.from_callable_or_type = staticmethod(_flags_of)  # pyright: ignore
