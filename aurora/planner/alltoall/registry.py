"""ORDER: one all-to-all, by name. Each takes (bytes_GG, out_Bps_G, in_Bps_G, rng, startup_s_G) and gives an Order of all pairs.

bytes_GG (G, G) int64 with a zero diagonal, rates (G,) float64 in bytes per second, start-ups (G,) in seconds a message (none
by default; only the open shops look at them). How long an order takes is
`timing.timed`'s to say, so makers and baselines are timed by the same switch.
"""

from bisect import insort
from dataclasses import replace
from typing import Protocol

import numpy as np

from aurora.planner.alltoall.birkhoff import slots
from aurora.planner.alltoall.open_shop import DenseShop
from aurora.planner.alltoall.split_transfers import CUT_RUNS, CutShop, best_split, best_whole
from aurora.planner.alltoall.sub_channels import sub_channel_counts, sub_channel_slots
from aurora.planner.network.lower_bounds import one_to_one, pair_seconds, with_startup
from aurora.types import Order, SubChannels
from aurora.types.arrays import FloatArray, IntArray


class OrderStrategy(Protocol):
    """What every entry of ORDER is."""

    def __call__(
        self,
        bytes_GG: IntArray,
        out_Bps: FloatArray,
        in_Bps: FloatArray,
        rng: np.random.Generator,
        startup_s: FloatArray | None = None,
    ) -> Order: ...


SMALL = 12  # ranks; below this one priority alone can be far from the bound, and trying more is cheap
SMALL_TRIES = 64
MOST_TRIES = 2500
SLOTS = 8  # times n: more than Birkhoff's fattest matchings need on most traffic
BEST_OPERATIONS = 2e6  # what openshop-best may spend, in steps of the inner loop


def openshop(
    bytes_GG: IntArray,
    out_Bps: FloatArray,
    in_Bps: FloatArray,
    rng: np.random.Generator,
    startup_s: FloatArray | None = None,
    shop: DenseShop | None = None,
) -> Order:
    """Dense open shop, no splits, no barriers: when a sender and a receiver are both free and have traffic, it starts.

    Of the ports that become free the one with the largest remaining load chooses first, and takes the free partner with the
    largest. Below SMALL ranks SMALL_TRIES further priorities are drawn and the shortest schedule is kept. One message a pair,
    one partner at a time. Makespan below twice the one-to-one bound, as of any dense schedule. shop: buffers to work in, for
    who orders every batch. Source: Gonzalez & Sahni 1976.
    """
    n = len(bytes_GG)
    shop = DenseShop(n) if shop is None else shop
    startup_s = np.zeros(n) if startup_s is None else startup_s
    bound_s = with_startup(bytes_GG, out_Bps, in_Bps, startup_s)
    tries = SMALL_TRIES if n < SMALL else 0
    shop.search(pair_seconds(bytes_GG, out_Bps, in_Bps, startup_s), tries, bound_s * (1 + 1e-12), rng)
    planned_X2 = np.stack([shop.src_X[: shop.count], shop.dst_X[: shop.count]], axis=1)
    return Order("openshop", np.concatenate([planned_X2, _silent(bytes_GG)]))


def openshop_best(
    bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator, startup_s: FloatArray | None = None
) -> Order:
    """The shortest of many dense open-shop schedules with drawn priorities, some tens of milliseconds' worth; splits a little.

    Up to exact.MOST_RANKS ranks it starts from the shortest schedule with one message a pair. Where what it starts from is
    above the bound, up to dense.MOST_CUTS pairs go in two parts, as long as each further message gains split.WORTH of the
    bound, start-ups counted: never longer than without, and seldom more than one or two. `openshop` always sends one a pair.
    """
    n, tries = len(bytes_GG), search_tries(len(bytes_GG))
    shop = CutShop(bytes_GG, out_Bps, in_Bps, np.zeros(n) if startup_s is None else startup_s)
    found = best_split(shop, best_whole(shop, tries, rng), min(CUT_RUNS, tries), rng)
    silent_X2 = _silent(bytes_GG)
    order = Order("openshop-best", np.concatenate([found.pairs_X2, silent_X2]))
    if len(order.pairs_X2) == n * (n - 1):
        return order
    return replace(order, share_X2=np.concatenate([found.share_X2, np.tile([0.0, 1.0], (len(silent_X2), 1))]))


def search_tries(ranks: int) -> int:
    """How many dense schedules openshop-best looks at."""
    return int(np.clip(BEST_OPERATIONS / max(1, ranks) ** 2.4, SMALL_TRIES, MOST_TRIES))


def birkhoff(
    bytes_GG: IntArray,
    out_Bps: FloatArray,
    in_Bps: FloatArray,
    rng: np.random.Generator,
    startup_s: FloatArray | None = None,
    most: int | None = None,
) -> Order:
    """Birkhoff-von Neumann slots, one partner at a time, transfers split between slots; meets the one-to-one bound.

    Exact: on equal ports in bytes, on mixed ones in ticks of a 2^40th of the bound. At most `most` slots are peeled (SLOTS n by
    default); what is left after them goes last, in dense open-shop order. Every slot costs a start-up. Source: Aurora Thm 4.2.
    """
    n = len(bytes_GG)
    seconds_GG = pair_seconds(bytes_GG, out_Bps, in_Bps)
    equal = len(np.unique(np.concatenate([out_Bps, in_Bps]))) <= 1
    bound_s = one_to_one(bytes_GG, out_Bps, in_Bps)
    work_GG = bytes_GG if equal else _ticks(seconds_GG, bound_s)
    pieces = _Pieces(work_GG)
    for _, partner_G, units_G in slots(work_GG, SLOTS * n if most is None else most):
        for src in np.flatnonzero(units_G).tolist():
            pieces.serve(src, int(partner_G[src]), int(units_G[src]))
    return pieces.order("birkhoff")


def sub_channels(
    bytes_GG: IntArray,
    out_Bps: FloatArray,
    in_Bps: FloatArray,
    rng: np.random.Generator,
    startup_s: FloatArray | None = None,
    most: int | None = None,
) -> Order:
    """Slots in which a fast port serves several slow ones at once, each over whole lanes; meets the fluid bound.

    To within the rounding of rates to lanes (`lane_counts`) and of every piece to whole bytes. At most `most` slots are peeled
    (SLOTS n by default); what is left after them goes last, one partner at a time. Transfers are split between slots, and each
    piece costs a start-up. Source: the fluid bound of Aurora Thm 5.2, which one partner at a time misses on mixed ports.
    """
    out_G, in_G = sub_channel_counts(bytes_GG, out_Bps, in_Bps)
    work_GG = _ticks(bytes_GG, float(bytes_GG.sum()))
    pieces = _Pieces(work_GG)
    for sub_channels_GG, units_GG in sub_channel_slots(work_GG, out_G, in_G, SLOTS * len(bytes_GG) if most is None else most):
        for src, dst in np.argwhere(units_GG).tolist():
            pieces.serve(src, dst, int(units_GG[src, dst]), int(sub_channels_GG[src, dst]))
    return pieces.order("sub-channels", out_G, in_G)


class _Pieces:
    """Rows of an order that splits its transfers, while slots are peeled off."""

    def __init__(self, work_GG: IntArray) -> None:
        self.work_GG, self.done_GG = work_GG, np.zeros_like(work_GG)
        self.rows: list[tuple[int, int]] = []
        self.shares: list[tuple[float, float]] = []
        self.sub_channels: list[int] = []

    def serve(self, src: int, dst: int, units: int, sub_channels: int = 1) -> None:
        before, whole = int(self.done_GG[src, dst]), int(self.work_GG[src, dst])
        self.done_GG[src, dst] += units
        self.rows.append((src, dst))
        self.shares.append((before / whole, (before + units) / whole))
        self.sub_channels.append(sub_channels)

    def order(self, method: str, out_G: IntArray | None = None, in_G: IntArray | None = None) -> Order:
        """What is served so far, then what is left in dense open-shop order over all lanes that both ports have."""
        n = len(self.work_GG)
        wide_GG = np.ones((n, n)) if out_G is None or in_G is None else np.minimum(out_G[:, None], in_G[None, :])
        left_GG = self.work_GG - self.done_GG
        if left_GG.any():
            shop = DenseShop(n)
            shop.run(left_GG / wide_GG)
            for src, dst in zip(shop.src_X[: shop.count].tolist(), shop.dst_X[: shop.count].tolist(), strict=True):
                self.serve(src, dst, int(left_GG[src, dst]), int(wide_GG[src, dst]))
        silent = [pair for pair in _all_pairs(n) if self.work_GG[pair] == 0]
        share_X2 = np.array([*self.shares, *([(0.0, 1.0)] * len(silent))]).reshape(-1, 2)
        made = replace(_order(method, self.rows + silent), share_X2=share_X2)
        if out_G is None or in_G is None:
            return made
        row_X = np.array([*self.sub_channels, *([1] * len(silent))], dtype=np.int64)
        return replace(made, sub_channels=SubChannels(row_X, out_G, in_G))


def aurora_alg1(
    bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator, startup_s: FloatArray | None = None
) -> Order:
    """Aurora's Algorithm 1, read literally: the busiest GPU's transfers in random order, then GPU by GPU, busiest first, each
    transfer at the earliest time at which both of its ends are still free. One partner at a time. Source: Aurora §4.2.
    """
    n = len(bytes_GG)
    seconds_GG = pair_seconds(bytes_GG, out_Bps, in_Bps)
    busy: list[list[tuple[float, float]]] = [[] for _ in range(2 * n)]  # of each port, senders first, by start
    started: list[tuple[float, int, int]] = []
    left_GG = bytes_GG.copy()
    for turn in range(n):
        traffic = np.maximum(left_GG.sum(axis=1) / out_Bps, left_GG.sum(axis=0) / in_Bps)
        gpu = int(np.argmax(traffic))
        pairs = [(gpu, j) for j in range(n) if left_GG[gpu, j]] + [(i, gpu) for i in range(n) if left_GG[i, gpu]]
        if turn == 0:
            pairs = [pairs[k] for k in rng.permutation(len(pairs))]
        for src, dst in pairs:
            begin = _earliest(busy[src], busy[n + dst], float(seconds_GG[src, dst]))
            for port in (src, n + dst):
                insort(busy[port], (begin, begin + float(seconds_GG[src, dst])))
            started.append((begin, src, dst))
            left_GG[src, dst] = 0
    silent = [pair for pair in _all_pairs(n) if bytes_GG[pair] == 0]
    return _order("aurora-alg1", [(src, dst) for _, src, dst in sorted(started)] + silent)


def _earliest(a: list[tuple[float, float]], b: list[tuple[float, float]], seconds: float) -> float:
    """The first time at which neither port is busy for `seconds`."""
    at = 0.0
    for begin, end in sorted(a + b):
        if begin - at >= seconds * (1 - 1e-12):
            break
        at = max(at, end)
    return at


def paced(
    bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator, startup_s: FloatArray | None = None
) -> Order:
    """Everything posted together, each pair held to bytes / T, T the fluid bound: all end at T on any ports (coflow MADD)."""
    return replace(all_at_once(bytes_GG, out_Bps, in_Bps, rng), method="paced", paced=True)


def smallest_first(
    bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator, startup_s: FloatArray | None = None
) -> Order:
    """SJF: every sender sends its smallest transfer first, one at a time; receivers take what comes (Aurora §8.1)."""
    return _sender_order("sjf", sorted(_all_pairs(len(bytes_GG)), key=lambda p: (bytes_GG[p], p)), len(bytes_GG))


def random_order(
    bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator, startup_s: FloatArray | None = None
) -> Order:
    """RCS: every sender sends in random order, one at a time; receivers take what comes (Aurora §8.1)."""
    pairs = _all_pairs(len(bytes_GG))
    return _sender_order("random", [pairs[i] for i in rng.permutation(len(pairs))], len(bytes_GG))


def spread_out(
    bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator, startup_s: FloatArray | None = None
) -> Order:
    """Step s sends to (i + s) mod G, one at a time; receivers take what comes."""
    n = len(bytes_GG)
    return _sender_order("spread-out", [(i, (i + step) % n) for step in range(1, n) for i in range(n)], n)


def all_at_once(
    bytes_GG: IntArray, out_Bps: FloatArray, in_Bps: FloatArray, rng: np.random.Generator, startup_s: FloatArray | None = None
) -> Order:
    """Every transfer posted together; ports are shared."""
    n = len(bytes_GG)
    return _order("all-at-once", _all_pairs(n), sends_open=max(1, n - 1), recvs_open=max(1, n - 1))


ORDER: dict[str, OrderStrategy] = {
    "openshop": openshop,
    "openshop-best": openshop_best,
    "birkhoff": birkhoff,
    "sub-channels": sub_channels,
    "paced": paced,
    "aurora-alg1": aurora_alg1,
    "sjf": smallest_first,
    "random": random_order,
    "spread-out": spread_out,
    "all-at-once": all_at_once,
}


def _ticks(work_GG: IntArray | FloatArray, whole: float) -> IntArray:
    """(n, n) int64: the work in 2^40ths of the whole, rounded up."""
    return np.ceil(work_GG / max(whole, 1e-300) * 2**40).astype(np.int64)


def _silent(bytes_GG: IntArray) -> IntArray:
    """(X, 2) the pairs that have nothing to send in this batch."""
    return np.argwhere((bytes_GG == 0) & ~np.eye(len(bytes_GG), dtype=np.bool_))


def _all_pairs(n: int) -> list[tuple[int, int]]:
    return [(src, dst) for src in range(n) for dst in range(n) if src != dst]


def _sender_order(method: str, pairs: list[tuple[int, int]], n: int) -> Order:
    return _order(method, pairs, recvs_open=max(1, n - 1))


def _order(method: str, pairs: list[tuple[int, int]], sends_open: int = 1, recvs_open: int = 1) -> Order:
    return Order(method, np.array(pairs, dtype=np.int64).reshape(-1, 2), sends_open, recvs_open)
