"""When all batches are held, against brute force over every set and every order of workers."""

import itertools
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.algorithms.replicas.survival_probability import all_held
from aurora.errors import BadInput
from bench.papers.bcc import recoverable_batches
from bench.papers.bcc.recoverable_batches import messages_needed, recoverable_sets, recoverable_share_K

pytestmark = pytest.mark.full


def covers(holds_WB, some):
    """By the definition, worker by worker."""
    return set(range(holds_WB.shape[1])) <= {b for w in some for b in np.flatnonzero(holds_WB[w])}


holdings = st.tuples(st.integers(1, 7), st.integers(1, 6)).flatmap(lambda shape: arrays(np.bool_, shape))


@given(holdings)
def test_sets_that_hold_everything_are_counted_exactly(holds_WB):
    workers = len(holds_WB)
    expected = [sum(covers(holds_WB, some) for some in itertools.combinations(range(workers), k)) for k in range(workers + 1)]
    assert recoverable_sets(holds_WB) == expected
    assert recoverable_share_K(holds_WB) == pytest.approx([n / comb(workers, k) for k, n in enumerate(expected)])


@given(holdings, st.randoms(use_true_random=False))
def test_waiting_ends_with_the_first_worker_that_completes(holds_WB, random):
    order = list(range(len(holds_WB)))
    random.shuffle(order)
    found = messages_needed(holds_WB, order)
    expected = next((k for k in range(1, len(order) + 1) if covers(holds_WB, order[:k])), None)
    assert found == expected


def test_neighbours_of_a_ring():
    """Batch b sits with workers b and b + 1: a set holds every batch unless two neighbours are missing."""
    holds_WB = (np.eye(6) + np.roll(np.eye(6), 1, axis=1)) > 0
    assert recoverable_sets(holds_WB)[3:] == [2, 9, 6, 1]
    assert all_held(holds_WB, np.array([[True, False] * 3, [True, True, False] * 2, [True] * 4 + [False] * 2])).tolist() == [
        True,
        True,
        False,
    ]


def test_too_long_a_count_is_refused(monkeypatch):
    monkeypatch.setattr(recoverable_batches, "MOST_BRANCHES", 3)
    with pytest.raises(BadInput, match="counted in 3 branches"):
        recoverable_sets((np.eye(9) + np.roll(np.eye(9), 1, axis=1)) > 0)
