"""How many passes of the value model the critic's idle time holds, from recorded seconds."""

from typing import Any

import pytest

from splitppo.config.cli import parse
from splitppo.run.idle import free_value_epochs, idle_line


def steps(
    *waits: float, update: float = 1.0, rest: float = 1.0, start: int = 1, tflop: float = 1.0
) -> list[dict[str, Any]]:
    """Steps that wait so many seconds before an update, and do `rest` besides."""
    found = []
    for number, wait in enumerate(waits, start):
        whole = wait + update + rest
        share = {"perf/idle_share": wait / whole, "timing_s/step": whole}
        work = {"timing_s/update": update, "perf/update_tflop": tflop}
        found.append({"step": number, **work, **share})
    return found


@pytest.mark.parametrize(
    ("critic", "epochs", "expected"),
    [
        (steps(3.0, 3.0, 3.0), 1, (0.6, 4)),
        (steps(3.0, 3.0, 3.0, update=2.0), 2, (0.5, 5)),  # an epoch takes 1 s of 2
        (steps(2.9, 2.9), 1, (2.9 / 4.9, 3)),
        (steps(2.97, 2.97), 1, (2.97 / 4.97, 4)),  # .03 s of a step of 4.97 s are lost
        # the first step's wait is over; of the two others, one has no second to give
        (steps(9.0, 3.0, 0.9), 1, (3.9 / 7.9, 1)),
        (steps(9.0, 3.0, 0.0), 1, (3.0 / 7.0, 1)),
        (steps(9.0, 3.0, 1.0), 1, (4.0 / 8.0, 2)),
        (steps(0.0, 0.0), 1, (0.0, 1)),  # colocated
        (steps(3.0), 1, (0.0, 1)),  # no step after the first
        (steps(3.0, 3.0, tflop=0.0), 1, (0.0, 1)),  # no row, or no value model
        ([], 2, (0.0, 2)),
    ],
)
def test_passes_that_fit_into_the_waits_of_the_next_step(critic, epochs, expected):
    assert free_value_epochs(critic, epochs) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", "the critic waited 50 % of a step: ppo.value_epochs = 6 costs nothing"),
        (
            "--ppo.value-epochs=1",
            "the critic waited 50 % of a step: ppo.value_epochs = 3 costs nothing",
        ),
        ("--value.pretrain-steps=4", ""),  # with the passes of pretraining: these say nothing
        ("--ppo.critic-warmup=4", ""),
    ],
)  # fmt: skip
def test_what_a_user_is_told(flags, told):
    warm_up = steps(0.0, 0.0)
    critic = [*warm_up, *steps(4.0, 4.0, 4.0, update=2.0, rest=2.0, start=3)]
    assert idle_line(critic, parse([*flags.split()])) == told


def test_passes_in_which_nothing_is_learned_are_not_offered():
    for number, (lowest, highest) in enumerate([(0, 0), (0, 1), (1, 1)]):
        critic = steps(*[4.0] * 5, update=2.0, rest=2.0)
        for step in critic[1:]:  # in the first, no row has ended
            step |= {"critic/score/min": lowest, "critic/score/max": highest}
        assert bool(idle_line(critic, parse([]))) == (number == 1)
    critic[-1]["critic/score/min"] = 0  # what differs from step to step can be learned
    assert idle_line(critic, parse([]))
