"""Replicas over servers: rows counted token by token, slots, limits, and min replicas."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.planner.placement.server_replicas import Homes, levelled, server_replicas
from aurora.planner.placement.server_search import Limits
from aurora.planner.replication.registry import REPLICAS
from aurora.planner.workload.serving_gpus import server_split


def homes(servers, gpus, slots, experts, tokens, top_k, lenient, seed):
    """Experts dealt out to equal servers, tokens that choose some more often, and a limit that is some part of the mean."""
    rng = np.random.default_rng(seed)
    weight_E = rng.random(experts) + 0.1
    chosen_UK = np.array([rng.choice(experts, top_k, replace=False, p=weight_E / weight_E.sum()) for _ in range(tokens)])
    source_U, server_G = rng.integers(0, servers, tokens), np.repeat(np.arange(servers), gpus)
    from_NE = np.zeros((servers, experts))
    np.add.at(from_NE, (source_U[:, None], chosen_UK), 1)
    load_E = from_NE.sum(axis=0)
    from_NE = np.where(load_E > 0, from_NE / np.maximum(load_E, 1), 1 / servers)
    gpu_s_GE, server_s_NE = np.tile(load_E, (servers * gpus, 1)), np.tile(load_E / gpus, (servers, 1))
    most_s = lenient * load_E.sum() / (servers * gpus)
    nothing = np.zeros(servers * gpus)
    limits = Limits(server_G, np.full(servers * gpus, slots), gpu_s_GE, server_s_NE, np.inf, most_s, nothing, np.zeros(servers))
    return Homes(chosen_UK, source_U, limits, np.arange(experts) % servers, from_NE)


@st.composite
def drawn_homes(draw):
    servers, gpus, experts = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(2, 8))
    slots = -(-experts // (servers * gpus)) + draw(st.integers(1, 4))
    top_k = draw(st.integers(1, min(3, experts)))
    return homes(servers, gpus, slots, experts, 40, top_k, draw(st.sampled_from((0.5, 1.2, 9.0))), draw(st.integers(0, 2**32)))


def crossing(layer, serving_NE):
    """Rows between servers, token by token."""
    pairs = zip(layer.experts_UK, layer.server_U, strict=True)
    return sum(len({int(serving_NE[source, expert]) for expert in chosen} - {int(source)}) for chosen, source in pairs)


@settings(max_examples=60)
@given(drawn_homes(), st.integers(0, 3))
def test_replicas_save_rows_within_slots_and_are_served_as_they_are_counted(layer, most):
    servers, server_G = len(layer.from_NE), layer.limits.server_G
    holds_NE = server_replicas(layer, np.full(servers, most))
    assert (holds_NE.sum(axis=1) - np.bincount(layer.server_E, minlength=servers) <= np.minimum(most, layer.spare_N)).all()
    assert holds_NE[layer.server_E, np.arange(len(layer.server_E))].all()
    serving_NE = np.where(holds_NE, np.arange(servers)[:, None], layer.server_E)
    at_home = np.tile(layer.server_E, (servers, 1))
    assert crossing(layer, serving_NE) <= crossing(layer, at_home)
    placement = levelled(layer, holds_NE, REPLICAS["equal-split"].make, np.random.default_rng(0))
    split_EG = placement.split_EG(0)
    assert ((split_EG > 0).sum(axis=0) <= layer.limits.slots_G).all()
    found_NE = np.array([server_G[split_EG.argmax(axis=1)] for split_EG in server_split(split_EG, server_G)])
    assert found_NE.tolist() == serving_NE.tolist()
    load_N, home_s_N = np.zeros(servers), np.zeros(servers)
    for at_NE, seconds_N in ((serving_NE, load_N), (at_home, home_s_N)):
        np.add.at(seconds_N, at_NE, layer.from_NE * layer.limits.server_s_NE[0])
    assert load_N.max() <= max(layer.limits.most_server_s, home_s_N.max()) * (1 + 1e-9)


@given(drawn_homes(), st.integers(2, 3))
@settings(max_examples=60)
def test_every_expert_comes_to_as_many_servers_as_it_must(layer, least):
    servers = len(layer.from_NE)
    holds_NE = server_replicas(layer, np.zeros(servers, dtype=np.int64), least)
    if holds_NE is None:
        assert (
            least > servers
            or layer.spare_N.sum() < (least - 1) * len(layer.server_E)
            or layer.spare_N.min() < len(layer.server_E)
        )
        return
    assert (holds_NE.sum(axis=0) == least).all()
    assert (holds_NE.sum(axis=1) <= layer.spare_N + np.bincount(layer.server_E, minlength=servers)).all()


def test_the_expert_that_a_servers_tokens_need_alone_comes_first():
    """Server 0's tokens choose experts 1 and 3, which server 1 holds: both rows are saved by two replicas, none by one."""
    experts_UK = np.array([[0, 1], [1, 3], [1, 3]])
    limits = Limits(np.arange(2), np.array([4, 4]), np.ones((2, 4)), np.ones((2, 4)), np.inf, np.inf, np.zeros(2), np.zeros(2))
    layer = Homes(experts_UK, np.zeros(3, dtype=np.int64), limits, np.array([0, 1, 0, 1]), np.full((2, 4), 0.5))
    assert server_replicas(layer, np.array([1, 0])).tolist() == [[True, True, True, False], [False, True, False, True]]
    assert server_replicas(layer, np.array([2, 2])).tolist() == [[True, True, True, True], [False, True, False, True]]
