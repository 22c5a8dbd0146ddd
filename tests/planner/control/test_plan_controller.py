"""What the controller of a plan takes from the plan's cluster and profile."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.planner.control.plan_controller import slots_in_use
from aurora.types import Curve, Placement
from tests.conftest import cluster
from tests.planner.test_make_plan import profile


def test_load_costs_what_a_kinds_own_curve_says():
    machines, (slow, fast) = cluster(1e9, 1e9), ("slow", "fast")
    machines = replace(
        machines, gpus=tuple(replace(gpu, kind=kind) for gpu, kind in zip(machines.gpus, (slow, fast), strict=True))
    )
    placement = Placement((((0, 1, 2), (3,)),))
    traffic = profile(np.full((1, 1, 2, 4), 100))
    curves = {
        kind: dict.fromkeys(("gate", "expert", "aggregate"), Curve(np.array([0.0, 1000.0]), np.array([0.0, seconds])))
        for kind, seconds in ((slow, 3.0), (fast, 1.0))
    }
    slots = slots_in_use(placement, machines, replace(traffic, curves=curves))
    assert slots.slots_G.tolist() == [3, 1]
    assert slots.cost_G[0] == pytest.approx(3 * slots.cost_G[1])
    assert slots_in_use(placement, machines).cost_G.tolist() == [1.0, 1.0]  # speeds tell alone
