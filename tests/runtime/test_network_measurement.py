"""What two exchanges tell of a network."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.planner.alltoall.registry import ORDER
from aurora.planner.network.schedule_time import timed
from aurora.runtime.network_measurement import scaled, startups_and_share
from aurora.types import Cluster, Gpu, servers


@given(st.floats(0, 0.1), st.floats(0.1, 2))
def test_a_line_is_found_again(startups_s, share):
    found = startups_and_share((0.001, 0.3), (startups_s + 0.001 / share, startups_s + 0.3 / share))
    assert found == pytest.approx((startups_s, share), abs=1e-9)


def test_a_small_exchange_that_passes_in_a_burst_tells_no_rate():
    assert startups_and_share((0.001, 0.3), (0.0002, 0.4)) == (0.0, pytest.approx(0.75))


def test_a_network_too_fast_to_be_timed_keeps_its_rates():
    assert startups_and_share((0.001, 0.3), (0.02, 0.01)) == (0.02, 1.0)


def test_a_share_of_the_rate_is_one_of_the_nics_too():
    gpus = tuple(Gpu(str(rank), "cpu", rank // 2, 100.0, 100.0, 1) for rank in range(4))
    cluster = Cluster("servers", gpus, servers([0, 0, 1, 1], [100.0] * 4, [100.0] * 4, 10.0, shared_nic=True))
    slower = scaled(cluster, 0.5, 0.8)
    assert slower.fabric == servers([0, 0, 1, 1], [80.0] * 4, [80.0] * 4, 8.0, shared_nic=True)
    assert slower.startup_s_G.tolist() == [0.5] * 4
    bytes_GG = np.where(np.eye(4, dtype=bool), 0, 1000)
    order = ORDER["all-at-once"](bytes_GG, cluster.network, rng=np.random.default_rng(0))
    whole_s, slower_s = (timed(order, bytes_GG, each.network).makespan_s for each in (cluster, slower))
    assert slower_s == pytest.approx(0.5 + whole_s / 0.8)
