"""Rows of a hierarchical all-to-all, counted token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aurora.algorithms.alltoall.hierarchical import carriers, hierarchical_rows, level_from, step_rows
from aurora.errors import BadInput
from aurora.types import Hierarchy, Network, Servers
from aurora.types.schedule import MOST_ROWS
from tests.algorithms.check.hierarchical_rows import rows_by_hand


@st.composite
def token_tables(draw):
    """(rank_UK, source_U, hierarchy) of few ranks, on servers of any sizes."""
    members = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ranks, tokens, top_k = sum(members), draw(st.integers(0, 30)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    server_G = rng.permutation(np.repeat(np.arange(len(members)), members))
    hierarchy = Hierarchy(server_G, draw(st.integers(1, 5)), draw(st.sampled_from((None, 1, 3))))
    source_U = np.minimum(rng.integers(0, ranks, tokens), draw(st.integers(0, ranks)))  # the last one has many or few
    return rng.integers(0, ranks, (tokens, top_k)), np.minimum(source_U, ranks - 1), hierarchy


def by_hand(rank_UK, source_U, hierarchy):
    """(steps, G, G) rows, by sending each token on its own, by the carriers."""
    return rows_by_hand(rank_UK, source_U, hierarchy, carriers_of(rank_UK, source_U, hierarchy))


def carriers_of(rank_UK, source_U, hierarchy):
    """The rank whose NIC carries each piece, as the planner claims."""
    return carriers(hierarchical_rows(rank_UK, source_U, hierarchy).sent_GN, hierarchy)


@given(token_tables())
def test_every_step_carries_the_rows_that_its_tokens_need(tokens):
    rank_UK, source_U, hierarchy = tokens
    found = step_rows(hierarchical_rows(rank_UK, source_U, hierarchy), hierarchy)
    np.testing.assert_array_equal(found, by_hand(rank_UK, source_U, hierarchy))
    carrier_GNC, server_G = carriers_of(rank_UK, source_U, hierarchy), hierarchy.server_G
    assert (server_G[carrier_GNC] == server_G[:, None, None]).all()
    sent_GN = hierarchical_rows(rank_UK, source_U, hierarchy).sent_GN
    for server in range(hierarchy.servers):  # levelling makes no NIC busier than the busiest, but by whole rows of pieces
        busiest_2N = [rows_GN[server_G == server].max(axis=0) for rows_GN in (carried_by(sent_GN, hierarchy), sent_GN)]
        assert (busiest_2N[0] <= busiest_2N[1] + hierarchy.pieces).all()


def test_a_token_goes_once_to_a_server():
    hierarchy = Hierarchy(np.array([0, 0, 1, 1]), 1)
    steps_SGG = step_rows(hierarchical_rows(np.array([[2, 3, 1]]), np.array([0]), hierarchy), hierarchy)
    assert np.argwhere(steps_SGG).tolist() == [[0, 0, 1], [0, 0, 2], [1, 2, 3]]


def test_a_rank_hands_rows_to_peers_in_the_step_before_they_leave():
    """Rank 0 has eight tokens for server 1, and rank 1 none: each of them carries half of every chunk."""
    hierarchy, rank_UK = Hierarchy(np.array([0, 0, 1, 1]), 2, 1), np.full((8, 1), 3)
    steps_SGG = step_rows(hierarchical_rows(rank_UK, np.zeros(8, dtype=np.int64), hierarchy), hierarchy)
    assert [(*at, int(steps_SGG[tuple(at)])) for at in np.argwhere(steps_SGG).tolist()] == [
        (0, 0, 1, 2), (0, 0, 2, 2),
        (1, 0, 1, 2), (1, 0, 2, 2), (1, 1, 3, 2), (1, 2, 3, 2),
        (2, 1, 3, 2), (2, 2, 3, 2),
    ]  # fmt: skip


def carried_by(sent_GN, hierarchy):
    """(G, N) rows that each rank's NIC carries to each server."""
    rows_GNC, carried_GN = np.diff(hierarchy.piece_starts(sent_GN)), np.zeros_like(sent_GN)
    np.add.at(carried_GN, (carriers(sent_GN, hierarchy), np.arange(hierarchy.servers)[:, None]), rows_GNC)
    return carried_GN


@pytest.mark.parametrize("chunks", [2, 4, 8])
@pytest.mark.parametrize(("nodes", "members"), [(2, 4), (4, 2), (3, 8)])
def test_nics_of_a_server_carry_nearly_the_same(nodes, members, chunks):
    """Some ranks have prompts and the others decode; a part is an eighth of a prompt's rows, or less."""
    hierarchy, rng = Hierarchy(np.arange(nodes * members) // members, chunks, 1), np.random.default_rng(chunks)
    sent_GN = np.where(rng.permutation(nodes * members) % 4 == 0, 512, 32)[:, None] + rng.integers(0, 9, (1, nodes))
    for server in range(nodes):
        own_G = hierarchy.server_G == server
        mean_N, most_N = sent_GN[own_G].mean(axis=0), carried_by(sent_GN, hierarchy)[own_G].max(axis=0)
        others_N = np.arange(nodes) != server
        assert (most_N <= mean_N + -(-sent_GN[own_G].max(axis=0) // hierarchy.pieces))[others_N].all()


def test_equal_ranks_and_few_rows_are_left_as_they_are():
    server_G = np.repeat(np.arange(3), 4)
    own_GNC = np.broadcast_to(np.arange(12)[:, None, None], (12, 3, 16))
    np.testing.assert_array_equal(carriers(np.full((12, 3), 100), Hierarchy(server_G, 4, 1)), own_GNC)
    few_GN = np.where(np.arange(12) % 4 == 0, 20, 0)[:, None].repeat(3, axis=1)  # fifteen more than the mean
    np.testing.assert_array_equal(carriers(few_GN, Hierarchy(server_G, 4, 16)), own_GNC)
    assert (carriers(few_GN, Hierarchy(server_G, 4, 15)) != own_GNC).any()


def test_levelling_begins_where_rows_save_start_ups():
    """A row takes a second by a NIC and half a second inside; a message starts in two seconds, in each of three chunks."""
    ports_Bps = [20.0] * 4
    servers = Servers.of([0, 0, 1, 1], 10.0)
    assert level_from(3, 10, Network(ports_Bps, ports_Bps, [2.0] * 4, servers)) == 12
    assert level_from(3, 10, Network(ports_Bps, ports_Bps, servers=servers)) == 1
    slow_Bps = [10.0] * 4
    assert level_from(3, 10, Network(slow_Bps, slow_Bps, servers=Servers.of([0, 0, 1, 1], 10.0))) is None


def test_a_hierarchy_has_a_rank_on_each_server_and_a_chunk():
    with pytest.raises(BadInput, match="expected a rank on each of 2 servers, found none on server 0"):
        Hierarchy(np.array([1, 1]))
    with pytest.raises(BadInput, match="expected servers from 0 to 2, found 1000000000000"):
        Hierarchy(np.array([0, 10**12, 1]))
    with pytest.raises(BadInput, match="expected from one to 1024 chunks, found 0"):
        Hierarchy(np.array([0, 0]), 0)
    for rows in (0, 10**30):
        with pytest.raises(BadInput, match=f"expected to level from one row to {MOST_ROWS} on, found {rows}"):
            Hierarchy(np.array([0, 0]), 1, rows)
