"""Fewest slots that survive: every set of failures leaves every expert, and with a slot less per GPU no placement can."""

from itertools import combinations, combinations_with_replacement, product

import numpy as np
import pytest

from aurora.algorithms.replicas.failure_resilient import fewest_slots, place_to_survive
from aurora.errors import InfeasiblePlan


def survives(slots_G, server_G, experts, failures):
    """Whether every set of `failures` servers may fail."""
    return all(
        set(range(experts)) == {e for held, server in zip(slots_G, server_G, strict=True) if server not in lost for e in held}
        for lost in combinations(sorted(set(server_G)), failures)
    )


@pytest.mark.parametrize(("gpus", "servers"), [(2, None), (3, None), (4, None), (4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("experts", [1, 2, 3, 5, 8])
def test_all_sets_of_failures_leave_every_expert(experts, gpus, servers):
    load_E = (1.0 + np.arange(experts)) ** -0.8
    server_G = [g // (gpus // (servers or gpus)) for g in range(gpus)]
    for failures in range(servers or gpus):
        for more in (0, 1):
            slots = fewest_slots(experts, gpus, failures, servers) + more
            made = place_to_survive(load_E, gpus, failures, servers, slots)
            assert survives(made.placement.slots_LG[0], server_G, experts, failures)
            assert max(map(len, made.placement.slots_LG[0])) <= slots
        with pytest.raises(InfeasiblePlan, match="slots per GPU"):
            place_to_survive(load_E, gpus, failures, servers, slots - 2)


@pytest.mark.parametrize(("gpus", "servers"), [(2, None), (3, None), (4, 2)])
def test_no_placement_survives_with_a_slot_less(gpus, servers):
    """Every placement of up to three experts in one slot less per GPU is tried."""
    server_G = [g // (gpus // (servers or gpus)) for g in range(gpus)]
    for experts, failures in product((1, 2, 3), range(1, servers or gpus)):
        slots = fewest_slots(experts, gpus, failures, servers) - 1
        contents = list(combinations_with_replacement(range(experts), slots))
        assert not any(survives(slots_G, server_G, experts, failures) for slots_G in product(contents, repeat=gpus))


def test_loads_are_balanced():
    load_LE = np.random.default_rng(0).permuted(np.tile((1.0 + np.arange(64)) ** -0.3, (2, 1)), axis=1)
    made = place_to_survive(load_LE, 16, 1, 4)
    assert (made.max_load_L < 1.02 * made.mean_load_L).all()


def test_nobody_is_left():
    with pytest.raises(InfeasiblePlan, match="4 failures: expected more GPUs or servers, found 4"):
        fewest_slots(8, 8, 4, 4)
