"""Rounds of matchings: schedules of nearly equal transfers, close to the bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.matchings import MOST_SPREAD, matched_rounds
from aurora.algorithms.alltoall.open_shop import search
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_schedule
from aurora.algorithms.network.switch import timed
from aurora.types import Network
from tests.algorithms.alltoall.test_open_shop import columns


def even(n, spread, seed):
    """(n, n) bytes between 1 - spread and 1 + spread millions."""
    bytes_GG = (1e6 * np.random.default_rng(seed).uniform(1 - spread, 1 + spread, (n, n))).astype(np.int64)
    np.fill_diagonal(bytes_GG, 0)
    return bytes_GG


@given(st.integers(3, 9), st.floats(0.0, 0.4), st.integers(0, 99))
def test_rounds_are_a_schedule(n, spread, seed):
    """Every transfer once, by start, each as soon as its ports have ended their previous transfer."""
    seconds_GG = even(n, spread, seed) / 1e6
    bound_s = max(seconds_GG.sum(axis=0).max(), seconds_GG.sum(axis=1).max())
    made = matched_rounds(seconds_GG, bound_s, np.random.default_rng(seed))
    src_X, dst_X, start_s_X, end_s_X = columns(made.pairs_X2, seconds_GG)
    assert sorted(zip(src_X.tolist(), dst_X.tolist(), strict=True)) == [(i, j) for i in range(n) for j in range(n) if i != j]
    assert made.makespan_s == end_s_X.max() >= bound_s * (1 - 1e-12)
    assert (np.diff(start_s_X) >= 0).all()


@pytest.mark.parametrize(("n", "spread"), [(16, 0.05), (16, 0.2), (32, 0.05), (64, 0.05)])
def test_nearly_equal_traffic_is_within_three_thousandths_of_the_bound(n, spread):
    bytes_GG, ones = even(n, spread, 0), Network.equal(n)
    order = ORDER["openshop-best"](bytes_GG, ones, rng=np.random.default_rng(0))
    made = timed(order, bytes_GG, ones)
    check_schedule(made, bytes_GG, ones)
    assert order.share_X2 is None
    assert made.gap <= 0.003
    assert made.makespan_s < search(bytes_GG, 50, np.random.default_rng(0)).makespan_s


@pytest.mark.parametrize("seconds", [0.0, 1 / MOST_SPREAD - 0.01, MOST_SPREAD + 0.01])
def test_uneven_traffic_is_not_tried(seconds):
    seconds_GG = 1.0 - np.eye(5)
    seconds_GG[1, 2] = seconds
    assert matched_rounds(seconds_GG, 1.0, np.random.default_rng(0)) is None
