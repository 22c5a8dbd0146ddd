"""Curves of grouped kernels: a kernel that is an overhead and its experts is told apart exactly."""

import numpy as np
import pytest

from aurora.algorithms.workload.curve_fit import BalancedPoints, grouped_curves

EXPERTS, HELD, LAUNCH_S = 64, 16, 20e-6
TOKENS = np.array([4.0, 16.0, 32.0, 64.0, 256.0, 1024.0, 4096.0])  # rows of the layer


def expert_s(rows):
    """One expert: the time of its weights, then of its rows."""
    return np.maximum(5e-6, rows * 1e-6)


def balanced(rows_X, launch_s=LAUNCH_S):
    busy_X = np.minimum(rows_X / EXPERTS, 1.0) * HELD
    return BalancedPoints(rows_X, launch_s + busy_X * expert_s(rows_X / EXPERTS), EXPERTS, HELD)


def test_overhead_and_experts_are_told_apart():
    expert, overhead = grouped_curves(balanced(TOKENS))
    assert overhead([1.0, 1e6]) == pytest.approx([LAUNCH_S] * 2)
    assert overhead(0.0) == 0
    assert expert([0.0, 1.0, 4.0, 64.0]) == pytest.approx([0.0, *expert_s(np.array([1.0, 4.0, 64.0]))], rel=0.02)


def test_skewed_rows_take_what_the_kernel_takes():
    expert, overhead = grouped_curves(balanced(TOKENS))
    own_E = np.array([64, 1, 0, 16, 4, 0])
    took_s = LAUNCH_S + expert_s(own_E[own_E > 0]).sum()
    assert float(expert(own_E).sum() + overhead(own_E.sum())) == pytest.approx(took_s, rel=0.02)


@pytest.mark.parametrize("rows_X", [TOKENS[3:], TOKENS[:2]])
def test_without_points_that_tell_it_there_is_no_overhead(rows_X):
    points = balanced(rows_X)
    expert, overhead = grouped_curves(points)
    assert overhead(64.0) == 0
    assert expert(rows_X / EXPERTS) * HELD == pytest.approx(points.seconds_X, rel=0.02)


def test_the_overhead_is_no_longer_than_the_shortest_kernel():
    rows_X = np.array([1.0, 2.0, 4.0, 64.0])
    points = BalancedPoints(rows_X, np.array([3e-5, 2e-5, 1e-5, 9e-5]), EXPERTS, HELD)
    expert, overhead = grouped_curves(points)
    assert 0 < float(overhead(1.0)) <= 1e-5
    assert (expert.seconds_X > 0).all()
