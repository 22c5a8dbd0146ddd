"""Hierarchical all-to-alls: counts the rows that travel from rank to rank in each step, and chooses the ranks that carry them.

Levelling: ranks of a server hand rows to each other, so that its NICs carry equally many.
"""

import math
from typing import NamedTuple

import numpy as np

from aurora.algorithms.alltoall import hierarchical_core as core
from aurora.types import Hierarchy, Network
from aurora.types.arrays import IntArray
from aurora.types.schedule import MOST_ROWS


def carriers(sent_GN: IntArray, hierarchy: Hierarchy) -> IntArray:
    """Returns, for each piece of the rows from each rank to each server, the rank whose NIC carries it.

    A rank carries its own rows, unless all-to-alls are levelled and it has at least `level_from` rows more for a server than
    the ranks of its own server have on average. Then it hands pieces, one at a time, to the least-loaded rank of its server,
    while that lowers the largest load.

    Args:
        sent_GN: (G, N) int64, tokens of each rank that need experts of each server.
        hierarchy: the servers, and how chunks are cut into pieces.

    Returns:
        (G, N, C) int64, the carrier of each of the C pieces of `Hierarchy`.

    Source: FAST (arXiv:2505.09764), which levels NICs before rows leave a server.
    """
    carrier_GNC = np.empty((hierarchy.ranks, hierarchy.servers, hierarchy.pieces), dtype=np.int64)
    carrier_GNC[:] = np.arange(hierarchy.ranks)[:, None, None]
    if hierarchy.parts > 1:
        assert hierarchy.level_from is not None
        sent_GN = np.ascontiguousarray(sent_GN)
        core.hand_over(carrier_GNC, sent_GN, hierarchy.member_G, hierarchy.first_N, hierarchy.chunks, hierarchy.level_from)
    return carrier_GNC


def level_from(chunks: int, row_bytes: int, network: Network) -> int | None:
    """Returns the number of excess rows from which levelling saves more than its extra message per chunk costs.

    Returns None if ports inside servers are no faster than NICs: levelling then saves nothing. See `Hierarchy.level_from`.

    Args:
        chunks: number of chunks of an all-to-all.
        row_bytes: size of a row in bytes.
        network: ports, start-ups and servers.
    """
    assert network.servers is not None
    row_s = row_bytes / network.servers.nic_Bps - row_bytes / float(network.out_Bps_G.min())
    return math.ceil(np.clip(chunks * float(network.startup_s_G.max()) / row_s, 1, MOST_ROWS)) if row_s > 0 else None


class HierarchicalRows(NamedTuple):
    """Rows of a hierarchical dispatch by source, before they are assigned to steps.

    Attributes:
        sent_GN: (G, N) int64, tokens of each rank that need experts of each server.
        needed_GCG: (G, C, G) int64, number of tokens of each rank, in each of its pieces, that need experts of each rank.
    """

    sent_GN: IntArray
    needed_GCG: IntArray


def hierarchical_rows(rank_UK: IntArray, source_U: IntArray, hierarchy: Hierarchy) -> HierarchicalRows:
    """Counts the rows of a hierarchical dispatch.

    Args:
        rank_UK: (U, K) int64, the rank that computes each of the K chosen experts of each token.
        source_U: (U,) int64, the rank that each token starts on. A rank's tokens are cut into pieces in this order.
        hierarchy: the servers, and how rows are cut.
    """
    ranks, servers, pieces, top_k = hierarchy.ranks, hierarchy.servers, hierarchy.pieces, rank_UK.shape[1]
    at_UK = np.sort(hierarchy.server_G[rank_UK] * ranks + rank_UK, axis=1)  # by server, then by rank
    server_UK, rank_UK = np.divmod(at_UK, ranks)
    new_rank_UK, new_server_UK = (np.diff(each_UK, axis=1, prepend=-1) != 0 for each_UK in (at_UK, server_UK))
    visit_X = new_server_UK.ravel().cumsum() - 1  # which visit of a token to a server each choice belongs to
    pair_V = np.repeat(source_U, top_k)[new_server_UK.ravel()] * servers + server_UK[new_server_UK]
    sent_A = np.bincount(pair_V, minlength=ranks * servers)
    by_pair, number_V = np.argsort(pair_V, kind="stable"), np.empty_like(pair_V)
    number_V[by_pair] = np.arange(len(pair_V)) - np.repeat(sent_A.cumsum() - sent_A, sent_A)
    piece_V = ((number_V + 1) * pieces - 1) // sent_A[pair_V]  # the last piece that starts at this number or before
    needed_X = np.repeat(source_U, top_k) * pieces + piece_V[visit_X]
    needed_X = (needed_X * ranks + rank_UK.ravel())[new_rank_UK.ravel()]
    needed_GCG = np.bincount(needed_X, minlength=ranks * pieces * ranks).reshape(ranks, pieces, ranks)
    return HierarchicalRows(sent_A.reshape(ranks, servers), needed_GCG)


class HopRows(NamedTuple):
    """Rows of a hierarchical dispatch by step and hop.

    Attributes:
        carrier_GNC: (G, N, C) int64, as returned by `carriers`.
        carried_SGG: (S, G, G) int64, rows of the first hop: from each rank to gateways on other servers, and to carriers on its
            own server.
        forwarded_SGG: (S, G, G) int64, rows of the second hop: from gateways, and from sources on the same server, to the ranks
            that need them. The diagonal counts rows that stay on their rank.
    """

    carrier_GNC: IntArray
    carried_SGG: IntArray
    forwarded_SGG: IntArray

    @property
    def total_SGG(self) -> IntArray:
        """(S, G, G) int64, rows of both hops from rank to rank; zero on the diagonal."""
        steps_SGG, every_G = self.carried_SGG + self.forwarded_SGG, np.arange(self.carried_SGG.shape[1])
        steps_SGG[:, every_G, every_G] = 0
        return np.asarray(steps_SGG)


def hop_rows(rows: HierarchicalRows, hierarchy: Hierarchy) -> HopRows:
    """Returns the rows that travel in each step of a dispatch, separately for each hop; arguments as in `step_rows`."""
    carrier_GNC = carriers(rows.sent_GN, hierarchy)
    carried_SGG, forwarded_SGG = np.zeros((2, hierarchy.steps, hierarchy.ranks, hierarchy.ranks), dtype=np.int64)
    sent_GN, needed_GCG = np.ascontiguousarray(rows.sent_GN), np.ascontiguousarray(rows.needed_GCG)
    servers = hierarchy.server_G, hierarchy.member_G, hierarchy.first_N, hierarchy.gateway_GN
    core.add_hops(carried_SGG, forwarded_SGG, sent_GN, needed_GCG, carrier_GNC, *servers, hierarchy.parts)
    return HopRows(carrier_GNC, carried_SGG, forwarded_SGG)


def step_rows(rows: HierarchicalRows, hierarchy: Hierarchy) -> IntArray:
    """Returns the number of rows sent from rank to rank in each step of a dispatch, without rows that stay on their rank.

    A combine has the same steps in reverse, each matrix transposed.

    Args:
        rows: the rows of all ranks, as `hierarchical_rows` counts them.
        hierarchy: the servers, and how rows are cut.

    Returns:
        (steps, G, G) int64, rows from rank (row) to rank (column) in each step.
    """
    return hop_rows(rows, hierarchy).total_SGG
