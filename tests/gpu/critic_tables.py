"""The tables of critic_block.py: scores with 95 % intervals, and the tests of the plan."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import atan, cos, isfinite, pi, sqrt
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

from critic_plan import AFTER, ARMS, DIGITS, EQUAL, EXPLAINED, SETTINGS, TASKS, Task
from critic_tasks import quotas


def read_lines(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line, which says what was run and where; and the runs."""
    first, *runs = map(json.loads, file.read_text().splitlines())
    # the first block's line has neither
    sums = {f"addition_{count}": size for count, size in quotas(DIGITS).items()}
    return {"task": "sums", "held_out": sums} | first, runs


def read_all(
    files: list[Path], arms: list[str] | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """As `read_lines`, of several files: the first one's plan, the fresh seeds of all. Without
    `arms` those of the first file."""
    first, runs = read_lines(files[0])
    kept = arms or {run["arm"] for run in runs}
    for file in files[1:]:
        more, others = read_lines(file)
        first["seeds"] = sorted({*first["seeds"], *more["seeds"]})
        runs += [run for run in others if run["seed"] in more["seeds"]]
    return first, [run for run in runs if run["arm"] in kept]


def mean_over_steps(run: dict[str, Any], column: int = 1) -> float:
    """Mean held-out score over the updates, by the trapezoid rule."""
    points = [(float(line[0]), line[column]) for line in run["held_out"]]
    return mean_of_curve(points, points[-1][0])


def mean_over_tokens(run: dict[str, Any], budget: float, column: int = 1) -> float:
    """Mean held-out score while so many tokens were sampled, by the trapezoid rule."""
    tokens = [0.0]
    for count in run["tokens"]:
        tokens.append(tokens[-1] + count)
    return mean_of_curve([(tokens[line[0]], line[column]) for line in run["held_out"]], budget)


def mean_of_curve(points: list[tuple[float, float]], end: float) -> float:
    """Mean height of a line through the points, from 0 to `end`."""
    area = 0.0
    for (x, y), (next_x, next_y) in pairwise(points):
        width = min(next_x, end) - x
        if width > 0:
            area += (y + (next_y - y) * width / (next_x - x) / 2) * width
    return area / end


def best_rate(runs: Iterable[dict[str, Any]]) -> str | None:
    """The rate with the highest mean held-out score over the updates, over the seeds that chose it;
    of equal ones the lower."""
    by_rate: dict[str, list[float]] = {}
    for run in runs:
        by_rate.setdefault(run["rate"], []).append(mean_over_steps(run))
    return max(sorted(by_rate, key=float), key=lambda rate: fmean(by_rate[rate]), default=None)


# ---- intervals and tests


def student_p(t: float, freedom: float) -> float:
    """Two-sided p of Student's t: with tan(x) = t / sqrt(freedom) its density is that of
    cos(x)^(freedom - 1)."""

    def area(start: float, end: float, pieces: int = 2000) -> float:
        width = (end - start) / pieces
        middles = (start + (piece + 0.5) * width for piece in range(pieces))
        return width * sum(cos(x) ** (freedom - 1) for x in middles)

    at = atan(abs(t) / sqrt(freedom))
    beyond = area(at, pi / 2)
    return beyond / (area(0.0, at) + beyond)


@cache
def student_limit(freedom: float) -> float:
    """The t whose two-sided p is .05."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, freedom) > 0.05 else (low, middle)
    return low


@dataclass(frozen=True)
class Estimate:
    """A mean with half the width of its 95 % interval. `p`: two-sided, of a mean of 0."""

    mean: float
    half: float
    p: float
    n: int

    def __str__(self) -> str:
        return f"{number(self.mean)} ± {number(self.half)}" if isfinite(self.half) else "-"


def number(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"


def estimate(values: list[float]) -> Estimate:
    """Of independent values, by Student's t."""
    n = len(values)
    if n < 2:
        return Estimate(values[0] if values else 0.0, float("inf"), 1.0, n)
    mean = fmean(values)
    error = stdev(values) / sqrt(n)
    p = student_p(mean / error, n - 1) if error else float(not mean)
    return Estimate(mean, student_limit(n - 1) * error, p, n)


def difference(first: dict[int, float], second: dict[int, float], *, paired: bool) -> Estimate:
    """Mean of the first less mean of the second, values by seed: of the seeds that both have, or by
    Welch's test."""
    if paired:
        return estimate([first[seed] - second[seed] for seed in sorted(first.keys() & second)])
    a, b = list(first.values()), list(second.values())
    n = min(len(a), len(b))
    parts = [variance(values) / len(values) for values in (a, b) if len(values) > 1]
    error = sqrt(sum(parts))
    if len(parts) < 2 or not error:
        return Estimate(0.0, float("inf"), 1.0, n)
    freedom = error**4 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    mean = fmean(a) - fmean(b)
    return Estimate(
        mean, student_limit(freedom) * error, student_p(mean / error, freedom), min(len(a), len(b))
    )


def holm(ps: list[float]) -> list[float]:
    """Holm's adjusted p-values, in the same order."""
    adjusted = [0.0] * len(ps)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = highest
    return adjusted


def verdict(result: Estimate) -> str:
    """What the plan lets the primary question say."""
    low, high = result.mean - result.half, result.mean + result.half
    near = f"within {EQUAL}" if max(-low, high) < EQUAL else ""
    if low <= 0 <= high:
        return f"as good, {near}" if near else "not decided"
    return f"{'first' if low > 0 else 'second'} better" + (f", but {near}" if near else "")


# ---- the tables

Runs = dict[str, dict[int, dict[str, Any]]]  # arm -> seed -> run
Measure = dict[str, dict[int, float]]  # arm -> seed -> value
Table = list[list[str]]  # the first line has the heads
Of = Callable[[dict[str, Any]], float]  # what is measured of a run


def tables(first: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Table]:
    """All tables of the page by title, of the lines of runs.jsonl."""
    task = TASKS[first["task"]]
    by_arm: Runs = {arm: {} for arm in ARMS}
    for run in runs:
        if run["seed"] in first["seeds"]:
            by_arm[run["arm"]][run["seed"]] = run
    by_arm = {arm: seeds for arm, seeds in by_arm.items() if seeds}
    main = {arm: seeds for arm, seeds in by_arm.items() if not ARMS[arm].like}
    searched = [run for run in runs if run["seed"] in first["rate_seeds"]]
    parts: dict[str, Table] = {}
    if searched:
        parts["Rates: held-out score, mean over the updates, each seed"] = rate_table(searched)
    if not main:
        return parts
    budget = budget_of(main)
    measures = [measure(main, of) for of in measures_of(budget)]
    name = f"Held-out score, mean of the seeds ± 95 % interval; equal tokens: {budget:,.0f}"
    parts[name] = arm_table(main, measures)
    parts["Differences, with 95 % intervals"] = difference_table(task, measures)
    sources = {
        f"{source.removeprefix('addition_')} ({size}{task.unit})": 2 + column
        for column, (source, size) in enumerate(first["held_out"].items())
    }
    if len(sources) > 1:
        parts["By kind of row, mean over equal tokens; at the end"] = source_table(
            main, budget, sources
        )
    parts["Explained variance, mean of the seeds ± 95 % interval"] = explained_table(
        task, by_arm, first["rows"]
    )
    parts["Each seed: held-out, mean over equal tokens"] = seed_table(measures[0])
    settings = {arm: seeds for arm, seeds in by_arm.items() if ARMS[arm].like}
    if settings and "V1" in by_arm:
        parts["Settings of the value model"] = setting_table(settings, by_arm["V1"])
    return parts


def printed(first: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    parts = [f"Plan: commit {first['plan']}. {first['machine']}. {len(runs)} runs."]
    for title, (heads, *rows) in tables(first, runs).items():
        lines = [heads, ["---"] * len(heads), *rows]
        parts += [f"## {title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join(parts)


def budget_of(arms: Runs) -> float:
    """The fewest tokens that a run of these has sampled."""
    return float(min(sum(run["tokens"]) for seeds in arms.values() for run in seeds.values()))


def measures_of(budget: float) -> tuple[Of, Of, Of]:
    """Held-out score: mean over so many tokens, mean over the updates, at the end."""
    return (
        lambda run: mean_over_tokens(run, budget),
        mean_over_steps,
        lambda run: run["held_out"][-1][1],
    )


def measure(arms: Runs, of: Of) -> Measure:
    return {arm: {seed: of(run) for seed, run in seeds.items()} for arm, seeds in arms.items()}


def rate_table(runs: list[dict[str, Any]]) -> Table:
    rates = sorted({run["rate"] for run in runs}, key=float)
    table = [["advantages from", *rates, "best"]]
    for arm in ARMS:
        if mine := [run for run in runs if run["arm"] == arm]:
            scores = [
                " ".join(number(mean_over_steps(run)) for run in mine if run["rate"] == rate)
                for rate in rates
            ]
            table.append([ARMS[arm].title, *scores, str(best_rate(mine))])
    return table


def arm_table(arms: Runs, columns: list[Measure]) -> Table:
    heads = ["advantages from", "policy rate", "seeds", "equal tokens", "equal updates"]
    table = [[*heads, "at the end", "score over training", "1,000 tokens sampled"]]
    for arm, seeds in arms.items():
        runs = list(seeds.values())
        trained = estimate([fmean(run["score"]) for run in runs])
        tokens = fmean(sum(run["tokens"]) for run in runs) / 1000
        cells = [str(estimate(list(column[arm].values()))) for column in columns]
        rates = " ".join(sorted({run["rate"] for run in runs}))
        counts = [rates, str(len(runs))]
        table.append([ARMS[arm].title, *counts, *cells, str(trained), f"{tokens:.0f}"])
    return table


def source_table(arms: Runs, budget: float, sources: dict[str, int]) -> Table:
    """`sources`: head -> where a held-out line has its score."""
    table = [["advantages from", *sources]]
    for arm, seeds in arms.items():
        cells = []
        for column in sources.values():
            over = estimate([mean_over_tokens(run, budget, column) for run in seeds.values()])
            end = estimate([run["held_out"][-1][column] for run in seeds.values()])
            cells.append(f"{over}; {end}")
        table.append([ARMS[arm].title, *cells])
    return table


def is_paired(first: str, second: str) -> bool:
    """Whether runs of one seed have the same prompts: those with as many responses."""
    return ARMS[first].flags[:2] == ARMS[second].flags[:2]


def difference_table(task: Task, measures: list[Measure]) -> Table:
    """The primary question, and the others with Holm's correction."""
    pairs = [pair for pair in (task.primary, *task.secondary) if {*pair} <= measures[0].keys()]
    results = [
        [
            difference(values[first], values[second], paired=is_paired(first, second))
            for values in measures
        ]
        for first, second in pairs
    ]
    others = [index for index, pair in enumerate(pairs) if pair != task.primary]
    corrected = holm([results[index][0].p for index in others])
    p = {index: result[0].p for index, result in enumerate(results)}
    p |= dict(zip(others, corrected, strict=True))
    heads = ["difference", "seeds", "equal tokens", "p", "equal updates", "at the end"]
    table = [[*heads, "by the plan"]]
    for index, (pair, result) in enumerate(zip(pairs, results, strict=True)):
        name = " - ".join(f"`{arm}`" for arm in pair) + ("" if is_paired(*pair) else " (Welch)")
        said = verdict(result[0]) if pair == task.primary else "by Holm's correction"
        cells = [str(result[0]), f"{p[index]:.2g}", *map(str, result[1:])]
        table.append([name, str(result[0].n), *cells, said])
    return table


def explained_table(task: Task, arms: Runs, rows_a_step: int) -> Table:
    """Means over three steps around the one after so many rows."""
    explained = {
        arm: kept
        for arm, seeds in arms.items()
        if (kept := [run["explained"] for run in seeds.values() if run["explained"]])
    }
    table = [["", *(f"`{arm}`" for arm in explained)]]
    for place in task.explained:
        for rows in AFTER:
            step = round(rows / rows_a_step)
            near = slice(max(0, step - 2), step + 1)
            cells = [
                str(estimate([fmean(part) for run in kept if (part := run.get(place, [])[near])]))
                for kept in explained.values()
            ]
            table.append([f"{EXPLAINED[place]}, {rows:,} rows", *cells])
    return table


def seed_table(equal: Measure) -> Table:
    seeds = sorted({seed for values in equal.values() for seed in values})
    table = [["", *map(str, seeds)]]
    for arm, values in equal.items():
        cells = [number(values[seed]) if seed in values else "-" for seed in seeds]
        table.append([f"`{arm}`", *cells])
    return table


def setting_table(settings: Runs, default: dict[int, dict[str, Any]]) -> Table:
    heads = ["less rate 1e-4, lambda 1", "seeds", "equal tokens", "p (Holm)", "equal updates"]
    table = [[*heads, "at the end", "1,000 tokens sampled"]]
    results = []
    for arm, seeds in settings.items():
        both = {"V1": default, arm: seeds}
        values = [measure(both, of) for of in measures_of(budget_of(both))]
        results.append([difference(one[arm], one["V1"], paired=True) for one in values])
    corrected = holm([result[0].p for result in results])
    for (arm, seeds), (tokens, *others), p in zip(
        settings.items(), results, corrected, strict=True
    ):
        sampled = fmean(sum(run["tokens"]) for run in seeds.values()) / 1000
        cells = [str(tokens.n), str(tokens), f"{p:.2g}", *map(str, others), f"{sampled:.0f}"]
        table.append([f"`{arm}`: {SETTINGS[arm][0]}", *cells])
    return table
