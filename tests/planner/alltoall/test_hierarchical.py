"""Rows of a hierarchical all-to-all, counted token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.errors import BadInput
from aurora.planner.alltoall.hierarchical import hierarchical_rows, step_rows
from aurora.types import Hierarchy


@st.composite
def token_tables(draw):
    """(rank_UK, source_U, hierarchy) of few ranks, on servers of any sizes."""
    members = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ranks, tokens, top_k = sum(members), draw(st.integers(0, 30)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    server_G = rng.permutation(np.repeat(np.arange(len(members)), members))
    hierarchy = Hierarchy(server_G, draw(st.integers(1, 5)))
    return rng.integers(0, ranks, (tokens, top_k)), rng.integers(0, ranks, tokens), hierarchy


def by_hand(rank_UK, source_U, hierarchy):
    """(steps, G, G) rows, by sending each token on its own."""
    steps_SGG = np.zeros((hierarchy.steps, hierarchy.ranks, hierarchy.ranks), dtype=np.int64)
    server_G = hierarchy.server_G.tolist()
    for rank in range(hierarchy.ranks):
        for server in range(hierarchy.servers):
            needed = [{int(to) for to in token if server_G[to] == server} for token in rank_UK[source_U == rank]]
            needed = [each for each in needed if each]
            gateway = rank
            if server_G[rank] != server:
                peers, own = ([g for g, s in enumerate(server_G) if s == n] for n in (server, server_G[rank]))
                gateway = peers[own.index(rank) % len(peers)]
            for number, each in enumerate(needed):
                chunk = next(c for c in range(hierarchy.chunks) if number < len(needed) * (c + 1) // hierarchy.chunks)
                steps_SGG[chunk, rank, gateway] += rank != gateway
                for to in each - {gateway}:
                    steps_SGG[chunk + (rank != gateway), gateway, to] += 1
    return steps_SGG


@given(token_tables())
def test_every_step_carries_the_rows_that_its_tokens_need(tokens):
    rank_UK, source_U, hierarchy = tokens
    found = step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy)
    np.testing.assert_array_equal(found, by_hand(rank_UK, source_U, hierarchy))


def test_a_token_goes_once_to_a_server():
    hierarchy = Hierarchy(np.array([0, 0, 1, 1]), 1)
    steps_SGG = step_rows(hierarchical_rows(np.array([[2, 3, 1]]), np.array([0]), hierarchy), hierarchy)
    assert np.argwhere(steps_SGG).tolist() == [[0, 0, 1], [0, 0, 2], [1, 2, 3]]


def test_a_hierarchy_has_a_rank_on_each_server_and_a_chunk():
    with pytest.raises(BadInput, match="expected a rank on each of 2 servers, found none on server 0"):
        Hierarchy(np.array([1, 1]))
    with pytest.raises(BadInput, match="expected servers from 0 to 2, found 1000000000000"):
        Hierarchy(np.array([0, 10**12, 1]))
    with pytest.raises(BadInput, match="expected from one to 1024 chunks, found 0"):
        Hierarchy(np.array([0, 0]), 0)


def test_ranks_that_are_left_keep_their_servers():
    hierarchy = Hierarchy(np.array([2, 0, 1, 2]), 3)
    assert hierarchy.among(np.array([True, False, True, True])) == Hierarchy(np.array([1, 0, 1]), 3)
