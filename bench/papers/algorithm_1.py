"""Algorithm 1 of Aurora (arXiv:2410.17043), which orders one all-to-all, to be compared with the orders of ORDER."""

from bisect import insort

import numpy as np

from aurora.algorithms.alltoall.open_shop import with_silent_pairs
from aurora.algorithms.network.port_bounds import pair_seconds, port_seconds
from aurora.types import Network, Order
from aurora.types.arrays import IntArray


def aurora_alg1(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders transfers by Aurora's Algorithm 1, read literally, with one partner at a time.

    The busiest GPU's transfers are placed first, in random order, then those of the next busiest, and so on. Each transfer gets
    the earliest time at which both of its ends are still free.

    Source: Aurora §4.2.
    """
    n = len(bytes_GG)
    seconds_GG = pair_seconds(bytes_GG, network.without_startup)
    busy: list[list[tuple[float, float]]] = [[] for _ in range(2 * n)]  # of each port, senders first, by start
    started: list[tuple[float, int, int]] = []
    left_GG = bytes_GG.copy()
    for turn in range(n):
        gpu = int(np.argmax(port_seconds(left_GG, network)))
        pairs = [(gpu, j) for j in range(n) if left_GG[gpu, j]] + [(i, gpu) for i in range(n) if left_GG[i, gpu]]
        if turn == 0:
            pairs = [pairs[k] for k in rng.permutation(len(pairs))]
        for src, dst in pairs:
            begin = _earliest(busy[src], busy[n + dst], float(seconds_GG[src, dst]))
            for port in (src, n + dst):
                insort(busy[port], (begin, begin + float(seconds_GG[src, dst])))
            started.append((begin, src, dst))
            left_GG[src, dst] = 0
    pairs = [(src, dst) for _, src, dst in sorted(started)]
    return Order("aurora-alg1", with_silent_pairs(np.array(pairs, dtype=np.int64).reshape(-1, 2), bytes_GG))


def _earliest(a: list[tuple[float, float]], b: list[tuple[float, float]], seconds: float) -> float:
    """The first time at which neither port is busy for `seconds`."""
    at = 0.0
    for begin, end in sorted(a + b):
        if begin - at >= seconds * (1 - 1e-12):
            break
        at = max(at, end)
    return at
