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
    ranks, servers, chunks, top_k = hierarchy.ranks, hierarchy.servers, hierarchy.chunks, rank_UK.shape[1]
    at_UK = np.sort(hierarchy.server_G[rank_UK] * ranks + rank_UK, axis=1)  # by server, then by rank
    server_UK, rank_UK = np.divmod(at_UK, ranks)
    new_rank_UK, new_server_UK = (np.diff(each_UK, axis=1, prepend=-1) != 0 for each_UK in (at_UK, server_UK))
    visit_X = new_server_UK.ravel().cumsum() - 1  # which visit of a token to a server each choice belongs to
    pair_V = np.repeat(source_U, top_k)[new_server_UK.ravel()] * servers + server_UK[new_server_UK]
    sent_P = np.bincount(pair_V, minlength=ranks * servers)
    by_pair, number_V = np.argsort(pair_V, kind="stable"), np.empty_like(pair_V)
    number_V[by_pair] = np.arange(len(pair_V)) - np.repeat(sent_P.cumsum() - sent_P, sent_P)
    chunk_V = ((number_V + 1) * chunks - 1) // sent_P[pair_V]  # the last chunk that starts at this number or before
    needed_X = np.repeat(source_U, top_k) * chunks + chunk_V[visit_X]
    needed_X = (needed_X * ranks + rank_UK.ravel())[new_rank_UK.ravel()]
    needed_GCG = np.bincount(needed_X, minlength=ranks * chunks * ranks).reshape(ranks, chunks, ranks)
    return HierarchicalRows(sent_P.reshape(ranks, servers), needed_GCG)


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
