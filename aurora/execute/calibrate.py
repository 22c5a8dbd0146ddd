"""Which way of posting an all-to-all is fastest on this fabric, by size: measured before serving starts."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from aurora.ranks.transport import Transport
from aurora.types import Cluster, Order
from aurora.types.arrays import FloatArray, IntArray

UNORDERED = ("all-at-once", "paced")
SIZES = (1 << 16, 1 << 19, 1 << 22, 1 << 25)  # bytes that a rank sends on average
REPETITIONS = 3
LONG_S = 0.1  # larger sizes are not tried once one takes this long
SHAPES: tuple[Callable[[int, np.random.Generator], FloatArray], ...] = (
    lambda n, rng: np.ones((n, n)),
    lambda n, rng: rng.integers(1, 100, (n, n)).astype(np.float64),
    lambda n, rng: np.stack([rng.permutation(1 / (1.0 + np.arange(n))) for _ in range(n)]),
)


@dataclass(frozen=True)
class Choice:
    """seconds_CW (C, W): what each of the ways took for each of sizes_C (C,) bytes a rank, the median, summed over SHAPES.

    The last way is the plan's own. orders: of the others, by name.
    """

    sizes_C: IntArray
    ways: tuple[str, ...]
    seconds_CW: FloatArray
    orders: Mapping[str, Order]

    def way(self, rank_bytes: float) -> str:
        """The fastest where a rank sends rank_bytes on average."""
        apart_C = np.abs(np.log(self.sizes_C) - np.log(max(rank_bytes, 1.0)))
        return self.ways[int(self.seconds_CW[apart_C.argmin()].argmin())]

    def order(self, planned: Order, rank_bytes: float) -> Order:
        """What to use instead of the planned order; every rank must ask with the same numbers."""
        return self.orders.get(self.way(rank_bytes), planned)

    def __str__(self) -> str:
        rows = []
        for size, seconds in zip(self.sizes_C.tolist(), self.seconds_CW.tolist(), strict=True):
            took = ", ".join(f"{way} {s * 1e3:.3g} ms" for way, s in zip(self.ways, seconds, strict=True))
            rows.append(f"{size / 1e6:.2g} MB a rank: {self.way(size)} ({took})")
        return "; ".join(rows)


def calibrate(transport: Transport, cluster: Cluster, planned: str) -> Choice:
    """Time UNORDERED and the planned method of ORDER on drawn traffic; every rank comes to the same Choice.

    All ranks call it together. Interleaved, in alternating sequence, the first round not counted. An exchange takes as long as
    on its slowest rank.
    """
    from aurora.plan.order import ORDER  # compiles: seconds that a run with the plan's order shall not pay

    ranks, rng = transport.ranks, np.random.default_rng(0)
    ways = (*(way for way in UNORDERED if way != planned), planned)
    seconds_CW: list[FloatArray] = []
    orders: dict[str, Order] = {}
    for size in SIZES:
        seconds_W = np.zeros(len(ways))
        for shape in SHAPES:
            shape_GG = shape(ranks, rng)
            np.fill_diagonal(shape_GG, 0.0)
            bytes_GG = np.round(shape_GG * (size * ranks / max(shape_GG.sum(), 1.0))).astype(np.int64)
            orders = {way: ORDER[way](bytes_GG, cluster.out_Bps_G, cluster.in_Bps_G, rng) for way in ways}
            seconds_W += _median_W(transport, list(orders.values()), bytes_GG)
        seconds_CW.append(seconds_W)
        if seconds_W.min() > LONG_S * len(SHAPES):
            break
    del orders[planned]  # it was for drawn traffic; the others do not depend on it
    return Choice(np.array(SIZES[: len(seconds_CW)]), ways, np.stack(seconds_CW), orders)


def _median_W(transport: Transport, orders_W: list[Order], bytes_GG: IntArray) -> FloatArray:
    rank = transport.rank
    sends = [torch.zeros(size, dtype=torch.uint8) for size in bytes_GG[rank].tolist()]
    recvs = [torch.zeros(size, dtype=torch.uint8) for size in bytes_GG[:, rank].tolist()]
    took_TW = torch.zeros(REPETITIONS + 1, len(orders_W), dtype=torch.float64)
    for repetition in range(len(took_TW)):
        for way in range(len(orders_W))[:: 1 if repetition % 2 else -1]:
            transport.gather(torch.zeros(1))
            began_s = time.perf_counter()
            transport.exchange(orders_W[way], sends, recvs, lambda *_: None)
            took_TW[repetition, way] = time.perf_counter() - began_s
    slowest_TW = transport.gather(took_TW).amax(dim=0)
    return np.asarray(np.median(slowest_TW[1:].numpy(), axis=0))
