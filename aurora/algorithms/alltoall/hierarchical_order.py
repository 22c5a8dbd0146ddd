"""Orders hierarchical all-to-alls: an open shop of servers; all NICs of a server follow the same sequence."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from aurora.algorithms.alltoall.open_shop import all_pairs, search
from aurora.types import Hierarchy, Network, Order
from aurora.types.arrays import FloatArray, IntArray, locked

RAILS = 0  # the tier of rows from ranks to gateways; those inside servers follow, and last those that never carry bytes
FEW_SERVERS = 4  # up to so many, a single priority can be far from the bound
TRIES = 15


def hierarchical_order(bytes_GG: IntArray, hierarchy: Hierarchy, network: Network, *, rng: np.random.Generator) -> Order:
    """Returns one order for all steps of a hierarchical dispatch; the combine uses it reversed.

    Between servers, all ranks of a server follow one sequence of servers, each rank with its own gateways. The sequence is a
    dense open shop of servers, in which a pair of servers takes as long as its busiest NIC. Inside a server, rank i sends to
    i + 1, then to i + 2, and so on. The rows between servers are one tier; those inside servers are divided into enough further
    tiers to need no more stages than the first.

    Args:
        bytes_GG: (G, G) int64, bytes from each rank to each other in all steps together, as measured or expected.
        hierarchy: the servers.
        network: the NICs of its servers count; without servers, its ports take their place.
        rng: draws random priorities, tried if there are at most FEW_SERVERS servers.

    Returns:
        An Order of all ordered pairs of ranks.

    Source: FAST (arXiv:2505.09764), for the sequence of servers; Gonzalez & Sahni 1976, for the open shop.
    """
    rows, nics, servers = _rows(hierarchy), network.servers, hierarchy.servers
    nic_Bps = network.out_Bps_G.min(initial=np.inf) if nics is None else nics.nic_Bps
    nic_G = np.arange(network.gpus) if nics is None else np.array(nics.nic_G)
    startup_s = network.startup_s_G.max(initial=0.0)
    seconds_NN = _server_seconds(bytes_GG, rows, servers, nic_Bps, startup_s, nic_G)
    schedule = search(seconds_NN, TRIES if servers <= FEW_SERVERS else 0, rng)
    return Order("hierarchical", _in_sequence(schedule.pairs_X2, rows, servers), tier_X=rows.tier_X)


def hierarchical(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Returns `hierarchical_order` over the servers of the network; without any, each rank counts as a server.

    Args: as in `registry.OrderStrategy`.
    """
    server_G = range(network.gpus) if network.servers is None else network.servers.server_G
    return hierarchical_order(bytes_GG, Hierarchy(np.array(server_G)), network, rng=rng)


class _OrderRows(NamedTuple):
    """The rows of all hierarchical orders of some servers."""

    pairs_X2: IntArray  # (X, 2), first those from ranks to gateways, by pair of servers
    pair_R: IntArray  # (R,), the pair of servers of each row from a rank to a gateway, rising
    tier_X: IntArray  # (X,), of each row


@lru_cache(maxsize=8)
def _rows(hierarchy: Hierarchy) -> _OrderRows:
    """Rows of all orders of some servers, kept for the next call."""
    server_G, servers, ranks = hierarchy.server_G, hierarchy.servers, hierarchy.ranks
    size_N, local_G = np.diff(hierarchy.first_N), np.empty(ranks, dtype=np.int64)
    local_G[hierarchy.member_G] = np.arange(ranks) - np.repeat(hierarchy.first_N[:-1], size_N)
    src_X, dst_X = all_pairs(ranks).T
    inside_X = server_G[src_X] == server_G[dst_X]
    rail_X = ~inside_X & (hierarchy.gateway_GN[src_X, server_G[dst_X]] == dst_X)
    distance_X = (local_G[dst_X] - local_G[src_X]) % size_N[server_G[src_X]]
    lanes = -(-int(size_N.max(initial=1) - 1) // max(servers - 1, 1)) or 1
    tier_X = np.where(rail_X, RAILS, np.where(inside_X, 1 + (distance_X - 1) % lanes, 1 + lanes))
    pair_X = server_G[src_X] * servers + server_G[dst_X]
    in_rails_X = np.where(rail_X, pair_X, distance_X)
    sequence = np.lexsort((in_rails_X, ~rail_X))
    return _OrderRows(*map(locked, (np.stack([src_X, dst_X], axis=1)[sequence], np.sort(pair_X[rail_X]), tier_X[sequence])))


def _server_seconds(
    bytes_GG: IntArray, rows: _OrderRows, servers: int, nic_Bps: float, startup_s: float, nic_G: IntArray
) -> FloatArray:
    """(N, N) seconds from each server to each other: of the busiest NIC at either end."""
    ends_2R = rows.pairs_X2[: len(rows.pair_R)].T
    bytes_R, most_A = bytes_GG[*ends_2R], np.zeros(servers * servers)
    for nic_R, far_R in zip(nic_G[ends_2R], divmod(rows.pair_R, servers)[::-1], strict=True):
        busy_R = nic_R * servers + far_R  # a NIC, with the server at the other end
        np.maximum.at(most_A, rows.pair_R, np.bincount(busy_R, bytes_R)[busy_R])
    return np.where(most_A > 0, most_A / nic_Bps + startup_s, 0.0).reshape(servers, servers)


def _in_sequence(pairs_Y2: IntArray, rows: _OrderRows, servers: int) -> IntArray:
    """The rows of some pairs of servers in sequence, then those of all other pairs, then the rows of other tiers."""
    place_A = np.full(servers * servers, len(pairs_Y2))
    place_A[pairs_Y2[::-1] @ (servers, 1)] = np.arange(len(pairs_Y2))[::-1]  # the first of a pair that is listed again
    made_X2 = rows.pairs_X2.copy()
    made_X2[: len(rows.pair_R)] = made_X2[np.argsort(place_A[rows.pair_R], kind="stable")]
    return made_X2
