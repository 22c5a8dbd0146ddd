"""Predicted intervals of reported gains: how wide they may be, and the imbalance that they follow from."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from reported_gains import POINTS, active_ratio, alike_within_prompts, busiest, gains, interval, reports
from routed_tasks import Traffic

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


def test_prompts_whose_tokens_choose_alike_are_told_from_independent_ones():
    rng, prompt_U = np.random.default_rng(0), np.repeat(np.arange(200), 50)
    every = rng.random((10_000, 2, 16)).argsort(axis=2)[:, :, :1]
    assert abs(alike_within_prompts(Traffic(every, prompt_U), 16, 4)) < 0.005
    assert alike_within_prompts(Traffic(every[prompt_U * 50], prompt_U), 16, 4) == pytest.approx(1.0, abs=0.02)
    half = np.where((np.arange(10_000) % 2 == 0)[:, None, None], every[prompt_U * 50], every)
    assert alike_within_prompts(Traffic(half, prompt_U), 16, 4) == pytest.approx(0.25, abs=0.03)
