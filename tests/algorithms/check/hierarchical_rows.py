"""Hierarchical all-to-alls token by token: who must compute its choices, and the rows by which it travels. Calls no maker."""

import numpy as np

from aurora.errors import BrokenPlan
from aurora.types import Hierarchy
from aurora.types.arrays import FloatArray, IntArray

SLACK = 1e-9  # relative, for sums of float seconds


def check_serving(
    rank_UK: IntArray, experts_UK: IntArray, source_U: IntArray, split_EG: FloatArray, server_G: IntArray
) -> None:
    """Checks the ranks that compute each token's choices, for a hierarchical all-to-all.

    A choice is a (token, expert) pair. Every choice must be computed by a rank that holds its expert. All choices of an expert
    by tokens that start on one server must be computed on one server: the same one if it holds the expert. There, the choices
    of each source rank must be divided over the expert's replicas by their shares.

    Args:
        rank_UK: (U, K) int64, the rank that computes each choice.
        experts_UK: (U, K) int64, the experts of each token.
        source_U: (U,) int64, the rank that each token starts on.
        split_EG: (E, G) float64, the share of each expert's tokens that each rank takes.
        server_G: (G,) int64, the server of each rank.

    Raises:
        BrokenPlan: if any of this fails.
    """
    experts, ranks = split_EG.shape
    source_X, expert_X, rank_X = np.repeat(source_U, experts_UK.shape[1]), experts_UK.ravel(), rank_UK.ravel()
    if (wrong_X := split_EG[expert_X, rank_X] <= 0).any():
        row = int(wrong_X.argmax())
        raise BrokenPlan(f"hierarchical all-to-all: rank {rank_X[row]} computes expert {expert_X[row]}, which it does not hold")
    servers = int(server_G.max()) + 1
    shares_NE = np.stack([split_EG[:, server_G == server].sum(axis=1) for server in range(servers)])
    found_NEN = np.zeros((servers, experts, servers), dtype=bool)
    found_NEN[server_G[source_X], expert_X, server_G[rank_X]] = True
    own_NE = found_NEN[np.arange(servers), :, np.arange(servers)]
    wrong_NE = (found_NEN.sum(axis=2) > 1) | (found_NEN.any(axis=2) & (shares_NE > 0) & ~own_NE)
    if wrong_NE.any():
        server, expert = np.argwhere(wrong_NE)[0].tolist()
        raise BrokenPlan(
            f"hierarchical all-to-all: expected one server, its own if it can, to compute expert {expert} for the tokens of "
            f"server {server}, found servers {np.flatnonzero(found_NEN[server, expert]).tolist()}"
        )
    pair_X = source_X * experts + expert_X
    pair_P, count_P = np.unique(pair_X, return_counts=True)
    triple_Q, count_Q = np.unique(pair_X * ranks + rank_X, return_counts=True)
    (source_Q, expert_Q), rank_Q = np.divmod(triple_Q // ranks, experts), triple_Q % ranks
    part_Q = split_EG[expert_Q, rank_Q] / shares_NE[server_G[rank_Q], expert_Q]
    all_Q = count_P[np.searchsorted(pair_P, triple_Q // ranks)]
    if (wrong_Q := abs(count_Q - part_Q * all_Q) > 1 + SLACK * all_Q).any():
        row = int(wrong_Q.argmax())
        raise BrokenPlan(
            f"hierarchical all-to-all: rank {rank_Q[row]} computes {count_Q[row]} of {all_Q[row]} choices of expert "
            f"{expert_Q[row]} by tokens of rank {source_Q[row]}, its share is {part_Q[row]:.3g}"
        )


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
