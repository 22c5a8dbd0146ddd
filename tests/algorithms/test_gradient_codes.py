"""Codes decode to the plain sum, whoever is late."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.gradient_codes import SCHEMES, group_count, load_of, make_code, misses
from aurora.errors import BadInput, InfeasiblePlan


@st.composite
def sizes(draw):
    workers, batches = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    least = -(-batches // workers)
    return workers, batches, draw(st.integers(least, batches))


def made(scheme, size, seed):
    """None where BCC's draw misses a batch."""
    try:
        return make_code(scheme, *size, np.random.default_rng(seed))
    except InfeasiblePlan:
        return None


@given(st.sampled_from(sorted(SCHEMES)), sizes(), st.integers(0, 9))
def test_workers_in_any_order_cover_all_batches_by_disjoint_groups(scheme, size, seed):
    if (code := made(scheme, size, seed)) is None:
        assert scheme == "bcc"
        return
    workers, _, load = size
    order = np.random.default_rng(seed).permutation(workers).tolist()
    first = next(k for k in range(workers + 1) if code.covered(order[:k]))
    assert code.holds_WB[order[:first]].any(axis=0).all()
    assert not code.holds_WB[order[: first - 1]].any(axis=0).all()
    groups = np.unique(code.holds_WB, axis=0)
    assert groups.sum(axis=0).max() == 1  # disjoint: one message of each group is the sum
    assert code.holds_WB.sum(axis=1).max() <= load


def test_balanced_groups_differ_by_one_worker_at_most():
    for workers, batches, load in itertools.product(range(4, 12), (4, 7), (2, 3)):
        code = make_code("balanced", workers, batches, load, np.random.default_rng(0))
        repeats_B = code.holds_WB.sum(axis=0)
        assert repeats_B.max() - repeats_B.min() <= 1
        assert repeats_B.sum() >= workers


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.sampled_from(sorted(SCHEMES)))
def test_redundancy_is_what_every_batch_has_at_least(workers, batches, redundancy, scheme):
    if redundancy > workers:
        with pytest.raises(BadInput):
            load_of(workers, batches, redundancy)
        return
    load = load_of(workers, batches, redundancy)
    if scheme == "bcc":
        assert workers / group_count(batches, load) >= redundancy
    else:
        code = make_code(scheme, workers, batches, load, np.random.default_rng(0))
        assert code.holds_WB.sum(axis=0).min() >= redundancy


@pytest.mark.parametrize(
    ("args", "error", "why"),
    [
        (("balanced", 0, 4, 1), BadInput, "at least one worker and one batch, found 0 and 4"),
        (("balanced", 4, 4, 5), BadInput, "a load of 1 to 4 batches a worker, found 5"),
        (("bcc", 4, 4, 0), BadInput, "a load of 1 to 4 batches a worker, found 0"),
        (("balanced", 3, 8, 2), InfeasiblePlan, "3 workers of 2 batches each cannot hold all 8 batches"),
        (("bcc", 3, 4, 1), InfeasiblePlan, "3 workers of 1 batches each cannot hold all 4 batches"),
        (("best", 4, 4, 2), BadInput, "`scheme`: expected one of balanced, bcc, found 'best'"),
    ],
)
def test_sizes_that_fit_nothing(args, error, why):
    with pytest.raises(error, match=why):
        make_code(*args, np.random.default_rng(0))


def test_a_draw_that_misses_says_how_probable_that_was():
    messages = set()
    for seed in range(30):
        try:
            make_code("bcc", 4, 4, 2, np.random.default_rng(seed))
        except InfeasiblePlan as error:
            messages.add(str(error))
    assert messages
    assert all(m.startswith("scheme bcc: no worker of 4 drew group ") for m in messages)
    assert all("probability 0.12" in m for m in messages)


@pytest.mark.parametrize(("workers", "groups"), [(4, 2), (5, 3), (6, 4)])
def test_misses_are_counted(workers, groups):
    drawn = list(itertools.product(range(groups), repeat=workers))
    assert misses(workers, groups) == pytest.approx(sum(len(set(d)) < groups for d in drawn) / len(drawn))
    assert misses(20, 10) == pytest.approx(0.785, abs=1e-3)
    assert misses(100, 10) == pytest.approx(2.6e-4, rel=0.05)
    assert misses(50, 5) == pytest.approx(7e-5, rel=0.05)
