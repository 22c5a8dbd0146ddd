"""Rebalancing: never worse than the placement in force, within its limits, and near the best placement if it may move enough."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.replicas.rebalance import rebalance
from aurora.algorithms.replicas.registry import place
from aurora.errors import BadInput
from aurora.types import GpuSlots
from tests.algorithms.replicas.test_registry import best_even, slots_and_loads


def largest_time(held_GP, load_E, cost_G):
    """The largest load of a GPU times its cost if each slot takes the same part of its expert's load."""
    count_E = np.bincount(held_GP[held_GP >= 0], minlength=len(load_E))
    return max(sum(load_E[e] / count_E[e] for e in held if e >= 0) * cost for held, cost in zip(held_GP, cost_G, strict=True))


@st.composite
def in_force(draw):
    """(held_LGP, slots, load_LE): slots that hold every expert, some twice on a GPU, and loads."""
    slots, load_LE = draw(slots_and_loads(layers=2))
    layers, experts = load_LE.shape
    held_LGP = np.full((layers, slots.gpus, slots.slots_G.max()), -1, dtype=np.int64)
    places = [(g, p) for g in range(slots.gpus) for p in range(slots.slots_G[g])]
    for held_GP in held_LGP:
        order = draw(st.permutations(places))
        for expert, (g, p) in enumerate(order[:experts]):
            held_GP[g, p] = expert
        for g, p in order[experts:]:
            held_GP[g, p] = draw(st.integers(-1, experts - 1))
    return held_LGP, slots, load_LE


def spread(held_GP, of_G, experts):
    """(E,) on how many GPUs, nodes or racks each expert is; of_G (G,) are their numbers."""
    return np.array([len({of for of, held in zip(of_G, held_GP, strict=True) if e in held}) for e in range(experts)])


@given(
    in_force(),
    st.one_of(st.none(), st.integers(0, 3)),
    st.sampled_from((0.0, 0.01)),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_the_next_placement_keeps_its_rules(case, max_moves, enough, min_replicas, of_a_domain):
    held_LGP, slots, load_LE = case
    domain_G = np.arange(slots.gpus) // of_a_domain
    made = rebalance(load_LE, held_LGP, slots, max_moves, enough, min_replicas, domain_G)
    for layer, (before_GP, after_GP, load_E) in enumerate(zip(held_LGP, made.held_LGP, load_LE, strict=True)):
        before, after = (largest_time(held_GP, load_E, slots.cost_G) for held_GP in (before_GP, after_GP))
        assert made.before_L[layer] == pytest.approx(before)
        assert made.max_load_L[layer] == pytest.approx(after)
        assert after < before or (after_GP == before_GP).all()
        for of_G in (range(slots.gpus), domain_G):
            was_E, is_E = (spread(held_GP, of_G, len(load_E)) for held_GP in (before_GP, after_GP))
            assert (is_E >= np.minimum(was_E, min_replicas)).all()
        moved = 0
        for g, (old_P, new_P) in enumerate(zip(before_GP, after_GP, strict=True)):
            assert (new_P[slots.slots_G[g] :] == -1).all()
            stays_P = np.isin(new_P, old_P[old_P >= 0])
            if (after_GP != before_GP).any():
                assert len(set(new_P[new_P >= 0].tolist())) == (new_P >= 0).sum()
                assert (new_P[stays_P] == old_P[stays_P]).all() or len(set(old_P.tolist())) < len(old_P)
            moved += int((~stays_P & (new_P >= 0)).sum())
        assert moved == made.moves_L[layer] <= (np.inf if max_moves is None else max_moves)


def test_against_every_placement():
    """Forty drawn layers of four experts on three mixed GPUs with two slots, from any start: near the best placement."""
    rng, ratios = np.random.default_rng(0), []
    for _ in range(40):
        load_E, slots = rng.random(4) ** 2, GpuSlots(np.array([2, 2, 2]), rng.choice([1.0, 1.5, 2.0], 3))
        held_GP = np.full(6, -1)
        held_GP[rng.permutation(6)[:4]] = np.arange(4)
        made = rebalance(load_E, held_GP.reshape(1, 3, 2), slots, enough=0.0)
        ratios.append(made.max_load_L[0] / best_even(load_E, slots.cost_G, (2, 2, 2)))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.75
    assert np.mean(ratios) <= 1.12


def test_min_replicas_stay_on_different_nodes():
    """Expert 1 is busy: without nodes, one more of it takes the place of expert 0's only replica on the first node."""
    load_E, held_LGP, domain_G = [7, 15, 8, 7], [[[3, 0], [1, 3], [2, 0], [2, 0]]], [0, 0, 1, 1]
    on_gpus, on_nodes = (rebalance(load_E, held_LGP, enough=0.0, min_replicas=2, domain_G=each) for each in (None, domain_G))
    assert spread(on_gpus.held_LGP[0], domain_G, 4)[0] == 1
    assert spread(on_nodes.held_LGP[0], domain_G, 4)[0] == 2
    assert on_nodes.max_load_L[0] == 11 < on_nodes.before_L[0]


def drifted(layers, experts, drift):
    """Zipf loads and the same after a lognormal drift."""
    rng = np.random.default_rng(0)
    before_LE = np.array([rng.permutation((1.0 + np.arange(experts)) ** -0.8) for _ in range(layers)])
    return before_LE, before_LE * rng.lognormal(0, drift, before_LE.shape)


def test_a_large_model_is_rebalanced_by_few_moves():
    before_LE, load_LE = drifted(3, 256, 0.3)
    slots = GpuSlots.equal(32, 9)
    held = place(before_LE, slots).placement
    made = rebalance(load_LE, held)
    assert (made.before_L > 1.15 * made.mean_load_L).all()
    assert (made.max_load_L <= 1.01 * made.mean_load_L).all()
    assert (made.moves_L < 288 / 3).all()
    assert made.moves_L.mean() < 30  # of 14 GPUs above the target; 41 where each step went by the slowest GPU's relief alone
    fewer = rebalance(load_LE, held, max_moves=np.int64(10))
    assert (fewer.moves_L <= 10).all()
    assert (fewer.max_load_L < made.before_L).all()
    assert (made.max_load_L < fewer.max_load_L).all()
    assert [made.placement.slots_LG[0][g] for g in range(32)] == [tuple(sorted(row)) for row in made.held_LGP[0].tolist()]
    assert rebalance(load_LE, held).held_LGP.tolist() == made.held_LGP.tolist()


def test_slots_that_stay_may_hold_an_expert_twice():
    made = rebalance([3.0, 1.0], [[[0, 0], [0, 1]]], max_moves=0)
    assert made.held_LGP.tolist() == [[[0, 0], [0, 1]]]
    assert made.placement.split_EG(0).tolist() == [[2 / 3, 1 / 3], [0, 1]]


@pytest.mark.parametrize(
    ("loads", "held", "options", "words"),
    [
        ([1, 1], [[[0], [0]]], {}, "none of expert 1 in layer 0"),
        ([1, 1], [[[0], [2]]], {}, "experts from 0 to 1"),
        ([1, 1], [[0, 1]], {}, "by layer, GPU and slot"),
        ([1, 1], [[[0, 1], [1]]], {}, "`held`: expected rows of one length"),
        ([1, 1], np.full((1, 2, 1), 2**64 - 1, dtype=np.uint64), {}, "experts from 0 to 1"),
        ([[1, 1], [1]], [[[0], [1]]], {}, "loads: expected rows of one length"),
        ([[[1, 1]]], [[[0], [1]]], {}, "loads: expected numbers with 2 axes"),
        ([1e308, 1e308], [[[0], [1]]], {}, "loads: a layer's loads sum to more"),
        ([1, 1], [[[0], [1]]], {"slots": GpuSlots.equal(3, 1)}, "1 layers on 3 GPUs, found 1 on 2"),
        ([1, 1], [[[0, 1], [0, 1]]], {"slots": GpuSlots.equal(2, 1)}, "slots of each GPU"),
        ([1, 1], [[[0], [1]]], {"max_moves": -1}, "`max_moves`"),
        ([1, 1], [[[0], [1]]], {"enough": float("nan")}, "`enough`"),
        ([1, 1], [[[0], [1]]], {"min_replicas": 0}, "`min_replicas`: expected a whole number of one or more, found 0"),
        ([1, 1], [[[0], [1]]], {"domain_G": [0]}, "`domain_G`: expected a failure domain for each of 2 GPUs, found 1"),
    ],
)
def test_what_does_not_fit_is_refused(loads, held, options, words):
    with pytest.raises(BadInput, match=words):
        rebalance(loads, held, **options)


def test_few_slots_full_of_the_wrong_replicas_are_balanced_with_fewer_moves_than_anew():
    shares_E = (1.0 + np.arange(64)) ** -0.8
    load_LE = np.random.default_rng(0).permuted(np.tile(shares_E / shares_E.sum(), (4, 1)), axis=1)
    slots = GpuSlots.equal(32, 3)
    held = place(load_LE, slots).placement
    now_LE = np.random.default_rng(1).permuted(load_LE, axis=1)
    made = rebalance(now_LE, held)
    assert made.max_load_L.mean() < 1.03 * made.mean_load_L.mean()  # single steps end at 1.2
    assert made.moves_L.mean() < 0.7 * held.held_LGP()[0].size
