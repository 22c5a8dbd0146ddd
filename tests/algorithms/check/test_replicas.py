"""The judge of layouts must find every kind of lie."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.algorithms.check.plans import check_layout
from aurora.errors import BrokenPlan
from aurora.types import GpuSlots, Placement, ReplicaPlacement

LOAD = np.array([[6.0, 2.0]])
GOOD = ReplicaPlacement("by hand", Placement((((0,), (0, 1)),), (((0.6,), (0.4, 1.0)),)), [4.4], [4.0], [4.0], 0.0)


def test_what_is_true_passes():
    check_layout(GOOD, LOAD, GpuSlots.equal(2, 2))


@pytest.mark.parametrize(
    ("changed", "load", "room", "message"),
    [
        ({}, LOAD, GpuSlots.equal(2, 1), "GPU 1 holds 2 experts in 1 slots"),
        ({}, LOAD, GpuSlots.equal(3, 2), r"expected \(layers, experts, GPUs\) \(1, 2, 3\), found \(1, 2, 2\)"),
        ({}, np.array([[6.0, 2.0, 0.0]]), GpuSlots.equal(2, 2), r"expected \(layers, experts, GPUs\) \(1, 3, 2\)"),
        ({}, np.array([[6.0]]), GpuSlots.equal(2, 2), r"expected \(layers, experts, GPUs\) \(1, 1, 2\)"),
        ({"max_load_L": [4.0]}, LOAD, GpuSlots.equal(2, 2), "claims a largest load of 4, its shares give 4.4"),
        ({"mean_load_L": [3.0]}, LOAD, GpuSlots.equal(2, 2), "claims a mean load of 3, found 4"),
        ({"bound_L": [4.5]}, LOAD, GpuSlots.equal(2, 2), "bound <= largest load"),
        ({"bound_L": [3.5]}, LOAD, GpuSlots.equal(2, 2), "mean 4 <= bound"),
        ({}, LOAD, GpuSlots(np.array([2, 2]), np.array([1.0, 2.0])), "its shares give 8.8"),
    ],
)
def test_lies_are_found(changed, load, room, message):
    with pytest.raises(BrokenPlan, match=message):
        check_layout(replace(GOOD, **changed), load, room)
