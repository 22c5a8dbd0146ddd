"""Predicted intervals of reported gains: how wide they may be, and the imbalance that they follow from."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from reported_gains import POINTS, active_ratio, busiest, gains, interval, reports

sys.path.pop()  # that folder has a vllm.py, which is not vLLM


def test_intervals_are_as_wide_as_allowed_at_most():
    assert interval([0.01, 0.02, 0.05]) == pytest.approx((0.01, 0.05))
    assert interval([0.0, 1.0]) == pytest.approx((0.5 - POINTS / 2, 0.5 + POINTS / 2))
    for report in reports():
        low, high = interval(gains(report))
        assert 0 <= high - low <= POINTS + 1e-9


def test_the_busiest_gpu_follows_from_how_uneven_experts_are():
    variance, experts, gpus = 0.5, 256, 8
    popular = np.random.default_rng(0).gamma(1 / variance, variance, (20_000, gpus, experts // gpus))
    load = popular.mean(axis=2)
    drawn = (load.max(axis=1) / load.mean(axis=1)).mean()
    assert busiest(variance, experts, gpus) == pytest.approx(drawn, abs=0.01)
    assert busiest(0.0, experts, gpus) == 1


def test_experts_in_sequence_are_worse_than_round_robin_where_a_token_has_few_groups():
    assert active_ratio(0.5, 8) > 1.02
