"""What both roles know of a run, and how they tell what they learnt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from splitppo.config import Config
from splitppo.placement import Ownership
from splitppo.rollout import Prompt, Rollout

WORK = ("padding", "imbalance", "update_tflop")  # figures of how the work was cut


@dataclass(frozen=True)
class Shared:
    """What both roles know of the run.

    Attributes:
        ownership: step -> who owns which row.
        batch: step -> the prompts of its rows.
        held_out: prompts of the validation.
        decode: token ids of a response -> its text.
        vocabulary: ids from 0 that a policy may sample.
        lengths: of the responses, in the order in which rows come, in a benchmark; else empty.
    """

    config: Config
    ownership: Callable[[int], Ownership]
    batch: Callable[[int], Sequence[Prompt]]
    held_out: Sequence[Prompt]
    decode: Callable[[list[int]], str]
    vocabulary: int
    lengths: Sequence[int] = ()

    def learnt(self, rollout: Rollout, mini_batches: Sequence[Sequence[int]]) -> list[list[int]]:
        """The rows that the losses are over."""
        left_out = set()
        if self.config.ppo.mask_truncated:
            left_out = {sample.row for sample in rollout.samples if not sample.finished}
        return [[row for row in rows if row not in left_out] for rows in mini_batches]


def learning_metrics(role: str, loss: str, figures: Sequence[dict[str, float]], names: Sequence[str]) -> dict[str, Any]:
    """Means over the step's optimizer steps, the steps that were skipped, and the bare figures of each.

    A step that trained on no row has 0 for every mean, and an empty `optimizer_steps`.

    Args:
        figures: what `Learner.update` returned. names: of the objective's metrics.
    """
    metrics: dict[str, Any] = {}
    for name in figures[0] if figures else (*names, "loss", "grad_norm", "skipped", *WORK):
        total = sum((figure[name] for figure in figures), 0.0)
        short = loss if name == "loss" else name
        # how the work was cut depends on the placement, as all of perf does, and nothing else here
        name_there = f"perf/{name}" if name in WORK else f"{role}/{short}"
        metrics[name_there] = total if name == "skipped" else total / max(1, len(figures))
    metrics["optimizer_steps"] = [{name: figure[name] for name in ("loss", "grad_norm")} for figure in figures]
    return metrics
