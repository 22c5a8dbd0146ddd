"""What the controller of a plan takes from the plan's cluster and profile."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.algorithms.control.controller import (
    load_cost_G,
    slots_in_use,
    slowest_port_Bps,
)
from aurora.types import Curve, Placement, Servers
from tests.conftest import cluster
from tests.planner.test_plan import profile


def of_kinds(machines, *kinds):
    return replace(machines, gpus=tuple(replace(gpu, kind=kind) for gpu, kind in zip(machines.gpus, kinds, strict=True)))


def curves(**seconds):
    """Of each kind, which takes so many seconds for a thousand tokens."""
    line = {kind: Curve(np.array([0.0, 1000.0]), np.array([0.0, each])) for kind, each in seconds.items()}
    return {kind: dict.fromkeys(("gate", "expert", "aggregate"), curve) for kind, curve in line.items()}


def test_load_costs_what_a_kinds_own_curve_says():
    machines = of_kinds(cluster(1e9, 1e9), "slow", "fast")
    traffic = replace(profile(np.full((1, 1, 2, 4), 100)), curves=curves(slow=3.0, fast=1.0))
    slots = slots_in_use(Placement((((0, 1, 2), (3,)),)), load_cost_G(machines, traffic))
    assert slots.slots_G.tolist() == [3, 1]
    assert slots.cost_G[0] == pytest.approx(3 * slots.cost_G[1])
    assert load_cost_G(machines).tolist() == [1.0, 1.0]  # speeds tell alone


def test_experts_travel_by_ports_and_nics():
    machines = replace(cluster(1e9, 1e9, 1e9, 1e9), servers=Servers.of([0, 1, 0, 1], 1e8))
    assert slowest_port_Bps(machines) == 1e8
    assert slowest_port_Bps(replace(machines, servers=None)) == 1e9
