"""Placing for failures: against all placements of small cases, min_replicas always kept, racks, rates, unequal nodes."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.check.plans import check_resilient
from aurora.algorithms.replicas.failure_resilient import SURVIVE, aim_of, allocate, mro, place_for_failures
from aurora.algorithms.replicas.survival_probability import held_by
from aurora.errors import BadInput, InfeasiblePlan
from aurora.types import FailureDomains
from tests.algorithms.replicas.brute_force import cases


@st.composite
def some_failure_domains(draw, max_nodes=7):
    """Nodes with different slots, each by itself or in racks, failing alike or not."""
    nodes = draw(st.integers(1, max_nodes))
    slots_N = np.array(draw(st.lists(st.integers(1, 5), min_size=nodes, max_size=nodes)))
    rack_N = np.array(draw(st.one_of(st.just(range(nodes)), st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes))))
    domain_N = np.unique(rack_N, return_inverse=True)[1]
    odds = st.floats(0.25, 4)
    domains = int(domain_N.max()) + 1
    odds_D = np.array(draw(st.one_of(st.just([1.0] * domains), st.lists(odds, min_size=domains, max_size=domains))))
    return FailureDomains(slots_N, domain_N, odds_D)


@given(some_failure_domains(), st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 4))
def test_replicas_follow_loads_and_keep_min_replicas(failure_domains, loads, min_replicas):
    """Eq. 1 written out with fractions."""
    load_E, slots = np.array(loads), int(failure_domains.slots_N.sum())
    if (
        len(loads) * min(min_replicas, failure_domains.nodes) > np.minimum(failure_domains.slots_N, len(loads)).sum()
        or len(loads) * min_replicas > slots
    ):
        with pytest.raises(InfeasiblePlan, match="slots"):
            allocate(load_E, failure_domains, min_replicas)
        return
    count_E = allocate(load_E, failure_domains, min_replicas)
    assert count_E.sum() == slots
    assert count_E.min() >= min_replicas
    left, order = slots, sorted(range(len(loads)), key=lambda expert: (loads[expert], expert))
    for place, expert in enumerate(order):
        rest = [loads[other] or (0 if any(loads) else 1) for other in order[place:]]
        assert count_E[expert] == max(int(Fraction(rest[0], sum(rest)) * left), min_replicas)
        left -= count_E[expert]
    assert (np.diff(count_E[order]) >= 0).all()


def test_all_739_small_cases():
    """aurora keeps as much as the best of all placements, whatever is left alive; mro does not in 27; min_replicas always kept."""
    seen = lost_by_mro = 0
    for nodes, slots, counts, best_K in cases():
        failure_domains, min_replicas, count_E = FailureDomains.equal(nodes, slots), counts[0], np.array(counts)
        kept = {}
        for name in ("aurora", "mro"):
            held_EN = SURVIVE[name](count_E, failure_domains, aim_of(min_replicas, failure_domains), np.random.default_rng(0))
            assert held_EN.sum(axis=1).tolist() == list(counts)
            assert (held_EN.sum(axis=0) == slots).all()
            mask_E = ((held_EN > 0) << np.arange(nodes)).sum(axis=1)
            kept[name] = np.zeros(nodes - 1, dtype=np.int64)
            for alive in range(1, (1 << nodes) - 1):
                kept[name][alive.bit_count() - 1] += bool((mask_E & alive).all())
            if name == "aurora":
                assert ((held_EN > 0).sum(axis=1) >= min(min_replicas, nodes)).all()
        assert kept["aurora"].tolist() == best_K.tolist()
        lost_by_mro += int((kept["mro"] < best_K).sum())
        seen += nodes - 1
    assert (seen, lost_by_mro) == (739, 27)


def test_where_the_papers_theorem_fails():
    """Four nodes of three slots, four experts of three replicas: MRO loses the fourth when the one node that holds it fails."""
    found = {
        name: place_for_failures(np.ones(4), FailureDomains.equal(4, 3), name, replicas=[3, 3, 3, 3]).survival_L[0].p_K
        for name in SURVIVE
    }
    assert found["mro"].tolist() == [0.75, 0.5, 0.0]
    assert found["aurora"].tolist() == [1.0, 1.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(some_failure_domains(), st.data())
def test_min_replicas_is_kept_and_nothing_is_below_mro(failure_domains, data):
    slots = int(failure_domains.slots_N.sum())
    experts = data.draw(st.integers(1, min(slots, 6)))
    load_E = np.array(data.draw(st.lists(st.integers(0, 20), min_size=experts, max_size=experts)))
    min_replicas = data.draw(st.integers(1, 3))
    alive = (
        data.draw(st.one_of(st.none(), st.integers(1, failure_domains.domains - 1))) if failure_domains.domains > 1 else None
    )
    try:
        made = place_for_failures(load_E, failure_domains, "aurora", min_replicas, alive=alive)
    except InfeasiblePlan:
        return
    check_resilient(made, failure_domains, guaranteed=True)
    assert sorted(e for held in made.slots_LN[0] for e in held) == sorted(
        np.repeat(range(experts), allocate(load_E, failure_domains, min_replicas))
    )
    other = place_for_failures(load_E, failure_domains, "mro", min_replicas)
    check_resilient(other, failure_domains, guaranteed=False)
    held = held_by(other.slots_LN[0], failure_domains, experts)
    on_nodes = np.array([[expert in slots_ for slots_ in other.slots_LN[0]] for expert in range(experts)]).sum(axis=1)
    if (held > 0).sum(axis=1).min() >= min(min_replicas, failure_domains.domains) and on_nodes.min() >= min(
        min_replicas, failure_domains.nodes
    ):
        p, q = made.survival_L[0].p_K, other.survival_L[0].p_K
        failures = list(range(min_replicas, failure_domains.domains)) if alive is None else [failure_domains.domains - alive]
        assert [p[k - 1] for k in failures] >= [q[k - 1] - 1e-9 for k in failures]


def test_the_failures_that_leave_the_given_number_alive_count_first():
    assert aim_of(2, FailureDomains.equal(5, 3)).failures == (2, 3, 4, 1)
    assert aim_of(2, FailureDomains.equal(5, 3), alive=2).failures == (3, 2, 4, 1)


def test_the_rarest_goes_where_failures_are_rare():
    failure_domains = FailureDomains(np.array([1, 1, 1]), np.arange(3), np.array([1.0, 1.0, 0.01]))
    found = place_for_failures(np.array([1.0, 5.0]), failure_domains, min_replicas=1)
    assert found.slots_LN[0][2] == (0,)


def test_many_nodes_are_placed_and_counted_exactly():
    load_E = (1.0 + np.arange(256)) ** -0.8
    failure_domains = FailureDomains.equal(64, 32)
    found, named = (
        place_for_failures(load_E, failure_domains, min_replicas=2),
        place_for_failures(load_E, failure_domains, "mro", 2),
    )
    check_resilient(found, failure_domains, guaranteed=True)
    assert not found.survival_L[0].half_width_K.any()
    assert (found.survival_L[0].p_K >= named.survival_L[0].p_K).all()


def test_what_lazarus_does():
    count_E, slots_N = np.array([2, 3, 4, 3]), np.full(4, 3)
    by_group = mro(count_E, slots_N)  # rarest first: 0, 1 and 3 on two nodes, 2 on the next; then what is left, in turn
    assert by_group[[0, 1, 3], :2].tolist() == [[1, 1]] * 3
    assert by_group.sum(axis=1).tolist() == count_E.tolist()
    assert (by_group.sum(axis=0) == 3).all()


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        (InfeasiblePlan, {"min_replicas": 4}, r"3 experts x 4 replicas need 12 slots; 2 nodes have 4"),
        (InfeasiblePlan, {"replicas": [2, 2, 1]}, "5 replicas need as many slots; 2 nodes have 4"),
        (BadInput, {"min_replicas": 0}, "`min_replicas`: expected one or more, found 0"),
        (BadInput, {"replicas": [1, 1]}, "`replicas`: expected 3 counts of 1 or more"),
        (BadInput, {"replicas": [1, 1, 1], "min_replicas": 2}, "`replicas`: expected 3 counts of 2 or more"),
        (BadInput, {"alive": 2}, "`alive`: expected 1 to 1 of 2"),
        (BadInput, {"method": "best"}, "`method`: expected one of aurora, mro"),
        (BadInput, {"seed": -1}, "`seed`"),
    ],
)
def test_what_it_refuses(kind, args, message):
    with pytest.raises(kind, match=message):
        place_for_failures(np.ones(3), FailureDomains.equal(2, 2), **args)


def test_min_replicas_that_only_equal_slots_would_keep():
    """One node has four slots, but the second of two replicas finds only one on the other."""
    with pytest.raises(InfeasiblePlan, match="2 distinct nodes each need 4 slots; of 5 slots 3"):
        place_for_failures(np.ones(2), FailureDomains(np.array([4, 1]), np.arange(2), np.ones(2)), min_replicas=2)


def test_min_replicas_that_only_equal_domains_would_keep():
    """One domain has five slots, so that three of eight experts find no second domain."""
    domains = FailureDomains(np.full(4, 5), np.array([0, 1, 1, 1]), np.ones(2))
    with pytest.raises(InfeasiblePlan, match="8 experts on 2 distinct failure domains each do not fit into 5, 15 slots"):
        place_for_failures(np.ones(8), domains, min_replicas=2)
    assert place_for_failures(np.ones(8), domains).min_replicas == 1


def test_what_was_drawn_and_never_seen_to_survive_is_no_broken_plan(monkeypatch):
    """Replicas of 256 experts in turn over 64 nodes: half of the nodes gone, no draw keeps everything."""
    failure_domains = FailureDomains.equal(64, 8)

    def in_turn(count_E, failure_domains, aim, rng):
        held_EN, turn_X = np.zeros((256, 64), dtype=np.int64), np.arange(512)
        np.add.at(held_EN, (np.repeat(np.argsort(count_E, kind="stable"), np.sort(count_E)), turn_X % 64), 1)
        return held_EN

    monkeypatch.setitem(SURVIVE, "in-turn", in_turn)
    made = place_for_failures((1.0 + np.arange(256)) ** -0.8, failure_domains, "in-turn", min_replicas=2)
    assert (made.survival_L[0].p_K - made.survival_L[0].half_width_K == 0).any()
    check_resilient(made, failure_domains, guaranteed=False)
