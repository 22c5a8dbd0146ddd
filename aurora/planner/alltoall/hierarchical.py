"""Hierarchical all-to-alls: which rows travel between which ranks in each step, who carries them, and their order.

Levelling evens out NICs: ranks of a server hand rows over, so that its NICs carry equally many. The order is an open shop of
servers, in which all NICs of a server follow one sequence. Compiled.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numba import njit

from aurora.planner.alltoall.open_shop import all_pairs, search
from aurora.planner.network.bounds import longest_port
from aurora.types import Hierarchy, Network, Order
from aurora.types.arrays import IntArray, locked, read_only
from aurora.types.schedule import MOST_ROWS


def carriers(sent_GN: IntArray, hierarchy: Hierarchy) -> IntArray:
    """Returns the rank whose NIC carries each piece of the rows from each rank to each server.

    A rank carries its own rows. If all-to-alls are levelled and it has `level_from` rows for a server more than the mean of its
    server's ranks, it hands over parts, chunk by chunk, as long as the rank that carries fewest so far carries less with the
    part than it does itself. So no NIC carries more to a server than the busiest would, but for
    rows that no part can halve.

    Args:
        sent_GN: (G, N) int64, tokens of each rank that need experts of each server.
        hierarchy: the servers, and how chunks are cut.

    Returns:
        (G, N, C) int64 for the C pieces of `Hierarchy`.

    Source: FAST (arXiv:2505.09764), which levels NICs before rows leave a server.
    """
    carrier_GNC = np.empty((hierarchy.ranks, hierarchy.servers, hierarchy.pieces), dtype=np.int64)
    carrier_GNC[:] = np.arange(hierarchy.ranks)[:, None, None]
    if hierarchy.parts > 1:
        assert hierarchy.level_from is not None
        sent_GN = np.ascontiguousarray(sent_GN)
        _hand_over(carrier_GNC, sent_GN, hierarchy.member_G, hierarchy.first_N, hierarchy.chunks, hierarchy.level_from)
    return carrier_GNC


def level_from(chunks: int, row_bytes: int, network: Network) -> int | None:
    """Returns from how many rows on levelling saves a message's start-up in each chunk; None if ports are no faster than NICs.

    Args:
        chunks: number of chunks of an all-to-all.
        row_bytes: size of a row in bytes.
        network: ports, start-ups, and a fabric of servers.
    """
    assert network.fabric is not None
    assert network.fabric.nic_Bps is not None
    row_s = row_bytes / network.fabric.nic_Bps - row_bytes / float(network.out_Bps_G.min())
    return math.ceil(np.clip(chunks * float(network.startup_s_G.max()) / row_s, 1, MOST_ROWS)) if row_s > 0 else None


@njit(cache=True)
def _hand_over(carrier_GNC, sent_GN, member_G, first_N, chunks, level_from):
    """Sets the carriers of parts that are handed over."""
    servers, pieces = sent_GN.shape[1], carrier_GNC.shape[2]
    parts = pieces // chunks
    carried_M, giver_M = np.zeros(len(member_G), np.int64), np.zeros(len(member_G), np.int64)
    for home in range(servers):
        members = member_G[first_N[home] : first_N[home + 1]]
        for server in range(servers):
            total, givers = 0, 0
            for rank in members:
                total += sent_GN[rank, server]
            for local in range(len(members)):
                carried_M[local] = 0
                if server != home and len(members) * (sent_GN[members[local], server] - level_from) >= total:
                    giver_M[givers] = local
                    givers += 1
            for chunk in range(chunks if givers else 0):
                for local in range(len(members)):
                    rows = sent_GN[members[local], server]
                    carried_M[local] += rows * (chunk + 1) // chunks - rows * chunk // chunks
                handed, piece = True, (chunk + 1) * parts
                while handed and piece > chunk * parts:
                    handed, piece = False, piece - 1
                    for giver in giver_M[:givers]:
                        rows, least = sent_GN[members[giver], server], server % len(members)
                        size = rows * (piece + 1) // pieces - rows * piece // pieces
                        for local in range(len(members)):
                            if carried_M[local] < carried_M[least]:
                                least = local
                        if size > 0 and carried_M[least] + size < carried_M[giver]:
                            carried_M[least] += size
                            carried_M[giver] -= size
                            carrier_GNC[members[giver], server, piece] = members[least]
                            handed = True


class HierarchicalRows(NamedTuple):
    """Rows of a hierarchical dispatch by source, before they are laid out in steps.

    Attributes:
        sent_GN: (G, N) int64, tokens of each rank that need experts of each server.
        needed_GCG: (G, C, G) int64, how many of these tokens of each rank, in each piece, need experts of each rank.
    """

    sent_GN: IntArray
    needed_GCG: IntArray


def hierarchical_rows(rank_UK: IntArray, source_U: IntArray, hierarchy: Hierarchy) -> HierarchicalRows:
    """Counts the rows of a hierarchical dispatch.

    Args:
        rank_UK: (U, K) int64, the rank that computes each choice of each token.
        source_U: (U,) int64, the rank that each token starts on. A rank's tokens are cut into pieces in this order.
        hierarchy: the servers, and how rows are cut.
    """
    ranks, servers, pieces, top_k = hierarchy.ranks, hierarchy.servers, hierarchy.pieces, rank_UK.shape[1]
    at_UK = np.sort(hierarchy.server_G[rank_UK] * ranks + rank_UK, axis=1)  # by server, then by rank
    server_UK, rank_UK = np.divmod(at_UK, ranks)
    new_rank_UK, new_server_UK = (np.diff(each_UK, axis=1, prepend=-1) != 0 for each_UK in (at_UK, server_UK))
    visit_X = new_server_UK.ravel().cumsum() - 1  # which visit of a token to a server each choice belongs to
    pair_V = np.repeat(source_U, top_k)[new_server_UK.ravel()] * servers + server_UK[new_server_UK]
    sent_P = np.bincount(pair_V, minlength=ranks * servers)
    by_pair, number_V = np.argsort(pair_V, kind="stable"), np.empty_like(pair_V)
    number_V[by_pair] = np.arange(len(pair_V)) - np.repeat(sent_P.cumsum() - sent_P, sent_P)
    piece_V = ((number_V + 1) * pieces - 1) // sent_P[pair_V]  # the last piece that starts at this number or before
    needed_X = np.repeat(source_U, top_k) * pieces + piece_V[visit_X]
    needed_X = (needed_X * ranks + rank_UK.ravel())[new_rank_UK.ravel()]
    needed_GCG = np.bincount(needed_X, minlength=ranks * pieces * ranks).reshape(ranks, pieces, ranks)
    return HierarchicalRows(sent_P.reshape(ranks, servers), needed_GCG)


class HopRows(NamedTuple):
    """Rows of a hierarchical dispatch by step and hop.

    Attributes:
        carrier_GNC: (G, N, C) int64, as of `carriers`.
        carried_SGG: (S, G, G) int64, rows from each rank to gateways, and inside servers to carriers.
        forwarded_SGG: (S, G, G) int64, rows to the ranks that need them, from gateways and from sources on the same server; on
            the diagonal those that stay.
    """

    carrier_GNC: IntArray
    carried_SGG: IntArray
    forwarded_SGG: IntArray

    @property
    def total_SGG(self) -> IntArray:
        """(S, G, G) int64, rows of both hops without those that stay."""
        steps_SGG, every_G = self.carried_SGG + self.forwarded_SGG, np.arange(self.carried_SGG.shape[1])
        steps_SGG[:, every_G, every_G] = 0
        return np.asarray(steps_SGG)


def hop_rows(rows: HierarchicalRows, hierarchy: Hierarchy) -> HopRows:
    """Returns the rows that travel in each step of a dispatch by hop; arguments as in `step_rows`."""
    carrier_GNC = carriers(rows.sent_GN, hierarchy)
    carried_SGG, forwarded_SGG = np.zeros((2, hierarchy.steps, hierarchy.ranks, hierarchy.ranks), dtype=np.int64)
    sent_GN, needed_GCG = np.ascontiguousarray(rows.sent_GN), np.ascontiguousarray(rows.needed_GCG)
    servers = map(read_only, (hierarchy.server_G, hierarchy.member_G, hierarchy.first_N, hierarchy.gateway_GN))
    _add_hops(carried_SGG, forwarded_SGG, sent_GN, needed_GCG, carrier_GNC, *servers, hierarchy.parts)
    return HopRows(carrier_GNC, carried_SGG, forwarded_SGG)


def step_rows(rows: HierarchicalRows, hierarchy: Hierarchy) -> IntArray:
    """Returns the rows that travel in each step of a dispatch; what stays on its rank is not counted.

    A combine has the same steps backwards, each transposed.

    Args:
        rows: of all ranks, as `hierarchical_rows` counts them.
        hierarchy: the servers, and how rows are cut.

    Returns:
        (steps, G, G) int64, from rank (row) to rank in each step.
    """
    return hop_rows(rows, hierarchy).total_SGG


@njit(cache=True)
def _add_hops(carried_SGG, forwarded_SGG, sent_GN, needed_GCG, carrier_GNC, server_G, member_G, first_N, gateway_GN, parts):
    """Adds the rows of every piece: to its carrier, from there to the gateway, and from there to the ranks that need them."""
    ranks, servers, pieces = carrier_GNC.shape
    for source in range(ranks):
        for server in range(servers):
            whole, left = sent_GN[source, server] // pieces, sent_GN[source, server] % pieces
            passed = 0  # of the rows that are left, in parts of a row
            for piece in range(pieces):
                passed += left
                more = passed >= pieces
                rows, passed = whole + more, passed - pieces * more
                if rows == 0:
                    continue
                step, at = piece // parts, source
                if server != server_G[source]:
                    carrier = carrier_GNC[source, server, piece]
                    if carrier != source:
                        carried_SGG[step, source, carrier] += rows
                        step += 1
                    at = gateway_GN[carrier, server]
                    carried_SGG[step, carrier, at] += rows
                    step += 1
                for rank in member_G[first_N[server] : first_N[server + 1]]:
                    forwarded_SGG[step, at, rank] += needed_GCG[source, piece, rank]


RAILS = 0  # the tier of rows from ranks to gateways; those inside servers follow, and last those that never carry bytes
FEW_SERVERS = 4  # up to so many, a single priority can be far from the bound
TRIES = 15


def hierarchical_order(bytes_GG: IntArray, hierarchy: Hierarchy, network: Network, *, rng: np.random.Generator) -> Order:
    """Returns the order of every step of a hierarchical dispatch; a combine has it reversed.

    Between servers all ranks of a server follow one sequence of servers, each with its own gateways: a dense open shop of
    servers, in which a pair takes as long as its busiest NIC. Inside a server a rank serves the next rank first, then the next
    but one, and so on. Both go on side by side, in tiers. Inside there are as many tiers as keep its rows to the stages that
    those between servers need.

    Args:
        bytes_GG: (G, G) int64, bytes from each rank to each other in all steps together, as measured or expected.
        hierarchy: the servers.
        network: with the NICs of a fabric of servers; without a fabric the ports are taken for NICs.
        rng: for drawn priorities, which are tried on up to FEW_SERVERS servers.

    Returns:
        An Order of all ordered pairs of ranks.

    Source: FAST (arXiv:2505.09764), for the sequence of servers; Gonzalez & Sahni 1976, for the open shop.
    """
    rows, fabric, servers = _rows(hierarchy), network.fabric, hierarchy.servers
    nic_Bps = fabric.nic_Bps if fabric is not None and fabric.nic_Bps is not None else network.out_Bps_G.min(initial=np.inf)
    startup_s = network.startup_s_G.max(initial=0.0)
    shared = fabric is not None and fabric.shared_nic
    seconds_NN = _server_seconds(bytes_GG, rows.pairs_X2, rows.first_P, servers, nic_Bps, startup_s, shared)
    bound_s = longest_port(seconds_NN) * (1 + 1e-12)
    found = search(seconds_NN, TRIES if servers <= FEW_SERVERS else 0, bound_s, rng)
    return Order("hierarchical", _in_sequence(found.pairs_X2, rows.pairs_X2, rows.first_P, servers), tier_X=rows.tier_X)


def hierarchical(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """`hierarchical_order` over the servers of the network's fabric; without these every rank is a server of its own.

    Args: as in `registry.OrderStrategy`.
    """
    fabric = network.fabric
    server_G = fabric.server_G if fabric is not None and fabric.server_G else range(network.gpus)
    return hierarchical_order(bytes_GG, Hierarchy(np.array(server_G)), network, rng=rng)


class _OrderRows(NamedTuple):
    """The rows of all hierarchical orders of some servers."""

    pairs_X2: IntArray  # (X, 2), first those from ranks to gateways, by pair of servers
    first_P: IntArray  # (N * N + 1,), where the rows of each pair of servers begin, and after the last of them
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
    count_P = np.bincount(pair_X[rail_X], minlength=servers * servers)
    first_P = np.append(0, count_P.cumsum())
    return _OrderRows(*(locked(each) for each in (np.stack([src_X, dst_X], axis=1)[sequence], first_P, tier_X[sequence])))


@njit(cache=True, error_model="numpy")
def _server_seconds(bytes_GG, pairs_X2, first_P, servers, nic_Bps, startup_s, shared):
    """(N, N) seconds from each server to each other: of the busiest NIC at either end, or of the one that a server has."""
    seconds_NN = np.zeros((servers, servers))
    sent_G, got_G = np.zeros((2, len(bytes_GG)), np.int64)
    for pair in range(servers * servers):
        whole = most = 0
        for row in range(first_P[pair], first_P[pair + 1]):
            src, dst = pairs_X2[row, 0], pairs_X2[row, 1]
            whole += bytes_GG[src, dst]
            sent_G[src] += bytes_GG[src, dst]
            got_G[dst] += bytes_GG[src, dst]
            most = max(most, sent_G[src], got_G[dst])
        for row in range(first_P[pair], first_P[pair + 1]):
            sent_G[pairs_X2[row, 0]] = got_G[pairs_X2[row, 1]] = 0
        if whole > 0:
            seconds_NN[pair // servers, pair % servers] = (whole if shared else most) / nic_Bps + startup_s
    return seconds_NN


@njit(cache=True)
def _in_sequence(pair_Y2, pairs_X2, first_P, servers):
    """The rows of some pairs of servers in sequence, then those of all other pairs, then the rows of other tiers."""
    made_X2 = np.empty_like(pairs_X2)
    last = first_P[servers * servers]
    made_X2[last:] = pairs_X2[last:]
    seen_P = np.zeros(servers * servers, np.bool_)
    at = 0
    for number in range(len(pair_Y2) + servers * servers):
        listed = number < len(pair_Y2)
        pair = pair_Y2[number, 0] * servers + pair_Y2[number, 1] if listed else number - len(pair_Y2)
        if not seen_P[pair]:
            seen_P[pair] = True
            for row in range(first_P[pair], first_P[pair + 1]):
                made_X2[at, 0], made_X2[at, 1] = pairs_X2[row, 0], pairs_X2[row, 1]
                at += 1
    return made_X2
