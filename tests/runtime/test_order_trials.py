"""Ways to exchange are tried while serving: an emulated machine whose fastest way changes, and what trials cost."""

import math
import random
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.runtime.order_trials import CLOSE, MAX_COST, RARITY, RECENT, SERIES, OrderTrials

QUIET = (1.04, 1.17, 1.24)  # open shop, torch's collective, all at once: seconds over the bound
LOADED = (1.38, 1.14, 1.30)
# A drift of the current way is seen in RECENT exchanges, and is followed by a series of the other ways; without a drift a way's
# next trial comes first.
SERIES_EXCHANGES = SERIES * CLOSE * 3 // 2
SOON = RECENT + SERIES_EXCHANGES
LATER = 2 * RARITY * 3 // 2 + RECENT + SERIES_EXCHANGES


def serve(trials, seconds_W, exchanges, noise=0.0, rng=None):
    """Performs exchanges on a machine on which ways take `seconds_W`. Returns the way of each, and the current one after it."""
    ways = []
    for _ in range(exchanges):
        way = trials.next_way()
        trials.took(way, seconds_W[way] * (math.exp(rng.gauss(0.0, noise)) if rng else 1.0))
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
    assert [way for _, way in loaded] in ([1], [2, 1])  # all at once gains something too
    assert loaded[0][0] < SOON
    assert loaded[-1][0] < 2 * SOON
    ((quiet, way),) = changes(serve(trials, QUIET, 5000), 1)
    assert way == 0
    assert quiet < LATER


def test_it_changes_over_on_a_noisy_machine():
    """On 40 machines whose loaded times vary by 20 %: on half of them soon, and trials stay within what they may cost."""
    loaded, quiet, cost, total = [], [], 0.0, 0.0
    for seed in range(40):
        rng, trials = random.Random(seed), OrderTrials(QUIET, 0)
        assert changes(serve(trials, QUIET, 2000, 0.03, rng), 0) == []
        ways = serve(trials, LOADED, 3000, 0.2, rng)
        loaded.append(changes(ways, 0)[-1])
        quiet.append(changes(serve(trials, QUIET, 1000, 0.03, rng), 1)[-1])
        cost += sum(max(0.0, LOADED[way] - LOADED[current]) for way, current in ways)
        total += sum(LOADED[way] for way, _ in ways)
    assert [way for _, way in loaded].count(1) >= 38  # the others are on one that is 14 % slower
    assert {way for _, way in quiet} == {0}
    assert median(index for index, _ in loaded) < 2 * LATER
    assert max(index for index, _ in quiet) < 2 * LATER
    assert cost < MAX_COST * total


@settings(max_examples=40)
@given(st.lists(st.floats(1.0, 50.0), min_size=1, max_size=5), st.integers(0, 4000))
def test_trials_of_slower_ways_are_bounded(slower, exchanges):
    """By number and by what they cost: a share of all, but for each way's first series, or first trial if it is far slower."""
    seconds_W = (1.0, *slower)
    ways = [way for way, current in serve(OrderTrials(seconds_W, 0), seconds_W, exchanges)]
    for way, seconds in enumerate(slower, start=1):
        first = 1 + SERIES * (seconds < 2.0)
        assert ways.count(way) <= first + exchanges / (len(slower) * RARITY)
        assert ways.count(way) * (seconds - 1) <= first * (seconds - 1) + exchanges * MAX_COST / len(slower) + 1e-9


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
        assert first.took(way, took) == second.took(way, took)
    assert first.current == second.current


@pytest.mark.parametrize("outlier", [0.01, 100.0])
def test_single_outliers_change_nothing(outlier):
    trials = OrderTrials(QUIET, 0)
    for index in range(3000):
        way = trials.next_way()
        trials.took(way, QUIET[way] * (outlier if index % 40 == 39 else 1.0))
        assert trials.current == 0
