"""The interpreter on hand-computed programs, and against the single all-to-all that the planner times."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aurora
from aurora.errors import BadInput
from aurora.plan.costs import divided
from aurora.plan.planner import exchanged_tokens, make_plan
from aurora.plan.timing import timed
from aurora.simulate.interpreter import simulate_plan
from aurora.types import TRACE_PHASES, Curve, PlanOptions, Profile
from tests.conftest import cluster
from tests.strategies import clusters, fabrics, profiles


def flat(seconds):
    """`seconds` for any number of tokens."""
    return Curve(np.array([1.0]), np.array([float(seconds)]))


def profile(tokens, gate=0, expert=0, aggregate=0, combine_bytes=1, name="m"):
    curves = {"reference": {"gate": flat(gate), "expert": flat(expert), "aggregate": flat(aggregate)}}
    return Profile(name, "print", np.array(tokens), 1, 1, combine_bytes, 1, 1, curves)


def rows(trace, phase, model=0):
    keep = (trace.phase_X == TRACE_PHASES.index(phase)) & (trace.model_X == model)
    return sorted(zip(trace.rank_X[keep].tolist(), trace.start_s_X[keep].tolist(), trace.end_s_X[keep].tolist(), strict=True))


KEEP = PlanOptions("contiguous", "contiguous", "contiguous", "openshop")


def test_one_layer_by_hand():
    """Two ranks, an expert each. Rank 0 sends 4 tokens and rank 1 sends 2, at 2 B/s and 1 B a token each way.

    gate 0..1, dispatch 1..3 and 1..2, experts of 5 s from 3 on both (each waits for its own transfers: rank 0's send ends at
    3, rank 1 receives until 3), combine 8..10, aggregation of 1 s.
    """
    p = profile([[[[1, 4], [2, 1]]]], gate=1, expert=5, aggregate=1)
    trace = simulate_plan(make_plan(cluster(2.0, 2.0), [p], KEEP), [p])
    assert rows(trace, "gate") == [(0, 0, 1), (1, 0, 1)]
    assert rows(trace, "dispatch") == [(0, 1, 2), (0, 1, 3), (1, 1, 2), (1, 1, 3)]
    assert rows(trace, "expert") == [(0, 3, 8), (1, 3, 8)]
    assert rows(trace, "combine") == [(0, 8, 9), (0, 8, 10), (1, 8, 9), (1, 8, 10)]
    assert trace.seconds == pytest.approx(11)


def test_a_rank_goes_on_when_its_own_transfers_are_done():
    """Rank 2 takes no part in the traffic: its expert's tokens are local and start right after the counts."""
    p = profile([[[[0, 6, 0], [0, 0, 0], [0, 0, 3]]]], gate=1, expert=2)
    trace = simulate_plan(make_plan(cluster(1.0, 1.0, 1.0), [p], KEEP), [p])
    assert rows(trace, "expert") == [(0, 7, 7), (1, 7, 9), (2, 1, 3)]


def test_two_models_interleave_as_the_paper_draws_them():
    """Both models: gate 1, dispatch 4, experts 3, combine 4, aggregation 1 on two ranks.

    a: gate 0..1, dispatch 1..5, experts 5..8, combine from 9 (b has the port 5..9) to 13, aggregation 13..14.
    b: gate 1..2, dispatch 5..9, experts 9..12, combine 13..17, aggregation 17..18.
    """
    a, b = (profile([[[[0, 4], [4, 0]]]], gate=1, expert=3, aggregate=1, name=n) for n in "ab")
    trace = simulate_plan(make_plan(cluster(1.0, 1.0), [a, b], KEEP), [a, b])
    assert rows(trace, "dispatch", 0)[0] == (0, 1, 5)
    assert rows(trace, "dispatch", 1)[0] == (0, 5, 9)
    assert rows(trace, "expert", 1) == [(0, 9, 12), (1, 9, 12)]
    assert rows(trace, "combine", 0)[0] == (0, 9, 13)
    assert rows(trace, "combine", 1)[0] == (0, 13, 17)
    assert trace.seconds == pytest.approx(18)
    alone = simulate_plan(make_plan(cluster(1.0, 1.0), [a], KEEP), [a]).seconds
    assert alone == pytest.approx(13)


def test_a_model_that_is_through_is_skipped():
    short = profile([[[[0, 4], [4, 0]]]], name="short")
    long = profile([[[[0, 4], [4, 0]]]] * 3, name="long")
    for pair in ([short, long], [long, short]):
        trace = simulate_plan(make_plan(cluster(1.0, 1.0), pair, KEEP), pair)
        assert trace.seconds == pytest.approx(4 * 8)  # eight exchanges of four seconds, back to back


def test_startup_counts_for_every_message():
    p = profile([[[[0, 4], [4, 0]]]])
    trace = simulate_plan(make_plan(cluster(1.0, 1.0, startup_s=0.5), [p], KEEP), [p])
    assert trace.seconds == pytest.approx(9)


def test_slow_gpus_take_longer():
    p = profile([[[[3, 0], [0, 3]]]], gate=1, expert=1, aggregate=1)
    assert simulate_plan(make_plan(cluster(1.0, 1.0, speed=0.5), [p], KEEP), [p]).seconds == pytest.approx(6)


@st.composite
def clusters_on_any_fabric(draw, gpus):
    kind = draw(st.sampled_from([None, "tree", "leaf-spine", "graph"]))
    return replace(draw(clusters(gpus)), fabric=None if kind is None else draw(fabrics(gpus, kind)))


@given(st.integers(1, 4).flatmap(lambda n: st.tuples(clusters_on_any_fabric(n), profiles(n, max_layers=1))))
def test_one_window_without_compute_is_the_planned_schedule(case):
    """simulate(order) equals the planner's timing of the same all-to-all, on the big switch and on fabrics."""
    machines, drawn = case
    p = profile(drawn.tokens_TLSE[:1], name="m")
    plan = make_plan(machines, [p])
    trace = simulate_plan(plan, [p])
    order = plan.models[0].dispatch_L[0]
    there = exchanged_tokens(p, 0, plan.models[0].placement.split_EG(0)) * p.dispatch_bytes
    ports = (machines.out_Bps_G, machines.in_Bps_G, machines.startup_s_G, machines.fabric)
    dispatch = trace.phase_X == TRACE_PHASES.index("dispatch")
    assert trace.end_s_X[dispatch].max(initial=0) == pytest.approx(timed(order, there, *ports).makespan_s)


@given(
    st.integers(1, 3).flatmap(
        lambda n: st.tuples(clusters(n), profiles(n), profiles(n), st.sampled_from(["openshop", "sjf", "all-at-once"]))
    )
)
def test_every_byte_travels_and_nobody_does_two_things_at_once(case):
    machines, a, b, order = case
    plan = make_plan(machines, [a, b], PlanOptions(order=order))
    trace = simulate_plan(plan, [a, b])
    for index, p in enumerate((a, b)):
        expected = sum(
            exchanged_tokens(p, layer, plan.models[index].placement.split_EG(layer)).sum() for layer in range(p.layers)
        )
        for phase, per in (("dispatch", p.dispatch_bytes), ("combine", p.combine_bytes)):
            rows = (trace.model_X == index) & (trace.phase_X == TRACE_PHASES.index(phase))
            assert trace.bytes_X[rows & trace.sent_X].sum() == expected * per
            assert trace.bytes_X[rows & ~trace.sent_X].sum() == expected * per
    computing = np.isin(trace.phase_X, [TRACE_PHASES.index(x) for x in ("gate", "expert", "aggregate")])
    for rank in range(len(machines)):
        own = computing & (trace.rank_X == rank) & (trace.end_s_X > trace.start_s_X)
        order_X = np.argsort(trace.start_s_X[own], kind="stable")
        starts, ends = trace.start_s_X[own][order_X], trace.end_s_X[own][order_X]
        assert (starts[1:] >= ends[:-1] - 1e-9).all()


def test_simulating_twice_gives_the_same_trace():
    p = profile(np.random.default_rng(0).integers(0, 9, (2, 2, 3, 5)), gate=1, expert=2)
    plan = aurora.plan(cluster(1.0, 2.0, 3.0), [p, p])
    first, second = aurora.simulate(plan, [p, p]), aurora.simulate(plan, [p, p])
    assert first.start_s_X.tolist() == second.start_s_X.tolist()
    assert first.rank_X.tolist() == second.rank_X.tolist()


def test_profiles_of_other_models_are_refused():
    p = profile([[[[0, 4], [4, 0]]]])
    plan = make_plan(cluster(1.0, 1.0), [p])
    with pytest.raises(BadInput, match="expected 1 profiles"):
        simulate_plan(plan, [p, p])
    with pytest.raises(BadInput, match="with 1 MoE layers of 2 experts, found 2 ranks, 1 layers, 3 experts"):
        simulate_plan(plan, [profile([[[[0, 4, 1], [4, 0, 1]]]])])


def test_ports_that_a_shared_table_forgets():
    """a: 0 -> 1 and 3 -> 4, two units each; b: 2 -> 1 and 2 -> 4, two each. No port carries more than 4 units in all, which is
    where Aurora's Table 2 ends N_b; but N_a fills both receivers until 2, and from then on rank 2 sends for 4: the end is 6."""
    a, b = np.zeros((5, 5), dtype=int), np.zeros((5, 5), dtype=int)
    a[0, 1] = a[3, 4] = b[2, 1] = b[2, 4] = 2
    pair = [profile(tokens[None, None], name=name) for tokens, name in ((a, "a"), (b, "b"))]
    plan = make_plan(cluster(1.0, 1.0, 1.0, 1.0, 1.0), pair, KEEP)
    trace = simulate_plan(plan, pair)
    assert max(end for _, _, end in rows(trace, "dispatch", 0)) == pytest.approx(2)
    assert max(end for _, _, end in rows(trace, "dispatch", 1)) == pytest.approx(6)


@given(clusters(3).flatmap(lambda m: profiles(3).map(lambda p: (m, p))), st.sampled_from(["equal-split", "free-split"]))
def test_every_token_of_a_replicated_expert_travels_once_and_is_worked_on(case, place):
    machines, p = case
    plan = make_plan(machines, [p], PlanOptions(place, slots_per_gpu=-(-p.experts // 3) + 1))
    trace = simulate_plan(plan, [p])
    placement = plan.models[0].placement
    sent, there = 0, 0
    for layer in range(p.layers):
        split_EG = placement.split_EG(layer)
        for t in range(p.windows):
            tokens_SG = sum(divided(p.tokens_TLSE[t, layer, :, e], split_EG[e]) for e in range(p.experts))
            assert tokens_SG.sum() == p.tokens_TLSE[t, layer].sum()
            sent += tokens_SG.sum() - tokens_SG.trace()
            for g, gpu in enumerate(machines.gpus):
                mine = np.array([divided(p.tokens_TLSE[t, layer, :, e], split_EG[e])[:, g].sum() for e in range(p.experts)])
                there += float(p.seconds("expert", gpu, mine).sum())
    for phase, per in (("dispatch", p.dispatch_bytes), ("combine", p.combine_bytes)):
        rows = trace.phase_X == TRACE_PHASES.index(phase)
        for way in (trace.sent_X, ~trace.sent_X):
            assert trace.bytes_X[rows & way].sum() == sent * per
    work = trace.phase_X == TRACE_PHASES.index("expert")
    assert (trace.end_s_X - trace.start_s_X)[work].sum() == pytest.approx(there, abs=1e-9)


def test_two_replicas_by_hand():
    """10 tokens on rank 0 for an expert on both ranks, 4 s a token: 5 stay, 5 travel 5 s, and both ranks work 20 s."""
    slow = Curve(np.array([1.0, 11.0]), np.array([4.0, 44.0]))
    curves = {"reference": {"gate": flat(0), "expert": slow, "aggregate": flat(0)}}
    p = Profile("m", "print", np.array([[[[10], [0]]]]), 1, 1, 1, 1, 1, curves)
    plan = make_plan(cluster(1.0, 1.0), [p], PlanOptions("equal-split", slots_per_gpu=1))
    assert plan.models[0].placement.split_LG == (((0.5,), (0.5,)),)
    trace = simulate_plan(plan, [p])
    assert [end for rank, start, end in rows(trace, "dispatch")] == [5, 5]
    assert [end - start for rank, start, end in rows(trace, "expert")] == [20, 20]
    assert plan.objective_s == pytest.approx(5 + 20 + 5)
