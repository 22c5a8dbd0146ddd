"""How likely experts survive: against every set of failures looked at by itself."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.replicas import survival_probability as module
from aurora.algorithms.replicas.failure_resilient import mro
from aurora.algorithms.replicas.survival_probability import held_by, sample_failures, survival, wilson
from aurora.errors import BadInput
from aurora.types import FailureDomains


@st.composite
def holdings(draw):
    """(count_ED, failure_domains): every expert somewhere, domains fail alike or not."""
    domains, experts = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 2), min_size=domains, max_size=domains).filter(any)
    count_ED = np.array(draw(st.lists(row, min_size=experts, max_size=experts)))
    odds = draw(st.one_of(st.just([1.0] * domains), st.lists(st.floats(0.1, 9), min_size=domains, max_size=domains)))
    slots_D = np.maximum(count_ED.sum(axis=0), 1)
    return count_ED, FailureDomains(slots_D, np.arange(domains), np.array(odds))


def by_listing(count_ED, failure_domains, failures):
    """The weight of the sets of failures that lose nothing, over that of all."""
    kept = total = 0.0
    for failed in combinations(range(failure_domains.domains), failures):
        weight = np.prod(failure_domains.odds_D[list(failed)])
        total += weight
        kept += weight * bool((np.delete(count_ED, failed, axis=1).sum(axis=1) > 0).all())
    return kept / total


@given(holdings())
def test_counted_is_listed_and_below_the_bound(case):
    count_ED, failure_domains = case
    found = survival(count_ED, failure_domains, np.random.default_rng(0))
    assert not found.half_width_K.any()
    for failures in range(1, failure_domains.domains):
        wanted = by_listing(count_ED, failure_domains, failures)
        assert found.p_K[failures - 1] == pytest.approx(wanted, abs=1e-12)
        assert wanted <= found.bound_K[failures - 1] + 1e-12


@settings(max_examples=20)
@given(holdings())
def test_drawn_intervals_hold_the_truth(case):
    """With a search that may not branch; five times the interval's half is never left."""
    count_ED, failure_domains = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BRANCHES", 0)
        found = survival(count_ED, failure_domains, np.random.default_rng(1))
    for failures, (p, half) in enumerate(zip(found.p_K, found.half_width_K, strict=True), 1):
        assert p == pytest.approx(by_listing(count_ED, failure_domains, failures), abs=5 * half / module.Z_95 * 1.96 + 1e-12)
        assert p - half >= 0
        assert p + half <= 1


def test_drawn_sets_have_their_size_and_odds():
    odds_D = np.array([1.0, 2.0, 4.0])
    failed_MD = sample_failures(odds_D, 2, 40_000, np.random.default_rng(0))
    assert (failed_MD.sum(axis=1) == 2).all()
    without = [float((~failed_MD[:, domain]).mean()) for domain in range(3)]
    assert without == pytest.approx([8 / 14, 4 / 14, 2 / 14], abs=0.01)


def test_fig_4_of_the_paper():
    """Two placements of the same replicas on five nodes, three of which fail: 5/10 with the pairs alive that the paper lists, and
    7/10, which is what MRO places."""
    failure_domains, rng = FailureDomains.equal(5, 4), np.random.default_rng(0)
    alive = [(1, 2), (1, 3), (1, 4), (2, 4), (2, 5)]
    plan_a = [{1, 2}, {2, 3, 4}, {1, 4, 5}, {1, 2, 3, 4, 5}]
    assert [pair for pair in combinations(range(1, 6), 2) if all(held & set(pair) for held in plan_a)] == alive
    count_ED = np.array([[node in held for node in range(1, 6)] for held in plan_a]).astype(np.int64)
    count_ED[3] += [1, 1, 3, 1, 1]  # the last expert fills all slots
    assert survival(count_ED, failure_domains, rng).p_K[2] == 0.5
    assert survival(mro(count_ED.sum(axis=1), failure_domains.slots_N), failure_domains, rng).p_K[2] == 0.7


def test_racks_fail_whole():
    failure_domains = FailureDomains(np.array([1, 1, 1, 1]), np.array([0, 0, 1, 1]), np.ones(2))
    apart, together = [[0], [1], [0], [1]], [[0], [0], [1], [1]]
    rng = np.random.default_rng(0)
    assert survival(held_by(apart, failure_domains, 2), failure_domains, rng).p_K.tolist() == [1.0]
    assert survival(held_by(together, failure_domains, 2), failure_domains, rng).p_K.tolist() == [0.0]


def test_64_nodes_and_256_experts_in_groups_are_exact():
    """Eight groups of 32 experts on 8 nodes each: by inclusion and exclusion over groups."""
    count_ED = np.kron(np.eye(8, dtype=np.int64), np.ones((32, 8), dtype=np.int64))
    found = survival(count_ED, FailureDomains.equal(64, 32), np.random.default_rng(0))
    assert not found.half_width_K.any()
    for failures in (8, 20, 40, 56, 57):
        terms = [(-1) ** g * comb(8, g) * comb(64 - 8 * g, failures - 8 * g) for g in range(9) if 8 * g <= failures]
        assert found.p_K[failures - 1] == pytest.approx(sum(terms) / comb(64, failures), abs=1e-15)


def test_an_interval_of_nothing_seen_is_not_empty():
    centre, half = wilson(0.0, 1000)
    assert 0 <= centre - half < 1e-12
    assert 0 < half < 0.01


@given(holdings())
def test_what_cannot_be_counted_whole_is_counted_in_part(case):
    count_ED, failure_domains = case
    counting = module.recoverable_odds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "recoverable_odds", lambda *given: counting(*given) if given[2] <= 2 else [])
        found = survival(count_ED, failure_domains, np.random.default_rng(0))
    for failures in range(1, min(failure_domains.domains, 3)):
        assert found.half_width_K[failures - 1] == 0
        assert found.p_K[failures - 1] == pytest.approx(by_listing(count_ED, failure_domains, failures), abs=1e-12)


def test_rates_that_rounding_would_lose_are_refused():
    with pytest.raises(BadInput, match=r"failure rates: expected them within 1e\+12 of each other"):
        FailureDomains(np.ones(2, dtype=int), np.arange(2), np.array([1e-300, 1.0]))
    with pytest.raises(BadInput, match="`slots`: expected from one to 65536, found 1000000000000000000000"):
        FailureDomains.equal(2, 10**21)
