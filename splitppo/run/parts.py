"""A user's own parts of the algorithm, functions of packed tensors: the policy's loss (`ppo.loss`)
and advantages (`ppo.advantages`)."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from splitppo.config import Config
from splitppo.errors import UserError
from splitppo.workers import find_in_file

# name in `ppo` -> the keyword arguments of the function. The first is `[N]`, and so is its result
ARGUMENTS = {
    "loss": ("logprobs", "old_logprobs", "advantages", "lengths", "reference_logprobs"),
    "advantages": ("rewards", "values", "lengths", "prompts"),
}


def find_parts(config: Config) -> dict[str, Callable[..., Tensor]]:
    """The functions that the settings name, under the names of ARGUMENTS. A call raises UserError
    if the result is not finite numbers of the first argument's shape; without tokens it calls
    nothing. Raises UserError if a file or a function is missing, or the function lacks
    parameters."""
    return {
        part: _find(f"ppo.{part}", named, arguments)
        for part, arguments in ARGUMENTS.items()
        if (named := getattr(config.ppo, part))
    }


def _find(setting: str, named: str, arguments: tuple[str, ...]) -> Callable[..., Tensor]:
    function = find_in_file(named, setting, setting, "function; use None")
    wrong = f"{setting}={named}"
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise UserError(
            f"{wrong}: it does not take the arguments ({error}); define it with "
            f"({', '.join(arguments)}), or with some of them and **more"
        ) from error

    def call(**columns: Any) -> Tensor:
        first = columns[arguments[0]]
        if not len(first):
            return first
        # clones: what the function writes into them changes nothing else
        result = function(**{name: x if x is None else x.clone() for name, x in columns.items()})
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        if shape != [len(first)]:
            raise UserError(
                f"{wrong} returned {shape} for {len(first)} tokens; return a tensor with a number "
                f"for each, [{len(first)}]"
            )
        if first.requires_grad > result.requires_grad:
            raise UserError(
                f"{wrong} returned a tensor without a gradient; compute it from {arguments[0]}, "
                "without detach()"
            )
        for at in (~result.isfinite()).nonzero().flatten()[:1].tolist():
            values = ", ".join(
                f"{name}={x[at].item():g}"
                for name, x in columns.items()
                if x is not None and x.shape == first.shape
            )
            raise UserError(
                f"{wrong} returned {result[at].item():g} for token {at} of {len(first)}, "
                f"computed from {values}; return finite numbers"
            )
        return result.to(first)

    return call
