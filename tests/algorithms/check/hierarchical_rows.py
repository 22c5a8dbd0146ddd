"""Rows of hierarchical all-to-alls, token by token. Calls no maker."""

import numpy as np

from aurora.types import Hierarchy
from aurora.types.arrays import IntArray


def hierarchical_moves(rank_UK: IntArray, source_U: IntArray, hierarchy: Hierarchy, carrier_GNC: IntArray) -> IntArray:
    """Returns (X, 5) int64: step, source, destination, token and server of every row of a hierarchical dispatch.

    Args:
        rank_UK: (U, K) int64, the rank that computes each choice of each token.
        source_U: (U,) int64, the rank that each token starts on.
        hierarchy: the servers, gateways and pieces.
        carrier_GNC: (G, N, C) int64, the rank whose NIC carries each piece of the rows from each rank to each server.
    """
    server_G, gateway_GN = hierarchy.server_G, hierarchy.gateway_GN
    starts_GNC = hierarchy.piece_starts(_visits(rank_UK, source_U, server_G, hierarchy.servers))
    return np.asarray(_moves(rank_UK, source_U, server_G, gateway_GN, starts_GNC, carrier_GNC, hierarchy.parts))


def rows_by_hand(rank_UK: IntArray, source_U: IntArray, hierarchy: Hierarchy, carrier_GNC: IntArray) -> IntArray:
    """Returns (S, G, G) int64, how many of these rows go from each rank to each other in each step."""
    rows_SGG = np.zeros((hierarchy.steps, hierarchy.ranks, hierarchy.ranks), dtype=np.int64)
    np.add.at(rows_SGG, tuple(hierarchical_moves(rank_UK, source_U, hierarchy, carrier_GNC)[:, :3].T), 1)
    return rows_SGG


def _visits(rank_UK, source_U, server_G, servers):
    """(G, N) how many tokens of each rank need each server."""
    visits_GN = np.zeros((len(server_G), servers), np.int64)
    last_N = np.full(servers, -1)
    for token in range(len(rank_UK)):
        for rank in rank_UK[token]:
            if last_N[server_G[rank]] != token:
                last_N[server_G[rank]] = token
                visits_GN[source_U[token], server_G[rank]] += 1
    return visits_GN


def _moves(rank_UK, source_U, server_G, gateway_GN, starts_GNC, carrier_GNC, parts):
    """The rows of a dispatch: of each token to the carrier and the gateway of each server, and from there to each rank."""
    ranks, servers, pieces = len(server_G), gateway_GN.shape[1], starts_GNC.shape[2] - 1
    visits_GN = np.zeros((ranks, servers), np.int64)
    seen_G, seen_N = np.full(ranks, -1), np.full(servers, -1)
    step_N, gateway_N = np.zeros(servers, np.int64), np.zeros(servers, np.int64)  # when a visit's rows are forwarded, by whom
    moves_X5 = np.empty((3 * rank_UK.size, 5), np.int64)
    count = 0
    for token in range(len(rank_UK)):
        source = source_U[token]
        for rank in rank_UK[token]:
            if seen_G[rank] == token:
                continue
            seen_G[rank] = token
            server = server_G[rank]
            if seen_N[server] != token:
                seen_N[server] = token
                number = visits_GN[source, server]
                visits_GN[source, server] += 1
                step_N[server] = -1
                for piece in range(pieces):
                    if starts_GNC[source, server, piece] <= number < starts_GNC[source, server, piece + 1]:
                        step, at = piece // parts, source
                        if server != server_G[source] and carrier_GNC[source, server, piece] != source:
                            moves_X5[count] = step, source, carrier_GNC[source, server, piece], token, server
                            count, step, at = count + 1, step + 1, carrier_GNC[source, server, piece]
                        if gateway_GN[at, server] != at:
                            moves_X5[count] = step, at, gateway_GN[at, server], token, server
                            count, step, at = count + 1, step + 1, gateway_GN[at, server]
                        step_N[server], gateway_N[server] = step, at
            if step_N[server] >= 0 and rank != gateway_N[server]:
                moves_X5[count] = step_N[server], gateway_N[server], rank, token, server
                count += 1
    return moves_X5[:count]
