"""Replicas over servers: rows counted token by token, slots, limits, and min replicas."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aurora.algorithms.placement.server_replicas import Homes, levelled, server_replicas
from aurora.algorithms.placement.server_search import ServerLimits
from aurora.algorithms.replicas.registry import REPLICAS
from aurora.algorithms.workload.serving_gpus import server_split, serving_servers


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
    limits = ServerLimits(
        server_G, np.full(servers * gpus, slots), gpu_s_GE, server_s_NE, np.inf, most_s, nothing, np.zeros(servers)
    )
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


def excess_s(layer, share_NE):
    """Seconds of all servers above the limit."""
    load_N, serving_NE = np.zeros(len(share_NE)), serving_servers(share_NE.T, layer.weight_N)
    for server, row_E in enumerate(serving_NE):
        for expert, at in enumerate(row_E):
            load_N[at] += layer.from_NE[server, expert] * layer.limits.server_s_NE[at, expert]
    return np.maximum(load_N - layer.limits.most_server_s, 0).sum()


@settings(max_examples=60, deadline=None)
@given(drawn_homes(), st.integers(0, 3))
def test_replicas_save_rows_within_slots_and_are_served_as_they_are_counted(layer, most):
    servers, server_G = len(layer.from_NE), layer.limits.server_G
    share_NE = server_replicas(layer, np.full(servers, most))
    held_N = np.bincount(layer.server_E, minlength=servers)
    assert ((share_NE > 0).sum(axis=1) - held_N <= np.minimum(most, layer.spare_N)).all()
    np.testing.assert_allclose(share_NE.sum(axis=0), 1)
    serving_NE, at_home = serving_servers(share_NE.T, layer.weight_N), np.tile(layer.server_E, (servers, 1))
    free_NE = server_replicas(layer._replace(limits=layer.limits._replace(most_server_s=np.inf)), np.full(servers, most))
    assert crossing(layer, serving_servers(free_NE.T, layer.weight_N)) <= crossing(layer, at_home)
    assert excess_s(layer, share_NE) <= excess_s(layer, free_NE) + 1e-9
    placement = levelled(layer, share_NE, REPLICAS["equal-split"], np.random.default_rng(0))
    split_EG = placement.split_EG(0)
    assert ((split_EG > 0).sum(axis=0) <= layer.limits.slots_G).all()
    found_NE = np.array([server_G[split_EG.argmax(axis=1)] for split_EG in server_split(split_EG, server_G)])
    assert found_NE.tolist() == serving_NE.tolist()


@given(drawn_homes(), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_every_expert_comes_to_as_many_servers_as_it_must(layer, least):
    servers, experts = len(layer.from_NE), len(layer.server_E)
    share_NE = server_replicas(layer, np.zeros(servers, dtype=np.int64), least)
    if share_NE is None:
        assert least > servers or layer.spare_N.sum() < (least - 1) * experts or layer.spare_N.min() < experts
        return
    assert ((share_NE > 0).sum(axis=0) == least).all()
    assert ((share_NE > 0).sum(axis=1) <= layer.spare_N + np.bincount(layer.server_E, minlength=servers)).all()


def four(most_server_s):
    """Four experts on two servers; server 0's tokens choose experts 1 and 3, which server 1 holds."""
    experts_UK = np.array([[0, 1], [1, 3], [1, 3]])
    nothing = np.zeros(2)
    limits = ServerLimits(
        np.arange(2), np.array([4, 4]), np.ones((2, 4)), np.ones((2, 4)), np.inf, most_server_s, nothing, nothing
    )
    return Homes(experts_UK, np.zeros(3, dtype=np.int64), limits, np.array([0, 1, 0, 1]), np.full((2, 4), 0.5))


def test_the_expert_that_a_servers_tokens_need_most_comes_first():
    assert server_replicas(four(np.inf), np.array([1, 0])).tolist() == [[1, 0.5, 1, 0], [0, 0.5, 0, 1]]
    assert server_replicas(four(np.inf), np.array([2, 2])).tolist() == [[1, 0.5, 1, 0.5], [0, 0.5, 0, 0.5]]


def test_what_takes_a_server_above_its_limit_is_given_up():
    """Each replica brings server 0 half a second more than its two."""
    assert server_replicas(four(2.4), np.array([2, 2])).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    assert server_replicas(four(2.6), np.array([2, 2])).tolist() == [[1, 0.5, 1, 0], [0, 0.5, 0, 1]]


def test_servers_without_an_expert_relieve_its_home():
    """Expert 0 is on servers 0 and 1, and serves three servers at home, one of which it may lose to server 1."""
    nothing = np.zeros(4)
    limits = ServerLimits(np.arange(4), np.full(4, 2), np.ones((4, 2)), np.ones((4, 2)), np.inf, 1.2, nothing, nothing)
    from_NE = np.array([[0.25, 0.0], [0.25, 0.0], [0.25, 1.0], [0.25, 0.0]])
    layer = Homes(np.array([[0]]), np.array([1]), limits, np.array([0, 0]), from_NE)
    share_NE = server_replicas(layer, np.array([0, 1, 0, 0]))
    assert share_NE.tolist() == [[0.25, 1], [0.75, 0], [0, 0], [0, 0]]
