"""Bars, transfers and stacked intervals, from first principles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.planner.alltoall.registry import ORDER
from aurora.planner.network.schedule_time import timed
from aurora.reports.spans import bars, interval_colouring, phase_seconds, planned, traced, whole
from aurora.types import Schedule, TraceRecorder
from tests.conftest import cluster
from tests.strategies import traffics


def test_bars_go_from_first_to_last_event_and_count_what_is_sent():
    recorder = TraceRecorder("measured", ("m",), 2)
    recorder.add(0, 0, 0, 0, "gate", 5.0, 6.0)
    recorder.transfer(0, 0, 0, 0, "dispatch", 1, True, 6, 7.0, 9.0)
    recorder.transfer(0, 0, 0, 0, "dispatch", 1, False, 4, 6.0, 8.0)
    recorder.transfer(1, 0, 0, 0, "dispatch", 0, False, 6, 7.0, 9.0)
    found = bars(recorder.trace())
    rows = zip(
        *(column.tolist() for column in (found.rank_X, found.phase_X, found.bytes_X, found.start_s_X, found.end_s_X)),
        strict=True,
    )
    assert list(rows) == [(0, 0, 0, 0.0, 1.0), (0, 2, 6, 1.0, 4.0), (1, 2, 0, 2.0, 4.0)]
    assert phase_seconds(found, 2) == {"gate": 0.5, "counts": 0, "dispatch": 2.5, "expert": 0, "combine": 0, "aggregate": 0}


def test_the_first_steps_are_whole(alone):
    whole_run = bars(alone.traces[0][1])
    one = int((whole_run.step_X == 0).sum())
    assert len(whole_run.first_steps(1).step_X) == one
    assert len(whole_run.first_steps(2 * one).step_X) == len(whole_run.step_X)


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
    found = planned(order, bytes_GG, ports)
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
