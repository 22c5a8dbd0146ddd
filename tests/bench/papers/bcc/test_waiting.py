"""Distributions of the messages waited for: against every order of finishing, and against draws."""

import itertools

import numpy as np
import pytest

from aurora.algorithms.gradient_codes import group_count
from bench.papers.bcc.recoverable_batches import messages_needed
from bench.papers.bcc.waiting import WAITING, formula, harmonic, waiting

pytestmark = pytest.mark.full

BY_HAND = [(3, 3, 1), (4, 4, 2), (5, 4, 2), (5, 5, 3), (4, 6, 3)]


@pytest.mark.parametrize(("workers", "batches", "load"), BY_HAND)
def test_bcc_is_every_draw_alike(workers, batches, load):
    groups = group_count(batches, load)
    pmf_K = np.zeros(workers + 1)
    for drawn in itertools.product(range(groups), repeat=workers):
        k = next((k for k in range(1, workers + 1) if len(set(drawn[:k])) == groups), None)
        if k:
            pmf_K[k] += groups**-workers
    found = waiting("bcc", workers, batches, load)
    assert found.pmf_K == pytest.approx(pmf_K)
    assert found.impossible == pytest.approx(1 - pmf_K.sum())


@pytest.mark.parametrize(("workers", "batches", "load"), BY_HAND)
def test_balanced_is_every_order_alike(workers, batches, load):
    groups = group_count(batches, load)
    holds_WJ = np.arange(workers)[:, None] % groups == np.arange(groups)
    orders = list(itertools.permutations(range(workers)))
    waits = [messages_needed(holds_WJ, order) for order in orders]
    expected_K = np.bincount(waits, minlength=workers + 1) / len(orders)
    assert waiting("balanced", workers, batches, load).pmf_K == pytest.approx(expected_K)


def test_simple_random_is_every_choice_alike():
    choices = list(itertools.combinations(range(4), 2))
    pmf_K = np.zeros(4)
    for drawn in itertools.product(choices, repeat=3):
        k = next((k for k in range(1, 4) if len(set().union(*drawn[:k])) == 4), None)
        if k:
            pmf_K[k] += len(choices) ** -3
    found = waiting("random", 3, 4, 2)
    assert found.pmf_K == pytest.approx(pmf_K)
    assert found.communication == pytest.approx(2 * found.threshold)


def test_idle_workers_are_waited_for_only_by_chance():
    """Two batches, three workers, one idle: both of the others must come."""
    assert waiting("uncoded", 3, 2, 1).pmf_K == pytest.approx([0, 0, 1 / 3, 2 / 3])


@pytest.mark.parametrize("scheme", sorted(WAITING))
def test_against_draws(scheme):
    workers, batches, load = 20, 20, 5
    rng = np.random.default_rng(1)
    found = waiting(scheme, workers, batches, load)
    waits = []
    for _ in range(4000):
        if scheme == "random":
            holds_WB = np.argsort(rng.random((workers, batches)), axis=1) < load
        elif scheme == "bcc":
            holds_WB = rng.integers(4, size=workers)[:, None] == np.arange(4)
        elif scheme == "balanced":
            holds_WB = rng.permutation(np.arange(workers) % 4)[:, None] == np.arange(4)
        else:
            assert np.flatnonzero(found.pmf_K).tolist() == [{"uncoded": 20, "cyclic": 16}[scheme]]
            return
        waits.append(messages_needed(holds_WB, range(workers)) or 0)
    share_K = np.bincount(waits, minlength=workers + 1)[1:] / len(waits)
    assert np.abs(share_K - found.pmf_K[1:]).max() < 0.03
    assert np.mean([w for w in waits if w]) == pytest.approx(found.threshold, rel=0.02)


@pytest.mark.parametrize(("workers", "bcc", "cyclic"), [(50, 11.4, 41), (100, 29.3, 91)])
def test_the_papers_thresholds(workers, bcc, cyclic):
    """Tables I and II, and the exact ones beside: finitely many workers change BCC's little, balance lowers it."""
    assert formula("bcc", workers, workers, 10) == pytest.approx(bcc, abs=0.05)
    assert waiting("bcc", workers, workers, 10).threshold == pytest.approx(bcc, abs=0.05)
    assert formula("cyclic", workers, workers, 10) == cyclic
    assert waiting("cyclic", workers, workers, 10).threshold == cyclic
    assert formula("uncoded", workers, workers, 1) == waiting("uncoded", workers, workers, 1).threshold == workers
    balanced = waiting("balanced", workers, workers, 10)
    assert workers / 10 <= balanced.threshold < bcc
    assert balanced.impossible == 0
    assert balanced.communication == balanced.threshold
    assert formula("random", workers, workers, 10) == pytest.approx(workers / 10 * np.log(workers))


@pytest.mark.parametrize("load", [1, 2, 4, 7, 13, 26, 52])
def test_balance_never_waits_for_more_and_nothing_for_less_than_the_bound(load):
    balanced, bcc = (waiting(scheme, 52, 52, load) for scheme in ("balanced", "bcc"))
    assert 52 / load <= balanced.threshold + 1e-9
    assert (np.cumsum(balanced.pmf_K) >= np.cumsum(bcc.pmf_K) - 1e-12).all()


def test_what_has_no_formula():
    assert formula("balanced", 4, 4, 2) is None
    assert harmonic(4) == pytest.approx(25 / 12)
