"""Exact seconds over servers: equal to the best of all placements and servings, and never above a plan's."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from aurora.algorithms.placement.cost_model import layer_costs
from aurora.algorithms.placement.phase_times import exclusive_s
from aurora.algorithms.placement.placement_bounds import hierarchical_bound_s
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.planner.plan import make_plan
from aurora.types import PlanOptions, SyntheticOptions
from bench.server_program import TOLERANCE, exact_hierarchical_s
from tests.planner.scenarios.test_servers import two_servers
from tests.strategies import RATES, routed_profiles


def shared_s(costs, holds_GE, wanted_NE):
    """The seconds of the slowest GPU if each server's GPUs share what they hold of its tokens as well as they can."""
    server_G, (experts_s_GE,) = costs.nics.server_G, costs.expert_s_WGE
    gpu_X, expert_X = np.nonzero(holds_GE)
    most_GX = np.where(gpu_X == np.arange(len(holds_GE))[:, None], experts_s_GE[gpu_X, expert_X], 0.0)
    pairs = [(n, e) for n, e in np.ndindex(wanted_NE.shape) if wanted_NE[n, e] > 0]
    sums_PX = np.array([(server_G[gpu_X] == n) & (expert_X == e) for n, e in pairs], dtype=float)
    rows = np.column_stack([most_GX, -np.ones(len(holds_GE))])
    cost = np.append(np.zeros(len(gpu_X)), 1.0)
    wanted = [wanted_NE[pair] for pair in pairs]
    found = linprog(cost, rows, np.zeros(len(rows)), np.column_stack([sums_PX, np.zeros(len(pairs))]), wanted)
    return found.fun


def best_s(costs, profile, slots_G):
    """The fewest seconds of all ways to hold experts and to serve them, counted token by token."""
    nics, (own_GE,) = costs.nics, costs.own_WGE
    server_G, members_NG = nics.server_G, nics.members_NG
    (gpus, experts), servers = own_GE.shape, len(members_NG)
    experts_UK, source_U = profile.routing.layer(0)
    from_NE = members_NG @ own_GE
    share_NE = from_NE / np.maximum(from_NE.sum(axis=0), 1)
    least_s = np.inf
    for bits in product((0, 1), repeat=gpus * experts):
        holds_GE = np.array(bits).reshape(gpus, experts)
        if (holds_GE.sum(axis=1) > slots_G).any() or not holds_GE.any(axis=0).all():
            continue
        at_NE = members_NG @ holds_GE > 0
        open_X = [[n] if at_NE[n, e] else np.flatnonzero(at_NE[:, e]).tolist() for n, e in np.ndindex(at_NE.shape)]
        for serves in product(*open_X):
            serves_NE, rows_NN, taken_NE = np.array(serves).reshape(at_NE.shape), np.zeros((servers, servers)), 0 * share_NE
            for n, e in np.ndindex(at_NE.shape):
                taken_NE[serves_NE[n, e], e] += share_NE[n, e]
            for chosen, source in zip(experts_UK, server_G[source_U], strict=True):
                for other in set(serves_NE[source, chosen].tolist()) - {source}:
                    rows_NN[source, other] += 1
            moved_s = 0.0
            for size, there_NN in ((costs.dispatch_bytes, rows_NN), (costs.combine_bytes, rows_NN.T)):
                sides = (there_NN.sum(axis=1), costs.out_Bps), (there_NN.sum(axis=0), costs.in_Bps)
                moved_s += size * max(
                    (side_N / np.minimum(nics.server_Bps_N, members_NG @ Bps_G)).max() for side_N, Bps_G in sides
                )
            if moved_s < least_s:
                least_s = min(least_s, moved_s + shared_s(costs, holds_GE, taken_NE))
    return least_s + costs.gate_s_WG.max() + costs.aggregate_s_WG.max()


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_no_placement_beats_the_exact_seconds_and_one_reaches_them(data):
    members, experts = data.draw(st.sampled_from([((1, 1), 4), ((1, 1, 1), 3), ((2, 1), 3)]))
    cluster, _ = two_servers(members, nic_Bps=data.draw(st.sampled_from(RATES)), speeds=data.draw(st.sampled_from((1.0, 0.5))))
    traffic = routed_profiles(len(cluster), max_experts=experts, max_layers=1, max_tokens=6)
    profile = data.draw(traffic)
    slots_G = np.full(len(cluster), -(-profile.experts // len(cluster)) + data.draw(st.integers(0, 1)))
    costs = layer_costs(cluster, profile, 0, True)
    known = costs, profile.top_k, slots_G
    found_s, best = exact_hierarchical_s(*known, True), best_s(costs, profile, slots_G)
    assert best * (1 - 2 * TOLERANCE) <= found_s <= best * (1 + 1e-9)
    assert hierarchical_bound_s(*([each] for each in known), True) <= best * (1 + 1e-9)
    assert found_s <= exact_hierarchical_s(*known, False) * (1 + 2 * TOLERANCE)


def test_a_relaxed_bound_is_below_the_exact_seconds_and_these_below_a_plan():
    cluster, _ = two_servers((2, 2), 450e9, 450e9, 50e9)
    config = {
        "num_local_experts": 6,
        "num_hidden_layers": 2,
        "num_experts_per_tok": 2,
        "hidden_size": 512,
        "intermediate_size": 256,
    }
    profile = draw_profile("zipf:0.8", config, SyntheticOptions(4, 512, token_level=True))
    plan = make_plan(cluster, [profile], PlanOptions(all_to_all="hierarchical", slots_per_gpu=2, aim="own"))
    layers = [layer_costs(cluster, profile, layer, True) for layer in range(2)]
    known = [(costs, 2, np.full(4, 2)) for costs in layers]
    exact_s = sum(exact_hierarchical_s(*each, True) for each in known)
    relaxed_s = sum(hierarchical_bound_s(*([part] for part in each), True) for each in known)
    split_EG = [plan.models[0].placement.split_EG(layer) for layer in range(2)]
    taken_s = sum(
        exclusive_s(c.phase_times(split, plan.models[0].hierarchy)) for c, split in zip(layers, split_EG, strict=True)
    )
    assert relaxed_s < exact_s <= taken_s
    assert plan.bound_s == pytest.approx(relaxed_s)
