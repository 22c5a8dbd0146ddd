"""Which experts share a GPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.placement.grouping import PLACE


@pytest.mark.parametrize("name", PLACE)
@given(slots=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any), data=st.data())
def test_every_group_is_filled(name, slots, data):
    experts = sum(slots)
    load = data.draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts))
    group_E = PLACE[name](np.array(load, dtype=np.int64), np.array(slots), np.random.default_rng(0))
    assert np.bincount(group_E, minlength=len(slots)).tolist() == slots
