"""Hierarchical all-to-alls in the simulator: by hand, and against the planner's timing of their steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.compile import compile_plan
from aurora.algorithms.network.switch import timed_steps
from aurora.algorithms.workload.traffic import exchange_bytes, exchange_rows
from aurora.planner.plan import make_plan
from aurora.simulator.interpreter import simulate, simulate_plan
from aurora.types import TRACE_PHASES, Cluster, Curve, Gpu, Hierarchy, PlanOptions, Profile, Servers, TokenRouting
from tests.simulator.test_interpreter import rows

KEEP = PlanOptions("contiguous", "contiguous", order="all-at-once")
ROW = 48  # bytes of a deduplicated row of one byte, with the weights and experts of two choices


def routed(experts_UK, source_U, window_U=None, experts=None, layers=1):
    """A profile without compute whose tokens chose these experts in every layer; a row has ROW bytes each way."""
    nothing = {phase: Curve([1.0], [0.0]) for phase in ("gate", "expert", "aggregate")}
    chosen = np.repeat(np.array(experts_UK)[:, None], layers, axis=1)
    windows = np.zeros(len(chosen), dtype=np.int64) if window_U is None else np.array(window_U)
    routing = TokenRouting(chosen, np.array(source_U), windows)
    tokens = routing.tokens_TLSE(int(windows.max()) + 1, experts, experts)
    return Profile("m", "print", tokens, chosen.shape[2], 1, ROW, 1, 1, {"reference": nothing}, routing=routing)


def machines(server_G, nic_Bps, inside_Bps=480.0, startup_s=0.0, shared_nic=False):
    gpus = tuple(Gpu(f"g{i}", "gpu", node, inside_Bps, inside_Bps, 10**9, 1.0, startup_s) for i, node in enumerate(server_G))
    return Cluster("servers", gpus, Servers.of(server_G, nic_Bps, shared_nic))


def hierarchical(plan, chunks, level_from=None):
    """The plan with all-to-alls in two hops over the servers of its cluster."""
    hierarchy = Hierarchy(np.array(plan.cluster.servers.server_G), chunks, level_from)
    return replace(plan, models=tuple(replace(each, hierarchy=hierarchy) for each in plan.models))


def transfers(trace, phase, rank):
    """(peer, start, end, bytes) of what a rank sends in a phase, by start."""
    keep = (trace.phase_X == TRACE_PHASES.index(phase)) & trace.sent_X & (trace.rank_X == rank)
    columns = (trace.peer_X, trace.start_s_X, trace.end_s_X, trace.bytes_X)
    return sorted(zip(*(column[keep].tolist() for column in columns), strict=True), key=lambda row: row[1:])


def test_two_servers_by_hand():
    """Rank 0 has four tokens for ranks 2 and 3, which are on the other server. A NIC carries a row a second, a port ten.

    The dispatch sends two rows by the NIC in each of 0..2 and 2..4; rank 2 passes the first two on to rank 3 in 2..2.2, and
    the others in 4..4.2. The combine goes back from 4.2: rank 3's sums to rank 2 in 4.2..4.4, then two rows by the NIC in
    4.4..6.4, while rank 3's other sums come, and two in 6.4..8.4. Flat, eight rows go by rank 0's NIC each way.
    """
    p = routed([[2, 3]] * 4, [0] * 4, experts=4)
    flat = make_plan(machines([0, 0, 1, 1], ROW), [p], KEEP)
    trace = simulate_plan(hierarchical(flat, 2), [p])
    expected = {
        ("dispatch", 0): [(2, 0, 2, 2 * ROW), (2, 2, 4, 2 * ROW)],
        ("dispatch", 2): [(3, 2, 2.2, 2 * ROW), (3, 4, 4.2, 2 * ROW)],
        ("dispatch", 3): [],
        ("combine", 3): [(2, 4.2, 4.4, 2 * ROW), (2, 4.4, 4.6, 2 * ROW)],
        ("combine", 2): [(0, 4.4, 6.4, 2 * ROW), (0, 6.4, 8.4, 2 * ROW)],
        ("combine", 0): [],
    }
    for (phase, rank), moved in expected.items():
        assert [pytest.approx(row) for row in moved] == transfers(trace, phase, rank)
    assert trace.seconds == pytest.approx(8.4)
    deduplicated = replace(compile_plan(flat), deduplicated_M=(True,))
    assert simulate(deduplicated, flat.cluster, [p]).seconds == pytest.approx(16)


def test_a_server_with_one_nic_divides_it():
    """Ranks 0 and 1 each have two tokens for their gateways: one NIC carries the four rows in turn, two NICs side by side."""
    p = routed([[2, 0], [2, 0], [3, 1], [3, 1]], [0, 0, 1, 1], experts=4)
    seconds = []
    for shared in (False, True):
        plan = hierarchical(make_plan(machines([0, 0, 1, 1], ROW, shared_nic=shared), [p], KEEP), 1)
        seconds.append(simulate_plan(plan, [p]).seconds)
    assert seconds == pytest.approx([4, 8])


def test_the_port_is_held_over_all_steps():
    """The second model's dispatch begins on a rank when the first model's has ended there, not between two of its steps."""
    p = routed([[2, 3]] * 4, [0] * 4, experts=4)
    plan = make_plan(machines([0, 0, 1, 1], ROW), [p, p], PlanOptions("contiguous", "contiguous", "contiguous", "all-at-once"))
    trace = simulate_plan(hierarchical(plan, 2), [p, p])
    ends = [max(end for rank, _, end in rows(trace, "dispatch", 0) if rank == each) for each in (0, 2)]
    starts = [min(start for rank, start, _ in rows(trace, "dispatch", 1) if rank == each) for each in (0, 2)]
    assert ends == pytest.approx([4, 4.2])
    assert starts == pytest.approx([4.2, 4.2])


@st.composite
def cases(draw):
    """(cluster, profile, chunks): servers of any sizes, and tokens of two windows."""
    members = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks, tokens = sum(members), draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    server_G = rng.permutation(np.repeat(np.arange(len(members)), members)).tolist()
    top_k = draw(st.integers(1, min(3, ranks)))
    chosen = np.array([rng.permutation(ranks)[:top_k] for _ in range(tokens)])
    p = routed(chosen, rng.integers(0, ranks, tokens), np.arange(tokens) % 2, ranks, draw(st.integers(1, 2)))
    startup_s = draw(st.sampled_from((0.0, 0.3)))
    return (
        machines(server_G, draw(st.sampled_from((20.0, 48.0))), 480.0, startup_s, draw(st.booleans())),
        p,
        draw(st.integers(1, 4)),
    )


def test_levelled_servers_by_hand():
    """Rank 0 has eight tokens for ranks 2 and 3, its peer none; rates are those above.

    Rank 0 sends two rows by its NIC in 0..2, beside two that it hands to rank 1 at the nine rows a second that are left of its
    port. Rank 1 sends these to rank 3 by its own NIC until 2.22, and the second chunk's, which come from 2 on, until 4.22. Rank
    3 passes them on to rank 2 until 4.42. The combine takes as long; not levelled, each takes 8.4 s.
    """
    p = routed([[2, 3]] * 8, [0] * 8, experts=4)
    flat = make_plan(machines([0, 0, 1, 1], ROW), [p], KEEP)
    trace = simulate_plan(hierarchical(flat, 2, 1), [p])
    for rank, moved in {
        0: [(1, 0, 2 / 9), (2, 0, 2), (1, 2, 20 / 9), (2, 2, 4)],
        1: [(3, 2 / 9, 20 / 9), (3, 20 / 9, 38 / 9)],
    }.items():
        expected = [pytest.approx((*row, 2 * ROW)) for row in moved]
        assert transfers(trace, "dispatch", rank) == expected
    assert trace.seconds == pytest.approx(2 * (38 / 9 + 0.2))
    assert simulate_plan(hierarchical(flat, 2), [p]).seconds == pytest.approx(16.8)


@pytest.mark.full
@given(cases(), st.booleans(), st.sampled_from((None, 1)))
def test_a_simulated_exchange_is_the_planners_and_carries_all_bytes(case, staged, level_from):
    cluster, p, chunks = case
    p = replace(p, tokens_TLSE=p.tokens_TLSE.sum(axis=0, keepdims=True), routing=replace(
        p.routing, window_U=np.zeros(len(p.routing.window_U), dtype=np.int64)
    ))  # fmt: skip
    plan = hierarchical(make_plan(cluster, [p], KEEP), chunks, level_from)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "aurora.simulator.interpreter.counts_seconds", lambda network: 0.0
        )  # ties fall alike from the same instant on
        (model,), trace = plan.models, simulate_plan(plan, [p], staged=staged)
    rows_SGG = exchange_rows(p, 0, model.placement.split_EG(0), deduplicated=True, hierarchy=model.hierarchy)
    sizes = [exchange_bytes(rows_SGG, p, phase, deduplicated=True) for phase in ("dispatch", "combine")]
    keep = (trace.phase_X == TRACE_PHASES.index("dispatch")) & (trace.layer_X == 0)
    made = timed_steps(model.dispatch_L[0], sizes[0], cluster.network, staged)
    assert trace.end_s_X[keep].max(initial=0) == pytest.approx(made.makespan_s)
    for phase, bytes_SGG in zip(("dispatch", "combine"), sizes, strict=True):
        keep = (trace.phase_X == TRACE_PHASES.index(phase)) & (trace.layer_X == 0) & trace.sent_X
        found_GG = np.zeros((len(cluster),) * 2, dtype=np.int64)
        np.add.at(found_GG, (trace.rank_X[keep], trace.peer_X[keep]), trace.bytes_X[keep])
        np.testing.assert_array_equal(found_GG, bytes_SGG.sum(axis=0))
    assert sizes[0].sum() // p.row_bytes(True) == sizes[1].sum() // ROW


@pytest.mark.full
@given(cases())
def test_windows_are_counted_apart(case):
    cluster, p, chunks = case
    plan = hierarchical(make_plan(cluster, [p], KEEP), chunks)
    trace = simulate_plan(plan, [p])
    for step in range(p.windows):
        given = p, 0, plan.models[0].placement.split_EG(0)
        rows_SGG = exchange_rows(*given, deduplicated=True, hierarchy=plan.models[0].hierarchy, window=step)
        keep = (trace.phase_X == TRACE_PHASES.index("dispatch")) & (trace.layer_X == 0) & trace.sent_X
        assert trace.bytes_X[keep & (trace.step_X == step)].sum() == rows_SGG.sum() * p.row_bytes(True)


@pytest.mark.full
@given(cases(), st.integers(2, 4))
def test_micro_batches_carry_the_rows_of_whole_batches(case, parts):
    """Tokens are not cut, so that those which go once to a server still do."""
    cluster, p, chunks = case
    plan = hierarchical(make_plan(cluster, [p], KEEP), chunks)
    whole, cut = (simulate_plan(each, [p]) for each in (plan, plan.with_micro_batches(parts)))
    for phase in range(len(TRACE_PHASES)):
        assert cut.bytes_X[cut.phase_X == phase].sum() == whole.bytes_X[whole.phase_X == phase].sum()


def test_counts_alone_tell_the_seconds_where_they_tell_the_choices():
    p = routed([[2, 3]] * 4, [0] * 4, experts=4)
    plan = hierarchical(make_plan(machines([0, 0, 1, 1], ROW), [p], KEEP), 2)
    assert simulate_plan(plan, [replace(p, routing=None)]).seconds == pytest.approx(simulate_plan(plan, [p]).seconds)
