"""After a failure or an arrival: every expert held again, the fewest moves, nothing drawn from the dead, and what is lost."""

from itertools import permutations
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms import recovery
from aurora.algorithms.recovery import fewest_moves
from aurora.algorithms.replicas.failure_resilient import place_for_failures
from aurora.errors import InfeasiblePlan
from aurora.types import FailureDomains
from bench.papers.lazarus import greedy_moves, recovered, recovery_moves


@st.composite
def failures(draw):
    """(old_LN, alive_N, load_LE, failure_domains, min_replicas): some of the nodes were placed on, some are alive, one at least both."""
    nodes, experts, layers = draw(st.integers(2, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 2))
    slots = draw(st.integers(experts, experts + 2))
    loads = st.lists(st.integers(0, 20), min_size=experts, max_size=experts)
    load_LE = np.array([draw(loads) for _ in range(layers)])
    some = st.lists(st.booleans(), min_size=nodes, max_size=nodes).map(np.array).filter(np.any)
    there_N, alive_N = draw(some), draw(some)
    first = place_for_failures(load_LE, FailureDomains.equal(int(there_N.sum()), slots), min_replicas=1)
    old_LN = []
    for held_J in first.slots_LN:
        rows = iter(held_J)
        old_LN.append([next(rows) if there else () for there in there_N])
    return old_LN, alive_N, load_LE, FailureDomains.equal(nodes, slots), draw(st.integers(1, 3))


@settings(max_examples=40, deadline=None)
@given(failures())
def test_the_living_hold_every_expert_again(case):
    old_LN, alive_N, load_LE, failure_domains, min_replicas = case
    made = recovered(old_LN, alive_N, load_LE, failure_domains, min_replicas)
    found = recovery_moves(old_LN, alive_N, made, 7)
    left, experts = np.flatnonzero(alive_N), load_LE.shape[1]
    slots_N = failure_domains.slots_N[left]
    least = max(1, min(min_replicas, slots_N.sum() // experts, np.minimum(slots_N, experts).sum() // experts))
    moved = 0
    arrived_N = np.zeros(failure_domains.nodes, dtype=np.int64)
    for layer, held_J in enumerate(made.slots_LG):
        assert len(held_J) == len(left)
        lost = set(range(load_LE.shape[1])) - {e for node in left for e in old_LN[layer][node]}
        assert set(found.lost_L[layer]) == lost
        for expert in range(load_LE.shape[1]):
            assert sum(expert in held for held in held_J) >= min(least, len(left))
        for node, held in zip(left, held_J, strict=True):
            assert len(held) <= failure_domains.slots_N[node]
            new = set(held) - set(old_LN[layer][node]) - lost
            moved += len(new)
            arrived_N[node] += 7 * len(new)
    assert found.moved == moved
    assert found.bytes_NN.sum(axis=0).tolist() == arrived_N.tolist()
    assert not found.bytes_NN[~alive_N].any()
    with patch.object(recovery, "fewest_moves", greedy_moves):
        greedy = recovered(old_LN, alive_N, load_LE, failure_domains, min_replicas)
    assert moved <= recovery_moves(old_LN, alive_N, greedy).moved


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 999))
def test_greedy_gives_a_renaming_and_never_fewer_bytes(gpus, experts, seed):
    rng = np.random.default_rng(seed)
    old_GE, new_GE = rng.integers(0, 2, (2, gpus, experts))
    bytes_E, alike_G = rng.integers(1, 9, experts), rng.integers(0, 2, gpus)

    def arriving(taker_G):
        return int(((new_GE * bytes_E)[np.argsort(taker_G)] * (1 - old_GE)).sum())

    greedy = greedy_moves(old_GE, new_GE, bytes_E, alike_G)
    assert tuple(greedy) in [p for p in permutations(range(gpus)) if (alike_G[list(p)] == alike_G).all()]
    assert arriving(fewest_moves(old_GE, new_GE, bytes_E, alike_G)) <= arriving(greedy)


def test_racks_move_as_a_whole_and_the_floor_gives_way_to_room():
    failure_domains = FailureDomains(np.full(4, 2), np.array([0, 0, 1, 1]), np.ones(2))
    old = [[(0, 1), (2, 3), (0, 1), (2, 3)]]
    alive_N = np.array([True, True, True, False])
    made = recovered(old, alive_N, np.ones((1, 4)), failure_domains, 2)
    assert recovery_moves(old, alive_N, made).lost_L == ((),)
    assert {e for held in made.slots_LG[0][:2] for e in held} == {0, 1, 2, 3}


def test_too_few_slots_are_refused():
    with pytest.raises(InfeasiblePlan, match="4 experts need 4 slots; the 1 nodes left have 2"):
        recovered([[(0, 1), (2, 3)]], np.array([True, False]), np.ones((1, 4)), FailureDomains.equal(2, 2), 1)
