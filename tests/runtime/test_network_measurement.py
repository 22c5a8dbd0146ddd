"""What two exchanges tell of a network."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.runtime.network_measurement import startups_and_share


@given(st.floats(0, 0.1), st.floats(0.1, 2))
def test_a_line_is_found_again(startups_s, share):
    found = startups_and_share((0.001, 0.3), (startups_s + 0.001 / share, startups_s + 0.3 / share))
    assert found == pytest.approx((startups_s, share), abs=1e-9)


def test_a_small_exchange_that_passes_in_a_burst_tells_no_rate():
    assert startups_and_share((0.001, 0.3), (0.0002, 0.4)) == (0.0, pytest.approx(0.75))


def test_a_network_too_fast_to_be_timed_keeps_its_rates():
    assert startups_and_share((0.001, 0.3), (0.02, 0.01)) == (0.02, 1.0)
