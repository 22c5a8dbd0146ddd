"""LP rounding: every expert on one GPU, within the slots, and where ports differ a better start than equal groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.placement import linear_program as module
from aurora.algorithms.placement import placement_bounds
from aurora.algorithms.placement.cost_model import AIMS, aimed_costs
from aurora.algorithms.placement.linear_program import lp_rounding, phase_program
from aurora.algorithms.search.slot_search import slot_search
from aurora.types import Placement
from tests.conftest import cluster
from tests.planner.scenarios.test_exclusive import drawn
from tests.strategies import clusters, profiles

ONE = st.integers(1, 4).flatmap(lambda n: st.tuples(clusters(n), profiles(n, max_layers=1)))


@given(ONE, st.sampled_from(["sum", *AIMS]), st.integers(0, 2), st.booleans())
def test_each_expert_is_on_one_gpu_within_the_slots(case, aim, spare, small):
    machines, source = case
    costs = aimed_costs(machines, source, (), 0, aim)
    slots_G = np.full(len(machines), -(-source.experts // len(machines)) + spare)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALL", module.SMALL if small else 0)
        gpu_E = lp_rounding(costs, slots_G)
    assert gpu_E.shape == (source.experts,)
    assert (np.bincount(gpu_E, minlength=len(machines)) <= slots_G).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_search_from_it_ends_near_the_bound_on_mixed_gpus(seed):
    """Where a search from groups of equal size stays far above the bound, as it would have to move many experts at once."""
    machines = cluster(*[12.5e3, 5e2] * 4)
    costs = aimed_costs(machines, drawn(seed, sources=8, experts=48), (), 0, "sum")
    layer, slots_G = costs.phase_sums(np.full(8, 48)), np.full(8, 48)
    least_s = phase_program(layer, placement_bounds._least_phases(layer, spare=0), np.arange(8)).relaxed_s()  # of no replicas

    def searched_s(gpu_E):
        return slot_search(
            layer, Placement.unreplicated(gpu_E, 8).held_LGP(48)[0], np.random.default_rng(0), 8, replicas=False
        )[1]

    assert searched_s(lp_rounding(costs, slots_G)) <= least_s * 1.01
