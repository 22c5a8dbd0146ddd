"""ORDER: strategies that order one all-to-all, by name. A new one is a function like OrderStrategy and one line here.

This module also has the strategies that need no search: paced transfers, and the baselines of papers. `switch.timed` computes
how long an order takes, so that all orders are timed by one model of the network.
"""

from bisect import insort
from dataclasses import replace
from typing import Protocol

import numpy as np

from aurora.planner.alltoall.birkhoff import birkhoff
from aurora.planner.alltoall.hierarchical_order import hierarchical
from aurora.planner.alltoall.open_shop import all_pairs, openshop, with_silent_pairs
from aurora.planner.alltoall.split_transfers import matchings, openshop_best
from aurora.planner.network.bounds import pair_seconds, port_seconds
from aurora.types import Network, Order
from aurora.types.arrays import IntArray
from aurora.types.schedule import rotated_pairs


def all_at_once(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Starts every transfer at once, so that transfers share ports. Rank i posts its message to i + 1 first."""
    return Order.all_at_once(len(bytes_GG))


def paced(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Starts every transfer at once, each held to the rate bytes / T, where T is the fluid bound (coflow MADD).

    All transfers end at T, on any ports.
    """
    return replace(Order.all_at_once(len(bytes_GG)), method="paced", paced=True)


def smallest_first(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders each sender's transfers by rising size, one at a time (SJF); a receiver takes any number at once.

    Source: Aurora §8.1.
    """
    pairs_X2 = all_pairs(len(bytes_GG))
    return _by_sender("sjf", pairs_X2[np.argsort(bytes_GG[*pairs_X2.T], kind="stable")], len(bytes_GG))


def random_order(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders each sender's transfers at random, one at a time (RCS); a receiver takes any number at once.

    Source: Aurora §8.1.
    """
    pairs_X2 = all_pairs(len(bytes_GG))
    return _by_sender("random", pairs_X2[rng.permutation(len(pairs_X2))], len(bytes_GG))


def spread_out(bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order:
    """Orders rank i's transfers to i + 1, i + 2, ... (mod G), one at a time; a receiver takes any number at once."""
    return _by_sender("spread-out", rotated_pairs(len(bytes_GG)), len(bytes_GG))


def _by_sender(method: str, pairs_X2: IntArray, ranks: int) -> Order:
    """An order in which senders have one transfer under way and receivers any number."""
    return Order(method, pairs_X2, recvs_open=max(1, ranks - 1))


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


class OrderStrategy(Protocol):
    """Signature of every entry of ORDER.

    Args:
        bytes_GG: (G, G) int64 with a zero diagonal, bytes from each rank to each other.
        network: the network that carries them.
        rng: draws random choices; equal generator states give equal orders.

    Returns:
        An Order of all ordered pairs of ranks.
    """

    def __call__(self, bytes_GG: IntArray, network: Network, *, rng: np.random.Generator) -> Order: ...


ORDER: dict[str, OrderStrategy] = {
    "openshop": openshop,
    "openshop-best": openshop_best,
    "birkhoff": birkhoff,
    "matchings": matchings,
    "paced": paced,
    "hierarchical": hierarchical,
    "aurora-alg1": aurora_alg1,
    "sjf": smallest_first,
    "random": random_order,
    "spread-out": spread_out,
    "all-at-once": all_at_once,
}
