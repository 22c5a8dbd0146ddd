"""Which way of posting an all-to-all is fastest on this fabric, by size: measured before serving starts."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from aurora.plan.order import ORDER
from aurora.ranks.transport import Transport
from aurora.types import Cluster, Order
from aurora.types.arrays import FloatArray, IntArray

WAYS = ("all-at-once", "paced", "openshop")  # the last stands for whatever one-at-a-time order the plan has
SIZES = (1 << 16, 1 << 19, 1 << 22, 1 << 25)  # bytes that a rank sends on average
REPETITIONS = 3
LONG_S = 0.1  # larger sizes are not tried once one takes this long


@dataclass(frozen=True)
class Choice:
    """ways_C: the fastest of WAYS for each of sizes_C (C,) bytes a rank; seconds_CW (C, W): what each took, the median."""

    sizes_C: IntArray
    seconds_CW: FloatArray
    orders: Mapping[str, Order]

    @property
    def ways_C(self) -> list[str]:
        return [WAYS[way] for way in self.seconds_CW.argmin(axis=1)]

    def order(self, planned: Order, rank_bytes: float) -> Order:
        """What to use instead of the planned order where a rank sends rank_bytes on average; every rank must ask alike."""
        apart_C = np.abs(np.log(self.sizes_C) - np.log(max(rank_bytes, 1.0)))
        return self.orders.get(self.ways_C[int(apart_C.argmin())], planned)

    def __str__(self) -> str:
        rows = zip(self.sizes_C.tolist(), self.ways_C, self.seconds_CW.tolist(), strict=True)
        return "; ".join(
            f"{size / 1e6:.2g} MB a rank: {'planned order' if way == WAYS[-1] else way} "
            f"({', '.join(f'{name} {s * 1e3:.3g} ms' for name, s in zip(WAYS, seconds, strict=True))})"
            for size, way, seconds in rows
        )


def calibrate(transport: Transport, cluster: Cluster) -> Choice:
    """Time WAYS on drawn traffic through the transport; every rank comes to the same Choice. All ranks call it together.

    Interleaved, in alternating sequence, the first round not counted. An exchange takes as long as on its slowest rank.
    """
    ranks, rng = transport.ranks, np.random.default_rng(0)
    shape_GG = rng.integers(1, 100, (ranks, ranks)).astype(float)
    np.fill_diagonal(shape_GG, 0.0)
    seconds_CW: list[FloatArray] = []
    orders: dict[str, Order] = {}
    for size in SIZES:
        bytes_GG = np.round(shape_GG * (size * ranks / max(shape_GG.sum(), 1.0))).astype(np.int64)
        orders = {way: ORDER[way](bytes_GG, cluster.out_Bps_G, cluster.in_Bps_G, rng) for way in WAYS}
        seconds_CW.append(_median_W(transport, orders, bytes_GG))
        if seconds_CW[-1].min() > LONG_S:
            break
    del orders[WAYS[-1]]
    return Choice(np.array(SIZES[: len(seconds_CW)]), np.stack(seconds_CW), orders)


def _median_W(transport: Transport, orders: Mapping[str, Order], bytes_GG: IntArray) -> FloatArray:
    rank = transport.rank
    sends = [torch.zeros(size, dtype=torch.uint8) for size in bytes_GG[rank].tolist()]
    recvs = [torch.zeros(size, dtype=torch.uint8) for size in bytes_GG[:, rank].tolist()]
    took_TW = torch.zeros(REPETITIONS + 1, len(WAYS), dtype=torch.float64)
    for repetition in range(len(took_TW)):
        for way in range(len(WAYS))[:: 1 if repetition % 2 else -1]:
            transport.gather(torch.zeros(1))
            began_s = time.perf_counter()
            transport.exchange(orders[WAYS[way]], sends, recvs, lambda *_: None)
            took_TW[repetition, way] = time.perf_counter() - began_s
    slowest_TW = transport.gather(took_TW).amax(dim=0)
    return np.asarray(np.median(slowest_TW[1:].numpy(), axis=0))
