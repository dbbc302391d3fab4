"""A part of the campaign of random configurations (campaign.py)."""

import campaign
import pytest


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_part_of_the_campaign():
    assert not campaign.run_all(1, 30)
