"""Layer times by hand and against each other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.placement.objective import formula
from aurora.algorithms.placement.phase_times import PhaseTimes, exclusive_s


def causal(*both):
    return formula(2).seconds(both)


@st.composite
def terms(draw, gpus):
    """A model's terms whose combine mirrors its dispatch, as on ports with equal rates both ways."""
    column = st.lists(st.integers(0, 20), min_size=gpus, max_size=gpus).map(lambda v: np.array(v, dtype=float))
    send, recv = draw(column), draw(column)
    return PhaseTimes(draw(column), np.stack([send, recv, recv, send]), draw(column), draw(column))


PAIRS = st.integers(1, 4).flatmap(lambda n: st.tuples(terms(n), terms(n)))


@given(PAIRS)
def test_colocation_takes_no_longer_than_one_after_the_other_with_barriers(pair):
    a, b = pair
    summed = sum(x.max() for t in pair for x in (t.gate_G, t.dispatch_G, t.expert_G, t.combine_G, t.aggregate_G))
    assert causal(a, b) <= summed + 1e-9


@given(PAIRS)
def test_causal_waits_for_each_models_own_chain(pair):
    """Neither model can be faster than its own phases one after another, b's gate included, a's too."""
    a, b = pair
    chain_b = b.gate_G.max() + b.dispatch_G.max() + b.expert_G.max() + b.combine_G.max() + b.aggregate_G.max()
    assert causal(a, b) >= chain_b + a.gate_G.max() - 1e-9


def one(value):
    return np.array([float(value)])


def test_exclusive_takes_the_slowest_gpu_of_each_part():
    port_4G = np.array([[5.0, 1], [0, 3], [0, 3], [5, 1]])
    t = PhaseTimes(np.array([1.0, 2]), port_4G, np.array([2.0, 9]), np.array([1.0, 4]))
    assert exclusive_s(t) == max(1 + 5, 2 + 3) + max(2 + 5, 9 + 3) + 4


def test_two_models_by_hand():
    """Gates 1, dispatch and combine 4 each, experts 3, aggregations 1, one GPU.

    F_a 4..7, N_b ends 8, F_b 8..11, s = 8, C_a ends 12, A_a 13, C_b ends max(8 + 8, 11 + 4) = 16, A_b 17, G_a 18.
    """
    t = PhaseTimes(one(1), np.full((4, 1), 4.0), one(3), one(1))
    assert causal(t, t) == 18
