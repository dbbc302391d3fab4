"""The alarm: log-probs of engine and trainer, held against each other in the first step."""

import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

from splitppo import train
from splitppo.engine.hf import HFEngine
from splitppo.errors import UserError
from splitppo.policy import MISMATCH, Policy


def compare(
    engine: list[float],
    trainer: list[float],
    *,
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    check_finite: Callable[[], object] = bool,
    **rollout: Any,
) -> Any:
    of: Any = Policy.__new__(Policy)
    settings = {"top_p": 1.0, "top_k": 0, **rollout}
    of.context = SimpleNamespace(config=SimpleNamespace(rollout=SimpleNamespace(**settings)))
    of.group = SimpleNamespace(all_sum=lambda sums: sums.double(), is_first=rank == 0)
    of.learner = SimpleNamespace(check_finite=check_finite)
    of.dtype, of.compared = dtype, False
    of._compare(torch.tensor(engine), torch.tensor(trainer))
    return of


def test_weights_that_are_not_finite_are_named_as_such() -> None:
    def check_finite() -> None:
        raise FloatingPointError("weights")

    with pytest.raises(FloatingPointError):
        compare([-1.0, math.nan], [-1.0, -2.0], check_finite=check_finite)
    with pytest.raises(UserError):
        compare([-1.0, -9.0], [-1.0, -2.0], check_finite=check_finite)


@pytest.mark.parametrize("dtype", MISMATCH)
def test_precision_sets_what_is_worth_a_warning_and_what_ends_the_run(
    dtype: torch.dtype, capsys: Any
) -> None:
    much, most = MISMATCH[dtype]
    for sign in (-1, 1):
        assert compare([-1.0, -2.0], [-1.0, -2.0 + sign * 1.9 * much], dtype=dtype).compared
        assert capsys.readouterr().out == ""
        compare([-1.0, -2.0], [-1.0, -2.0 + sign * 2.1 * much], dtype=dtype, rank=1)
        assert capsys.readouterr().out == "", "one rank says it"
        compare([-1.0, -2.0], [-1.0, -2.0 + sign * 2.1 * much], dtype=dtype)
        assert f"{str(dtype)[6:]} explains {much:g}" in capsys.readouterr().out
        with pytest.raises(
            UserError, match=rf"{str(dtype)[6:]} explains {most:g}: .*--engine.kind hf"
        ):
            compare([-1.0, -2.0], [-1.0, -2.0 + sign * 2.1 * most], dtype=dtype)
    with pytest.raises(UserError, match="nan nats"):
        compare([-1.0], [math.nan], dtype=dtype)
    assert not compare([], [], dtype=dtype).compared  # no row has ended: the next step compares


def test_log_probs_of_a_cut_distribution_are_higher_by_what_is_cut() -> None:
    assert compare([-1.0, -2.0], [-1.6, -2.0], top_p=0.5).compared
    for engine, trainer in (([-1.0], [-2.0]), ([-1.0], [-0.7])):
        with pytest.raises(UserError):
            compare(engine, trainer, top_p=0.5)
    assert compare([-1.0], [-9.0], top_k=5).compared
    with pytest.raises(UserError):
        compare([-1.0], [-0.7], top_k=5)


def other_weights_rank(rank: int, argv: list[str]) -> tuple[int, list[Any]]:
    """The last rank's engine has other weights than the policy. Also gives the tokens of each
    comparison."""
    load, seen = HFEngine.load_weights, []

    def other(self: HFEngine, weights: Any) -> None:
        load(
            self,
            (
                (
                    name,
                    tensor * 30
                    if rank == int(os.environ["WORLD_SIZE"]) - 1 and tensor.ndim > 1
                    else tensor,
                )
                for name, tensor in weights
            ),
        )

    def noted(self: Policy, *args: Any) -> None:
        seen.append(args)
        compare(self, *args)

    kind: Any = Policy
    compare = kind._compare
    HFEngine.load_weights, kind._compare = other, noted
    return train.main(argv), [len(sampled) for sampled, _ in seen]


@pytest.mark.parametrize(("ranks", "old"), [(2, "trainer"), (1, "engine")])
def test_an_engine_with_other_weights_ends_the_run_on_all_ranks(
    ranks: int, old: str, tmp_path: Any, capfd: Any
) -> None:
    argv = (
        "--steps=3 --rollout.batch-size=8 --log.validate-every=0 --placement.mode=colocated"
    ).split()
    argv += [f"--run-dir={tmp_path / 'run'}", f"--ppo.old-logprobs={old}", "--timeout=60"]
    for status, compared in run_ranks(ranks, other_weights_rank, argv):
        assert (status, len(compared)) == (2, 1)
    said = capfd.readouterr().err
    assert said.count("error: log-probs of engine and trainer differ by") == 1
    assert "they run different models; try --engine.kind hf or --compute.packing off" in said
