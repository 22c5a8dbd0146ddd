"""The compiled open shop: dense, repeatable, the same without the compiler."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.open_shop import NO_CUTS, DenseSchedule, dense, ring, search
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.port_bounds import one_to_one_bound, pair_seconds
from aurora.algorithms.network.switch import timed
from aurora.types import Order
from aurora.types.arrays import locked
from tests.strategies import traffics_on_ports
from tests.without_compiler import printed


def columns(made):
    """Source, destination, start, end of a schedule; its makespan."""
    schedule = DenseSchedule(*made)
    return *schedule.pairs_X2.T, *schedule.span_s_X2.T, schedule.makespan_s


@given(traffics_on_ports(max_ranks=7), st.integers(0, 3))
def test_no_pair_waits_while_both_ends_are_free(case, tries):
    """Density from first principles: just before any transfer starts, each earlier instant had one of its ends busy."""
    bytes_GG, network = case
    seconds_GG = pair_seconds(bytes_GG, network)
    bias_s = np.random.default_rng(tries).random(2 * len(bytes_GG)) * 10 * (tries > 0)
    src, dst, start, end, makespan = columns(dense(seconds_GG, bias_s, NO_CUTS, np.inf))
    assert sorted(zip(src, dst, strict=True)) == [tuple(pair) for pair in np.argwhere(bytes_GG > 0)]
    assert np.allclose(end - start, seconds_GG[src, dst])
    assert makespan == end.max(initial=0)
    for k in range(len(src)):
        touching = (src == src[k]) | (dst == dst[k])
        touching[k] = False
        busy = sorted(zip(start[touching], end[touching], strict=True))
        covered = 0.0
        for begin, finish in busy:
            if begin <= covered + 1e-9:
                covered = max(covered, finish)
        assert start[k] <= covered + 1e-9  # the ends were busy without a gap from zero until it started


@given(traffics_on_ports(min_ranks=2, max_ranks=6))
def test_the_switch_times_it_the_same(case):
    bytes_GG, network = case
    made = timed(ORDER["openshop"](bytes_GG, network, rng=np.random.default_rng(0)), bytes_GG, network)
    bound_s = one_to_one_bound(bytes_GG, network)
    best = search(pair_seconds(bytes_GG, network), 64, bound_s * (1 + 1e-12), np.random.default_rng(0)).makespan_s
    assert made.makespan_s >= bound_s * (1 - 1e-9)
    assert made.makespan_s == pytest.approx(best)


@given(traffics_on_ports(min_ranks=2, max_ranks=7), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_pair_in_two_parts_takes_turns(case, cuts, random):
    """Both parts go, one after the other, for as long as they were said to, and nothing waits while both of its ends are free."""
    bytes_GG, network = case
    seconds_GG = pair_seconds(bytes_GG, network)
    pairs = np.argwhere(bytes_GG > 0)
    cut_C2 = pairs[random.sample(range(len(pairs)), min(cuts, len(pairs)))]
    part_s_C2 = np.array([[random.uniform(0.1, 9), random.uniform(0.1, 9)] for _ in cut_C2]).reshape(-1, 2)
    cut_C4 = np.concatenate([cut_C2, part_s_C2], axis=1)
    src, dst, start, end, makespan = columns(dense(seconds_GG, np.zeros(2 * len(bytes_GG)), locked(cut_C4), np.inf))
    assert makespan == end.max(initial=0)
    assert len(src) == len(pairs) + len(cut_C2)
    took = {(i, j): [seconds_GG[i, j]] for i, j in pairs.tolist()}
    took |= {tuple(pair): parts for pair, parts in zip(cut_C2.tolist(), part_s_C2.tolist(), strict=True)}
    for (i, j), parts in took.items():
        assert (end - start)[(src == i) & (dst == j)] == pytest.approx(parts)
    for k in range(len(src)):
        covered = 0.0
        for begin, finish in sorted(zip(start, end, strict=True)):
            row = np.flatnonzero((start == begin) & (end == finish) & ((src == src[k]) | (dst == dst[k])))
            if len(row) and begin < start[k] and begin <= covered + 1e-9:
                covered = max(covered, finish)
        assert start[k] <= covered + 1e-9
    for port in range(len(bytes_GG)):
        for own in (src, dst):
            rows = np.flatnonzero(own == port)
            assert (start[rows][1:] >= end[rows][:-1] - 1e-9).all()


def test_searching_more_is_never_worse_and_repeats_for_a_seed():
    rng = np.random.default_rng(3)
    for _ in range(20):
        seconds_GG = rng.integers(0, 50, (6, 6)) * (1 - np.eye(6))
        found = [search(seconds_GG, tries, 0.0, np.random.default_rng(1)).makespan_s for tries in (0, 10, 200, 200)]
        plain = dense(seconds_GG, np.zeros(12), NO_CUTS, np.inf), ring(seconds_GG, np.arange(6), np.inf)
        assert found[0] == min(made[2] for made in plain)
        assert found[0] >= found[1] >= found[2] == found[3]


def test_compiled_and_plain_code_find_the_same():
    code = (
        "import numpy as np; from aurora.algorithms.alltoall.open_shop import NO_CUTS, dense, search;"
        "m = np.random.default_rng(5).integers(0, 99, (9, 9)) * (1 - np.eye(9));"
        "made = search(m, 3, 0.0, np.random.default_rng(0)); print(float(made.makespan_s), made.pairs_X2.tolist());"
        "many = dense(np.minimum(np.arange(1600).reshape(40, 40) % 3, 1.0), np.zeros(80), NO_CUTS, np.inf);"
        "print(float(many[2]), many[0].tolist())"
    )
    compiled, plain = printed(code)
    assert compiled == plain


@given(traffics_on_ports(min_ranks=2, max_ranks=7), st.floats(0.5, 2.0), st.integers(0, 3))
def test_schedules_that_take_too_long_are_given_up(case, factor, seed):
    """Below the limit a schedule is the one that would be made without it; all others are infinitely long."""
    bytes_GG, network = case
    seconds_GG = pair_seconds(bytes_GG, network)
    rng = np.random.default_rng(seed)
    bias_s, ring_G = rng.random(2 * len(bytes_GG)) * 10 * (seed > 0), rng.permutation(len(bytes_GG))
    for make, arguments in ((dense, (bias_s, NO_CUTS)), (ring, (ring_G,))):
        whole = make(seconds_GG, *arguments, np.inf)
        limit_s = whole[2] * factor
        within = make(seconds_GG, *arguments, limit_s)
        if whole[2] > 0:
            assert within[2] == (whole[2] if whole[2] < limit_s else np.inf)
        if within[2] < np.inf:
            assert np.array_equal(within[0], whole[0])
            assert np.array_equal(within[1], whole[1])


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_to_do(ranks):
    made = search(np.zeros((ranks, ranks)), 0, 0.0, np.random.default_rng(0))
    assert (made.makespan_s, made.pairs_X2.shape) == (0.0, (0, 2))


@pytest.mark.parametrize("n", [8, 16, 33])
def test_traffic_that_is_nearly_equal_goes_round_a_ring(n):
    """Dense schedules are 5-15 % above the bound here; exactly equal traffic has no gap at all."""
    rng = np.random.default_rng(0)
    equal = 1.0 - np.eye(n)
    assert search(equal, 0, 0.0, rng).makespan_s == n - 1
    nearly = equal * rng.uniform(0.95, 1.05, (n, n))
    bound_s = max(nearly.sum(axis=0).max(), nearly.sum(axis=1).max())
    found_s = search(nearly, 0, 0.0, rng).makespan_s
    assert found_s <= 1.02 * bound_s
    assert found_s < dense(nearly, np.zeros(2 * n), NO_CUTS, np.inf)[2]


@given(case=traffics_on_ports(min_ranks=1), seed=st.integers(0, 3))
def test_a_ring_is_a_schedule(case, seed):
    """Every transfer once, no port twice at a time, and the makespan is the last end."""
    bytes_GG, network = case
    n = len(bytes_GG)
    seconds_GG = pair_seconds(bytes_GG, network)
    *rows, makespan_s = columns(ring(seconds_GG, np.random.default_rng(seed).permutation(n), np.inf))
    by_start = np.argsort(rows[2], kind="stable")
    rows = [column[by_start] for column in rows]
    assert sorted(zip(rows[0].tolist(), rows[1].tolist(), strict=True)) == [tuple(p) for p in np.argwhere(bytes_GG).tolist()]
    assert makespan_s == max(rows[3], default=0.0)
    assert rows[3] - rows[2] == pytest.approx(seconds_GG[rows[0], rows[1]])
    for ports in rows[:2]:
        for port in range(n):
            own = ports == port
            assert (rows[2][own][1:] >= rows[3][own][:-1] * (1 - 1e-12)).all()


@given(case=traffics_on_ports(min_ranks=2, max_ranks=3))
def test_openshop_against_every_possible_list(case):
    """Brute force over all lists of at most six transfers: how far from the best one-message order, at most."""
    bytes_GG, network = case
    pairs = [tuple(p) for p in np.argwhere(bytes_GG > 0)]
    rest = [(i, j) for i in range(len(bytes_GG)) for j in range(len(bytes_GG)) if i != j and bytes_GG[i, j] == 0]
    best = min(
        timed(Order("brute", np.array([*listed, *rest], dtype=np.int64).reshape(-1, 2)), bytes_GG, network).makespan_s
        for listed in permutations(pairs)
    )
    made = timed(ORDER["openshop"](bytes_GG, network, rng=np.random.default_rng(0)), bytes_GG, network).makespan_s
    assert best * (1 - 1e-9) <= made <= 1.05 * best + 1e-9
