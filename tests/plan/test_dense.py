"""The compiled open shop: dense, repeatable, the same without the compiler."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.plan.bounds import one_to_one, pair_seconds
from aurora.plan.dense import DenseShop
from aurora.plan.order import ORDER, openshop
from aurora.plan.timing import timed
from tests.strategies import traffics_on_ports


def schedule(shop):
    return [column[: shop.count].copy() for column in (shop.src_X, shop.dst_X, shop.start_s_X, shop.end_s_X)]


@given(traffics_on_ports(max_ranks=7), st.integers(0, 3))
def test_no_pair_waits_while_both_ends_are_free(case, tries):
    """Density from first principles: just before any transfer starts, each earlier instant had one of its ends busy."""
    bytes_GG, out, into = case
    seconds_GG = pair_seconds(bytes_GG, out, into)
    shop = DenseShop(len(bytes_GG))
    makespan = shop.search(seconds_GG, tries, 0.0, np.random.default_rng(0))
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
    bytes_GG, out, into = case
    for method in ("openshop", "openshop-best"):
        made = timed(ORDER[method](bytes_GG, out, into, np.random.default_rng(0)), bytes_GG, out, into)
        assert made.makespan_s >= one_to_one(bytes_GG, out, into) * (1 - 1e-9)
    shop = DenseShop(len(bytes_GG))
    best = shop.search(
        pair_seconds(bytes_GG, out, into), 4000, one_to_one(bytes_GG, out, into) * (1 + 1e-12), np.random.default_rng(0)
    )
    assert made.makespan_s == pytest.approx(best)


def test_searching_more_is_never_worse_and_repeats_for_a_seed():
    rng = np.random.default_rng(3)
    for _ in range(20):
        seconds_GG = rng.integers(0, 50, (6, 6)) * (1 - np.eye(6))
        shop = DenseShop(6)
        found = [shop.search(seconds_GG, tries, 0.0, np.random.default_rng(1)) for tries in (0, 10, 200, 200)]
        assert found[0] == shop.run(seconds_GG)
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
        "import numpy as np; from aurora.plan.dense import DenseShop; shop = DenseShop(9);"
        "m = np.random.default_rng(5).integers(0, 99, (9, 9)) * (1 - np.eye(9));"
        "print(shop.search(m, 3, 0.0, np.random.default_rng(0)), shop.src_X[:shop.count].tolist())"
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


@given(st.integers(1, 6).flatmap(lambda n: st.lists(traffics_on_ports(n, n), min_size=2, max_size=3)))
def test_orders_made_in_the_same_buffers_are_those_made_in_fresh_ones(cases):
    shop = DenseShop(len(cases[0][0]))
    for case in cases:
        kept = openshop(*case, np.random.default_rng(0), shop=shop)
        fresh = ORDER["openshop"](*case, np.random.default_rng(0))
        assert np.array_equal(kept.pairs_X2, fresh.pairs_X2)
