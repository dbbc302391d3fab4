"""The steps of a run as its columns recorded them: what overlaps, the timeline of a step, the curves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from splitppo.errors import UserError
from splitppo.run.files import parse_record, read_lines

Span = tuple[str, float, float]  # name, start and end in seconds

SPAN_COLOURS = {
    "rollout": "#4878b8",
    "barrier_wait": "#a9c1dd",  # the rollout's, paler: other ranks of the group still generate
    "logprobs": "#3fa7a3",
    "update": "#e08a3c",
    "score": "#8a6bbf",
    "advantages": "#5aa454",
    "sync": "#d8b93a",
    "validate": "#cf6f9f",
    "checkpoint": "#97705a",
}
COLOURS = ("#2f6db3", "#d9722e", "#3c9a5f", "#b5486f", "#8a6bbf", "#97705a", "#2fa3b0", "#c2a11f", "#5c6773", "#e08fb0")
RASTER_STEPS = 6  # drawn, the last
OTHER_COLOUR = "#c94f4f"  # of a span that is not ours


@dataclass(frozen=True)
class Step:
    """What one column recorded of one step."""

    metrics: dict[str, float]
    spans: list[Span]
    calibration: Sequence[dict[str, float]] = ()
    slots: Sequence[Sequence[Sequence[int]]] = ()  # (row, tokens) that each of the first slots decoded

    @property
    def start(self) -> float:
        return min(start for _, start, _ in self.spans)

    @property
    def end(self) -> float:
        return max(end for _, _, end in self.spans)


Column = dict[int, Step]


def read_column(path: Path) -> Column:
    """The steps of a metrics file; {} without a file, since a colocated run may have the actor's alone. A resumed run
    does steps again: the last record of a step counts."""
    records = read_lines(path, parse_record) if path.is_file() else ()
    found = {}
    for r in records:
        numbers: dict[str, float] = {name: value for name, value in r.items() if isinstance(value, int | float)}
        found[r["step"]] = Step(numbers, r["spans"], r.get("critic/calibration", ()), r.get("slots", ()))
    return found


def read_columns(run: Path) -> tuple[Column, Column]:
    """The steps of the actor and of the critic."""
    return read_column(run / "metrics" / "actor.jsonl"), read_column(run / "metrics" / "critic.jsonl")


def is_wait(name: str) -> bool:
    """Whether a span is a wait for the other column."""
    return name.startswith("wait_")


def shared_work(actor_spans: Iterable[Span], critic_spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The intervals in which both columns are at work. Spans of one column don't overlap, so neither do these."""
    actor, critic = ([span for span in spans if not is_wait(span[0])] for spans in (actor_spans, critic_spans))
    cuts = [(max(a[1], c[1]), min(a[2], c[2])) for a in actor for c in critic]
    return sorted((start, end) for start, end in cuts if start < end)


def timed_steps(actor: Column, critic: Column) -> list[int]:
    """The steps that have spans, in order: in both columns, or in the actor's if none has them in both."""
    timed = sorted(number for number, step in actor.items() if step.spans)
    return [number for number in timed if number in critic and critic[number].spans] or timed


def choose_step(actor: Column, critic: Column, wanted: int | None = None) -> int | None:
    """The step to draw: the wanted one, or one of median duration among the last half; None if none has spans. If the
    wanted step has none, it is a UserError."""
    steps = timed_steps(actor, critic)
    if wanted is None:  # the first ones warm up
        late = sorted(steps[len(steps) // 2 :], key=lambda number: actor[number].end - actor[number].start)
        return late[(len(late) - 1) // 2] if late else None
    if wanted not in steps:
        known = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise UserError(f"--step {wanted} has no recorded spans; steps with spans: {known}: name one of them")
    return wanted


@dataclass(frozen=True)
class Timeline:
    """One step and its two neighbours, in seconds since the actor began the step. `shared`: work of both lanes at once
    within the step, whichever step the critic's work belongs to. In a steady run the critic's update of the step before
    runs under this rollout."""

    step: int
    length: float  # seconds of the actor's step
    lanes: dict[str, list[tuple[int, Span]]]  # lane -> its spans, each with the step that it belongs to
    shared: list[tuple[float, float]]

    def title(self) -> str:
        """The step, its seconds, and the overlap."""
        if not self.shared:  # also a colocated run that wrote both columns: they take turns
            return f"Step {self.step}: {seconds(self.length)}, in which nothing overlaps"
        both = sum(end - start for start, end in self.shared)
        share = f"{seconds(both)} of {seconds(self.length)} ({both / self.length:.0%})"
        return f"Step {self.step}: both columns worked at once for {share}"

    def view(self) -> tuple[float, float]:
        """The seconds to show: the step, a little before it, and its spans beyond the end (the critic's update ends in
        the next step), up to as long again."""
        last = max(end for spans in self.lanes.values() for step, (_, _, end) in spans if step == self.step)
        low = -0.06 if len(self.lanes) > 1 else -0.01
        return low * self.length, min(max(last + 0.05 * self.length, 1.02 * self.length), 2 * self.length)


def build_timeline(actor: Column, critic: Column, step: int) -> Timeline:
    """Lays out a step. Columns with the same spans are one column that was written twice (colocated)."""
    origin, length = actor[step].start, max(actor[step].end - actor[step].start, 1e-6)
    near = [
        [(n, (name, a - origin, b - origin)) for n in range(step - 1, step + 2) if n in c for name, a, b in c[n].spans]
        for c in (actor, critic)
    ]
    if step not in critic or critic[step].spans in ([], actor[step].spans):
        return Timeline(step, length, {"all ranks": near[0]}, [])
    inside = ([(name, max(a, 0.0), min(b, length)) for _, (name, a, b) in spans] for spans in near)
    return Timeline(step, length, {"actor": near[0], "critic": near[1]}, shared_work(*inside))


def raster(actor: Column) -> tuple[str, list[tuple[int, int]], list[list[tuple[str, int, int]]]]:
    """What the first slots decoded in the last steps, side by side: a title, (step, where it begins), and of each slot
    (colour, where it begins, tokens) for each row. A step is as wide as the most tokens that a slot decoded in it."""
    last = [number for number in sorted(actor) if actor[number].slots][-RASTER_STEPS:]
    begins, at = [], 0
    bars: list[list[tuple[str, int, int]]] = [[] for _ in range(max((len(actor[n].slots) for n in last), default=0))]
    order: list[dict[int, int]] = [{} for _ in bars]  # of each slot: row -> number
    for number in last:
        begins.append((number, at))
        for slot, rows in enumerate(actor[number].slots):
            ends = accumulate((tokens for _, tokens in rows), initial=at)
            for (row, tokens), start in zip(rows, ends, strict=False):
                colour = COLOURS[(3 * slot + order[slot].setdefault(row, len(order[slot]))) % len(COLOURS)]
                bars[slot].append((colour, start, tokens))
        at = max(start + tokens for rows in bars for _, start, tokens in rows[-1:])
    full = sum(tokens for rows in bars for *_, tokens in rows)
    return f"{len(bars)} slots, a colour a row: {full / max(1, at * len(bars)):.0%} busy", begins, bars


def seconds(value: float) -> str:
    """Seconds with as many digits as help."""
    return f"{value:.{1 if value >= 10 else 2 if value >= 0.1 else 3}f} s"


def curves(actor: Column, critic: Column) -> dict[str, dict[int, float]]:
    """The values of each metric by step. A critic's metric has `critic/` in front, also where its name lacks it."""
    found: dict[str, dict[int, float]] = {}
    for prefix, column in (("", actor), ("critic/", critic)):
        for number, step in sorted(column.items()):
            for name, value in step.metrics.items():
                found.setdefault(prefix + name.removeprefix(prefix), {})[number] = value
    return found
