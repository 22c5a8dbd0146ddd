"""The order `openshop-best` against every list of transfers, and against its bound."""

from dataclasses import replace
from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_order, check_schedule
from aurora.algorithms.network.port_bounds import one_to_one_bound, pair_seconds
from aurora.algorithms.network.switch import timed
from aurora.types import Network
from tests.strategies import traffics_on_ports


def every_list(seconds_GG):
    """The shortest list schedule: each transfer in turn as early as both of its ports are through with the last."""
    n, best = len(seconds_GG), np.inf
    pairs = [(i, n + j, seconds_GG[i, j]) for i, j in np.argwhere(seconds_GG > 0).tolist()]
    for listed in permutations(pairs):
        free = [0.0] * (2 * n)
        for src, dst, took in listed:
            free[src] = free[dst] = max(free[src], free[dst]) + took
        best = min(best, max(free))
    return best


def few_transfers(bytes_GG, most=6):
    """The first `most` transfers; the rest is silent."""
    kept = np.zeros_like(bytes_GG)
    for i, j in np.argwhere(bytes_GG > 0)[:most]:
        kept[i, j] = bytes_GG[i, j]
    return kept


def with_startup(network, startup_s):
    return replace(network, startup_s_G=np.full(network.gpus, startup_s))


@settings(max_examples=60)
@given(traffics_on_ports(min_ranks=2, max_ranks=4), st.integers(0, 9), st.sampled_from([0.0, 0.7]))
def test_orders_of_few_ranks_are_optimal(case, seed, startup):
    bytes_GG, network = case
    shuffled = np.random.default_rng(seed).permutation(len(bytes_GG))
    bytes_GG, network = few_transfers(bytes_GG[np.ix_(shuffled, shuffled)]), with_startup(network, startup)
    made = timed(ORDER["openshop-best"](bytes_GG, network, rng=np.random.default_rng(0)), bytes_GG, network)
    best_s = every_list(pair_seconds(bytes_GG, network))
    assert best_s * (1 - 1e-9) <= made.makespan_s <= best_s * (1 + 1e-9)


@given(traffics_on_ports(min_ranks=2, max_ranks=8, startups=(0.0, 0.3, 5.0)))
def test_searching_longer_never_costs(case):
    bytes_GG, network = case
    order = ORDER["openshop-best"](bytes_GG, network, rng=np.random.default_rng(0))
    check_order(order, len(bytes_GG))
    assert order.share_X2 is None
    made = timed(order, bytes_GG, network)
    check_schedule(made, bytes_GG, network)
    assert made.makespan_s >= one_to_one_bound(bytes_GG, network) * (1 - 1e-9)
    plain = timed(ORDER["openshop"](bytes_GG, network, rng=np.random.default_rng(0)), bytes_GG, network)
    assert made.makespan_s <= plain.makespan_s * (1 + 1e-9)


def test_many_ports_with_equal_loads_end_sooner_than_by_the_plain_schedule():
    """Every port has as much to do in transfers of random lengths, as where experts are balanced."""
    rng, n = np.random.default_rng(3), 40
    bytes_GG = np.zeros((n, n), dtype=np.int64)
    for _ in range(400):  # whole matchings, so that rows and columns have one sum, but for the diagonal
        bytes_GG[np.arange(n), rng.permutation(n)] += rng.integers(1, 10**5)
    np.fill_diagonal(bytes_GG, 0)
    network = Network.equal(n)
    plain, best = (timed(ORDER[name](bytes_GG, network, rng=rng), bytes_GG, network) for name in ("openshop", "openshop-best"))
    assert best.makespan_s < plain.makespan_s
    assert len(best.src_X) == np.count_nonzero(bytes_GG)
    check_schedule(best, bytes_GG, network)


def test_orders_are_close_to_the_bound_and_repeat_for_a_seed():
    rng, ones = np.random.default_rng(0), Network.equal(8)
    gaps = []
    for _ in range(20):
        bytes_GG = rng.integers(1, 10**6, (8, 8)) * (1 - np.eye(8, dtype=int))
        first, second = (ORDER["openshop-best"](bytes_GG, ones, rng=np.random.default_rng(0)) for _ in range(2))
        assert first.pairs_X2.tolist() == second.pairs_X2.tolist()
        gaps.append(timed(first, bytes_GG, ones).gap)
    assert np.mean(gaps) <= 0.003
    assert max(gaps) <= 0.02
