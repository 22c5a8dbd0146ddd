"""Experts that move while training goes on: decisions after windows of timed steps."""

import numpy as np

from aurora.training.migration import end_window, rebalancer
from aurora.types import Placement
from tests.conftest import cluster


def test_a_window_of_steps_moves_experts_and_the_next_one_keeps_them():
    placement = Placement((((0, 1), (2, 3)),))
    controller = rebalancer(placement, cluster(1e9, 1e9), 1000, 1, None)
    load_LE = np.array([[9000, 8000, 100, 200]])
    assert end_window(controller, np.zeros_like(load_LE), []) is None
    wanted = end_window(controller, load_LE, [0.5, 0.5])
    assert wanted is not None
    controller.moved(0.1)
    assert [set(held_P) for held_P in controller.held_LGP[0].tolist()] == [set(held_P) for held_P in wanted.slots_LG[0]]
    assert end_window(controller, load_LE, [0.5, 0.5]) is None
