"""The reward of configs/calculator: whether the last message says the product."""

from typing import Any

from splitppo.rewards.rules import last_number


def product(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, float]:
    """1 if the last number on the last message's first line is the product. `right` is a metric
    without the rewards of turns."""
    right = last_number(data_source, solution_str, ground_truth, extra_info)
    return {"score": right, "right": right}
