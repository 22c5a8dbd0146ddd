"""Equal shares of experts within the slots of each GPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.gpu_slots import even_slots
from aurora.errors import BadInput


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 30))
def test_even_slots_are_as_equal_as_they_can_be(slots, experts):
    slots_G = np.array(slots)
    if experts > slots_G.sum():
        with pytest.raises(BadInput, match=f"expected slots for {experts} experts, found {slots_G.sum()}"):
            even_slots(experts, slots_G)
        return
    own_G = even_slots(experts, slots_G)
    assert own_G.sum() == experts
    assert (own_G <= slots_G).all()
    for low in np.flatnonzero(own_G < slots_G):
        assert own_G.max() <= own_G[low] + 1
