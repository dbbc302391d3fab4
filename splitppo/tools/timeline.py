"""The steps of a run as its columns recorded them: reading them, what overlaps, the timeline of a step, the curves.

Reads RUN/metrics/{actor,critic}.jsonl (see metrics.py) and needs no torch.
"""

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from splitppo.errors import UserError

Span = tuple[str, float, float]  # name, start and end in seconds

SPAN_COLOURS = {"rollout": "#4878b8", "logprobs": "#3fa7a3", "update": "#e08a3c", "score": "#8a6bbf"}
SPAN_COLOURS |= {"advantages": "#5aa454", "sync": "#d8b93a", "validate": "#cf6f9f", "checkpoint": "#97705a"}
SPAN_COLOURS |= {"stragglers": "#a9c1dd"}  # the rollout's, paler: it goes on elsewhere in the group
OTHER_COLOURS = ("#c94f4f", "#6f8f2f", "#3d9bd1", "#b08ad0", "#a8763e", "#5f7f95")


@dataclass(frozen=True)
class Step:
    """What one column recorded of one step."""

    metrics: dict[str, float]
    spans: list[Span]


Column = dict[int, Step]


def read_column(path: Path) -> Column:
    """The steps of a metrics file, none without a file: a colocated run may have the actor's alone. A step that a
    resumed run did again counts as it was done last."""
    column: Column = {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            spans = [(str(name), float(start), float(end)) for name, start, end in record.get("spans", [])]
            numbers = {k: float(v) for k, v in record.items() if isinstance(v, int | float)}  # some are lists
            if not all(math.isfinite(end - start) and math.isfinite(start) for _, start, end in spans):
                raise ValueError("a span that never begins or ends")
            column[int(record["step"])] = Step(numbers, spans)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError) and number == len(lines):  # killed as it wrote, or writing now
                print(f"note: {path}:{number} is torn and was skipped", file=sys.stderr)
                break
            rule = "a line must be a JSON object of `step`, numbers and `spans` (only the last may be torn)"
            raise UserError(f"{path}:{number}: {line[:40]!r} is no step; {rule}: mend or remove that line") from error
    return column


def shared_work(actor_spans: Iterable[Span], critic_spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The intervals in which both columns are at work. Spans of one column don't overlap, so neither do these."""
    actor, critic = ([s for s in spans if not s[0].startswith("wait_")] for spans in (actor_spans, critic_spans))
    cuts = [(max(a[1], c[1]), min(a[2], c[2])) for a in actor for c in critic]
    return sorted((start, end) for start, end in cuts if start < end)


def overlap(actor_spans: Iterable[Span], critic_spans: Iterable[Span]) -> float:
    """Seconds in which both columns are in a span that is no wait."""
    return sum(end - start for start, end in shared_work(actor_spans, critic_spans))


def duration(step: Step) -> float:
    """Seconds from the first span's start to the last one's end."""
    return max(end for _, _, end in step.spans) - min(start for _, start, _ in step.spans)


def timed_steps(actor: Column, critic: Column) -> list[int]:
    """The steps that have spans, in order: in both columns, or in the actor's if none has them in both."""
    timed = sorted(number for number, step in actor.items() if step.spans)
    return [number for number in timed if number in critic and critic[number].spans] or timed


def choose_step(actor: Column, critic: Column, wanted: int | None = None, flag: str = "--step") -> int | None:
    """The step to draw: the wanted one, or one of median duration among the last half; None if none has spans.

    Raises:
        UserError: the wanted step, which `flag` named, has no spans.
    """
    steps = timed_steps(actor, critic)
    if wanted is not None:
        if wanted not in steps:
            known = f"{steps[0]} to {steps[-1]}" if steps else "none"
            raise UserError(f"{flag} {wanted} has no recorded spans; steps with spans: {known}: name one of them")
        return wanted
    if not steps:
        return None
    late = sorted(steps[len(steps) // 2 :], key=lambda number: duration(actor[number]))  # the first ones warm up
    return late[(len(late) - 1) // 2]


@dataclass(frozen=True)
class Timeline:
    """One step and its two neighbours, in seconds since the actor began the step."""

    step: int
    length: float
    lanes: dict[str, list[tuple[int, Span]]]
    """By lane: the spans with the step that they belong to."""
    shared: list[tuple[float, float]]
    """Work of both lanes at once within the step, whichever step the critic's work belongs to: in a steady run the
    update of the step before is under this rollout, as this step's update is under the next one."""

    def title(self) -> str:
        """The step, its seconds, and the overlap."""
        if not self.shared:  # also a colocated run that wrote both columns: they take turns
            return f"Step {self.step}: {seconds(self.length)}, in which nothing overlaps"
        both = sum(end - start for start, end in self.shared)
        share = f"{seconds(both)} of {seconds(self.length)} ({both / self.length:.0%})"
        return f"Step {self.step}: both columns worked at once for {share}"

    def view(self) -> tuple[float, float]:
        """The seconds to show: the step, a little before it, and what it has beyond its end (the critic's update ends
        in the next step), up to as long again."""
        last = max(end for spans in self.lanes.values() for step, (_, _, end) in spans if step == self.step)
        low = -0.06 if len(self.lanes) > 1 else -0.01
        return low * self.length, min(max(last + 0.05 * self.length, 1.02 * self.length), 2 * self.length)


def build_timeline(actor: Column, critic: Column, step: int) -> Timeline:
    """Lay out a step. Columns with the same spans are one column that was written down twice (colocated)."""
    origin, length = min(start for _, start, _ in actor[step].spans), max(duration(actor[step]), 1e-6)
    near: list[list[tuple[int, Span]]] = [
        [(n, (name, a - origin, b - origin)) for n in range(step - 1, step + 2) if n in c for name, a, b in c[n].spans]
        for c in (actor, critic)
    ]
    if step not in critic or critic[step].spans in ([], actor[step].spans):
        return Timeline(step, length, {"all ranks": near[0]}, [])
    inside = ([(name, max(a, 0.0), min(b, length)) for _, (name, a, b) in spans] for spans in near)
    return Timeline(step, length, {"actor": near[0], "critic": near[1]}, shared_work(*inside))


def span_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each span name, known or not."""
    return dict(zip(sorted(set(names) - SPAN_COLOURS.keys()), cycle(OTHER_COLOURS), strict=False)) | SPAN_COLOURS


def seconds(value: float) -> str:
    """Seconds with as many digits as help."""
    return f"{value:.{1 if value >= 10 else 2 if value >= 0.1 else 3}f} s"


def curves(actor: Column, critic: Column) -> dict[str, dict[int, float]]:
    """The values of each metric by step. A colocated run may write the critic's metrics into actor.jsonl: the column
    is in the name, and put there where both columns have a metric."""
    found: dict[str, dict[int, float]] = {}
    for prefix, column in (("", actor), ("critic/", critic)):
        for number, step in sorted(column.items()):
            for name, value in step.metrics.items():
                found.setdefault(prefix + name.removeprefix(prefix), {})[number] = value
    return found
