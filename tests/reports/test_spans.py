"""Transfers, merged and stacked intervals, from first principles."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.planner.alltoall.registry import ORDER
from aurora.planner.network.schedule_time import timed
from aurora.reports.spans import interval_colouring, planned, traced, union, whole
from aurora.types import Schedule
from tests.conftest import cluster
from tests.strategies import traffics


def test_pieces_that_touch_are_one_transfer():
    schedule = Schedule(
        "drawn", False, np.array([0, 1, 0, 0]), np.array([1, 0, 1, 1]), np.array([3, 5, 4, 2]), np.array([0.0, 0.0, 1.0, 4.0]),
        np.array([1.0, 2.0, 3.0, 5.0]), np.ones(4), 4.0, 4.0,
    )  # fmt: skip
    found = whole(schedule)
    rows = zip(
        found.src_X.tolist(),
        found.dst_X.tolist(),
        found.bytes_X.tolist(),
        found.start_s_X.tolist(),
        found.end_s_X.tolist(),
        strict=True,
    )
    assert list(rows) == [(0, 1, 7, 0.0, 3.0), (1, 0, 5, 0.0, 2.0), (0, 1, 2, 4.0, 5.0)]
    assert (found.seconds, found.bound_s) == (5.0, 4.0)


@given(traffics(max_ranks=5), st.sampled_from(["openshop", "all-at-once"]))
def test_planned_transfers_carry_all_bytes_and_end_with_the_schedule(bytes_GG, method):
    ports = cluster(*[2.0] * len(bytes_GG))
    order = ORDER[method](bytes_GG, ports.network, rng=np.random.default_rng(0))
    found = planned(order, bytes_GG[None], ports)
    carried = np.zeros_like(bytes_GG)
    np.add.at(carried, (found.src_X, found.dst_X), found.bytes_X)
    assert np.array_equal(carried, bytes_GG)
    assert found.seconds == timed(order, bytes_GG, ports.network).makespan_s


def test_a_trace_shows_what_the_plan_sends(alone):
    (_, trace), _ = alone.traces
    found = traced(trace, 0, 1, 1, "combine", alone.plan.cluster)
    rows = trace.sent_X & (trace.step_X == 1) & (trace.layer_X == 1) & (trace.phase_X == 4)
    assert found.bytes_X.sum() == trace.bytes_X[rows].sum() > 0
    assert found.start_s_X.min() == 0
    assert found.bound_s <= found.seconds * (1 + 1e-9)


spans = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 8)), max_size=25)


@given(spans)
def test_levels_never_overlap_and_are_as_few_as_can_be(drawn):
    drawn = sorted(drawn, key=lambda row: row[1])
    track_X, start_X = np.array([r[0] for r in drawn], dtype=int), np.array([float(r[1]) for r in drawn])
    end_X = start_X + np.array([r[2] for r in drawn], dtype=float)
    level_X = interval_colouring(track_X, start_X, end_X)
    for a in range(len(drawn)):
        for b in range(a):
            if track_X[a] == track_X[b] and level_X[a] == level_X[b]:
                assert end_X[b] <= start_X[a]
    for track in range(3):
        own = track_X == track
        most = max(((start_X[own] <= t) & (t < end_X[own])).sum() for t in range(30))
        assert len(set(level_X[own].tolist())) == most


@given(spans)
def test_a_union_covers_the_same_moments_in_as_few_intervals(drawn):
    key_X, start_X = np.array([r[0] for r in drawn], dtype=int), np.array([float(r[1]) for r in drawn])
    end_X = start_X + np.array([r[2] for r in drawn], dtype=float)
    row_X, first, start, end = union(key_X, start_X, end_X)
    for key in range(3):
        covered = {t + 0.5 for a, b in zip(start_X[key_X == key], end_X[key_X == key], strict=True) for t in np.arange(a, b)}
        own = key_X[row_X][first] == key
        merged = sorted(zip(start[own].tolist(), end[own].tolist(), strict=True))
        assert covered == {t + 0.5 for a, b in merged for t in np.arange(a, b)}
        assert all(later[0] > earlier[1] for earlier, later in pairwise(merged))
