"""The interpreter on hand-computed programs, and against the single all-to-all that the planner times."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.alltoall.schedule import batch_order
from aurora.algorithms.compile import SLICE_INTERVALS, compile_plan
from aurora.algorithms.network.switch import counts_seconds, timed
from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.placement.objective import formula
from aurora.algorithms.placement.phase_times import exclusive_s
from aurora.algorithms.workload.step_traffic import micro_batches
from aurora.algorithms.workload.traffic import layer_traffic
from aurora.errors import BadInput
from aurora.planner.choice import with_time_slice
from aurora.planner.plan import make_plan
from aurora.simulator.interpreter import simulate, simulate_plan
from aurora.types import (
    BARRIERS,
    PREEMPTION_INTERVAL_S,
    PRIORITIES,
    TIME_SLICES,
    TRACE_PHASES,
    Curve,
    PlanOptions,
    Profile,
    Servers,
)
from aurora.types.options import GATHERED
from tests.conftest import cluster
from tests.strategies import clusters, profiles, servers


def flat(seconds):
    """`seconds` for any number of tokens."""
    return Curve(np.array([1.0]), np.array([float(seconds)]))


def profile(tokens, gate=0, expert=0, aggregate=0, combine_bytes=1, name="m"):
    curves = {"reference": {"gate": flat(gate), "expert": flat(expert), "aggregate": flat(aggregate)}}
    return Profile(name, "print", np.array(tokens), 1, 1, combine_bytes, 1, 1, curves)


def rows(trace, phase, model=0):
    keep = (trace.phase_X == TRACE_PHASES.index(phase)) & (trace.model_X == model)
    return sorted(zip(trace.rank_X[keep].tolist(), trace.start_s_X[keep].tolist(), trace.end_s_X[keep].tolist(), strict=True))


def test_slices_of_three_models_go_round_and_a_model_without_traffic_takes_no_time():
    """Rank 0 sends 4 bytes of each model at 2 B/s, and gets them back; the fourth model's tokens stay where they are.

    Dispatches follow each other, 0..2, 2..4, 4..6, then the combines in the same sequence, until 12. The second layer of the
    second model takes 4 s more, when the others have left.
    """
    one = profile([[[[0, 4], [0, 0]]]])
    two, idle = profile([[[[0, 4], [0, 0]]] * 2]), profile([[[[4, 0], [0, 4]]]])
    plan = make_plan(cluster(2.0, 2.0), [one, two, one, idle], KEEP)
    trace = simulate_plan(plan, [one, two, one, idle])
    for model, begin in enumerate((0, 2, 4)):
        assert rows(trace, "dispatch", model)[0] == (0, begin, begin + 2)
        assert (1, 6 + begin, 8 + begin) in rows(trace, "combine", model)
    assert [trace.end_s_X[trace.model_X == model].max() for model in range(3)] == [8, 16, 12]


def one_window(p):
    return replace(p, tokens_TLSE=p.tokens_TLSE[:1])


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


def test_an_allgather_sends_all_tokens_to_all_ranks():
    """Two ranks at 2 B/s, tokens of 1 B with a weight and an expert number of 4 B each. Rank 0 has 4 tokens, rank 1 has 2.

    Hidden states take 2 s and 1 s, weights and numbers 8 s and 4 s each: a rank goes on when it has sent and received all, so
    both dispatch until 18 in steps of their own. Experts of 5 s; then rank 0's sums take 2 s, those of rank 1 take 1 s.
    """
    p = profile([[[[4, 0], [0, 2]]]], expert=5)
    trace = simulate_plan(make_plan(cluster(2.0, 2.0), [p], KEEP), [p], orders=GATHERED)
    for rank in range(2):  # what it sends and what it receives
        dispatch, combine = ([row for row in rows(trace, phase) if row[0] == rank] for phase in ("dispatch", "combine"))
        assert [row[1:] for row in dispatch] == [(0, 1), (0, 2), (2, 6), (2, 10), (10, 14), (10, 18)]
        assert [row[1:] for row in combine] == [(23, 24), (23, 25)]
    assert rows(trace, "counts") == []  # an engine knows the sizes


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


def test_startup_counts_for_every_message():
    """Also for that of the token counts, one to the other rank; among five ranks an allgather by doubling has three."""
    p = profile([[[[0, 4], [4, 0]]]])
    trace = simulate_plan(make_plan(cluster(1.0, 1.0, startup_s=0.5), [p], KEEP), [p])
    assert trace.seconds == pytest.approx(9.5)
    local = profile(np.eye(5, dtype=np.int64)[None, None])
    assert simulate_plan(make_plan(cluster(*[1.0] * 5, startup_s=0.5), [local], KEEP), [local]).seconds == pytest.approx(1.5)


def test_the_overhead_of_a_grouped_kernel_is_part_of_the_expert_phase():
    """As test_one_layer_by_hand, with 2 s beside the experts' 5; the planner counts them too, and those of slow GPUs' twice."""
    p = profile([[[[1, 4], [2, 1]]]], gate=1, expert=5, aggregate=1)
    longer = replace(p, curves={"reference": {**p.curves["reference"], "overhead": flat(2)}})
    for speed in (1.0, 0.5):
        machines = cluster(2.0, 2.0, speed=speed)
        plans = [make_plan(machines, [each], KEEP) for each in (p, longer)]
        shorter, trace = (simulate_plan(plan, [each]) for plan, each in zip(plans, (p, longer), strict=True))
        assert trace.seconds == pytest.approx(shorter.seconds + 2 / speed)
        assert [end - start for _, start, end in rows(trace, "expert")] == pytest.approx([7 / speed] * 2)
        assert plans[1].objective_s == pytest.approx(plans[0].objective_s + 2 / speed)
        assert plans[1].bound_s == pytest.approx(plans[0].bound_s + 2 / speed)
    assert longer.digest != p.digest


@st.composite
def clusters_with_and_without_servers(draw, gpus):
    """Where GPUs share a NIC, a rank's combine takes from the dispatch of others: each has its own."""
    drawn = draw(st.none() | servers(gpus))
    return replace(draw(clusters(gpus)), servers=drawn and Servers(drawn.server_G, drawn.nic_Bps))


@pytest.mark.full
@given(
    st.integers(1, 4).flatmap(lambda n: st.tuples(clusters_with_and_without_servers(n), profiles(n, max_layers=1))),
    st.booleans(),
)
def test_one_window_without_compute_is_the_planned_schedule(case, staged):
    """simulate(order) equals the planner's timing of the same all-to-all after the counts, on the big switch and over servers."""
    machines, drawn = case
    p = profile(drawn.tokens_TLSE[:1], name="m")
    plan = make_plan(machines, [p])
    trace = simulate_plan(plan, [p], staged=staged)
    order = plan.models[0].dispatch_L[0]
    there = layer_traffic(p, 0, plan.models[0].placement.split_EG(0)) * p.dispatch_bytes
    dispatch = trace.phase_X == TRACE_PHASES.index("dispatch")
    counts_s = counts_seconds(machines.network) if dispatch.any() else 0.0
    took_s = timed(order, there, machines.network, staged).makespan_s
    assert trace.end_s_X[dispatch].max(initial=0) == pytest.approx(counts_s + took_s)


@given(
    st.integers(1, 3).flatmap(
        lambda n: st.tuples(
            clusters(n),
            profiles(n),
            profiles(n),
            st.sampled_from(["openshop", "sjf", "all-at-once"]),
            st.sampled_from(TIME_SLICES),
        )
    )
)
def test_every_byte_travels_and_nobody_does_two_things_at_once(case):
    machines, a, b, order, time_slice = case
    plan = make_plan(machines, [a, b], PlanOptions(order=order, time_slice=time_slice))
    trace = simulate_plan(plan, [a, b])
    for index, p in enumerate((a, b)):
        expected = sum(layer_traffic(p, layer, plan.models[index].placement.split_EG(layer)).sum() for layer in range(p.layers))
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
        if time_slice == "layer":
            check_ports_are_kept(trace, rank, [p.layers for p in (a, b)])


def check_ports_are_kept(trace, rank, layers_M):
    """On a rank's port nothing of the other model lies between a layer's combine and the next one's dispatch."""
    own = (trace.rank_X == rank) & (trace.peer_X >= 0) & (trace.end_s_X > trace.start_s_X)
    combine, dispatch = (trace.phase_X == TRACE_PHASES.index(phase) for phase in ("combine", "dispatch"))
    for model, layers in enumerate(layers_M):
        for step in np.unique(trace.step_X[own & (trace.model_X == model)]):
            for layer in range(layers - 1):
                of_step = own & (trace.model_X == model) & (trace.step_X == step)
                held = of_step & ((combine & (trace.layer_X == layer)) | (dispatch & (trace.layer_X == layer + 1)))
                if held.any():
                    begins, ends = trace.start_s_X[held].min(), trace.end_s_X[held].max()
                    other = own & (trace.model_X != model)
                    assert not ((trace.start_s_X[other] < ends - 1e-9) & (trace.end_s_X[other] > begins + 1e-9)).any()


def test_time_slices_by_layer_by_hand():
    """Both models: two layers of gate 1, dispatch 4, experts 8, combine 4, aggregation 0 on two ranks. From the first combine
    on a holds the port through its second dispatch, and its gate runs at a preemption point of b's experts.

    a: gate 0..1, dispatch 1..5, experts 5..13, combine 13..17 (b has dispatched 5..9), gate 17..18, dispatch 18..22, experts
    22..30 less what b takes: b's gate 26..27 preempts them, so until 31; combine 31..35.
    b: gate 1..2, dispatch 5..9, experts 13..22 with a's gate in between, combine 22..26, gate 26..27, dispatch 27..31, experts
    31..39, combine 39..43.
    By exchange a gates after the experts of b, 21..22, and dispatches after its combine, 25..29: 49 in all.
    """
    window = [[[0, 4], [4, 0]]] * 2
    a, b = (profile([window], gate=1, expert=8, name=n) for n in "ab")
    plan = make_plan(cluster(1.0, 1.0), [a, b], replace(KEEP, time_slice="layer"))
    trace = simulate_plan(plan, [a, b])

    def of_rank_0(phase, model):
        """Where stretches begin and end; an aggregation of no seconds splits them too."""
        spans = [span for rank, *span in rows(trace, phase, model) if rank == 0]
        ends = np.ravel(spans)
        pauses = np.flatnonzero(np.diff(ends)[1::2] < 2 * PREEMPTION_INTERVAL_S)
        return np.delete(ends, [*(2 * pauses + 1), *(2 * pauses + 2)]).tolist()

    within = {"abs": 6 * PREEMPTION_INTERVAL_S}  # high-priority work waits for a preemption point
    assert of_rank_0("gate", 0) == pytest.approx([0, 1, 17, 18], **within)
    assert of_rank_0("expert", 1) == pytest.approx([13, 17, 18, 22, 31, 39], **within)
    assert of_rank_0("expert", 0) == pytest.approx([5, 13, 22, 26, 27, 31], **within)
    assert of_rank_0("gate", 1) == pytest.approx([1, 2, 26, 27], **within)
    assert trace.seconds == pytest.approx(43, **within)
    by_exchange = replace(plan, options=replace(plan.options, time_slice="exchange"))
    assert simulate_plan(by_exchange, [a, b]).seconds == pytest.approx(49)
    assert with_time_slice(by_exchange, [a, b]).options.time_slice == "layer"


def test_one_model_takes_as_long_whatever_the_time_slices():
    p = profile([[[[0, 4], [4, 0]]] * 3], gate=1, expert=8)
    plan = make_plan(cluster(1.0, 1.0), [p], KEEP)
    by_layer = replace(plan, options=replace(plan.options, time_slice="layer"))
    assert simulate_plan(by_layer, [p]).seconds == pytest.approx(simulate_plan(plan, [p]).seconds)


def test_a_time_slice_is_for_models_that_share():
    p = profile([[[[0, 4], [4, 0]]]])
    with pytest.raises(BadInput, match="`time_slice`: is for models or micro-batches that share"):
        make_plan(cluster(1.0, 1.0), [p], replace(KEEP, time_slice="layer"))


def test_profiles_of_other_models_are_refused():
    p = profile([[[[0, 4], [4, 0]]]])
    plan = make_plan(cluster(1.0, 1.0), [p])
    with pytest.raises(BadInput, match="expected 1 profiles"):
        simulate_plan(plan, [p, p])
    with pytest.raises(BadInput, match="with 1 MoE layers of 2 experts, found 1 of 3"):
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


THREE = cluster(1.0, 1.0, 1.0)
UNEVEN = [[[[0, 6, 0], [0, 0, 2], [1, 0, 3]]]]


@pytest.mark.full
@given(profiles(sources=2), profiles(sources=2))
def test_one_after_the_other_two_models_take_as_long_as_each_by_itself(a, b):
    """Where all wait for all, the second model begins when the first has left every rank."""
    plan = make_plan(cluster(2.0, 2.0), [a, b], KEEP)
    single = [simulate_plan(make_plan(plan.cluster, [p], KEEP), [p], "global").seconds for p in (a, b)]
    assert simulate_plan(plan, [a, b], "global", interleave="off").seconds == pytest.approx(sum(single))


def test_barriers_by_hand():
    """Rank 0 sends 6 to rank 1, rank 1 sends 2 to rank 2, rank 2 one to rank 0; a gate of 1, experts of 2 where there are tokens.

    none and gpu: rank 2 is done with its transfers at 3 and computes 3..5. global: all dispatches end at 7, all experts at 9.
    """
    p = profile(UNEVEN, gate=1, expert=2)
    plan = make_plan(THREE, [p], KEEP)
    experts = {barriers: rows(simulate_plan(plan, [p], barriers), "expert") for barriers in ("none", "gpu", "global")}
    assert experts["none"] == experts["gpu"] == [(0, 7, 9), (1, 7, 9), (2, 3, 5)]
    assert experts["global"] == [(0, 7, 9), (1, 7, 9), (2, 7, 9)]
    with pytest.raises(BadInput, match="expected one of gpu, global, none, found 'all'"):
        simulate_plan(plan, [p], "all")


def test_without_the_counts_barrier_early_ranks_begin_early():
    """Rank 2's gate takes 5, the others' 1; 0 -> 1 need not wait for it."""
    curve = Curve(np.array([1.0, 5.0]), np.array([1.0, 5.0]))
    p = replace(
        profile([[[[0, 1, 0], [1, 0, 0], [5, 0, 0]]]]),
        curves={"reference": {**profile([[[[1]]]]).curves["reference"], "gate": curve}},
    )
    plan = make_plan(THREE, [p], KEEP)
    began = {b: min(start for _, start, _ in rows(simulate_plan(plan, [p], b), "dispatch")) for b in ("gpu", "none")}
    assert began == {"gpu": 5, "none": 1}
    assert not rows(simulate_plan(plan, [p], "none"), "counts")


def terms(plan, p, model=0):
    groups = plan.models[model].placement.gpu_E(0)
    return layer_costs(plan.cluster, p, 0).grouped(groups).times_alone(np.arange(len(plan.cluster)))


single = st.integers(2, 4).flatmap(lambda n: st.tuples(clusters(n), *[profiles(n, max_layers=1).map(one_window)] * 2))


@pytest.mark.full
@given(single)
def test_where_all_wait_for_all_phases_add_up(case):
    """One model: the sum of the longest gate, counts, dispatch, experts, combine and aggregation; Eq. 1 is never above it."""
    machines, p, _ = case
    plan = make_plan(machines, [p])
    trace = simulate_plan(plan, [p], "global")
    there = layer_traffic(p, 0, plan.models[0].placement.split_EG(0))
    exchanges = (
        (plan.models[0].dispatch_L[0], there * p.dispatch_bytes),
        (plan.models[0].combine_L[0], there.T * p.combine_bytes),
    )
    own = terms(plan, p)
    longest = [part.max() for part in (own.gate_G, own.expert_G, own.aggregate_G)]
    longest += [timed(order, bytes_GG, machines.network).makespan_s for order, bytes_GG in exchanges]
    assert trace.seconds == pytest.approx(sum(longest) + counts_seconds(machines.network))
    assert exclusive_s(own) <= trace.seconds * (1 + 1e-9)


@pytest.mark.full
@given(single)
def test_two_models_that_all_wait_for_are_never_faster_than_the_formulas(case):
    """Table 2, in which transfers wait, is at most the simulated time."""
    machines, a, b = case
    plan = make_plan(machines, [a, b])
    both = [terms(plan, p, model) for model, p in enumerate((a, b))]
    assert formula(2).seconds(both) <= simulate_plan(plan, [a, b], "global").seconds * (1 + 1e-9)


def test_orders_made_from_each_batch():
    """Two batches, each of which two slots of 4 s can carry: orders are asked for with the bytes of every batch, both ways."""
    tokens = np.zeros((2, 1, 4, 4), dtype=int)
    for window, shift in ((0, 1), (0, 2), (1, 2), (1, 3)):
        tokens[window, 0, np.arange(4), (np.arange(4) + shift) % 4] = 4
    p, machines, seen = profile(tokens), cluster(1.0, 1.0, 1.0, 1.0), []
    plan = make_plan(machines, [p], KEEP)
    made = batch_order(machines.network, "openshop", 0)

    def watched(bytes_SGG, hierarchy):
        seen.append(bytes_SGG[0].copy())
        return made(bytes_SGG, hierarchy)

    assert simulate(compile_plan(plan), machines, [p], ordered=watched).seconds == pytest.approx(2 * 16)
    there = [exchange.sum() for exchange in seen]
    assert there == [32, 32, 32, 32]
    assert np.array_equal(seen[1], seen[0].T)
    assert simulate_plan(plan, [p]).seconds >= 2 * 16


def test_incast_is_paid_where_senders_meet():
    """Two senders of 4 bytes into one port of 1 that a second sender costs half: 16 s each way there, one at a time 8."""
    p = profile([[[[0, 0, 4], [0, 0, 4], [0, 0, 0]]]], combine_bytes=0)
    machines = replace(THREE, incast=0.5)
    seconds = [
        simulate_plan(make_plan(machines, [p], replace(KEEP, order=o)), [p]).seconds for o in ("all-at-once", "openshop")
    ]
    assert seconds == pytest.approx([16, 8])


@pytest.mark.full
@given(profiles(2), st.integers(2, 3), st.sampled_from(TIME_SLICES))
def test_micro_batches_take_as_long_as_as_many_models_with_parts_of_the_traffic(p, parts, time_slice):
    machines, options = cluster(2.0, 1.0), PlanOptions(time_slice=time_slice, micro_batches=parts)
    plan = make_plan(machines, [p], options)
    trace, cut = simulate_plan(plan, [p]), micro_batches(p, parts)
    assert trace.names_M == (tuple(f"{p.model}/{part}" for part in range(len(cut))) if len(cut) > 1 else (p.model,))
    if len(cut) == parts:
        models = replace(plan, models=plan.models * parts, options=replace(plan.options, micro_batches=1))
        assert trace.seconds == simulate(compile_plan(models), machines, cut).seconds == simulate_plan(plan, cut).seconds
    program = compile_plan(plan)
    assert program.plan_model_M == (0,) * parts
    assert len({id(placement) for placement in program.placements_M}) == 1


def test_a_batch_models_exchange_is_cut_beside_an_interactive_model_by_hand():
    """Two ranks; a is interactive: gate 1, dispatch 1, experts 2, combine 1. b sends 8 each way, in slices of 2: four pieces.

    a: gate 0..1, dispatch 1..2, experts 2..4, combine 4..6, as a slice of b that begins at 4 has half of the port. b waits for the
    GPU until 1 and for a's dispatch until 2: slices 2..4, 4..7, 7..9 and 9..11, and its combine 11..19.
    On NCCL a is alone on the port: dispatch 1..2, experts 2..4 and combine 4..5. b joins at 0, behind the two slices of a that
    other ranks may have had: when a has ended, at 5. Its dispatch is 5..13, its combine 13..21.
    """
    a = profile([[[[0, 1], [1, 0]]]], gate=1, expert=2, name="a")
    b = profile([[[[0, 8], [8, 0]]]], name="b")
    options = replace(KEEP, priorities=("interactive", "batch"), preemption_s=2.0 / SLICE_INTERVALS)
    plan = make_plan(cluster(1.0, 1.0), [a, b], options)
    trace = simulate_plan(plan, [a, b])
    assert [end for rank, _, end in rows(trace, "combine", 0) if rank == 0] == pytest.approx([6, 6])
    of_b = sorted({(start, end) for rank, start, end in rows(trace, "dispatch", 1) if rank == 0})
    assert np.ravel(of_b) == pytest.approx([2, 4, 4, 7, 7, 9, 9, 11])
    assert trace.seconds == pytest.approx(19)
    trace = simulate_plan(plan, [a, b], staged=True)
    assert [end for rank, _, end in rows(trace, "combine", 0) if rank == 0] == pytest.approx([5, 5])
    of_b = [(start, end) for rank, start, end in rows(trace, "dispatch", 1) if rank == 0]
    assert sorted({end - start for start, end in of_b}) == pytest.approx([2.0])
    assert trace.seconds == pytest.approx(21)


@settings(max_examples=15)
@given(st.lists(profiles(3), min_size=2, max_size=3), st.data())
def test_models_of_all_policies_end_and_send_all_their_tokens(found, data):
    found = [replace(each, model=str(number)) for number, each in enumerate(found)]
    plan = make_plan(cluster(1.0, 1.0, 1.0), found, KEEP)
    plain = simulate_plan(plan, found)
    options = replace(
        plan.options,
        time_slice=data.draw(st.sampled_from(TIME_SLICES[:2])),
        priorities=tuple(data.draw(st.sampled_from(PRIORITIES)) for _ in found),
        preemption_s=max(1e-6, (plain.seconds or 1.0) / data.draw(st.sampled_from([3, 20]))),
    )
    staged = data.draw(st.booleans())
    trace = simulate_plan(replace(plan, options=options), found, data.draw(st.sampled_from(BARRIERS)), staged=staged)
    for model in range(len(found)):
        of_model, before = trace.model_X == model, plain.model_X == model
        assert trace.bytes_X[of_model].sum() == plain.bytes_X[before].sum()


def test_a_model_has_the_port_for_a_whole_forward_pass():
    """Time slices by step: all that one model sends is over before the other begins to compute; only the sum may wait."""
    window = [[[0, 4], [4, 0]]] * 2
    a, b = (profile([window] * 2, gate=1, expert=8, name=n) for n in "ab")
    plan = make_plan(cluster(1.0, 1.0), [a, b], replace(KEEP, time_slice="step"))
    trace = simulate_plan(plan, [a, b])
    single = make_plan(cluster(1.0, 1.0), [a], KEEP)
    assert trace.seconds == pytest.approx(2 * simulate_plan(single, [a]).seconds)
    first_X = trace.step_X == 0
    sent_s = trace.end_s_X[first_X & (trace.model_X == 0) & (trace.peer_X >= 0)].max()
    assert trace.start_s_X[first_X & (trace.model_X == 1)].min() == pytest.approx(sent_s)
