"""Times of a trace by hand, intervals from first principles, and predictions over measurements."""

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.switch import timed
from aurora.algorithms.workload.load_statistics import contiguous_interval
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput
from aurora.planner.evaluate import evaluate
from aurora.planner.plan import make_plan
from aurora.reports.formatting import DASH
from aurora.reports.plan_tables import evaluation_table, plan_table, profile_table
from aurora.reports.spans import interval_colouring, union, whole
from aurora.reports.trace_tables import comparison_table, models_table, summary_table
from aurora.reports.trace_times import TIMED_PHASES, CaseErrors, PhaseError, bars, compare, phase_seconds, summarise
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Schedule, Servers, SyntheticOptions, TraceRecorder
from tests.conftest import cluster
from tests.reports.as_text import as_text
from tests.strategies import profiles, traffics

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}


def test_times_bounds_and_utilisation_by_hand():
    """Rank 0 computes 0..2 and sends 6 bytes to rank 1 in 2..8 over ports of 2 B/s, whose bound is 3 s; the other end is ready at 1.

    Rank 1 waits for rank 0 from 1 to 2, which is no network time.
    """
    recorder = TraceRecorder("measured", ("m",), 2)
    recorder.add(0, 0, 0, 0, "gate", 0.0, 2.0)
    recorder.add(0, 0, 0, 0, "dispatch", 2.0, 8.0, (1, True, 6))
    recorder.add(1, 0, 0, 0, "gate", 0.0, 1.0)
    recorder.add(1, 0, 0, 0, "dispatch", 1.0, 8.0, (0, False, 6))
    recorder.add(1, 0, 0, 0, "expert", 8.0, 10.0)
    recorder.add(1, 0, 0, 0, "head", 11.0, 13.0)
    found = summarise(recorder.trace(), cluster(2.0, 2.0))
    assert found.seconds == 13
    assert found.utilisation_G.tolist() == pytest.approx([2 / 13, 5 / 13])
    assert found.phases == dict.fromkeys(TIMED_PHASES, 0.0) | {
        "gate": 1.5, "dispatch": 6.0, "expert": 1.0, "head": 1.0, "waiting": 1.0,
    }  # fmt: skip
    (layer,) = found.layers
    assert (layer.seconds, layer.dispatch_s, layer.combine_s, layer.waiting_s, layer.bound_s) == (13, 6, 0, 1, 3)
    assert layer.gap == 1


def test_a_rank_that_waits_within_an_exchange_is_not_on_the_network():
    """Rank 1 sends at once, rank 2 only after its experts: what rank 0 waits between the two is waiting."""
    recorder = TraceRecorder("predicted", ("m",), 3)
    recorder.add(2, 0, 0, 0, "expert", 0.0, 5.0)
    for peer, start_s, end_s in ((1, 1.0, 2.0), (2, 5.0, 6.0)):
        recorder.add(0, 0, 0, 0, "combine", start_s, end_s, (peer, False, 2))
        recorder.add(peer, 0, 0, 0, "combine", start_s, end_s, (0, True, 2))
    found = summarise(recorder.trace(), cluster(2.0, 2.0, 2.0))
    assert (found.phases["combine"], found.phases["waiting"]) == pytest.approx((4 / 3, 1.0))
    assert found.exchange_gap == 0


def test_bars_are_pieces_that_count_what_is_sent():
    recorder = TraceRecorder("measured", ("m",), 2)
    recorder.add(0, 0, 0, 0, "gate", 4.0, 5.0)
    recorder.add(0, 0, 0, 0, "dispatch", 7.0, 9.0, (1, True, 6))
    recorder.add(0, 0, 0, 0, "dispatch", 6.0, 8.0, (1, False, 4))
    recorder.add(1, 0, 0, 0, "dispatch", 7.0, 9.0, (0, False, 6))
    recorder.add(1, 0, 0, 0, "dispatch", 6.0, 8.0, (0, True, 4))
    trace = recorder.trace()
    found = bars(trace)
    columns = found.rank_X, found.phase_X, found.bytes_X, found.start_s_X, found.end_s_X
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        (0, 0, 0, 0.0, 1.0), (0, TIMED_PHASES.index("waiting"), 0, 1.0, 2.0), (0, 2, 6, 2.0, 5.0), (1, 2, 4, 2.0, 5.0),
    ]  # fmt: skip
    (phases,) = phase_seconds(trace, found)
    assert (phases["gate"], phases["dispatch"], phases["waiting"]) == (0.5, 3.0, 0.5)


def test_a_second_event_of_a_phase_adds_its_own_time_and_not_what_lies_between():
    recorder = TraceRecorder("measured", ("m",), 1)
    for phase, start_s in (("gate", 0.0), ("expert", 1.0), ("gate", 7.0), ("head", 9.0)):
        recorder.add(0, 0, 0, 0, phase, start_s, start_s + 0.5)
    phases = summarise(recorder.trace(), cluster(1.0)).phases
    assert (phases["gate"], phases["expert"], phases["head"], phases["waiting"]) == (1.0, 0.5, 0.5, 7.5)


def test_the_first_steps_are_whole(alone):
    whole_run = bars(alone.traces[0][1])
    one = int((whole_run.step_X == 0).sum())
    assert len(whole_run.first_steps(1).step_X) == one
    assert len(whole_run.first_steps(len(whole_run.step_X)).step_X) == len(whole_run.step_X) > one


def test_a_run_without_events_took_no_time():
    found = summarise(TraceRecorder("measured", ("m",), 2).trace(), cluster(1.0, 1.0))
    assert (found.seconds, found.layers, sum(found.phases.values())) == (0.0, (), 0.0)
    assert (found.models[0].seconds, len(found.models[0].step_s_T)) == (0.0, 0)


def test_models_have_times_of_their_own():
    """A rank begins a step half a second after the other; the second model has one step, and the recording begins at step 4."""
    recorder = TraceRecorder("predicted", ("a", "b"), 2)
    for step, start in ((4, 1.0), (5, 3.0), (6, 7.0)):
        for rank in (0, 1):
            recorder.add(rank, 0, step, 0, "gate", start + rank / 2, start + 1)
            recorder.add(rank, 0, step, 1, "gate", start + 1, start + 2 - rank / 2)
    recorder.add(0, 1, 9, 0, "gate", 5.0, 5.5)
    found = summarise(recorder.trace(), cluster(1.0, 1.0))
    first, second = found.models
    assert (first.model, first.seconds, found.seconds) == ("a", 8.0, 8.0)
    assert (first.step_s_T.tolist(), first.between_s_X.tolist()) == ([2.0] * 3, [2.0, 4.0])
    assert (second.seconds, second.step_s_T.tolist(), second.between_s_X.tolist()) == (0.5, [0.5], [])
    lines = [line.split() for line in as_text([models_table(found)]).splitlines()]
    cells = [[each for each in line if each not in "│┃|"] for line in lines]
    assert ["a", "3", "8", "s", "2", "s", "2", "s", "3", "s", "3.98", "s"] in cells
    assert ["b", "1", "500", "ms", "500", "ms", "500", "ms", DASH, DASH] in cells
    alone = TraceRecorder("predicted", ("a",), 1)
    alone.add(0, 0, 0, 0, "gate", 0.0, 1.0)
    assert models_table(summarise(alone.trace(), cluster(1.0))) is None


def test_a_simulated_exclusive_plan_is_at_its_own_bound():
    p = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=1, window_tokens=32))
    trace = simulate_plan(make_plan(cluster(1e6), [p]), [p])
    found = summarise(trace, cluster(1e6))
    assert found.utilisation == pytest.approx(1.0)  # one rank sends nothing
    assert found.exchange_gap == 0


@pytest.mark.parametrize(("shared", "bound_s"), [(False, 6.0), (True, 10.0)])
def test_what_goes_between_servers_is_bounded_by_nics(shared, bound_s):
    """GPUs 0 and 1 of a server send 6 and 4 bytes to the other one by NICs of 1 B/s, and GPU 0 sends 8 to GPU 1 at 10 B/s."""
    recorder = TraceRecorder("measured", ("m",), 4)
    for source, to, size in ((0, 2, 6), (1, 3, 4), (0, 1, 8)):
        recorder.add(source, 0, 0, 0, "dispatch", 0.0, 12.0, (to, True, size))
        recorder.add(to, 0, 0, 0, "dispatch", 0.0, 12.0, (source, False, size))
    machines = cluster(*[10.0] * 4)
    servers = Servers.of([0, 0, 1, 1], 1.0, shared_nic=shared)
    assert summarise(recorder.trace(), replace(machines, servers=servers)).layers[0].bound_s == pytest.approx(bound_s)


def test_tables_show_every_layer_of_every_model():
    p = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=2, window_tokens=32))
    plan = make_plan(cluster(1e6, 1e6), [p, p])
    trace = simulate_plan(plan, [p, p])
    text = as_text(
        [profile_table(p, contiguous_interval(p, 0)), plan_table(plan), summary_table(summarise(trace, plan.cluster))]
    )
    assert text.count("synthetic") == 1 + 4 + 4
    assert "colocated, equal GPUs" in text


def test_an_evaluation_shows_its_slowest_layers():
    planned_for, served = (
        draw_profile("zipf:1", CONFIG | {"num_hidden_layers": 6}, SyntheticOptions(sources=2, window_tokens=32, seed=seed))
        for seed in (0, 1)
    )
    plan = make_plan(cluster(1e6, 1e6), [planned_for])
    found = evaluate(plan, [served])
    slowest = sorted(np.argsort(-found.served_s_L)[:2].tolist())
    assert [row[1] for row in evaluation_table(plan, found, most=2).cells] == [str(layer) for layer in slowest]


def test_tables_bound_predictions_alone_and_tell_which_times_do_not_add_up():
    p = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=2, window_tokens=32))
    plan = make_plan(cluster(1e6, 1e6), [p, p])
    shared, apart = (simulate_plan(plan, [p, p], interleave=each) for each in ("on", "off"))
    texts = [
        " ".join(as_text([summary_table(summarise(trace, plan.cluster))], 500).split())
        for trace in (shared, apart, replace(shared, kind="measured"))
    ]
    assert ["another model has the port" in text for text in texts] == [True, False, False]
    assert ["fluid bound" in text for text in texts] == [True, True, False]
    assert all("dispatch and combine: of the busiest port; ranks may be in several layers at once" in text for text in texts)


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
    found = whole(timed(order, bytes_GG, ports.network))
    carried = np.zeros_like(bytes_GG)
    np.add.at(carried, (found.src_X, found.dst_X), found.bytes_X)
    assert np.array_equal(carried, bytes_GG)
    assert found.seconds == timed(order, bytes_GG, ports.network).makespan_s


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


def trace(kind, gate_s, send, receive, counts_s=0.5, ranks=2):
    """Rank 0 computes gate_s, rank 1 half of it; then rank 0 sends 8 bytes: (start, end) of either end."""
    recorder = TraceRecorder(kind, ("m",), ranks)
    recorder.add(0, 0, 0, 0, "gate", 0.0, gate_s)
    recorder.add(1, 0, 0, 0, "gate", 0.0, gate_s / 2)
    recorder.add(0, 0, 0, 0, "counts", gate_s, gate_s + counts_s)
    recorder.add(0, 0, 0, 0, "dispatch", *send, (1, True, 8))
    recorder.add(1, 0, 0, 0, "dispatch", *receive, (0, False, 8))
    return recorder.trace()


def test_a_transfer_begins_when_both_of_its_ends_are_ready():
    """The receiver waits from 3, the sender comes at 5, all is there at 9: 4 seconds, of which 5 were predicted."""
    found = compare(trace("predicted", 1.0, (4.0, 9.0), (4.0, 9.0)), trace("measured", 2.0, (5.0, 8.5), (3.0, 9.0)))
    assert found.phases == (
        PhaseError("m", "gate", 0.75, 1.5),
        PhaseError("m", "counts", 0.25, 0.25),
        PhaseError("m", "dispatch", 5.0, 3.75),
        PhaseError("m", "waiting", 3.0, 3.25),
    )
    assert [phase.error for phase in found.phases] == pytest.approx([-0.5, 0.0, 1 / 3, -1 / 13])
    assert found.network == CaseErrors(1, 0.25, 0.25, "m, step 0, layer 0, dispatch")
    assert found.compute == CaseErrors(1, 0.5, 0.5, "m, step 0, layer 0, gate")
    assert (found.predicted_s, found.measured_s, found.error, found.unmatched) == (9.0, 9.0, 0.0, 0)
    text = as_text([comparison_table(found)])
    assert re.search(r"dispatch\W+5 s\W+3\.75 s\W+33\.3%", text)
    assert "network: median error 25.0% of 1 cases, worst 25.0% (m, step 0, layer 0, dispatch)" in " ".join(text.split())


def test_medians_and_the_worst_over_cases_and_what_is_in_one_trace_alone():
    recorders = {kind: TraceRecorder(kind, ("m",), 1) for kind in ("predicted", "measured")}
    for step, (says, took) in enumerate([(1.0, 1.0), (1.0, 2.0), (1.0, 4.0)]):
        for kind, seconds in (("predicted", says), ("measured", took)):
            recorders[kind].add(0, 0, step, 0, "expert", 10.0 * step, 10.0 * step + seconds)
    recorders["measured"].add(0, 0, 3, 0, "expert", 40.0, 41.0)
    found = compare(recorders["predicted"].trace(), recorders["measured"].trace())
    assert found.compute == CaseErrors(3, 0.5, 0.75, "m, step 2, layer 0, expert")
    assert (found.network, found.unmatched) == (None, 1)


@pytest.mark.full
@given(profiles(sources=2), profiles(sources=2))
def test_a_prediction_laid_over_itself_has_no_error(a, b):
    plan = make_plan(cluster(2.0, 3.0), [a, b])
    predicted = simulate_plan(plan, [a, b])
    found = compare(predicted, replace(predicted, kind="measured"))
    assert found.error == pytest.approx(0.0)
    for errors in (found.network, found.compute):
        assert errors is None or errors.worst == pytest.approx(0.0)
    assert all(phase.error in (None, pytest.approx(0.0)) for phase in found.phases)


def test_traces_that_do_not_belong_together_are_refused():
    predicted, measured = trace("predicted", 1.0, (1.0, 2.0), (1.0, 2.0)), trace("measured", 1.0, (1.0, 2.0), (1.0, 2.0))
    with pytest.raises(BadInput, match="compare: expected a predicted trace, found a measured one"):
        compare(measured, measured)
    with pytest.raises(BadInput, match="compare: measured m on 2 ranks, predicted m on 3"):
        compare(replace(predicted, ranks=3), measured)
