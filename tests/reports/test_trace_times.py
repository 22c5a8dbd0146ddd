"""Numbers from a trace, by hand."""

from dataclasses import replace

import pytest

from aurora.planner.plan import make_plan
from aurora.planner.workload.synthetic import synthetic_profile
from aurora.reports.formatting import DASH, as_text
from aurora.reports.input_tables import profile_table
from aurora.reports.plan_tables import plan_table
from aurora.reports.trace_tables import models_table, summary_table
from aurora.reports.trace_times import TIMED_PHASES, bars, phase_seconds, summarise
from aurora.simulator.interpreter import simulate_plan
from aurora.types import SyntheticOptions, TraceRecorder, servers
from tests.conftest import cluster

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}


def test_times_bounds_and_utilisation_by_hand():
    """Rank 0 computes 0..2 and sends 6 bytes to rank 1 in 2..8 over ports of 2 B/s, whose bound is 3 s; the other end is ready at 1.

    Rank 1 waits for rank 0 from 1 to 2, which is no network time.
    """
    recorder = TraceRecorder("measured", ("m",), 2)
    recorder.add(0, 0, 0, 0, "gate", 0.0, 2.0)
    recorder.transfer(0, 0, 0, 0, "dispatch", 1, True, 6, 2.0, 8.0)
    recorder.add(1, 0, 0, 0, "gate", 0.0, 1.0)
    recorder.transfer(1, 0, 0, 0, "dispatch", 0, False, 6, 1.0, 8.0)
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


def test_moves_are_a_phase_of_their_own_and_no_layers_time():
    recorder = TraceRecorder("measured", ("m",), 2)
    for rank in (0, 1):
        recorder.add(rank, 0, 0, 0, "gate", 0.0, 2.0)
        recorder.transfer(rank, 0, 0, 0, "moves", 1 - rank, rank == 0, 6, 2.0, 5.0)
        recorder.add(rank, 0, 0, 0, "moves", 5.0, 6.0)
    found = summarise(recorder.trace(), cluster(2.0, 2.0))
    assert (found.phases["gate"], found.phases["moves"], found.phases["waiting"]) == (2.0, 4.0, 0.0)
    (layer,) = found.layers
    assert (layer.seconds, layer.dispatch_s, layer.bound_s) == (2.0, 0.0, 0.0)


def test_a_rank_that_waits_within_an_exchange_is_not_on_the_network():
    """Rank 1 sends at once, rank 2 only after its experts: what rank 0 waits between the two is waiting."""
    recorder = TraceRecorder("predicted", ("m",), 3)
    recorder.add(2, 0, 0, 0, "expert", 0.0, 5.0)
    for peer, start_s, end_s in ((1, 1.0, 2.0), (2, 5.0, 6.0)):
        recorder.transfer(0, 0, 0, 0, "combine", peer, False, 2, start_s, end_s)
        recorder.transfer(peer, 0, 0, 0, "combine", 0, True, 2, start_s, end_s)
    found = summarise(recorder.trace(), cluster(2.0, 2.0, 2.0))
    assert (found.phases["combine"], found.phases["waiting"]) == pytest.approx((4 / 3, 1.0))
    assert found.exchange_gap == 0


def test_bars_are_pieces_that_count_what_is_sent():
    recorder = TraceRecorder("measured", ("m",), 2)
    recorder.add(0, 0, 0, 0, "gate", 4.0, 5.0)
    recorder.transfer(0, 0, 0, 0, "dispatch", 1, True, 6, 7.0, 9.0)
    recorder.transfer(0, 0, 0, 0, "dispatch", 1, False, 4, 6.0, 8.0)
    recorder.transfer(1, 0, 0, 0, "dispatch", 0, False, 6, 7.0, 9.0)
    recorder.transfer(1, 0, 0, 0, "dispatch", 0, True, 4, 6.0, 8.0)
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
    p = synthetic_profile("zipf:1", CONFIG, SyntheticOptions(sources=1, window_tokens=32))
    trace = simulate_plan(make_plan(cluster(1e6), [p]), [p])
    found = summarise(trace, cluster(1e6))
    assert found.utilisation == pytest.approx(1.0)  # one rank sends nothing
    assert found.exchange_gap == 0


@pytest.mark.parametrize(("shared", "bound_s"), [(False, 6.0), (True, 10.0)])
def test_what_goes_between_servers_is_bounded_by_nics(shared, bound_s):
    """GPUs 0 and 1 of a server send 6 and 4 bytes to the other one by NICs of 1 B/s, and GPU 0 sends 8 to GPU 1 at 10 B/s."""
    recorder = TraceRecorder("measured", ("m",), 4)
    for source, to, size in ((0, 2, 6), (1, 3, 4), (0, 1, 8)):
        recorder.transfer(source, 0, 0, 0, "dispatch", to, True, size, 0.0, 12.0)
        recorder.transfer(to, 0, 0, 0, "dispatch", source, False, size, 0.0, 12.0)
    machines = cluster(*[10.0] * 4)
    fabric = servers([0, 0, 1, 1], machines.out_Bps_G, machines.in_Bps_G, 1.0, shared_nic=shared)
    assert summarise(recorder.trace(), replace(machines, fabric=fabric)).layers[0].bound_s == pytest.approx(bound_s)


def test_tables_show_every_layer_of_every_model():
    p = synthetic_profile("zipf:1", CONFIG, SyntheticOptions(sources=2, window_tokens=32))
    plan = make_plan(cluster(1e6, 1e6), [p, p])
    trace = simulate_plan(plan, [p, p])
    text = as_text([profile_table(p), plan_table(plan), summary_table(summarise(trace, plan.cluster))])
    assert text.count("synthetic") == 1 + 4 + 4
    assert "colocated, equal GPUs" in text
