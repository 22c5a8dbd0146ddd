"""Ways to exchange are tried while serving: an emulated machine whose fastest way changes, and what trials cost."""

import math
import random
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.runtime.order_choice import CLOSE, MAX_COST, PROMISING_COST, RARITY, RECENT, SERIES, OrderTrials

pytestmark = pytest.mark.full

# Open shop, torch's collective, all at once, paced: seconds over the bound, as measured on 8 hosts.
QUIET = (1.05, 1.20, 1.28, 1.40)
LOADED = (1.45, 1.235, 1.36, 1.40)
SERIES_EXCHANGES = SERIES * CLOSE * 2
SOON = RECENT + SERIES_EXCHANGES  # a drift is seen in RECENT exchanges, and is followed by a series of the other ways
FOUND_AGAIN = 100  # exchanges in which a way that was the fastest before is found


def serve(trials, seconds_W, exchanges, noise=0.0, rng=None):
    """Performs exchanges on a machine on which ways take `seconds_W`. Returns the way of each, and the current one after it."""
    ways = []
    for _ in range(exchanges):
        way = trials.next_way()
        trials.record(way, seconds_W[way] * (math.exp(rng.gauss(0.0, noise)) if rng else 1.0))
        ways.append((way, trials.current))
    return ways


def changes(ways, before):
    """(exchange, way) of each change-over."""
    currents = [before, *(current for _, current in ways)]
    return [(index, after) for index, (was, after) in enumerate(pairwise(currents)) if was != after]


def test_it_changes_over_with_the_machine_and_back():
    """Without noise: not while quiet, soon after the machine is loaded, and soon after it is quiet again."""
    trials = OrderTrials(QUIET, 0)
    assert changes(serve(trials, QUIET, 5000), 0) == []
    loaded = changes(serve(trials, LOADED, 5000), 0)
    assert loaded[0][0] < SOON
    assert loaded[-1][0] < 2 * SOON
    assert loaded[-1][1] == 1
    ((quiet, way),) = changes(serve(trials, QUIET, 5000), 1)
    assert way == 0
    assert quiet < FOUND_AGAIN


def loaded_and_quiet(seed, exchanges):
    """By `exchanges` on a quiet machine, on a loaded one with its noise and late ranks, and on a quiet one: (way, current way)."""
    rng, trials = random.Random(seed), OrderTrials(QUIET, 0)
    served = []
    for seconds_W, noise in ((QUIET, 0.03), (LOADED, 0.1), (QUIET, 0.03)):
        served.append([])
        for _ in range(exchanges):
            current, way = trials.current, trials.next_way()
            late = rng.choice((1.3, 1.6)) if rng.random() < noise / 2 else 1.0
            trials.record(way, seconds_W[way] * late * math.exp(rng.gauss(0.0, noise)))
            served[-1].append((way, current))
    return served


@pytest.mark.parametrize("exchanges", [500, 2000])
def test_it_finds_back_when_the_load_has_gone(exchanges):
    """Though torch's collective takes as long as before: nothing but a trial tells that the open shop is fast again."""
    loaded, back = [], []
    cost_P, total_P = [0.0] * 3, [0.0] * 3
    for seed in range(40):
        served = loaded_and_quiet(seed, exchanges)
        for phase, (ways, seconds_W) in enumerate(zip(served, (QUIET, LOADED, QUIET), strict=True)):
            cost_P[phase] += sum(seconds_W[way] - seconds_W[current] for way, current in ways)
            total_P[phase] += sum(seconds_W[way] for way, _ in ways)
        assert all(current == 0 for _, current in served[0])
        loaded.append(sum(current != 1 for _, current in served[1]))
        back.append(sum(current != 0 for _, current in served[2]))
    assert median(loaded) < FOUND_AGAIN
    assert median(back) < FOUND_AGAIN / 2
    assert sorted(back)[35] < FOUND_AGAIN
    assert max(cost / total for cost, total in zip(cost_P, total_P, strict=True)) < MAX_COST


def test_a_way_that_another_kind_of_exchange_found_is_tried_soon():
    """It was never faster before, so that nothing else gives it a trial for long."""
    seconds_W = (0.9, 1.2, 1.3, 1.4)
    trials = OrderTrials((1.5, 1.2, 1.3, 1.4), 1)
    serve(trials, (1.5, *seconds_W[1:]), 300)
    trials.try_soon(0)
    ((index, way),) = changes(serve(trials, seconds_W, 300), 1)
    assert way == 0
    assert index < SERIES_EXCHANGES
    trials.try_soon(0)  # the current one
    assert changes(serve(trials, seconds_W, 300), 0) == []


@settings(max_examples=40)
@given(st.lists(st.floats(1.0, 50.0), min_size=1, max_size=5), st.integers(0, 4000))
def test_trials_of_slower_ways_are_bounded(slower, exchanges):
    """By number and by what they cost: a share of all, but for each way's first series, or first trial if it is far slower."""
    seconds_W = (1.0, *slower)
    ways = [way for way, current in serve(OrderTrials(seconds_W, 0), seconds_W, exchanges)]
    for way, seconds in enumerate(slower, start=1):
        first = 1 + SERIES * (seconds < 2.0)
        assert ways.count(way) <= first + exchanges / (len(slower) * RARITY)
        budget = exchanges * (MAX_COST - PROMISING_COST) / len(slower)
        assert ways.count(way) * (seconds - 1) <= first * (seconds - 1) + budget + 1e-9


@settings(max_examples=40)
@given(st.lists(st.floats(1.0, 50.0), min_size=1, max_size=5), st.integers(0, 4000))
def test_trials_of_promising_ways_are_bounded(slower, exchanges):
    """They were faster than the current way is now, are slower for good, and share their part of the cost."""
    trials, ways = OrderTrials((1.0, *[2.1] * len(slower)), 0), range(1, 1 + len(slower))
    for way in ways:
        trials._best_W[way] = math.log(0.5)
    served = [way for way, _ in serve(trials, (1.0, *slower), exchanges)]
    for way, seconds in zip(ways, slower, strict=True):
        assert served.count(way) * (seconds - 1) <= 4 * (seconds - 1) + exchanges * PROMISING_COST / len(slower) + 1e-9


@settings(max_examples=40)
@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=5), st.data())
def test_it_ends_with_a_way_that_is_as_fast_as_any(seconds_W, data):
    """Whatever was believed before, without noise, but for the gain below which nothing changes."""
    believed_W = data.draw(st.lists(st.floats(0.5, 2.0), min_size=len(seconds_W), max_size=len(seconds_W)))
    trials = OrderTrials(believed_W, data.draw(st.integers(0, len(seconds_W) - 1)))
    serve(trials, seconds_W, 6000)
    assert seconds_W[trials.current] <= min(seconds_W) * 1.0501


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=300), st.integers(1, 5))
def test_equal_seconds_lead_to_equal_choices(seconds, ways):
    first, second = (OrderTrials([1.0] * ways, 0) for _ in range(2))
    for took in seconds:
        way = first.next_way()
        assert way == second.next_way()
        assert first.record(way, took) == second.record(way, took)
    assert first.current == second.current


@pytest.mark.parametrize("outlier", [0.01, 100.0])
def test_single_outliers_change_nothing(outlier):
    trials = OrderTrials(QUIET, 0)
    for index in range(3000):
        way = trials.next_way()
        trials.record(way, QUIET[way] * (outlier if index % 40 == 39 else 1.0))
        assert trials.current == 0
