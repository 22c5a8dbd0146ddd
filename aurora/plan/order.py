"""Orders of one all-to-all, by name. Each takes (bytes_GG, out_Bps_G, in_Bps_G, rng) and gives an Order of all pairs.

bytes_GG (G, G) int64 with a zero diagonal, rates (G,) float64 in bytes per second. How long an order takes is
`switch.timed`'s to say, so makers and baselines are timed by the same switch.
"""

from collections.abc import Callable

import numpy as np

from aurora.plan.bounds import one_to_one, pair_seconds
from aurora.plan.dense import DenseShop
from aurora.types import Order
from aurora.types.arrays import FloatArray, IntArray

OrderMaker = Callable[[IntArray, FloatArray, FloatArray, np.random.Generator], Order]


SMALL = 12  # ranks; below this one priority alone can be far from the bound, and trying more is cheap
SMALL_TRIES = 64
MOST_TRIES = 4000
BEST_OPERATIONS = 2e6  # what openshop-best may spend, in steps of the inner loop


def openshop(bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator) -> Order:
    """Dense open shop, no splits, no barriers: when a sender and a receiver are both free and have traffic, it starts.

    Of the ports that become free the one with the largest remaining load chooses first, and takes the free partner with the
    largest. Below SMALL ranks SMALL_TRIES further priorities are drawn and the shortest schedule is kept. One message a pair,
    one partner at a time. Makespan below twice the one-to-one bound, as of any dense schedule. Source: THEORY §1; Gonzalez &
    Sahni 1976.
    """
    return _open_shop("openshop", bytes_GG, out_Bps, in_Bps, rng, SMALL_TRIES if len(bytes_GG) < SMALL else 0)


def openshop_best(bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator) -> Order:
    """The shortest of many dense open-shop schedules with drawn priorities, some tens of milliseconds' worth."""
    tries = int(np.clip(BEST_OPERATIONS / max(1, len(bytes_GG)) ** 2.4, SMALL_TRIES, MOST_TRIES))
    return _open_shop("openshop-best", bytes_GG, out_Bps, in_Bps, rng, tries)


def _open_shop(
    name: str, bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator, tries: int
) -> Order:
    n = len(bytes_GG)
    shop = DenseShop(n)
    shop.search(pair_seconds(bytes_GG, out_Bps, in_Bps), tries, one_to_one(bytes_GG, out_Bps, in_Bps) * (1 + 1e-12), rng)
    pairs = zip(shop.src_X[: shop.count].tolist(), shop.dst_X[: shop.count].tolist(), strict=True)
    return _order(name, [*pairs, *(pair for pair in _all_pairs(n) if bytes_GG[pair] == 0)])


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
    "openshop-best": openshop_best,
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
