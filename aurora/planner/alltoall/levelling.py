"""Levels NICs: which rank of a server carries which rows to another server, so that its NICs carry equally many. Compiled."""

import math

import numpy as np
from numba import njit

from aurora.types import Hierarchy, Network
from aurora.types.arrays import IntArray
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
