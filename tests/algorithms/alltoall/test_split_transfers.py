"""One message a pair against every list and an integer program; a few transfers in two parts against that and the bound."""

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.alltoall.split_transfers import MOST_CUTS, TIGHT, WORTH, CutShop, best_split, best_whole, search_tries
from aurora.algorithms.check.plans import check_order, check_schedule
from aurora.algorithms.network.port_bounds import one_to_one_bound, pair_seconds
from aurora.algorithms.network.switch import timed
from aurora.types import Network
from tests.conftest import cluster
from tests.strategies import traffics_on_ports
from tests.without_compiler import printed

PAYS = np.array([[0, 2, 1, 1], [0, 0, 2, 2], [0, 2, 0, 0], [2, 0, 1, 0]])  # bound 4, whole 5
FOUR = Network.equal(4)


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
def test_whole_schedules_of_few_ranks_are_optimal(case, seed, startup):
    bytes_GG, network = case
    shuffled = np.random.default_rng(seed).permutation(len(bytes_GG))
    bytes_GG = few_transfers(bytes_GG[np.ix_(shuffled, shuffled)])
    shop = CutShop(bytes_GG, with_startup(network, startup))
    whole = best_whole(shop, 400, np.random.default_rng(0))
    best = every_list(shop.seconds_GG)
    assert best * (1 - 1e-9) <= whole.makespan_s <= best * (1 + 1e-9)
    split, _ = best_split(shop, whole, 200, np.random.default_rng(0))
    assert shop.bound_s * (1 - 1e-9) <= split.makespan_s <= whole.makespan_s


@pytest.mark.parametrize("seed", range(4))
def test_four_full_ranks_against_an_integer_program(seed):
    rng = np.random.default_rng(seed)
    bytes_GG = PAYS if seed == 0 else rng.integers(1, 40, (4, 4)) * (1 - np.eye(4, dtype=int))
    shop = CutShop(bytes_GG, cluster(1.0, 1.0, 1.0, 1.0).network)
    found = best_whole(shop, search_tries(4), rng)
    assert integer_program(shop.seconds_GG) * (1 - 1e-9) <= found.makespan_s <= 1.005 * integer_program(shop.seconds_GG)
    assert sorted(map(tuple, found.pairs_X2.tolist())) == [tuple(pair) for pair in np.argwhere(bytes_GG > 0)]


@given(traffics_on_ports(min_ranks=2, max_ranks=8, startups=(0.0, 0.3, 5.0)))
def test_splitting_never_costs_and_carries_whole_bytes(case):
    bytes_GG, network = case
    order = ORDER["openshop-best"](bytes_GG, network, rng=np.random.default_rng(0))
    check_order(order, len(bytes_GG))
    made = timed(order, bytes_GG, network)
    check_schedule(made, bytes_GG, network)
    bound_s = one_to_one_bound(bytes_GG, network)
    assert made.makespan_s >= bound_s * (1 - 1e-9)
    whole_s = timed(ORDER["openshop"](bytes_GG, network, rng=np.random.default_rng(0)), bytes_GG, network)
    extra = len(order.pairs_X2) - len(bytes_GG) * (len(bytes_GG) - 1)
    assert 0 <= extra <= MOST_CUTS
    assert made.makespan_s + extra * WORTH * bound_s <= whole_s.makespan_s * (1 + 1e-9)
    assert np.array_equal(
        timed(
            order.reversed, bytes_GG.T, replace(network, out_Bps_G=network.in_Bps_G, in_Bps_G=network.out_Bps_G)
        ).bytes_X.sum(),
        bytes_GG.sum(),
    )


def test_one_cut_reaches_the_bound_where_no_whole_schedule_can():
    made = {m: ORDER[m](PAYS, FOUR, rng=np.random.default_rng(0)) for m in ("openshop", "openshop-best")}
    assert {m: timed(order, PAYS, FOUR).makespan_s for m, order in made.items()} == {"openshop": 5, "openshop-best": 4}
    assert made["openshop"].share_X2 is None
    split = made["openshop-best"]
    assert len(split.pairs_X2) == 13
    parts = {}
    for pair, share in zip(split.pairs_X2.tolist(), split.share_X2.tolist(), strict=True):
        parts.setdefault(tuple(pair), []).append(tuple(share))
    assert [shares for shares in parts.values() if len(shares) > 1] == [[(0.0, 0.5), (0.5, 1.0)]]  # by time


def test_nothing_is_cut_at_the_bound_or_where_too_little_is_to_be_gained():
    even = 1000 * (np.ones((4, 4), dtype=int) - np.eye(4, dtype=int))
    for bytes_GG in (even, 1000 * even + 10 * PAYS):
        shop = CutShop(bytes_GG, FOUR)
        whole = best_whole(shop, 64, np.random.default_rng(0))
        assert whole.makespan_s <= shop.bound_s * (1 + WORTH)
        assert best_split(shop, whole, 500, np.random.default_rng(0)) == (whole, [])


def test_many_ports_with_equal_loads_end_sooner_than_by_the_plain_schedule():
    """Every port has as much to do in transfers of random lengths, as where experts are balanced."""
    rng, n = np.random.default_rng(3), 40
    bytes_GG = np.zeros((n, n), dtype=np.int64)
    for _ in range(400):  # whole matchings, so that rows and columns have one sum, but for the diagonal
        bytes_GG[np.arange(n), rng.permutation(n)] += rng.integers(1, 10**5)
    np.fill_diagonal(bytes_GG, 0)
    network = Network.equal(n)
    plain, best = (timed(ORDER[name](bytes_GG, network, rng=rng), bytes_GG, network) for name in ("openshop", "openshop-best"))
    assert plain.makespan_s > one_to_one_bound(bytes_GG, network) * (1 + TIGHT)
    assert best.makespan_s < plain.makespan_s
    assert len(best.src_X) == np.count_nonzero(bytes_GG)
    check_schedule(best, bytes_GG, network)


def test_splits_are_few_and_repeat_for_a_seed():
    rng = np.random.default_rng(0)
    extra, gaps = [], []
    for _ in range(20):
        bytes_GG = rng.integers(1, 10**6, (8, 8)) * (1 - np.eye(8, dtype=int))
        first, second = (ORDER["openshop-best"](bytes_GG, Network.equal(8), rng=np.random.default_rng(0)) for _ in range(2))
        assert first.pairs_X2.tolist() == second.pairs_X2.tolist()
        extra.append(len(first.pairs_X2) - 56)
        gaps.append(timed(first, bytes_GG, Network.equal(8)).gap)
    assert np.mean(extra) < 1
    assert np.mean(gaps) <= 0.002
    assert max(gaps) <= 0.01


@pytest.mark.full
def test_compiled_and_plain_code_find_the_same():
    code = (
        "import numpy as np; from aurora.algorithms.alltoall.registry import ORDER; from aurora.types import Network;"
        f"order = ORDER['openshop-best'](np.array({PAYS.tolist()}), Network.equal(4), rng=np.random.default_rng(0));"
        "print(order.pairs_X2.tolist(), order.share_X2.tolist())"
    )
    compiled, plain = printed(code)
    assert compiled == plain


def test_pairs_count_their_start_up_in_each_part():
    shop = CutShop(PAYS, with_startup(FOUR, 0.25))
    assert np.array_equal(shop.seconds_GG, pair_seconds(PAYS, Network.equal(4, startup_s=0.25)))
    made = shop.run(np.zeros(8), [(0, 1, 1)])
    took = made.span_s_X2[:, 1] - made.span_s_X2[:, 0]
    assert took[(made.pairs_X2 == (0, 1)).all(axis=1)] == pytest.approx([1.25, 1.25])
