"""Orders of one all-to-all, by name. Each takes (bytes_GG, out_Bps_G, in_Bps_G, rng) and gives an Order of all pairs.

bytes_GG (G, G) int64 with a zero diagonal, rates (G,) float64 in bytes per second. How long an order takes is
`switch.timed`'s to say, so makers and baselines are timed by the same switch.
"""

from collections.abc import Callable

import numpy as np

from aurora.plan.bounds import one_to_one, pair_seconds
from aurora.types import Order
from aurora.types.arrays import FloatArray, IntArray

OrderMaker = Callable[[IntArray, FloatArray, FloatArray, np.random.Generator], Order]


SMALL = 12  # ranks; below this one priority alone can be far from the bound, and trying more is cheap
TRIES = 24


def openshop(bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator) -> Order:
    """Dense open shop, no splits, no barriers: when a sender and a receiver are both free and have traffic, it starts.

    Among the pairs that could start, the one with the busiest remaining port goes first, then the larger sum of both
    ports, then the lower index. Below SMALL ranks TRIES further priorities are drawn and the shortest schedule is kept.
    One message a pair, one partner at a time. Makespan below twice the one-to-one bound, as of any dense schedule.
    Source: THEORY §1; Gonzalez & Sahni 1976.
    """
    seconds_GG = pair_seconds(bytes_GG, out_Bps, in_Bps)
    n = len(bytes_GG)
    pairs, best_s = _dense(seconds_GG, np.zeros((n, n)))
    if n < SMALL:
        bound_s = one_to_one(bytes_GG, out_Bps, in_Bps)
        for _ in range(TRIES):
            if best_s <= bound_s:
                break
            drawn, drawn_s = _dense(seconds_GG, rng.uniform(-0.5, 0.5, (n, n)) * bound_s)
            if drawn_s < best_s:
                pairs, best_s = drawn, drawn_s
    return _order("openshop", pairs + [pair for pair in _all_pairs(n) if bytes_GG[pair] == 0])


def _dense(seconds_GG: FloatArray, favour_GG: FloatArray) -> tuple[list[tuple[int, int]], float]:
    """Pairs in order of their start in a dense open-shop schedule, and its makespan; favour_GG adds to a pair's priority."""
    n = len(seconds_GG)
    waiting_GG = seconds_GG > 0
    left_out, left_in = seconds_GG.sum(axis=1), seconds_GG.sum(axis=0)
    free_out, free_in = np.zeros(n), np.zeros(n)
    pairs: list[tuple[int, int]] = []
    now = 0.0
    while waiting_GG.any():
        ready_GG = waiting_GG & (free_out <= now)[:, None] & (free_in <= now)[None, :]
        if not ready_GG.any():
            now = float(min(free_out[free_out > now].min(initial=np.inf), free_in[free_in > now].min(initial=np.inf)))
            continue
        busiest_GG = np.maximum(left_out[:, None], left_in[None, :]) + favour_GG
        sum_GG = left_out[:, None] + left_in[None, :]
        best = np.flatnonzero(ready_GG & (busiest_GG == busiest_GG[ready_GG].max()))
        src, dst = divmod(int(best[np.argmax(sum_GG.flat[best])]), n)
        free_out[src] = free_in[dst] = now + seconds_GG[src, dst]
        left_out[src] -= seconds_GG[src, dst]
        left_in[dst] -= seconds_GG[src, dst]
        waiting_GG[src, dst] = False
        pairs.append((src, dst))
    return pairs, float(max(free_out.max(initial=0.0), free_in.max(initial=0.0)))


def smallest_first(bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator) -> Order:
    """SJF: every sender sends its smallest transfer first, one at a time; receivers take what comes (Aurora §8.1)."""
    return _sender_order("sjf", sorted(_all_pairs(len(bytes_GG)), key=lambda p: (bytes_GG[p], p)), len(bytes_GG))


def random_order(bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator) -> Order:
    """RCS: every sender sends in random order, one at a time; receivers take what comes (Aurora §8.1)."""
    pairs = _all_pairs(len(bytes_GG))
    return _sender_order("random", [pairs[i] for i in rng.permutation(len(pairs))], len(bytes_GG))


def spread_out(bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator) -> Order:
    """Step s sends to (i + s) mod G, one at a time; receivers take what comes."""
    n = len(bytes_GG)
    return _sender_order("spread-out", [(i, (i + step) % n) for step in range(1, n) for i in range(n)], n)


def all_at_once(bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator) -> Order:
    """Every transfer posted together; ports are shared."""
    n = len(bytes_GG)
    return _order("all-at-once", _all_pairs(n), sends_open=max(1, n - 1), recvs_open=max(1, n - 1))


ORDER: dict[str, OrderMaker] = {
    "openshop": openshop,
    "sjf": smallest_first,
    "random": random_order,
    "spread-out": spread_out,
    "all-at-once": all_at_once,
}


def _all_pairs(n: int) -> list[tuple[int, int]]:
    return [(src, dst) for src in range(n) for dst in range(n) if src != dst]


def _sender_order(method: str, pairs: list[tuple[int, int]], n: int) -> Order:
    return _order(method, pairs, recvs_open=max(1, n - 1))


def _order(method: str, pairs: list[tuple[int, int]], sends_open: int = 1, recvs_open: int = 1) -> Order:
    return Order(method, np.array(pairs, dtype=np.int64).reshape(-1, 2), sends_open, recvs_open)
