"""Hypothesis strategies for aurora's values."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aurora.types import Cluster, Curve, Gpu, Network, Profile, Servers, TokenRouting

RATES = (1.0, 2.0, 2.5, 4.0, 5.0, 10.0)


def traffics(min_ranks=1, max_ranks=6, most=50):
    """(G, G) int64 with a zero diagonal."""

    def clear(matrix):
        np.fill_diagonal(matrix, 0)
        return matrix

    sizes = st.integers(min_ranks, max_ranks)
    return sizes.flatmap(lambda n: arrays(np.int64, (n, n), elements=st.integers(0, most)).map(clear))


@st.composite
def traffics_on_ports(draw, min_ranks=1, max_ranks=6, equal=None, startups=(0.0,)):
    """(bytes_GG, network): a big switch whose messages all cost one of `startups`."""
    bytes_GG = draw(traffics(min_ranks, max_ranks))
    n, startup_s = len(bytes_GG), draw(st.sampled_from(startups))
    if draw(st.booleans()) if equal is None else equal:
        return bytes_GG, Network.equal(n, draw(st.sampled_from(RATES)), startup_s)
    rates = st.lists(st.sampled_from(RATES), min_size=n, max_size=n).map(np.array)
    return bytes_GG, Network(draw(rates), draw(rates), np.full(n, startup_s))


@st.composite
def clusters(draw, gpus=None, equal=None):
    n = draw(st.integers(1, 5)) if gpus is None else gpus
    shared = draw(st.booleans()) if equal is None else equal
    one = st.tuples(st.sampled_from(RATES), st.sampled_from((1.0, 0.5, 0.25)), st.sampled_from((0.0, 0.01)))
    rows = [draw(one)] * n if shared else [draw(one) for _ in range(n)]
    return Cluster("drawn", tuple(Gpu(f"g{i}", f"k{s}", 0, r, r, 10**9, s, a) for i, (r, s, a) in enumerate(rows)))


@st.composite
def profiles(draw, sources, max_experts=6, max_layers=3, name="drawn"):
    experts = draw(st.integers(1, max_experts))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, max_layers)), sources, experts)
    tokens = draw(arrays(np.int64, shape, elements=st.integers(0, 30)))
    tokens[~tokens.any(axis=(1, 2, 3))] = 1
    curve = st.tuples(st.floats(0, 0.5), st.floats(0, 0.2)).map(
        lambda c: Curve(np.array([1.0, 11.0]), np.array([c[0], c[0] + 10 * c[1]]))
    )
    curves = {"reference": {"gate": draw(curve), "expert": draw(curve), "aggregate": draw(curve)}}
    return Profile(name, "print", tokens, 1, draw(st.integers(1, 4)), draw(st.integers(1, 4)), 10, 10, curves)


@st.composite
def routed_profiles(draw, sources, max_experts=6, max_layers=2, max_tokens=12):
    """Profiles that hold their tokens' choices, the tokens in any order."""
    experts = draw(st.integers(1, max_experts))
    top_k, layers, windows = draw(st.integers(1, min(3, experts))), draw(st.integers(1, max_layers)), draw(st.integers(1, 2))
    tokens = draw(st.integers(1, max_tokens))
    row = st.permutations(range(experts)).map(lambda drawn: drawn[:top_k])
    chosen = draw(st.lists(st.lists(row, min_size=layers, max_size=layers), min_size=tokens, max_size=tokens))
    source = draw(st.lists(st.integers(0, sources - 1), min_size=tokens, max_size=tokens))
    window = draw(st.lists(st.integers(0, windows - 1), min_size=tokens, max_size=tokens))
    routing = TokenRouting(np.array(chosen), np.array(source), np.array(window))
    plain = draw(profiles(sources))
    counted = routing.tokens_TLSE(windows, sources, experts)
    return Profile("drawn", "print", counted, top_k, draw(st.integers(1, 99)), draw(st.integers(1, 99)), 10, 10, plain.curves,
                   routing=routing)  # fmt: skip


@st.composite
def servers(draw, gpus):
    """Up to three servers; GPUs have NICs of their own, share them in pairs, or share one in a server."""
    server_G = draw(st.lists(st.integers(0, 2), min_size=gpus, max_size=gpus))
    sharing = draw(st.sampled_from((1, 2, gpus)))
    nic_G = [server * gpus + server_G[:rank].count(server) // sharing for rank, server in enumerate(server_G)]
    return Servers.of(server_G, draw(st.sampled_from(RATES)), nic_G=nic_G)


@st.composite
def traffics_on_servers(draw, max_ranks=5, startups=(0.0,)):
    """(bytes_GG, network) with servers."""
    bytes_GG, network = draw(traffics_on_ports(1, max_ranks, startups=startups))
    return bytes_GG, replace(network, servers=draw(servers(len(bytes_GG))))
