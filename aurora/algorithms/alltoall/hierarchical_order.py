"""Orders hierarchical all-to-alls: an open shop of servers; all NICs of a server follow the same sequence. Compiled."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from aurora.algorithms.alltoall.open_shop import all_pairs, search
from aurora.algorithms.network.port_bounds import longest_port
from aurora.types import Hierarchy, Network, Order
from aurora.types.arrays import IntArray, locked
from aurora.types.compiled import njit

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
    seconds_NN = _server_seconds(bytes_GG, rows.pairs_X2, rows.first_A, servers, nic_Bps, startup_s, nic_G)
    bound_s = longest_port(seconds_NN) * (1 + 1e-12)
    schedule = search(seconds_NN, TRIES if servers <= FEW_SERVERS else 0, bound_s, rng)
    return Order("hierarchical", _in_sequence(schedule.pairs_X2, rows.pairs_X2, rows.first_A, servers), tier_X=rows.tier_X)


def hierarchical(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Returns `hierarchical_order` over the servers of the network; without any, each rank counts as a server.

    Args: as in `registry.OrderStrategy`.
    """
    server_G = range(network.gpus) if network.servers is None else network.servers.server_G
    return hierarchical_order(bytes_GG, Hierarchy(np.array(server_G)), network, rng=rng)


class _OrderRows(NamedTuple):
    """The rows of all hierarchical orders of some servers."""

    pairs_X2: IntArray  # (X, 2), first those from ranks to gateways, by pair of servers
    first_A: IntArray  # (N * N + 1,), where the rows of each pair of servers begin, and after the last of them
    tier_X: IntArray  # (X,), of each row


@lru_cache(maxsize=8)
def _rows(hierarchy: Hierarchy) -> _OrderRows:
    """Rows of all orders of some servers, kept for the next call."""
    server_G, servers, ranks = hierarchy.server_G, hierarchy.servers, hierarchy.ranks
    size_N = np.bincount(server_G, minlength=servers)
    by_server = np.argsort(server_G, kind="stable")
    local_G = np.empty(ranks, dtype=np.int64)
    local_G[by_server] = np.arange(ranks) - np.repeat(size_N.cumsum() - size_N, size_N)
    src_X, dst_X = all_pairs(ranks).T
    inside_X = server_G[src_X] == server_G[dst_X]
    rail_X = ~inside_X & (hierarchy.gateway_GN[src_X, server_G[dst_X]] == dst_X)
    distance_X = (local_G[dst_X] - local_G[src_X]) % size_N[server_G[src_X]]
    lanes = -(-int(size_N.max(initial=1) - 1) // max(servers - 1, 1)) or 1
    tier_X = np.where(rail_X, RAILS, np.where(inside_X, 1 + (distance_X - 1) % lanes, 1 + lanes))
    pair_X = server_G[src_X] * servers + server_G[dst_X]
    in_rails_X = np.where(rail_X, pair_X, distance_X)
    sequence = np.lexsort((in_rails_X, ~rail_X))
    count_A = np.bincount(pair_X[rail_X], minlength=servers * servers)
    first_A = np.append(0, count_A.cumsum())
    return _OrderRows(*map(locked, (np.stack([src_X, dst_X], axis=1)[sequence], first_A, tier_X[sequence])))


@njit(cache=True, error_model="numpy")
def _server_seconds(bytes_GG, pairs_X2, first_A, servers, nic_Bps, startup_s, nic_G):
    """(N, N) seconds from each server to each other: of the busiest NIC at either end."""
    seconds_NN = np.zeros((servers, servers))
    sent_G, got_G = np.zeros((2, len(bytes_GG)), np.int64)
    for pair in range(servers * servers):
        most = 0
        for row in range(first_A[pair], first_A[pair + 1]):
            src, dst = pairs_X2[row, 0], pairs_X2[row, 1]
            sent_G[nic_G[src]] += bytes_GG[src, dst]
            got_G[nic_G[dst]] += bytes_GG[src, dst]
            most = max(most, sent_G[nic_G[src]], got_G[nic_G[dst]])
        for row in range(first_A[pair], first_A[pair + 1]):
            sent_G[nic_G[pairs_X2[row, 0]]] = got_G[nic_G[pairs_X2[row, 1]]] = 0
        if most > 0:
            seconds_NN[pair // servers, pair % servers] = most / nic_Bps + startup_s
    return seconds_NN


@njit(cache=True)
def _in_sequence(pair_Y2, pairs_X2, first_A, servers):
    """The rows of some pairs of servers in sequence, then those of all other pairs, then the rows of other tiers."""
    made_X2 = np.empty_like(pairs_X2)
    last = first_A[servers * servers]
    made_X2[last:] = pairs_X2[last:]
    seen_A = np.zeros(servers * servers, np.bool_)
    at = 0
    for number in range(len(pair_Y2) + servers * servers):
        listed = number < len(pair_Y2)
        pair = pair_Y2[number, 0] * servers + pair_Y2[number, 1] if listed else number - len(pair_Y2)
        if not seen_A[pair]:
            seen_A[pair] = True
            for row in range(first_A[pair], first_A[pair + 1]):
                made_X2[at, 0], made_X2[at, 1] = pairs_X2[row, 0], pairs_X2[row, 1]
                at += 1
    return made_X2
