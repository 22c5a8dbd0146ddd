"""Workers of different speeds: expectations against draws, roots against their equation."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.bcc.mixed_workers import (
    ALLOT,
    MixedWorkers,
    expected_by,
    fluid_s,
    loads_by,
    lower_bound_s,
    random_recovery_time,
    recommend,
    results_s,
    seconds_a_batch,
    theorem_2,
    unrecoverable_probability,
)

pytestmark = pytest.mark.full


def mixed(shift, rate):
    return MixedWorkers(np.array(shift), np.array(rate))


PAPER = MixedWorkers(np.full(100, 20.0), np.array([1.0] * 95 + [20.0] * 5))

speeds = st.lists(st.tuples(st.floats(0.01, 30), st.floats(0.05, 30)), min_size=1, max_size=6).map(
    lambda pairs: MixedWorkers(*(np.array(column) for column in zip(*pairs, strict=True)))
)


@given(speeds)
def test_paces_solve_their_equation(workers):
    pace = seconds_a_batch(workers)
    x, c = workers.rate_W * pace, workers.rate_W * workers.shift_W
    assert x - np.log1p(x) == pytest.approx(c, rel=1e-6, abs=1e-9)
    assert (pace >= workers.shift_W).all()


@given(speeds, st.floats(0.5, 50))
def test_no_other_loads_are_expected_to_give_more(workers, at_s):
    at = np.array([at_s])
    best = expected_by(workers, 40, at)[0]
    load_W = loads_by(workers, 40, at)[0]
    for scale in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        other_W = np.minimum(load_W * scale, 40.0)
        assert workers.finished(other_W, at)[0] @ other_W <= best * (1 + 1e-9)


@given(speeds, st.integers(1, 12))
def test_the_fluid_time_gives_the_results(workers, results):
    at_s = fluid_s(workers, 12, results)
    assert expected_by(workers, 12, np.array([at_s]))[0] == pytest.approx(results, rel=1e-6)


@pytest.mark.parametrize(("loads", "results"), [((2, 3, 4), 9), ((2, 3, 4), 5), ((5, 5, 5), 6), ((1, 0, 7), 7)])
def test_times_to_results_against_draws(loads, results):
    workers, load_W = mixed([0.5, 1.0, 2.0], [1.0, 0.5, 4.0]), np.array(loads)
    seconds_XW = workers.draw(load_W, 100_000, np.random.default_rng(0))
    order_XW = np.argsort(seconds_XW, axis=1)
    enough_XW = np.cumsum(load_W[order_XW], axis=1) >= results
    times = np.take_along_axis(seconds_XW, order_XW, axis=1)[np.arange(len(seconds_XW)), enough_XW.argmax(axis=1)]
    assert results_s(workers, load_W, results) == pytest.approx(times.mean(), abs=4 * times.std() / np.sqrt(len(times)))


def test_the_last_of_equal_workers():
    """a r + (r / mu) H_n."""
    workers = MixedWorkers(np.full(4, 2.0), np.full(4, 0.5))
    assert results_s(workers, np.full(4, 3), 12) == pytest.approx(6 + 6 * 25 / 12, rel=1e-4)


def test_the_papers_mixed_cluster():
    """Fig. 5: floor(m log m) results against waiting for all under load balancing, and the even split beside both."""
    wanted = int(500 * np.log(500))
    assert fluid_s(PAPER, 500, wanted) == pytest.approx(744.4, abs=0.1)
    p2_W = ALLOT["p2"](PAPER, 500, wanted)
    p2, balanced = results_s(PAPER, p2_W, wanted), results_s(PAPER, ALLOT["load-balanced"](PAPER, 500, wanted), 500)
    assert p2 == pytest.approx(750, rel=0.01)
    assert balanced == pytest.approx(1040, rel=0.02)
    assert 0.27 < 1 - p2 / balanced < 0.30
    even = results_s(PAPER, ALLOT["even"](PAPER, 500, 500), 500)
    assert even == pytest.approx(126, abs=0.5)
    assert unrecoverable_probability(500, p2_W) > 0.3


@given(speeds, st.integers(1, 20))
def test_what_is_recommended_is_never_slower_than_the_even_split(workers, batches):
    name, load_W, seconds = recommend(workers, batches)
    assert load_W.sum() == batches
    assert seconds <= results_s(workers, ALLOT["even"](workers, batches, batches), batches)
    assert seconds >= lower_bound_s(workers, batches)
    assert name in ALLOT


@pytest.mark.parametrize("name", ["even", "load-balanced", "by-pace"])
def test_shares_add_up(name):
    for batches in (3, 100, 501):
        load_W = ALLOT[name](PAPER, batches, batches)
        assert load_W.sum() == batches
        assert (load_W >= 0).all()


def test_the_lower_bound_holds_for_every_allocation():
    """All placements of three batches on two workers, by draws."""
    workers = mixed([1.0, 0.2], [1.0, 0.5])
    rng = np.random.default_rng(0)
    bound_s = lower_bound_s(workers, 3)
    held = [frozenset(s) for k in range(4) for s in itertools.combinations(range(3), k)]
    for a, b in itertools.product(held, repeat=2):
        if a | b != {0, 1, 2}:
            continue
        seconds_XW = workers.draw(np.array([len(a), len(b)]), 4000, rng)
        one = [seconds_XW[:, w] for w, own in enumerate((a, b)) if len(own) == 3]
        times = np.minimum(*one) if len(one) == 2 else one[0] if one else seconds_XW.max(axis=1)
        assert bound_s <= times.mean() * 1.03


def test_theorem_2_brackets_the_time_of_its_own_scheme():
    workers = MixedWorkers(np.full(10, 1.0), np.linspace(0.5, 2, 10))
    lower, upper = theorem_2(workers, 10)
    _, _, seconds = recommend(workers, 10)
    assert lower <= upper
    assert lower_bound_s(workers, 10) <= lower
    assert seconds <= upper
    recovery = random_recovery_time(workers, 10, np.full(10, 8), 400, np.random.default_rng(0))
    assert recovery.mean_s + 3 * recovery.error_s >= lower


def test_random_placements_against_draws():
    workers, load_W = MixedWorkers(np.full(4, 1.0), np.full(4, 1.0)), np.array([1, 2, 2, 3])
    recovery = random_recovery_time(workers, 4, load_W, 3000, np.random.default_rng(0))
    assert recovery.impossible == pytest.approx(unrecoverable_probability(4, load_W), abs=0.03)
    assert unrecoverable_probability(2, np.array([1, 1])) == pytest.approx(0.5)
    assert unrecoverable_probability(2, np.array([2, 1])) == pytest.approx(0.0)
    assert random_recovery_time(workers, 4, np.array([1, 1, 1, 0]), 5, np.random.default_rng(0)).impossible == 1


def test_workers_without_shift():
    workers = mixed([0.0, 0.0], [1.0, 1.0])
    assert loads_by(workers, 7, np.array([1.0])).tolist() == [[7.0, 7.0]]
    assert recommend(workers, 4)[0] == "even"
