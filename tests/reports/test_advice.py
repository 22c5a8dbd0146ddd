"""What to do next follows from figures."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.planner.plan import make_plan
from aurora.reports.advice import advice
from aurora.reports.formatting import seconds
from aurora.reports.inputs import ReportInputs
from aurora.reports.numbers import ReportNumbers
from aurora.reports.plan_tables import gap_line
from aurora.simulator.interpreter import simulate_plan
from aurora.types import Cluster, PlanOptions, Profile, TraceRecorder
from tests.conftest import cluster
from tests.reports.conftest import measured, profile
from tests.strategies import profiles


def told(inputs, word):
    return [sentence for sentence in advice(ReportNumbers(inputs)) if word in sentence]


def hot_expert():
    """Four experts on four GPUs; expert 2 draws almost all tokens."""
    tokens_SE = np.full((4, 4), 10)
    tokens_SE[:, 2] = 200
    return Profile("m", "", tokens_SE[None, None], 1, 100, 100, 10, 10, profile().curves)


def test_a_hot_experts_gpu_is_the_bottleneck():
    hot = hot_expert()
    plan = make_plan(cluster(*[1e6] * 4), [hot])
    inputs = ReportInputs(plan, (), (hot,))
    (port,) = told(inputs, "of what it receives.")
    assert "Expert 2 draws" in port
    gpu = next(g for g, held in enumerate(plan.models[0].placement.slots_LG[0]) if 2 in held)
    assert f"The port of GPU {gpu} is the bottleneck of m, layer 0" in port
    assert told(inputs, f"Placements may have more to give: {gap_line(plan)}")
    assert not told(inputs, "has no more to give")
    better = make_plan(plan.cluster, [hot], PlanOptions(slots_per_gpu=2))
    assert plan.bound_s <= better.objective_s < plan.assignment_bound_s  # replicas fit, so the headline bound counts them
    for shown, within in ((plan, "memory"), (better, "2 slots per GPU")):
        assert f"no placement within {within} below" in gap_line(shown)


def test_a_further_slot_is_advised_where_planning_found_that_it_saves_time():
    hot = hot_expert()
    plan = make_plan(cluster(*[1e6] * 4), [hot])
    what = f"one more slot per GPU ({hot.expert_bytes} bytes, fits)"
    chosen = replace(plan, slot_gain=0.031, notes=("`slots_per_gpu`: room for 3",))
    assert told(ReportInputs(chosen, (), (hot,)), "would save 3.1% of a simulated step.")
    for gain, advised in (
        (0.031, [f"Try aurora plan --slots-per-gpu 2: {what} would save 3.1% of the time expected on unseen windows."]),
        (0.0, []),
    ):
        assert told(ReportInputs(replace(plan, slot_gain=gain), (), (hot,)), "slots-per-gpu") == advised


def test_neither_replicas_that_no_memory_holds_nor_moves_of_an_expert_that_is_alone_are_advised():
    """As many experts as GPUs, and memory for one each: wherever the hot one goes, its GPU is as busy."""
    hot = hot_expert()
    small = tuple(replace(gpu, memory_bytes=hot.other_bytes + hot.expert_bytes) for gpu in cluster(*[1e6] * 4).gpus)
    inputs = ReportInputs(make_plan(Cluster("full", small), [hot]), (), (hot,))
    assert not [s for s in advice(ReportNumbers(inputs)) if re.search("slots-per-gpu|replicate|move", s)]


def test_the_layer_is_named_whose_dispatch_is_farthest_from_its_bound():
    """Where messages cost much to start, orders with many are above the fluid bound."""
    ports, traffic = cluster(*[1e6] * 4, startup_s=0.0005), profile()
    plan = make_plan(ports, [traffic])
    (sentence,) = told(ReportInputs(plan, (), (traffic,)), "longer than their bounds")
    planned = plan.models[0]
    layer = int((planned.dispatch_s_L - planned.bound_s_L).argmax())
    assert f"most in layer {layer}." in sentence


def test_an_order_that_is_advised_is_not_the_one_that_the_plan_has():
    """On equal ports auto is one order; where messages cost much to start, sending all at once is shorter."""
    ports, traffic = cluster(*[1e6] * 4, startup_s=0.0005), profile()
    plan = make_plan(ports, [traffic])
    (sentence,) = told(ReportInputs(plan, (), (traffic,)), "Try --order")
    name, words = re.search(r"--order ([\w-]+): dispatches of one take ([0-9.]+)% less", sentence).groups()
    better = make_plan(ports, [traffic], PlanOptions(order=name))
    took_s = [each.models[0].dispatch_s_L.sum() for each in (better, plan)]
    assert took_s[0] == pytest.approx(took_s[1] * (1 - float(words) / 100), rel=1e-3)
    assert took_s[0] < took_s[1]


@pytest.mark.full
@settings(max_examples=20)
@given(profiles(sources=2), st.sampled_from(["contiguous", "random", "swap-search"]), st.booleans())
def test_no_two_sentences_contradict_each_other_and_no_plan_disproves_one(drawn, place, replicas):
    """What is said to have no more to give is not advised, and no other plan beats a bound that is told."""
    ports = cluster(2.0, 3.0)
    options = PlanOptions(slots_per_gpu=drawn.experts) if replicas else PlanOptions(place=place)
    plan = make_plan(ports, [drawn], options)
    predicted = simulate_plan(plan, [drawn])
    sentences = advice(ReportNumbers(ReportInputs(plan, (("p", predicted), ("m", measured(predicted))), (drawn,))))
    assert len([s for s in sentences if "more to give" in s]) == 1
    assert not any("no more to give" in s for s in sentences) or not any("--slots-per-gpu" in s for s in sentences)
    assert len([s for s in sentences if re.search("would help most|second (model|copy)|See the timeline", s)]) == 1
    others = [make_plan(ports, [drawn], PlanOptions(slots_per_gpu=drawn.experts))] if plan.models[0].placement.split_LG else []
    others += [make_plan(ports, [drawn], PlanOptions(place=other)) for other in ("contiguous", "balanced", "swap-search")]
    for sentence in sentences:
        for words in re.findall(r"no placement[a-z ]* (?:more|less) than ([0-9.]+)% shorter", sentence):
            for other in others:
                assert other.objective_s >= plan.objective_s * (1 - float(words) / 100 - 6e-4), sentence


def test_a_rank_waits_no_longer_than_the_run(together):
    """Of several models: a rank waits while none of them is under way."""
    for summary in ReportNumbers(together).summaries:
        assert max(summary.phases.values()) <= summary.seconds * (1 + 1e-9)
        assert summary.phases["waiting"] + max(summary.exchanging_s, summary.computing_s) <= summary.seconds * (1 + 1e-9)


def test_prediction_and_network(alone, together):
    (sentence,) = told(alone, "were predicted")
    assert "20.0%" in sentence
    near = tuple(
        (name, replace(trace, kind="measured" if name == "b.npz" else "predicted"))
        for name, trace in (alone.traces[0], ("b.npz", alone.traces[0][1]))
    )
    assert not told(replace(alone, traces=near), "were predicted")
    assert told(alone, "Faster ports")  # nearly always busy: a second model would find no time on them
    assert told(together, "Faster ports")


@pytest.mark.parametrize(("sent_s", "says"), [(1.0, "second model"), (6.0, "at most 1.7 times"), (9.0, "Faster ports")])
def test_a_second_model_is_advised_where_ports_and_gpus_have_time_left(sent_s, says):
    """Two ranks that compute for the rest of ten seconds, or at most for four of them."""
    recorder = TraceRecorder("predicted", ("one",), 2)
    for rank in (0, 1):
        recorder.add(rank, 0, 0, 0, "expert", 0.0, min(4.0, 10 - sent_s))
        recorder.add(rank, 0, 0, 0, "combine", 10 - sent_s, 10.0, (1 - rank, True, 6))
        recorder.add(rank, 0, 0, 0, "combine", 10 - sent_s, 10.0, (1 - rank, False, 6))
    plan = make_plan(cluster(1e6, 1e6), [profile(sources=2)])
    assert told(ReportInputs(plan, (("p", recorder.trace()),)), says)


@pytest.mark.parametrize(("slower", "differs"), [(0.5, "less"), (1.5, "more")])
def test_the_largest_difference_is_of_the_ranks_time_and_in_the_runs_direction(together, slower, differs):
    """Not the sum over models, in which a rank waits for itself; and a run that was faster was not delayed."""
    ((name, trace),) = together.traces
    inputs = replace(together, traces=((name, trace), ("b.npz", measured(trace, slower))))
    (sentence,) = told(inputs, "were predicted")
    assert sentence.startswith("Check ports and start-up costs")
    predicted, found = (summary.phases["combine"] for summary in ReportNumbers(inputs).summaries)
    assert f"is in combine, {seconds(abs(found - predicted))} {differs} (mean over ranks" in sentence


def test_uneven_experts_are_told_only_where_placements_have_more_to_give():
    tokens_SE = np.tile([200, 200, 10, 10], (2, 1))
    traffic = Profile("m", "", tokens_SE[None, None], 1, 100, 100, 10, 10, profile().curves)
    plan = make_plan(cluster(1e6, 1e6), [traffic], PlanOptions(place="contiguous"))
    for bound_s, uneven in ((plan.objective_s / 2, 1), (plan.objective_s, 0)):
        assert len(told(ReportInputs(replace(plan, bound_s=bound_s), (), (traffic,)), "are uneven")) == uneven


def test_waiting_is_not_taken_for_the_network():
    """Ranks that only wait for a slow one ask for no faster ports, though their exchanges last as long as its experts."""
    recorder = TraceRecorder("predicted", ("one",), 4)
    recorder.add(0, 0, 0, 0, "expert", 0.0, 10.0)
    for rank in (1, 2, 3):
        for peer, end_s in ((0, 10.1), (rank % 3 + 1, 0.2)):
            recorder.add(rank, 0, 0, 0, "combine", end_s - 0.1, end_s, (peer, False, 6))
            recorder.add(peer, 0, 0, 0, "combine", end_s - 0.1, end_s, (rank, True, 6))
    plan = make_plan(cluster(*[1e6] * 4), [profile()])
    sentences = advice(ReportNumbers(ReportInputs(plan, (("p", recorder.trace()),))))
    assert not [s for s in sentences if "Faster ports" in s]
    assert any("a rank's port is busy 1.7% of the time, its GPU 24.8%" in s for s in sentences)


def test_something_is_always_said(alone):
    assert advice(ReportNumbers(ReportInputs(alone.plan)))
