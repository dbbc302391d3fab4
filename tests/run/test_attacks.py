"""A part of the attacks (attacks.py): each is refused in one line, or does what was asked."""

import attacks
import pytest


@pytest.mark.wide
def test_a_part_of_the_attacks():
    assert not attacks.run_all(200, seed=0, chosen=slice(None, None, 18), tell=False)
