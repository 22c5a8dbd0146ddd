"""Two models on the same GPUs: cases that are computed by hand, divisions of GPUs, memory, and what is recommended."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.advisor.two_models import HALVES, IN_SEQUENCE, recommend_for_two
from aurora.errors import BadInput, InfeasiblePlan
from aurora.reports.advice import two_models_advice
from aurora.types import Cluster, Curve, Gpu, Profile

NOTHING = Curve(np.array([1.0]), np.array([0.0]))
BATCH = 8


def two_gpus(memory_bytes=1000, port_Bps=8000.0):
    return Cluster("two", tuple(Gpu(f"g{rank}", "cpu", 0, port_Bps, port_Bps, memory_bytes) for rank in range(2)))


def both_experts(seconds_a_pair=0.125):
    """Every token goes to both experts, one on each GPU: with BATCH tokens a dispatch and a combine take a second each."""
    compute = Curve(np.array([0.0, 1.0]), np.array([0.0, seconds_a_pair]))
    curves = {"cpu": {"gate": NOTHING, "expert": compute, "aggregate": NOTHING}}
    return Profile("m", "", np.full((1, 1, 2, 2), BATCH), 2, 1000, 1000, 100, 10, curves)


def test_gains_by_hand():
    """Alone a step takes 1.016 + 2 + 1 s by vLLM's gathers, of 16 bytes of choices a token. Each on a GPU of its own: 4 s of experts without an exchange, both at once."""
    two = recommend_for_two(two_gpus(), "vllm", [both_experts()] * 2)
    assert two.batch == BATCH
    assert two.gains == pytest.approx({IN_SEQUENCE: 1.0, HALVES: 4.016 / 2})
    assert two.way == HALVES
    assert two_models_advice(two).startswith("Split the GPUs, a half for each model: 2.01x the throughput of one model after")


def test_nothing_to_gain_where_only_the_gpu_is_busy():
    two = recommend_for_two(two_gpus(port_Bps=8e9), "vllm", [both_experts()] * 2)
    assert max(two.gains.values()) < 1.001
    assert two.way is None
    assert two_models_advice(two).startswith("Serve one model after the other: nothing brings 1.05x")


def test_halves_that_bring_little_are_not_recommended():
    two = recommend_for_two(two_gpus(), "vllm", [both_experts()] * 2)
    for halves, way in ((1.06, HALVES), (1.04, None)):
        assert replace(two, gains={IN_SEQUENCE: 1.0, HALVES: halves}).way == way


def test_what_memory_does_not_hold_is_left_out():
    share = 110  # an expert and the rest; a half holds both experts of a model in as much
    two = recommend_for_two(two_gpus(share), "vllm", [both_experts()] * 2)
    assert set(two.gains) == {IN_SEQUENCE}
    assert two_models_advice(two).startswith("Serve one model after the other: cluster 'two' has 1 expert slots")
    with pytest.raises(InfeasiblePlan, match="memory"):
        recommend_for_two(two_gpus(share - 1), "vllm", [both_experts()] * 2)
    with pytest.raises(BadInput, match="expected one, or two of two models, found 3"):
        recommend_for_two(two_gpus(), "vllm", [both_experts()] * 3)


def test_mixed_gpus_are_split_so_that_the_slower_half_has_less_to_do():
    """Models of 1 and of 3 s a step on GPUs of which one is half as fast: 2 and 3 s the right way round, 1 and 6 the other."""
    slow, fast = two_gpus().gpus
    cluster = Cluster("mixed", (fast, replace(slow, kind="other", speed=0.5)))
    light, heavy = (replace(both_experts(seconds / 32), other_bytes=0) for seconds in (1, 3))
    found = [recommend_for_two(cluster, "sglang", models) for models in ((heavy, light), (light, heavy))]
    assert [two.swapped for two in found] == [False, True]
    assert "the first model on the second half" in two_models_advice(found[1])
    assert found[0].gains[HALVES] == pytest.approx(found[1].gains[HALVES])
    odd = Cluster("odd", (*cluster.gpus, replace(fast, name="third")))
    assert "expected an even number of GPUs to split, found 3" in recommend_for_two(odd, "sglang", [light] * 2).refusal
