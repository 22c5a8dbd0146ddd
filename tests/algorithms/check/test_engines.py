"""What engines are asked to serve by, and what they cannot."""

import dataclasses

import numpy as np
import pytest

from aurora.algorithms.check.fit import check_engine
from aurora.errors import BadInput, InfeasiblePlan
from aurora.planner.plan import make_plan
from aurora.types import Cluster, Curve, Gpu, Placement, PlanOptions, Profile

CLUSTER = Cluster("two", tuple(Gpu(f"g{i}", "cpu", i, 1e9, 1e9, 10**9) for i in range(2)))
CURVE = Curve(np.array([1.0]), np.array([1e-6]))
PHASES = dict.fromkeys(("gate", "expert", "aggregate"), CURVE)
PROFILE = Profile("m", "", np.arange(2 * 2 * 4).reshape(1, 2, 2, 4), 2, 64, 64, 100, 0, {"cpu": PHASES})


def plan(*profiles, **options):
    return make_plan(CLUSTER, profiles, PlanOptions(**options))


def test_any_number_of_experts_and_replicas_on_a_rank_is_fine():
    made = plan(PROFILE)
    uneven = Placement((((0, 1, 2), (3,)), ((), (0, 1, 2, 3))))
    odd = Placement((((0, 1, 2), (2, 3)), ((0, 1, 2), (2, 3))), (((1.0, 1.0, 0.5), (0.5, 1.0)),) * 2)
    for placement in (uneven, odd):
        check_engine(dataclasses.replace(made, models=(dataclasses.replace(made.models[0], placement=placement),)), "vllm")
    check_engine(plan(PROFILE, slots_per_gpu=3, place="eplb"), "vllm")


def test_two_models_are_not():
    with pytest.raises(InfeasiblePlan, match="vllm: serves one model by a plan, this one is for 2"):
        check_engine(plan(PROFILE, PROFILE), "vllm")


def test_an_unknown_engine():
    with pytest.raises(BadInput, match="`engine`: expected one of vllm, found 'ollama'"):
        check_engine(plan(PROFILE), "ollama")
