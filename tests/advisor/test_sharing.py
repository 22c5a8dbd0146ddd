"""What a colocated plan's models take one after the other."""

import re
from dataclasses import replace

import numpy as np
import pytest

from aurora.advisor.sharing import ApartSeconds, apart_seconds
from aurora.planner.plan import price
from aurora.reports.advice import sharing_line
from aurora.reports.trace_times import summarise
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, Curve, Gpu, Placement, Profile

NOTHING = Curve(np.array([1.0]), np.array([0.0]))
EVEN = Placement.unreplicated(np.array([0, 1, 0, 1]), 2)


def two_gpus(memory_bytes=1000):
    return Cluster("two", tuple(Gpu(f"g{rank}", "cpu", rank, 8000.0, 8000.0, memory_bytes) for rank in range(2)))


def both_experts(seconds_a_pair=0.125):
    """Every token goes to both experts, one on each GPU: a dispatch and a combine of 8 tokens take a second each."""
    compute = Curve(np.array([0.0, 1.0]), np.array([0.0, seconds_a_pair]))
    curves = {"cpu": {"gate": NOTHING, "expert": compute, "aggregate": NOTHING}}
    return Profile("m", "", np.full((1, 1, 2, 2), 8), 2, 1000, 1000, 100, 10, curves)


def test_what_a_colocated_plan_is_compared_with():
    """Its models' parts of it, and their own plans: by these a model's hot experts are apart, and sharing this plan loses."""
    hot_LSE = np.tile([[9, 9, 1, 1]] * 2, (20, 1, 1))
    models = [replace(both_experts(), model=name, tokens_TLSE=hot_LSE[None], top_k=1) for name in "ab"]
    lopsided = Placement.stack([Placement.unreplicated(np.array([0, 0, 1, 1]), 2)] * 20)
    plan = price(two_gpus(100_000), models, [lopsided] * 2)
    apart = apart_seconds(plan, models)
    assert apart.by_plan == pytest.approx(simulate_plan(plan, models, interleave="off").seconds)
    own = [price(plan.cluster, each, Placement.stack([EVEN] * 20)) for each in models]
    alone_s = [simulate_plan(*each).seconds for each in zip(own, ([each] for each in models), strict=True)]
    assert apart.by_own == pytest.approx(sum(alone_s))  # its layers are alike: eight of them stand for twenty
    shared = summarise(simulate_plan(plan, models), plan.cluster)
    assert apart.by_own < shared.seconds < apart.by_plan
    assert re.search(
        r"^Sharing loses here: .*each by a plan of its own\. .*: plan and serve each model alone",
        sharing_line(shared, apart),
    )
    assert "is worth 1." in sharing_line(shared, apart._replace(by_own=apart.by_plan))
    assert "makes no difference here" in sharing_line(shared, ApartSeconds(shared.seconds * 1.01, shared.seconds * 1.01))
    assert "makes no difference here" in sharing_line(shared, ApartSeconds(shared.seconds * 0.99, shared.seconds))
    assert "--interleave off" in sharing_line(shared, ApartSeconds(shared.seconds / 2, shared.seconds))
