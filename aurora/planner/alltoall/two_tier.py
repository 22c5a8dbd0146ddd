"""Two-tier schedules: balance each server's bytes over its NICs inside the server, then send between servers.

Source: FAST (arXiv:2505.09764).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
from numba import njit

from aurora.errors import BadInput
from aurora.planner.alltoall.open_shop import DenseSchedule, search
from aurora.planner.network.bounds import two_tier_bound
from aurora.types import Schedule
from aurora.types.arrays import FloatArray, IntArray

FEW = 12  # servers; up to this number, drawn priorities and rings are worth their microseconds
TRIES = 3


def balanced_order(
    bytes_GG: IntArray, width: int, nic_Bps: float, rng: np.random.Generator, startup_s: float = 0.0
) -> tuple[IntArray, DenseSchedule]:
    """Balances the NICs of servers with `width` GPUs, and as many NICs, and orders the transfers between servers.

    NIC k of a server sends to NIC k of another server, and all NICs of a server send the same bytes to it, to within one byte.
    Before sending, bytes move inside servers so that the NICs are balanced. Balanced transfers are nearly equal in size, so
    that a ring is often the shortest. Deterministic for the state of rng.

    Args:
        bytes_GG: (G, G) int64, bytes from each GPU to each other; a server's GPUs are adjacent.
        width: GPUs of a server.
        nic_Bps: bytes per second of a NIC.
        rng: for drawn priorities.
        startup_s: seconds of start-up of each message between servers.

    Returns:
        (move_X4, schedule). move_X4 (X, 4): the GPU that has the bytes, the GPU by whose NIC they leave, the GPU that they are
        for, and bytes; what is not moved leaves by its own GPU's NIC. The schedule's ranks are servers.
    """
    move_X4, carried_SS = _balance(bytes_GG, width)
    seconds_SS = np.where(carried_SS > 0, carried_SS / nic_Bps + startup_s, 0.0)
    bound_s = float(max(seconds_SS.sum(axis=0).max(initial=0.0), seconds_SS.sum(axis=1).max(initial=0.0)))
    return move_X4, search(seconds_SS, TRIES if len(seconds_SS) <= FEW else 0, bound_s, rng)


@njit(cache=True)
def _balance(bytes_GG, width):
    """The moves inside servers, as in `balanced_order`, and the most bytes that one NIC carries from server to server."""
    gpus = bytes_GG.shape[0]
    servers = gpus // width
    carried_SS = np.zeros((servers, servers), np.int64)
    move_X4 = np.empty((gpus * (gpus - width) + servers * gpus, 4), np.int64)  # every pair once, and a cut a NIC
    free = np.empty(width, np.int64)
    count = 0
    for a in range(servers):
        for b in range(servers):
            if a != b:
                carried_SS[a, b] = _fill_shares(bytes_GG, a * width, b * width, free)
                count = _give_away(bytes_GG, a * width, b * width, free, move_X4, count)
    return move_X4[:count], carried_SS


@njit(cache=True)
def _fill_shares(bytes_GG, a, b, free):
    """Writes what each NIC of the server at GPU `a` has free of its equal share for the server at `b`; below zero: too much.

    Returns the largest share.
    """
    width = len(free)
    total = 0
    for i in range(width):
        held = 0
        for j in range(width):
            held += bytes_GG[a + i, b + j]
        free[i] = -held
        total += held
    for i in range(width):
        free[i] += total // width + (i < total % width)
    return (total + width - 1) // width


@njit(cache=True)
def _give_away(bytes_GG, a, b, free, move_X4, count):
    """Moves the bytes beyond each NIC's share to NICs that have less; returns the number of moves so far.

    A GPU keeps bytes for its own NIC's peer first, then for the peers after it, and moves the others.
    """
    width = len(free)
    lacking = 0
    for i in range(width):
        spare = -free[i]
        if spare <= 0:
            continue
        keep = -spare
        for j in range(width):
            keep += bytes_GG[a + i, b + j]
        for step in range(width):
            j = (i + step) % width
            kept = min(keep, bytes_GG[a + i, b + j])
            keep -= kept
            count, lacking = _move(bytes_GG[a + i, b + j] - kept, a, i, b + j, j, free, lacking, move_X4, count)
    return count


@njit(cache=True)
def _move(piece, a, i, dst, j, free, lacking, move_X4, count):
    """Moves `piece` bytes for GPU `dst`, by the NIC of its peer j if that has capacity left, else by the first that has.

    Returns the number of moves so far, and the first NIC that may lack bytes.
    """
    while piece > 0:
        via = j
        if free[j] <= 0:
            while free[lacking] <= 0:
                lacking += 1
            via = lacking
        moved = min(piece, free[via])
        move_X4[count, 0], move_X4[count, 1], move_X4[count, 2], move_X4[count, 3] = a + i, a + via, dst, moved
        count += 1
        free[via] -= moved
        piece -= moved
    return count, lacking


def two_tier_schedule(
    bytes_GG: IntArray,
    node_G: IntArray,
    nic_Bps_G: FloatArray,
    inside_Bps: float,
    startup_s_G: FloatArray,
    *,
    rng: np.random.Generator,
) -> Schedule:
    """Computes the hops of an all-to-all over servers: balance inside, send between NICs, deliver inside; the stages overlap.

    A server does one thing inside at a time: it balances in the order of its transfers, then serves its own traffic, then
    delivers what has arrived.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each GPU to each other.
        node_G: (G,) int64, the server of each GPU.
        nic_Bps_G: (G,) float64, bytes per second of each GPU's NIC.
        inside_Bps: bytes per second that a GPU sends, and receives, inside its server.
        startup_s_G: (G,) float64, seconds of start-up of a message between NICs; the largest is used.
        rng: for drawn priorities.

    Returns:
        A schedule with hops. Its bound is `two_tier_bound`, which no forwarding beats.

    Raises:
        BadInput: if servers differ in size or NICs in rate.

    Source: FAST (arXiv:2505.09764).
    """
    members = np.unique(node_G, return_counts=True)[1]
    if len(set(members.tolist())) > 1 or len(np.unique(nic_Bps_G)) > 1:
        raise BadInput(
            f"two-tier: expected servers of as many GPUs with equal NICs, found {sorted(set(members.tolist()))} GPUs a server "
            f"and rates of {', '.join(f'{rate:g}' for rate in np.unique(nic_Bps_G))} B/s"
        )
    where_G = np.argsort(node_G, kind="stable")  # a server's GPUs side by side
    nic_Bps = float(nic_Bps_G.max(initial=0.0)) or 1.0
    startup_s = float(startup_s_G.max(initial=0.0))
    side_by_side_GG = np.ascontiguousarray(bytes_GG[np.ix_(where_G, where_G)])
    rows = [*_hops(side_by_side_GG, int(members.max(initial=1)), nic_Bps, inside_Bps, rng, startup_s)]
    rows.sort()
    start_s, src, dst, at, to, size, end_s, rate = (np.array([row[i] for row in rows]) for i in range(8))
    bound_s = two_tier_bound(bytes_GG, node_G, nic_Bps, inside_Bps)
    src, dst, at, to = (where_G[ends.astype(np.int64)] for ends in (src, dst, at, to))
    hop_X2 = np.stack([at, to], axis=1)
    return Schedule("two-tier", False, src, dst, size.astype(np.int64), start_s, end_s, rate, bound_s, bound_s, hop_X2=hop_X2)


Hop = tuple[float, int, int, int, int, int, float, float]  # start, source, destination, from, to, bytes, end, rate


def _hops(
    bytes_GG: IntArray, m: int, nic_Bps: float, inside_Bps: float, rng: np.random.Generator, startup_s: float
) -> Iterator[Hop]:
    """All hops, with m GPUs a server: stage by stage for each pair of servers, then servers' own traffic, then deliveries."""
    move_X4, schedule = balanced_order(bytes_GG, m, nic_Bps, rng, startup_s)
    servers = len(bytes_GG) // m
    leaving = _leaving(move_X4, bytes_GG, m)
    inside_free = [0.0] * servers
    out_free, in_free = [0.0] * servers, [0.0] * servers
    arrivals: list[tuple[float, int, int]] = []
    for a, b in schedule.pairs_X2.tolist():
        level = [(src, dst, src, via, size) for src, dst, via, size in leaving[a, b] if via != src]
        inside_free[a], hops = _paced_hops(level, inside_free[a], inside_Bps)
        yield from hops
        begin = max(inside_free[a] if level else 0.0, out_free[a], in_free[b])
        nic_s = [begin + startup_s] * m
        for src, dst, via, size in leaving[a, b]:
            k = via % m
            end = nic_s[k] + size / nic_Bps
            yield nic_s[k], src, dst, via, b * m + k, size, end, nic_Bps
            nic_s[k] = end
        out_free[a] = in_free[b] = max(nic_s)
        arrivals.append((max(nic_s), a, b))
    for a in range(servers):
        own = slice(a * m, (a + 1) * m)
        pairs = (np.argwhere(bytes_GG[own, own]) + a * m).tolist()
        inside_free[a], hops = _paced_hops([(i, j, i, j, int(bytes_GG[i, j])) for i, j in pairs], inside_free[a], inside_Bps)
        yield from hops
    for arrived, a, b in sorted(arrivals):
        deliveries = [(src, dst, b * m + via % m, dst, size) for src, dst, via, size in leaving[a, b] if via % m != dst % m]
        inside_free[b], hops = _paced_hops(deliveries, max(inside_free[b], arrived), inside_Bps)
        yield from hops


def _leaving(move_X4: IntArray, bytes_GG: IntArray, m: int) -> dict[tuple[int, int], list[tuple[int, int, int, int]]]:
    """By pair of servers: (source, destination, the GPU by whose NIC they leave, bytes), every byte once."""
    kept_GG = bytes_GG.copy()
    leaving: defaultdict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    for src, via, dst, size in move_X4.tolist():
        kept_GG[src, dst] -= size
        leaving[src // m, dst // m].append((src, dst, via, size))
    for src, dst in np.argwhere(kept_GG).tolist():
        leaving[src // m, dst // m].append((src, dst, src, int(kept_GG[src, dst])))
    return leaving


def _paced_hops(moves: list[tuple[int, int, int, int, int]], begin: float, inside_Bps: float) -> tuple[float, list[Hop]]:
    """Hops of moves inside a server, paced to end when its busiest inside port does; returns their end and the hops."""
    carried: Counter[tuple[str, int]] = Counter()
    for _, _, at, to, size in moves:
        carried["sent", at] += size
        carried["got", to] += size
    took = max(carried.values(), default=0) / inside_Bps
    return begin + took, [(begin, src, dst, at, to, size, begin + took, size / took) for src, dst, at, to, size in moves]
