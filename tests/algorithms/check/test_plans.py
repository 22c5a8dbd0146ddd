"""The judge must find every kind of lie."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_plan, check_schedule
from aurora.algorithms.network.switch import timed
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BrokenPlan
from aurora.io import load_plan, save
from aurora.planner.plan import make_plan
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Network, Schedule, SyntheticOptions
from tests.conftest import cluster

BYTES = np.array([[0, 4, 6], [5, 0, 2], [3, 7, 0]])
ONES = Network.equal(3)
CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}


def good(method="openshop"):
    return timed(ORDER[method](BYTES, ONES, rng=np.random.default_rng(0)), BYTES, ONES)


def edited(array, index, value):
    copy = array.copy()
    copy[index] = value
    return copy


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("bytes_X", 0, "bytes, expected"), ("end_s_X", -1.0, "ends before it starts"), ("src_X", 7, "beyond the 3")],
)
def test_a_value_that_cannot_be(column, value, message):
    s = good()
    with pytest.raises(BrokenPlan, match=message):
        check_schedule(replace(s, **{column: edited(getattr(s, column), 0, value)}), BYTES, ONES)


def test_shared_ports_that_are_too_full_together():
    """Each transfer keeps to the port's rate, both at once do not."""
    both = Schedule("x", False, [0, 1], [2, 2], [5, 5], [0.0, 0.0], [5.0, 5.0], [1.0, 1.0], 0, 0)
    traffic = np.array([[0, 0, 5], [0, 0, 5], [0, 0, 0]])
    with pytest.raises(BrokenPlan, match="rank 2 receives 2 B/s at 0 s, its port carries 1"):
        check_schedule(both, traffic, ONES)
    slower = replace(both, end_s_X=np.array([10.0, 10.0]), rate_Bps_X=np.array([0.5, 0.5]))
    check_schedule(slower, traffic, ONES)


def test_a_plan_that_promises_too_much():
    plan = make_plan(cluster(1e6, 1e6), [draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=2, window_tokens=64))])
    check_plan(plan)
    with pytest.raises(BrokenPlan, match="below its bound"):
        check_plan(replace(plan, objective_s=plan.bound_s / 2))
    with pytest.raises(BrokenPlan, match="below its bound"):
        check_plan(replace(plan, assignment_bound_s=plan.objective_s * 2))
    model = plan.models[0]
    rushed = replace(model, dispatch_s_L=model.fluid_bound_s_L * 0.9)
    with pytest.raises(BrokenPlan, match="below the fluid bound"):
        check_plan(replace(plan, models=(rushed,)))


def test_weights_that_a_gpu_has_no_memory_for(tmp_path):
    """Refused wherever a plan passes: checked, saved, loaded, simulated, and for two models together."""
    profile = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=2, window_tokens=64))
    plan = make_plan(cluster(1e6, 1e6), [profile])
    held = max(sum(len(layer[rank]) for layer in plan.models[0].placement.slots_LG) for rank in range(2))
    need = profile.other_bytes + held * profile.expert_bytes
    roomy, tight = (
        replace(plan, cluster=replace(plan.cluster, gpus=tuple(replace(g, memory_bytes=most) for g in plan.cluster.gpus)))
        for most in (need, need - 1)
    )
    check_plan(roomy)
    save(plan, tmp_path / "plan.json")
    (tmp_path / "tight.json").write_text((tmp_path / "plan.json").read_text().replace("1000000000", str(need - 1)))
    refusals = (
        lambda: check_plan(tight),
        lambda: save(tight, tmp_path / "never.json"),
        lambda: simulate_plan(tight, [profile]),
        lambda: check_plan(replace(roomy, models=roomy.models * 2)),
    )
    for refusal in refusals:
        with pytest.raises(BrokenPlan, match=r"gpu 'g\d' has \d+ bytes of memory, but the \d+ experts of all layers"):
            refusal()
    with pytest.raises(BrokenPlan, match="was changed after it was made"):
        load_plan(tmp_path / "tight.json")
    assert not (tmp_path / "never.json").exists()
