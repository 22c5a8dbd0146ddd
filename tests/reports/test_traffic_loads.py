"""Traffic and loads before and after, and drift, by hand and from first principles."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.planner.evaluate import balance_loss, evaluate
from aurora.planner.plan import make_plan
from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers
from aurora.reports.traffic_loads import contiguous, objective_s, skew
from aurora.types import Cluster, Gpu, PlanOptions, servers
from tests.reports.conftest import profile


def test_contiguous_deals_experts_in_order():
    assert contiguous(profile(sources=3)).slots_LG == (((0, 1, 2), (3, 4, 5), (6, 7)),) * 2


def test_tokens_travel_from_sources_to_where_experts_sit(alone):
    (given,) = alone.profiles
    (flows,) = ReportNumbers(alone).traffic_M
    for side, placed in enumerate((contiguous(given), alone.plan.models[0].placement)):
        for layer in range(2):
            tokens_SE = given.tokens_TLSE[:, layer].sum(axis=0)
            for gpu, held in enumerate(placed.slots_LG[layer]):
                into_S = tokens_SE[:, list(held)].sum(axis=1)
                into_S[gpu] = 0
                assert np.array_equal(flows.tokens_BLGG[side, layer, :, gpu], into_S)
    sends, receives = flows.tokens_BLGG.sum(axis=3), flows.tokens_BLGG.sum(axis=2)
    assert np.allclose(flows.port_s_BLG, np.maximum(sends, receives) * given.dispatch_bytes / 1e6)
    assert (flows.expert_s_BLG.max(axis=2) >= flows.expert_bound_s_L * (1 - 1e-9)).all()


def test_the_plan_is_no_slower_than_index_order_and_at_its_own_value(alone):
    before_s, after_s = objective_s(alone.plan, alone.profiles)
    assert after_s == pytest.approx(alone.plan.objective_s)
    assert before_s >= after_s


def test_drift_is_the_plans_own_where_it_was_made_from_the_profile_alone(alone, together):
    later = profile(2, skew="zipf:2")
    (of_plan,) = ReportNumbers(replace(alone, later=(later,))).drift_M
    assert of_plan.loss == pytest.approx(evaluate(alone.plan, [later]).loss)
    moved, same = ReportNumbers(together).drift_M
    assert moved.moved
    assert moved.loss == balance_loss(*(each.load_LE for each in (together.profiles[0], later)), 4)
    assert (same.variation_L == 0).all()
    assert not same.moved
    assert ReportNumbers(alone).drift_M == ()


def test_skew():
    assert skew(np.array([1.0, 1.0, 4.0])) == 1.0
    assert skew(np.zeros(2)) == 0.0


@pytest.mark.parametrize("shared", [False, True])
def test_the_nics_of_servers_count_where_they_take_longer_than_ports(shared):
    gpus = tuple(Gpu(f"g{i}", "x", i // 2, 1e9, 1e9, 10**12) for i in range(4))
    machines, given = Cluster("servers", gpus, servers([0, 0, 1, 1], [1e9] * 4, [1e9] * 4, 1e6, shared)), profile(2)
    plan = make_plan(machines, [given], PlanOptions("contiguous"))
    (flows,) = ReportNumbers(ReportInputs(plan, profiles=(given,))).traffic_M
    for layer in range(2):
        far_GG = flows.tokens_BLGG[1, layer] * given.dispatch_bytes
        far_GG[:2, :2] = far_GG[2:, 2:] = 0
        sums = [far_GG.sum(axis=axis) for axis in (0, 1)]
        if shared:
            sums = [sum_G.reshape(2, 2).sum(axis=1).repeat(2) for sum_G in sums]
        assert flows.port_s_BLG[1, layer] == pytest.approx(np.maximum(*sums) / 1e6)
