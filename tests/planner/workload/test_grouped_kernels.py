"""Curves of grouped kernels: a kernel that is an overhead and its experts is told apart exactly."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.planner.workload.curve_fit import BalancedPoints, grouped_curves

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


def test_rows_of_other_ranks_are_overhead():
    """A kernel of four ranks that spends 0.1 us on each row of the others, beside the kernel of one rank."""
    other_s = 1e-7 * TOKENS * (1 - HELD / EXPERTS)
    several = replace(balanced(TOKENS), seconds_X=balanced(TOKENS).seconds_X + other_s)
    one = BalancedPoints(TOKENS, LAUNCH_S + np.minimum(TOKENS, EXPERTS) * expert_s(TOKENS / EXPERTS), EXPERTS, EXPERTS)
    expert, overhead = grouped_curves(several, one)
    own_E, rows = np.array([512, 256, *[0] * 14]), 1024
    took_s = LAUNCH_S + expert_s(own_E[own_E > 0]).sum() + 1e-7 * rows * (1 - HELD / EXPERTS)
    assert float(expert(own_E).sum() + overhead(rows)) == pytest.approx(took_s, rel=0.05)
    alone, constant = grouped_curves(several)
    assert float(alone(own_E).sum() + constant(rows)) > 1.05 * took_s


def test_a_rank_has_an_expert_with_rows_however_few_there_are():
    """Two experts on each of 32 ranks: one is busy with up to 32 rows in the layer, both with 64, beside the kernel of one rank."""
    busy_X = np.clip(TOKENS / 32, 1, 2)
    several = BalancedPoints(TOKENS, LAUNCH_S + busy_X * expert_s(np.maximum(TOKENS / EXPERTS, 1)), EXPERTS, 2)
    one = BalancedPoints(TOKENS, LAUNCH_S + np.minimum(TOKENS, EXPERTS) * expert_s(TOKENS / EXPERTS), EXPERTS, EXPERTS)
    expert, overhead = grouped_curves(several, one)
    for rows in (4, 16, 32):
        assert float(expert(1) + overhead(rows)) == pytest.approx(LAUNCH_S + float(expert_s(1)), rel=0.02)


def test_overheads_that_fall_count_by_their_kernels_seconds():
    """Kernels of 40 and 20 us with as many rows of others: the overhead between is nearer to the shorter kernel's."""
    rows_X = np.array([1.0, 2.0, 4.0, 16.0, 64.0, 256.0])
    one = BalancedPoints(rows_X, np.minimum(rows_X, EXPERTS) * 1e-6, EXPERTS, EXPERTS)
    several = BalancedPoints(rows_X, np.array([2e-5, 2e-5, 4e-5, 2e-5, 4e-5, 4e-5]), EXPERTS, 1)
    _, overhead = grouped_curves(several, one)
    assert (np.diff(overhead.seconds_X) >= 0).all()
    assert float(overhead(4.0)) == pytest.approx(float(overhead(16.0)))
    assert 19e-6 < float(overhead(4.0)) < 25e-6


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
