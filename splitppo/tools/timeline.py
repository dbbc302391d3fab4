"""A step as a report draws it: what each column did. Needs no torch."""

from collections.abc import Iterable
from typing import NamedTuple

from splitppo.tools.runs import COLOURS, Column, Span, seconds

# its name; step, name, start and end of spans
Lane = tuple[str, list[tuple[int, str, float, float]]]

SPANS = "rollout update advantages validate score checkpoint logprobs sync barrier_wait"
SPAN_COLOURS: dict[str, str] = dict(zip(SPANS.split(), COLOURS, strict=False))
OTHER_COLOUR = "#c94f4f"  # of a span that is not ours
WAIT = "wait_"  # begins the name of a wait for the other column


class Timeline(NamedTuple):
    """One step and its neighbours as they are drawn, in seconds since the actor began the step."""

    step: int
    title: str
    length: float  # of the actor's step
    view: tuple[float, float]
    lanes: list[Lane]  # the spans in view
    # work of both lanes at once within the step, whichever step the critic's is of
    shared: list[tuple[float, float]]


def shared_work(
    actor_spans: Iterable[Span], critic_spans: Iterable[Span]
) -> list[tuple[float, float]]:
    """The intervals in which both columns are at work. Spans of one column don't overlap, so
    neither do these."""
    actor, critic = (
        [s for s in spans if not s[0].startswith(WAIT)] for spans in (actor_spans, critic_spans)
    )
    cuts = [(max(a[1], c[1]), min(a[2], c[2])) for a in actor for c in critic]
    return sorted((start, end) for start, end in cuts if start < end)


def timed_steps(actor: Column, critic: Column) -> list[int]:
    """The steps that have spans in both columns, in order."""
    return sorted(n for n in actor.keys() & critic.keys() if actor[n].spans and critic[n].spans)


def build_timeline(actor: Column, critic: Column, step: int) -> Timeline:
    """Lays out a step. The view has its spans beyond its end, up to as long again: the critic's
    update ends in the next step."""
    origin, end = actor[step].ends()
    length = max(end - origin, 1e-6)

    def near(column: Column) -> list[tuple[int, str, float, float]]:
        return [
            (number, name, round(start - origin, 6), round(end - origin, 6))
            for number in range(step - 1, step + 2)
            if number in column
            for name, start, end in column[number].spans
        ]

    lanes: list[Lane] = [("actor", near(actor)), ("critic", near(critic))]
    shared = shared_work(
        *([(name, max(a, 0.0), min(b, length)) for _, name, a, b in spans] for _, spans in lanes)
    )
    both = sum(b - a for a, b in shared)
    title = (
        f"both groups worked at the same time for {seconds(both)} of {seconds(length)} "
        f"({both / length:.0%})"
        if shared
        else f"{seconds(length)}, in which nothing overlaps"
    )
    last = max(b for _, spans in lanes for n, _, _, b in spans if n == step)
    low = -0.06 * length
    high = min(max(last + 0.05 * length, 1.02 * length), 2 * length)
    return Timeline(
        step,
        title=f"Step {step}: {title}",
        length=length,
        view=(low, high),
        lanes=[
            (lane, [bar for bar in spans if bar[2] < high and bar[3] > low])
            for lane, spans in lanes
        ],
        shared=shared,
    )
