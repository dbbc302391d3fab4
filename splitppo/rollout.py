"""Rows: what crosses between data, engine, wire and learner. Packed, never padded, never pickled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One prompt of the data set.

    Attributes:
        text: the prompt as text, after the chat template.
        tokens: its token ids.
        data_source, ground_truth, extra_info: what the reward function gets beside the response.
    """

    text: str
    tokens: list[int]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One row to generate: `row` is its index in the step's batch, and seeds its noise."""

    row: int
    prompt: list[int]


@dataclass(frozen=True)
class Sample:
    """One finished row.

    Attributes:
        row: index in the step's batch.
        prompt, response: token ids; the response holds its end-of-sequence token or stop string, if it ended.
        logprobs: the engine's log-probs of the response tokens at the sampling temperature.
        finished: False if the response was cut at max_new_tokens.
    """

    row: int
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    finished: bool
