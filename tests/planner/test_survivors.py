"""What those who are left hold and do, and how they come by it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.hierarchical_order import hierarchical_order
from aurora.algorithms.compile import compile_plan
from aurora.algorithms.recovery import program_among, restored
from aurora.algorithms.workload.serving_gpus import server_split
from aurora.planner.plan import make_plan
from aurora.runtime.weight_messages import expert_transfers, transfer_bytes
from aurora.types import Compute, Exchange, Hierarchy, Network, Placement, PlanOptions, Program
from tests.conftest import cluster
from tests.planner.test_plan import profile


@st.composite
def programs(draw):
    ranks, experts, layers = draw(st.integers(2, 5)), draw(st.integers(2, 6)), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    slots, split = [], []
    for _ in range(layers):
        held_EG = rng.random((experts, ranks)) < 0.3
        held_EG[np.arange(experts), rng.integers(0, ranks, experts)] = True
        share_EG = held_EG * rng.integers(0, 3, held_EG.shape).astype(float)
        none = share_EG.sum(axis=1) == 0
        share_EG[none] = held_EG[none]
        share_EG /= share_EG.sum(axis=1, keepdims=True)
        slots.append(tuple(tuple(np.flatnonzero(held_EG[:, g]).tolist()) for g in range(ranks)))
        split.append(tuple(tuple(share_EG[list(held), g].tolist()) for g, held in enumerate(slots[-1])))
    placement = Placement(tuple(slots), tuple(split))
    plan = make_plan(cluster(*[1e6] * ranks), [profile(np.ones((1, 1, ranks, ranks), dtype=np.int64))], PlanOptions())
    ops = compile_plan(plan).ops_ML[0][0]
    alive = sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
    return Program(ranks, ("m",), (placement,), (tuple(ops for _ in range(layers)),), (False,)), alive, rng


@given(programs())
def test_who_is_left_keeps_what_it_has_come_to_hold(drawn):
    """Whatever that is; experts that nobody holds come on top."""
    program, alive, rng = drawn
    (planned,), layers = program.placements_M, len(program.placements_M[0].slots_LG)
    held_R = [(tuple(tuple(np.flatnonzero(rng.random(planned.experts) < 0.4).tolist()) for _ in range(layers)),) for _ in alive]
    loads = [np.ones((layers, planned.experts))]
    (left,) = program_among(program, alive, loads, held_R, moved=True).placements_M
    for layer in range(layers):
        missing = set(range(planned.experts))
        for rank, held_ML in enumerate(held_R):
            assert set(held_ML[0][layer]) <= set(left.slots_LG[layer][rank])
            missing -= set(held_ML[0][layer])
        added = [e for rank, held_ML in enumerate(held_R) for e in set(left.slots_LG[layer][rank]) - set(held_ML[0][layer])]
        assert sorted(added) == sorted(missing)


@given(programs())
def test_all_is_held_and_nobody_gives_up_what_was_planned(drawn):
    program, alive, rng = drawn
    (planned,), layers = program.placements_M, len(program.placements_M[0].slots_LG)
    load_LE = rng.integers(0, 9, (layers, planned.experts)).astype(float)
    held_R = [(tuple(planned.slots_LG[layer][gpu] for layer in range(layers)),) for gpu in alive]
    left = program_among(program, alive, [load_LE], held_R)
    (placement,) = left.placements_M
    assert left.ranks == placement.gpus == len(alive)
    for layer in range(layers):
        for rank, gpu in enumerate(alive):
            assert set(planned.slots_LG[layer][gpu]) <= set(placement.slots_LG[layer][rank])
        split_ER = placement.split_EG(layer)
        assert np.allclose(split_ER.sum(axis=1), 1)
        before_ER = planned.split_EG(layer)[:, alive]
        kept = before_ER.sum(axis=1) > 0
        assert np.allclose(split_ER[kept], before_ER[kept] / before_ER[kept].sum(axis=1, keepdims=True))
    for op, before in zip(left.ops_ML[0][0], program.ops_ML[0][0], strict=True):
        if isinstance(op, Exchange):
            pairs = [(alive.index(a), alive.index(b)) for a, b in before.order.pairs_X2.tolist() if {a, b} <= set(alive)]
            assert op.order.pairs_X2.tolist() == [list(pair) for pair in pairs]
        elif isinstance(op, Compute):
            assert op == before
    assert program_among(program, alive, [load_LE], held_R, moved=True) == left
    found = expert_transfers(left.placements_M, held_R, [100])
    for layer in range(layers):
        for rank in range(len(alive)):
            came = {move.expert for move in found if (move.layer, move.to) == (layer, rank)}
            assert came | set(held_R[rank][0][layer]) == set(placement.slots_LG[layer][rank])
    assert all(move.source is None or move.expert in held_R[move.source][0][move.layer] for move in found)
    assert all(move.source is not None or all(move.expert not in held[0][move.layer] for held in held_R) for move in found)
    bytes_RR = transfer_bytes(found, [100], len(alive))
    assert bytes_RR.sum() == 100 * sum(move.source is not None for move in found)
    assert not bytes_RR.diagonal().any()


@given(programs())
def test_who_comes_back_gets_back_what_was_planned(drawn):
    program, _, _ = drawn
    (planned,), layers = program.placements_M, len(program.placements_M[0].slots_LG)
    everything = (tuple(tuple(range(planned.experts)) for _ in range(layers)),)
    again = program_among(program, range(program.ranks), [np.ones((layers, planned.experts))], [everything] * program.ranks)
    assert again.placements_M[0].slots_LG == planned.slots_LG
    assert not expert_transfers(again.placements_M, [everything] * program.ranks, [1])


def test_the_heaviest_orphan_goes_where_least_load_is():
    planned = Placement((((0, 1), (2,), (3,)),))
    program = Program(3, ("m",), (planned,), (((),),), (False,))
    left = program_among(program, [1, 2], [np.array([[5.0, 9.0, 1.0, 4.0]])], [((((2,)),),), ((((3,)),),)])
    assert left.placements_M[0].slots_LG == (((1, 2), (0, 3)),)


def test_restored_replicas_are_on_as_many_ranks_as_the_floor_says():
    plan = make_plan(
        cluster(*[1e6] * 5), [profile(np.arange(1, 41).reshape(1, 1, 5, 8))], PlanOptions(min_replicas=2, slots_per_gpu=6)
    )
    program, alive = compile_plan(plan), [0, 2, 4]
    load_LE = np.arange(1.0, 9.0)[None]
    held_R = [((program.placements_M[0].slots_LG[0][gpu],),) for gpu in alive]
    left = program_among(program, alive, [load_LE], held_R)
    again = restored(program, plan.cluster, alive, load_LE, left.placements_M[0].slots_LG, 2)
    assert (again.placements_M[0].holds_EG(0).sum(axis=1) >= 2).all()
    assert [op.order.pairs_X2.max() for op in again.ops_ML[0][0] if isinstance(op, Exchange)] == [2, 2]


def test_survivors_of_servers_have_an_order_in_tiers_for_their_own_gateways():
    hierarchy = Hierarchy(np.array([0, 0, 1, 1, 2, 2]))
    even_GG = np.ones((6, 6), dtype=np.int64) - np.eye(6, dtype=np.int64)
    order = hierarchical_order(even_GG, hierarchy, Network.equal(6), rng=np.random.default_rng(0))
    ops = Exchange("dispatch", order, hierarchy=hierarchy), Exchange("combine", order.reversed, hierarchy=hierarchy)
    planned = Placement((tuple((expert,) for expert in range(6)),))
    program = Program(6, ("m",), (planned,), ((ops,),), (True,))
    alive = [0, 1, 2, 4, 5]
    left = program_among(program, alive, [np.ones((1, 6))], [(((gpu,),),) for gpu in alive])
    dispatch, combine = left.ops_ML[0][0]
    assert dispatch.hierarchy == combine.hierarchy == Hierarchy(np.array([0, 0, 1, 2, 2]))
    assert {tuple(pair) for pair in dispatch.order.pairs_X2.tolist()} == {(a, b) for a in range(5) for b in range(5) if a != b}
    server_G, gateway_GN = dispatch.hierarchy.server_G, dispatch.hierarchy.gateway_GN
    rails = [
        tier
        for (src, dst), tier in zip(dispatch.order.pairs_X2.tolist(), dispatch.order.tier_X.tolist(), strict=True)
        if server_G[src] != server_G[dst] and gateway_GN[src, server_G[dst]] == dst
    ]
    assert len(set(rails)) == 1
    assert combine.order == dispatch.order.reversed


def test_replicas_on_servers_that_are_left_serve_their_own_ranks():
    """Three servers of two ranks; of experts 0 and 1, each on two servers, one replica is lost, of expert 2 both."""
    hierarchy = Hierarchy(np.array([0, 0, 1, 1, 2, 2]))
    even_GG = np.ones((6, 6), dtype=np.int64) - np.eye(6, dtype=np.int64)
    order = hierarchical_order(even_GG, hierarchy, Network.equal(6), rng=np.random.default_rng(0))
    planned = Placement.evenly((((0, 3), (4,), (1, 2), (2, 5), (0,), (1,)),))
    program = Program(6, ("m",), (planned,), (((Exchange("dispatch", order, hierarchy=hierarchy),),),), (True,))
    alive = [0, 1, 4, 5]
    held_R = [((planned.slots_LG[0][gpu],),) for gpu in alive]
    left = program_among(program, alive, [np.ones((1, 6))], held_R)
    server_G = left.ops_ML[0][0][0].hierarchy.server_G
    assert server_G.tolist() == [0, 0, 1, 1]
    serving_NE = server_split(left.placements_M[0].split_EG(0), server_G).argmax(axis=2)
    assert serving_NE[:, [0, 1, 3, 4]].tolist() == [[0, 3, 0, 1], [2, 3, 0, 1]]
    assert left.placements_M[0].holds_EG(0).any(axis=1).all()
