"""The compiled open shop: dense, repeatable, the same without the compiler."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.planner.alltoall.open_shop import DenseShop, openshop
from aurora.planner.alltoall.registry import ORDER
from aurora.planner.network.lower_bounds import one_to_one_bound, pair_seconds
from aurora.planner.network.schedule_time import timed
from tests.strategies import traffics_on_ports


def schedule(shop):
    return [column[: shop.count].copy() for column in (shop.src_X, shop.dst_X, shop.start_s_X, shop.end_s_X)]


@given(traffics_on_ports(max_ranks=7), st.integers(0, 3))
def test_no_pair_waits_while_both_ends_are_free(case, tries):
    """Density from first principles: just before any transfer starts, each earlier instant had one of its ends busy."""
    bytes_GG, network = case
    seconds_GG = pair_seconds(bytes_GG, network)
    shop = DenseShop(len(bytes_GG))
    bias_s = np.random.default_rng(tries).random(2 * len(bytes_GG)) * 10 * (tries > 0)
    makespan = shop.run(seconds_GG, bias_s)
    src, dst, start, end = schedule(shop)
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
    shop = DenseShop(len(bytes_GG))
    best = shop.search(pair_seconds(bytes_GG, network), 64, bound_s * (1 + 1e-12), np.random.default_rng(0))
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
    shop = DenseShop(len(bytes_GG))
    makespan = shop.run(seconds_GG, None, cut_C2, part_s_C2)
    src, dst, start, end = schedule(shop)
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
        shop = DenseShop(6)
        found = [shop.search(seconds_GG, tries, 0.0, np.random.default_rng(1)) for tries in (0, 10, 200, 200)]
        assert found[0] == min(shop.run(seconds_GG), shop.ring(seconds_GG, np.arange(6)))
        assert found[0] >= found[1] >= found[2] == found[3]


def test_buffers_can_be_used_again():
    shop = DenseShop(5)
    rng = np.random.default_rng(0)
    first = rng.integers(0, 9, (5, 5)) * (1 - np.eye(5))
    shop.run(first)
    before = [column.tolist() for column in schedule(shop)]
    shop.search(rng.integers(0, 9, (5, 5)) * (1 - np.eye(5)), 5, 0.0, rng)
    shop.run(first)
    assert [column.tolist() for column in schedule(shop)] == before


def test_the_same_code_runs_without_the_compiler():
    code = (
        "import numpy as np; from aurora.planner.alltoall.open_shop import DenseShop; shop = DenseShop(9);"
        "m = np.random.default_rng(5).integers(0, 99, (9, 9)) * (1 - np.eye(9));"
        "print(shop.search(m, 3, 0.0, np.random.default_rng(0)), shop.src_X[:shop.count].tolist());"
        "many = DenseShop(40); print(many.run(np.minimum(np.arange(1600).reshape(40, 40) % 3, 1.0)), many.dst_X.tolist())"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "NUMBA_DISABLE_JIT": flag}, capture_output=True, text=True,
                       check=True).stdout
        for flag in ("0", "1")
    }  # fmt: skip
    assert len(outputs) == 1


def test_nothing_to_do():
    assert DenseShop(1).run(np.zeros((1, 1))) == 0.0
    assert DenseShop(3).run(np.zeros((3, 3))) == 0.0


def test_buffers_grow_with_the_pairs():
    small, large = (DenseShop(n).buffer_bytes / n**2 for n in (64, 512))
    assert 32 < large < small < 36  # two counts and two times a transfer, and a bit for each pair and side


@pytest.mark.parametrize("n", [8, 16, 33])
def test_traffic_that_is_nearly_equal_goes_round_a_ring(n):
    """Dense schedules are 5-15 % above the bound here; exactly equal traffic has no gap at all."""
    rng = np.random.default_rng(0)
    shop = DenseShop(n)
    equal = 1.0 - np.eye(n)
    assert shop.search(equal, 0, 0.0, rng) == n - 1
    nearly = equal * rng.uniform(0.95, 1.05, (n, n))
    bound_s = max(nearly.sum(axis=0).max(), nearly.sum(axis=1).max())
    found_s = shop.search(nearly, 0, 0.0, rng)
    assert found_s <= 1.02 * bound_s
    assert found_s < shop.run(nearly)


@given(case=traffics_on_ports(min_ranks=1), seed=st.integers(0, 3))
def test_a_ring_is_a_schedule(case, seed):
    """Every transfer once, by start, no port twice at a time, and its makespan as the search reckons it."""
    bytes_GG, network = case
    n = len(bytes_GG)
    seconds_GG = pair_seconds(bytes_GG, network)
    shop = DenseShop(n)
    makespan_s = shop.ring(seconds_GG, np.random.default_rng(seed).permutation(n))
    rows = [column[: shop.count] for column in (shop.src_X, shop.dst_X, shop.start_s_X, shop.end_s_X)]
    assert sorted(zip(rows[0].tolist(), rows[1].tolist(), strict=True)) == [tuple(p) for p in np.argwhere(bytes_GG).tolist()]
    assert (np.diff(rows[2]) >= 0).all()
    assert makespan_s == max(rows[3], default=0.0)
    assert rows[3] - rows[2] == pytest.approx(seconds_GG[rows[0], rows[1]])
    for ports in rows[:2]:
        for port in range(n):
            own = ports == port
            assert (rows[2][own][1:] >= rows[3][own][:-1] * (1 - 1e-12)).all()


@given(st.integers(1, 6).flatmap(lambda n: st.lists(traffics_on_ports(n, n), min_size=2, max_size=3)))
def test_orders_made_in_the_same_buffers_are_those_made_in_fresh_ones(cases):
    shop = DenseShop(len(cases[0][0]))
    for case in cases:
        kept = openshop(*case, rng=np.random.default_rng(0), shop=shop)
        fresh = ORDER["openshop"](*case, rng=np.random.default_rng(0))
        assert np.array_equal(kept.pairs_X2, fresh.pairs_X2)
