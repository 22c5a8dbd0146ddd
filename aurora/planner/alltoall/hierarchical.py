"""Rows of a hierarchical all-to-all: how many travel between which ranks in each step, from the experts of each token."""

from typing import NamedTuple

import numpy as np

from aurora.types import Hierarchy
from aurora.types.arrays import IntArray


class HierarchicalRows(NamedTuple):
    """What the ranks send in a hierarchical dispatch, before it is laid out in steps.

    Attributes:
        sent_GN: (G, N) int64, tokens of each rank that need experts of each server.
        needed_GCG: (G, C, G) int64, how many of these tokens of each rank, in each chunk, need experts of each rank.
    """

    sent_GN: IntArray
    needed_GCG: IntArray


def hierarchical_rows(rank_UK: IntArray, source_U: IntArray, hierarchy: Hierarchy) -> HierarchicalRows:
    """Counts the rows of a hierarchical dispatch.

    Args:
        rank_UK: (U, K) int64, the rank that computes each choice of each token.
        source_U: (U,) int64, the rank that each token starts on. A rank's tokens are cut into chunks in this order.
        hierarchy: the servers and the number of chunks.
    """
    ranks, servers, server_G = hierarchy.ranks, hierarchy.servers, hierarchy.server_G
    token_U = np.arange(len(rank_UK))[:, None]
    needs_UG = np.zeros((len(rank_UK), ranks), dtype=np.bool_)
    needs_UG[token_U, rank_UK] = True
    needs_UN = np.zeros((len(rank_UK), servers), dtype=np.bool_)
    needs_UN[token_U, server_G[rank_UK]] = True
    sent_GN = np.zeros((ranks, servers), dtype=np.int64)
    needed_GCG = np.zeros((ranks, hierarchy.chunks, ranks), dtype=np.int64)
    for rank in range(ranks):
        own_U = source_U == rank
        own_XG, own_XN = needs_UG[own_U], needs_UN[own_U]
        sent_GN[rank] = own_XN.sum(axis=0)
        for server, starts_C in enumerate(hierarchy.chunk_starts(sent_GN[rank]).tolist()):
            members = np.flatnonzero(server_G == server)
            rows_XG = own_XG[own_XN[:, server]][:, members]
            for chunk in range(hierarchy.chunks):
                needed_GCG[rank, chunk, members] = rows_XG[starts_C[chunk] : starts_C[chunk + 1]].sum(axis=0)
    return HierarchicalRows(sent_GN, needed_GCG)


def step_rows(rows: HierarchicalRows, hierarchy: Hierarchy) -> IntArray:
    """Returns the rows that travel in each step of a dispatch; what stays on its rank is not counted.

    A combine has the same steps backwards, each transposed.

    Args:
        rows: of all ranks, as `hierarchical_rows` counts them.
        hierarchy: the servers and the number of chunks.

    Returns:
        (steps, G, G) int64, from rank (row) to rank in each step.
    """
    server_G, gateway_GN = hierarchy.server_G, hierarchy.gateway_GN
    every_G = np.arange(hierarchy.ranks)
    between_GNC = np.diff(hierarchy.chunk_starts(rows.sent_GN), axis=-1)
    between_GNC[every_G, server_G] = 0
    apart_GG = server_G[:, None] != server_G[None, :]
    via_GG = gateway_GN[:, server_G]  # the rank from which each rank (column) gets what each rank (row) sends it
    steps_SGG = np.zeros((hierarchy.steps, hierarchy.ranks, hierarchy.ranks), dtype=np.int64)
    for chunk in range(hierarchy.chunks):
        np.add.at(steps_SGG[chunk], (every_G[:, None], gateway_GN), between_GNC[:, :, chunk])
        needed_GG = rows.needed_GCG[:, chunk]
        to_GG = np.broadcast_to(every_G, needed_GG.shape)
        np.add.at(steps_SGG[chunk], (via_GG, to_GG), np.where(apart_GG, 0, needed_GG))
        np.add.at(steps_SGG[chunk + 1], (via_GG, to_GG), np.where(apart_GG, needed_GG, 0))
    steps_SGG[:, every_G, every_G] = 0
    return steps_SGG
