"""What a comparison of placements found: a job's figures, the table, the ratios, the picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from splitppo.tools.timeline import span_colours


@dataclass(frozen=True)
class Result:
    """A job's figures, means of its measured steps.

    Attributes:
        tokens_s: tokens of prompts and responses a second, of the whole job. step_s: seconds a step; steps_s: of each.
        predicted_s: a step's seconds by the cost model, from the colocated job's phases.
        phases: seconds of each span, by role. idle: share of the time in which a group waited, by role.
        tflops: model FLOPs (6 N a token) of the update, in 10^12 a second and rank, by role; mfu: of the GPU's peak.
        memory_gib: most memory allocated on the first rank of a group, by role.
        wire_mb, wire_s: what crossed at the first rank of a group, by role.
        padding: share of the update's tokens that are padding; imbalance: by how much the rank with the most tokens has
            more than the mean, by role. mismatch: of the engine's and the trainer's log-probs, mean.
        start_s: from the command to the first rollout.
    """

    job: str
    tokens_s: float
    step_s: float
    steps_s: list[float]
    predicted_s: float | None
    phases: dict[str, dict[str, float]]
    idle: dict[str, float]
    tflops: dict[str, float]
    mfu: dict[str, float]
    memory_gib: dict[str, float]
    wire_mb: dict[str, float]
    wire_s: dict[str, float]
    padding: dict[str, float]
    imbalance: dict[str, float]
    mismatch: float
    start_s: float


def table(results: list[Result]) -> str:
    """The comparison as it is printed."""
    head = ("job", "tokens/s", "s/step", "from-to", "model", "rollout", "update", "value upd.", "idle a/c", "MFU a/c")
    base = next((result for result in results if result.job == "colocated"), results[0])
    lines: list[tuple[str, ...]] = [(*head, "ratio")]
    for result in results:
        mfu = "/".join(f"{result.mfu[role]:.0%}" for role in ("actor", "critic")) if result.mfu else "-"
        lines.append(
            (
                result.job,
                f"{result.tokens_s:,.0f}",
                f"{result.step_s:.2f}",
                f"{min(result.steps_s):.2f}-{max(result.steps_s):.2f}",
                f"{result.predicted_s:.2f}" if result.predicted_s else "-",
                f"{sum(result.phases['actor'].get(name, 0.0) for name in ('rollout', 'stragglers')):.2f}",
                f"{result.phases['actor'].get('update', 0.0):.2f}",
                f"{result.phases['critic'].get('update', 0.0):.2f}",
                "/".join(f"{result.idle[role]:.0%}" for role in ("actor", "critic")),
                mfu,
                f"{result.tokens_s / base.tokens_s:.2f}x",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def ratios(results: list[Result]) -> list[str]:
    """The best split against the colocated job and against the split with a barrier."""
    free = [r for r in results if r.job != "colocated" and not r.job.endswith("/barrier")]
    if not free:
        return []
    best = max(free, key=lambda result: result.tokens_s)
    told = []
    for other in results:
        if other.job == "colocated" or other.job.endswith("/barrier"):
            told.append(f"{best.job} against {other.job}: {best.tokens_s / other.tokens_s:.2f}x tokens/s")
    return told


def draw(results: list[Result], path: Path) -> None:
    """A bar for each job's columns, its phases end to end."""
    figure = Figure(figsize=(9, 0.6 + 0.7 * len(results)))
    ax = figure.subplots()
    names = list(dict.fromkeys(n for r in results for part in r.phases.values() for n in part if n != "step"))
    colours = span_colours(name for name in names if not name.startswith("wait_"))
    for i, result in enumerate(results):
        for offset, role in ((0.2, "actor"), (-0.2, "critic")):
            at = 0.0
            for name, value in result.phases.get(role, {}).items():
                if name != "step":
                    look: Any = {"color": colours[name]} if name in colours else {"color": "#eceef1", "hatch": "///"}
                    ax.barh(len(results) - i + offset, value, left=at, height=0.36, **look)
                    at += value
    ax.set_yticks([len(results) - i for i in range(len(results))], [result.job for result in results])
    ax.set_xlabel("seconds of a step; above the actor's column, below the critic's; hatched: waits")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    ax.legend(handles=handles, ncols=4, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")
