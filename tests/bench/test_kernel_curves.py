"""Curves of grouped kernels on several ranks: what a kernel spends on rows of others is overhead."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.algorithms.workload.curve_fit import BalancedPoints
from bench.kernel_curves import curves_on_ranks
from tests.algorithms.workload.test_grouped_kernels import EXPERTS, HELD, LAUNCH_S, TOKENS, balanced, expert_s


def test_rows_of_other_ranks_are_overhead():
    """A kernel of four ranks that spends 0.1 us on each row of the others, beside the kernel of one rank."""
    other_s = 1e-7 * TOKENS * (1 - HELD / EXPERTS)
    several = replace(balanced(TOKENS), seconds_X=balanced(TOKENS).seconds_X + other_s)
    one = BalancedPoints(TOKENS, LAUNCH_S + np.minimum(TOKENS, EXPERTS) * expert_s(TOKENS / EXPERTS), EXPERTS, EXPERTS)
    expert, overhead = curves_on_ranks(several, one)
    own_E, rows = np.array([512, 256, *[0] * 14]), 1024
    took_s = LAUNCH_S + expert_s(own_E[own_E > 0]).sum() + 1e-7 * rows * (1 - HELD / EXPERTS)
    assert float(expert(own_E).sum() + overhead(rows)) == pytest.approx(took_s, rel=0.05)
    alone, constant = curves_on_ranks(several)
    assert float(alone(own_E).sum() + constant(rows)) > 1.05 * took_s


def test_a_rank_has_an_expert_with_rows_however_few_there_are():
    """Two experts on each of 32 ranks: one is busy with up to 32 rows in the layer, both with 64, beside the kernel of one rank."""
    busy_X = np.clip(TOKENS / 32, 1, 2)
    several = BalancedPoints(TOKENS, LAUNCH_S + busy_X * expert_s(np.maximum(TOKENS / EXPERTS, 1)), EXPERTS, 2)
    one = BalancedPoints(TOKENS, LAUNCH_S + np.minimum(TOKENS, EXPERTS) * expert_s(TOKENS / EXPERTS), EXPERTS, EXPERTS)
    expert, overhead = curves_on_ranks(several, one)
    for rows in (4, 16, 32):
        assert float(expert(1) + overhead(rows)) == pytest.approx(LAUNCH_S + float(expert_s(1)), rel=0.02)


def test_overheads_that_fall_count_by_their_kernels_seconds():
    """Kernels of 40 and 20 us with as many rows of others: the overhead between is nearer to the shorter kernel's."""
    rows_X = np.array([1.0, 2.0, 4.0, 16.0, 64.0, 256.0])
    one = BalancedPoints(rows_X, np.minimum(rows_X, EXPERTS) * 1e-6, EXPERTS, EXPERTS)
    several = BalancedPoints(rows_X, np.array([2e-5, 2e-5, 4e-5, 2e-5, 4e-5, 4e-5]), EXPERTS, 1)
    _, overhead = curves_on_ranks(several, one)
    assert (np.diff(overhead.seconds_X) >= 0).all()
    assert float(overhead(4.0)) == pytest.approx(float(overhead(16.0)))
    assert 19e-6 < float(overhead(4.0)) < 25e-6
