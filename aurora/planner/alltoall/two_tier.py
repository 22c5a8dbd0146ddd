"""Two-tier schedules: balance each server's bytes over its NICs inside the server, then send between servers.

Source: FAST (arXiv:2505.09764).
"""

from collections.abc import Iterator

import numpy as np
from numba import njit

from aurora.errors import BadInput
from aurora.planner.alltoall.open_shop import DenseShop
from aurora.planner.network.lower_bounds import two_tier_bound
from aurora.types import Schedule
from aurora.types.arrays import FloatArray, IntArray

FEW = 12  # servers; up to this number, drawn priorities and rings are worth their microseconds
TRIES = 3


class TwoTier:
    """Buffers for all-to-alls of `servers` servers with `width` GPUs and as many NICs each. One thread at a time.

    NIC k of a server sends to NIC k of another server, and all NICs of a server send the same bytes to it, to within one byte.
    Before sending, bytes move inside servers so that the NICs are balanced.

    Args:
        servers: number of servers.
        width: GPUs, and NICs, of a server.

    Attributes:
        count: number of moves of the last `run`; only rows [:count] of the columns below are valid. Whatever is not moved
            leaves by its own GPU's NIC.
        src_X: int64, the GPU that has the bytes.
        via_X: int64, the GPU by whose NIC they leave.
        dst_X: int64, the GPU that they are for.
        bytes_X: int64, bytes moved.
        carried_SS: (servers, servers) int64, the most bytes that one NIC carries from server to server.
        shop: holds the servers' transfers with their starts.
    """

    def __init__(self, servers: int, width: int) -> None:
        n = servers * width
        rows = max(1, n * (n - width) + servers * servers * width)  # every pair once, and a cut a NIC
        self.width = width
        self.count = 0
        self.src_X, self.via_X, self.dst_X, self.bytes_X = np.zeros((4, rows), dtype=np.int64)
        self.carried_SS: IntArray = np.zeros((servers, servers), dtype=np.int64)
        self.shop = DenseShop(servers)
        self._seconds_SS = np.zeros((servers, servers))
        self._held, self._free = np.zeros((2, width), dtype=np.int64)

    def run(self, bytes_GG: IntArray, nic_Bps: float, rng: np.random.Generator, startup_s: float = 0.0) -> float:
        """Balances the NICs, orders the transfers between servers, and returns the seconds that the NICs need.

        Balanced transfers are nearly equal in size, so that a ring is often the shortest. Deterministic for the state of rng.

        Args:
            bytes_GG: (servers * width, servers * width) int64, bytes from each GPU to each other; a server's GPUs are adjacent.
            nic_Bps: bytes per second of a NIC.
            rng: for drawn priorities.
            startup_s: seconds of start-up of each message between servers.
        """
        outputs = (self.src_X, self.via_X, self.dst_X, self.bytes_X, self.carried_SS)
        self.count = _level(bytes_GG, self.width, *outputs, self._held, self._free)
        np.divide(self.carried_SS, nic_Bps, out=self._seconds_SS)
        if startup_s > 0:
            self._seconds_SS[self.carried_SS > 0] += startup_s
        bound_s = float(max(self._seconds_SS.sum(axis=0).max(initial=0.0), self._seconds_SS.sum(axis=1).max(initial=0.0)))
        return self.shop.search(self._seconds_SS, TRIES if self.shop.ranks <= FEW else 0, bound_s, rng)


@njit(cache=True)
def _level(bytes_GG, width, src_X, via_X, dst_X, bytes_X, carried_SS, held, free):
    """For each pair of servers, moves bytes beyond a NIC's share to NICs that have less; returns the number of moves.

    A GPU keeps bytes for its own NIC's peer first, and moves bytes to the NIC whose peer wants them if that NIC has capacity
    left.
    """
    servers = carried_SS.shape[0]
    count = 0
    for a in range(servers):
        for b in range(servers):
            carried_SS[a, b] = 0
            if a == b:
                continue
            total = 0
            for i in range(width):
                held[i] = 0
                for j in range(width):
                    held[i] += bytes_GG[a * width + i, b * width + j]
                total += held[i]
            share, odd = total // width, total % width
            carried_SS[a, b] = share + (odd > 0)
            for i in range(width):
                free[i] = share + (i < odd) - held[i]
            lacking = 0
            for i in range(width):
                spare = -free[i]
                keep = held[i] - spare
                for step in range(width):
                    if spare <= 0:
                        break
                    j = (i + step) % width
                    piece = bytes_GG[a * width + i, b * width + j]
                    if piece <= keep:
                        keep -= piece
                        continue
                    piece -= keep
                    keep = 0
                    spare -= piece
                    while piece > 0:
                        via = j
                        if free[via] <= 0:
                            while free[lacking] <= 0:
                                lacking += 1
                            via = lacking
                        moved = min(piece, free[via])
                        src_X[count] = a * width + i
                        via_X[count] = a * width + via
                        dst_X[count] = b * width + j
                        bytes_X[count] = moved
                        count += 1
                        free[via] -= moved
                        piece -= moved
    return count


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
    nodes, members = np.unique(node_G, return_counts=True)
    if len(set(members.tolist())) > 1 or len(np.unique(nic_Bps_G)) > 1:
        raise BadInput(
            f"two-tier: expected servers of as many GPUs with equal NICs, found {sorted(set(members.tolist()))} GPUs a server "
            f"and rates of {', '.join(f'{rate:g}' for rate in np.unique(nic_Bps_G))} B/s"
        )
    where_G = np.argsort(node_G, kind="stable")  # a server's GPUs side by side
    tiers = TwoTier(len(nodes), int(members.max(initial=1)))
    nic_Bps = float(nic_Bps_G.max(initial=1.0))
    startup_s = float(startup_s_G.max(initial=0.0))
    rows = [*_hops(tiers, np.ascontiguousarray(bytes_GG[np.ix_(where_G, where_G)]), nic_Bps, inside_Bps, rng, startup_s)]
    rows.sort()
    start_s, src, dst, at, to, size, end_s, rate = (np.array([row[i] for row in rows]) for i in range(8))
    bound_s = two_tier_bound(bytes_GG, node_G, nic_Bps, inside_Bps)
    src, dst, at, to = (where_G[ends.astype(np.int64)] for ends in (src, dst, at, to))
    hop_X2 = np.stack([at, to], axis=1)
    return Schedule("two-tier", False, src, dst, size.astype(np.int64), start_s, end_s, rate, bound_s, bound_s, hop_X2=hop_X2)


Hop = tuple[float, int, int, int, int, int, float, float]  # start, source, destination, from, to, bytes, end, rate


def _hops(
    tiers: TwoTier, bytes_GG: IntArray, nic_Bps: float, inside_Bps: float, rng: np.random.Generator, startup_s: float
) -> Iterator[Hop]:
    """All hops: stage by stage for each pair of servers, then each server's own traffic, then deliveries."""
    tiers.run(bytes_GG, nic_Bps, rng, startup_s)
    m, servers = tiers.width, len(tiers.carried_SS)
    leaving = _leaving(tiers, bytes_GG)
    inside_free = [0.0] * servers
    out_free, in_free = [0.0] * servers, [0.0] * servers
    arrivals: list[tuple[float, int, int]] = []
    jobs = list(zip(tiers.shop.src_X[: tiers.shop.count].tolist(), tiers.shop.dst_X[: tiers.shop.count].tolist(), strict=True))
    for a, b in jobs:
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


def _leaving(tiers: TwoTier, bytes_GG: IntArray) -> dict[tuple[int, int], list[tuple[int, int, int, int]]]:
    """By pair of servers: (source, destination, the GPU by whose NIC they leave, bytes), every byte once."""
    m, servers = tiers.width, len(tiers.carried_SS)
    kept_GG = bytes_GG.copy()
    leaving: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {
        (a, b): [] for a in range(servers) for b in range(servers)
    }
    columns = (column[: tiers.count].tolist() for column in (tiers.src_X, tiers.via_X, tiers.dst_X, tiers.bytes_X))
    for src, via, dst, size in zip(*columns, strict=True):
        kept_GG[src, dst] -= size
        leaving[src // m, dst // m].append((src, dst, via, size))
    for src, dst in np.argwhere(kept_GG).tolist():
        leaving[src // m, dst // m].append((src, dst, src, int(kept_GG[src, dst])))
    return leaving


def _paced_hops(moves: list[tuple[int, int, int, int, int]], begin: float, inside_Bps: float) -> tuple[float, list[Hop]]:
    """Hops of moves inside a server, paced to end when its busiest inside port does; returns their end and the hops."""
    sent: dict[int, int] = {}
    got: dict[int, int] = {}
    for _, _, at, to, size in moves:
        sent[at] = sent.get(at, 0) + size
        got[to] = got.get(to, 0) + size
    took = max([*sent.values(), *got.values()], default=0) / inside_Bps
    return begin + took, [(begin, src, dst, at, to, size, begin + took, size / took) for src, dst, at, to, size in moves]
