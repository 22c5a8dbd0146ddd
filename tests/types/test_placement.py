"""Placements and tables of slots say the same; replicas without a given split take even parts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.types import Placement
from aurora.types.placement import EMPTY


@st.composite
def slot_tables(draw):
    """(L, G, P) tables that hold every expert, maybe twice on a GPU, with empty slots."""
    layers, gpus, slots = (draw(st.integers(1, 3)) for _ in range(3))
    experts = draw(st.integers(1, gpus * slots))
    held_LGP = draw(arrays(np.int64, (layers, gpus, slots), elements=st.integers(EMPTY, experts - 1)))
    for held_GP in held_LGP:
        held_GP.flat[draw(st.permutations(range(held_GP.size)))[:experts]] = range(experts)
    return held_LGP


@given(slot_tables(), st.integers(1, 5))
def test_a_table_of_slots_is_a_placement_with_even_parts(held_LGP, slots):
    placement = Placement.of_slots(held_LGP)
    for layer, held_GP in enumerate(held_LGP):
        parts_EG = np.array([[(held_P == expert).sum() for held_P in held_GP] for expert in range(placement.experts)])
        assert np.allclose(placement.split_EG(layer), parts_EG / parts_EG.sum(axis=1, keepdims=True), rtol=1e-15)
    assert (placement.split_LG is None) == all((np.bincount(held_GP[held_GP >= 0]) == 1).all() for held_GP in held_LGP)
    table_LGP = placement.held_LGP(slots)
    most = max(len(held) for layer in placement.slots_LG for held in layer)
    assert table_LGP.shape == (*held_LGP.shape[:2], max(most, slots))
    for held_P, table_P in zip(held_LGP.reshape(-1, held_LGP.shape[2]), table_LGP.reshape(-1, table_LGP.shape[2]), strict=True):
        held = sorted(set(held_P.tolist()) - {EMPTY})
        assert table_P.tolist() == held + [EMPTY] * (len(table_P) - len(held))


def test_shares_stay_with_their_slots():
    held_LGP = np.array([[[2, EMPTY, 0], [EMPTY, 1, 2]]])
    placement = Placement.of_slots(held_LGP, np.array([[[0.25, 0.0, 1.0], [0.0, 1.0, 0.75]]]))
    assert placement == Placement((((0, 2), (1, 2)),), (((1.0, 0.25), (1.0, 0.75)),))
    assert Placement.of_slots(np.array([[[1], [0]]])) == Placement((((1,), (0,)),))
