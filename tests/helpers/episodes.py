"""Episodes from plain lists."""

from array import array
from collections.abc import Sequence
from itertools import groupby, islice

from splitppo.rollout import IDS, LOGPROBS, End, Episode, Segment


def episode(
    row: int,
    prompt: Sequence[int],
    response: Sequence[int],
    logprobs: Sequence[float] = (),
    end: End | None = "eos",
    *,
    mask: Sequence[bool] = (),
    steps: Sequence[int] = (),
) -> Episode:
    """Of each id of the response, `mask` says whether the policy sampled it (if empty: all), and
    `steps` in which step. Where one of them changes, a segment begins."""
    left = iter(response)
    given = iter(logprobs)
    kinds = zip(mask or [True] * len(response), steps or [0] * len(response), strict=True)
    segments = []
    for (sampled, step), part in groupby(kinds):
        ids = array(IDS, [next(left) for _ in part])
        own = array(LOGPROBS, islice(given, len(ids))) if sampled else None
        segments.append(Segment(ids, own, step))
    return Episode(row, array(IDS, prompt), tuple(segments), end)
