"""The checker of schedules of several steps."""

from dataclasses import replace

import numpy as np
import pytest

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_steps
from aurora.algorithms.network.switch import timed_steps
from aurora.errors import BrokenPlan
from aurora.types import Network


def test_steps_that_begin_too_early_or_are_not_told_are_found():
    """Two transfers inside the servers, each by itself possible: rank 1 sends step 1 while step 0 still comes in."""
    network = Network.equal(3, 1.0)
    bytes_SGG = np.zeros((2, 3, 3), dtype=np.int64)
    bytes_SGG[0, 0, 1], bytes_SGG[1, 1, 2] = 4, 4
    order = ORDER["all-at-once"](bytes_SGG.sum(axis=0), network, rng=np.random.default_rng(0))
    made = timed_steps(order, bytes_SGG, network)
    check_steps(made, bytes_SGG, network)
    early = replace(made, start_s_X=made.start_s_X - made.step_X, end_s_X=made.end_s_X - made.step_X)
    with pytest.raises(BrokenPlan, match="rank 1 begins step 1 before its transfers of earlier steps have ended"):
        check_steps(early, bytes_SGG, network)
    with pytest.raises(BrokenPlan, match="expected the step of each transfer, of 2 steps"):
        check_steps(replace(made, step_X=None), bytes_SGG, network)
    with pytest.raises(BrokenPlan, match="bytes, expected"):
        check_steps(replace(made, step_X=np.zeros_like(made.step_X)), bytes_SGG, network)
