"""The order `openshop-best` against every list of transfers, and against an integer program."""

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.check.plans import check_order, check_schedule
from aurora.algorithms.network.port_bounds import one_to_one_bound, pair_seconds
from aurora.algorithms.network.switch import timed
from aurora.types import Network
from tests.conftest import cluster
from tests.strategies import traffics_on_ports

WHOLE_5 = np.array([[0, 2, 1, 1], [0, 0, 2, 2], [0, 2, 0, 0], [2, 0, 1, 0]])  # the bound is 4, which only splits reach


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


def integer_program(seconds_GG):
    """The same optimum with one binary for each two transfers that share a port: which of them goes first."""
    pairs = np.argwhere(seconds_GG > 0)
    took = seconds_GG[pairs[:, 0], pairs[:, 1]]
    clashes = [(a, b) for a, b in combinations(range(len(pairs)), 2) if (pairs[a] == pairs[b]).any()]
    count, horizon = len(pairs) + len(clashes) + 1, took.sum()  # starts, binaries, the makespan
    rows, least = [], []
    for at, (a, b) in enumerate(clashes):
        for first, then, sign, slack in ((a, b, 1, 0), (b, a, -1, horizon)):
            row = np.zeros(count)
            row[then], row[first], row[len(pairs) + at] = 1, -1, sign * horizon
            rows.append(row)
            least.append(took[first] - slack)
    for a in range(len(pairs)):
        row = np.zeros(count)
        row[-1], row[a] = 1, -1
        rows.append(row)
        least.append(took[a])
    binary = np.arange(count) - len(pairs)
    integral = (binary >= 0) & (binary < len(clashes))
    solved = milp(
        np.eye(count)[-1],
        integrality=integral,
        bounds=Bounds(0, np.where(integral, 1, np.inf)),
        constraints=LinearConstraint(np.array(rows), np.array(least)),
    )
    return solved.fun


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


@pytest.mark.parametrize("seed", range(4))
def test_four_full_ranks_against_an_integer_program(seed):
    rng, network = np.random.default_rng(seed), cluster(1.0, 1.0, 1.0, 1.0).network
    bytes_GG = WHOLE_5 if seed == 0 else rng.integers(1, 40, (4, 4)) * (1 - np.eye(4, dtype=int))
    made = timed(ORDER["openshop-best"](bytes_GG, network, rng=rng), bytes_GG, network)
    best_s = integer_program(pair_seconds(bytes_GG, network))
    assert best_s * (1 - 1e-9) <= made.makespan_s <= 1.005 * best_s


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
