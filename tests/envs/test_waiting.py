"""Who waits for a tool: the sampler on a clock that counts decode steps."""

import pytest
from simulated import Simulation

FOREVER = 10**6


@pytest.mark.parametrize(
    ("first", "waits"),
    [
        # the answer to a slot's last token of the step comes under the next one
        ((100, 50), False),
        # a turn that is cut by the window asks nothing
        ((150, 20), False),
        ((99, 50), True),
    ],
)
def test_a_step_waits_for_a_tool_only_if_a_row_of_it_needs_the_answer(first, waits):
    run = Simulation(
        slots=4,
        places=2,
        window=100,
        tool=lambda row, turn: FOREVER if (row, turn) == (1, 0) else 10,
        turns=lambda row: first if row == 1 else (30, 20),
    )
    assert {row.row for row in run.step(1)} == {0, 2, 3}
    assert (run.clock.now >= FOREVER) == waits
    before = run.clock.now
    assert 1 in {row.row for row in run.step(2)}
    assert (run.clock.now - before >= FOREVER - 1000) == (not waits)
    assert run.engine.tokens == 2 * 4 * 100


def test_more_slots_than_places_keep_the_engine_busy():
    """Each slot decodes half the time."""

    def busy(slots: int, window: int) -> float:
        run = Simulation(slots, 8, window, lambda *_: 20, lambda row: (20,) * 5)
        for step in range(1, 4):
            run.step(step)
        return run.engine.tokens / run.clock.now / 8

    for window in (200, 0):
        assert busy(8, window) == pytest.approx(0.5, abs=0.05)
        assert busy(16, window) > 0.9
