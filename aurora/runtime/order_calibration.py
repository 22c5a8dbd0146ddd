"""Which way of posting an all-to-all is fastest on this fabric, by size: measured before serving starts."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from aurora.runtime.distributed.transport import Transport
from aurora.types import Cluster, Order, Plan
from aurora.types.arrays import FloatArray, IntArray

UNORDERED = ("all-at-once", "paced")
SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes that a rank sends on average
FEWEST, MOST = 3, 9  # repetitions of each shape
ROUNDS_S = 0.2  # for them: small sizes are repeated more often
LONG_S = 0.1  # larger sizes are not tried once one takes this long
STEPS = 4  # of sizes in a factor of two: what is remembered of the lines between those tried
MOST_NOISE = 0.03  # that keeps the plan's order
SHAPES: tuple[Callable[[int, np.random.Generator], FloatArray], ...] = (
    lambda n, rng: np.ones((n, n)),
    lambda n, rng: rng.integers(1, 100, (n, n)).astype(np.float64),
    lambda n, rng: np.stack([rng.permutation(1 / (1.0 + np.arange(n))) for _ in range(n)]),
)


@dataclass(frozen=True)
class OrderCalibration:
    """seconds_CW (C, W): what each of the ways took for each of sizes_C (C,) bytes a rank, medians summed over SHAPES.

    noise_CW (C, W): the standard error of each, as a part of it. The last way is the plan's own. orders: those of the others.
    """

    sizes_C: IntArray
    ways: tuple[str, ...]
    seconds_CW: FloatArray
    noise_CW: FloatArray
    orders: Mapping[str, Order]

    def way(self, rank_bytes: float) -> str:
        """The fastest where a rank sends rank_bytes on average: seconds between the sizes tried lie on lines in logarithms.

        The plan's own where the fastest does not differ from it by more than noise, of which MOST_NOISE counts.
        """
        step = int(STEPS * math.log2(max(rank_bytes, 1.0)))
        return self._way_by_step[min(step, len(self._way_by_step) - 1)]

    @cached_property
    def _way_by_step(self) -> list[str]:
        tried_C = np.log2(self.sizes_C)
        step_X = np.arange(int(STEPS * tried_C[-1]) + 2) / STEPS
        log_XW, noise_XW = (
            np.stack([np.interp(step_X, tried_C, column) for column in table_CW.T], axis=1)
            for table_CW in (np.log(self.seconds_CW), self.noise_CW)
        )
        ways = []
        for log_W, noise_W in zip(log_XW, noise_XW, strict=True):
            best = int(log_W.argmin())
            noise = min(float(np.hypot(noise_W[best], noise_W[-1])), MOST_NOISE)
            ways.append(self.ways[-1 if log_W[-1] <= log_W[best] + noise else best])
        return ways

    def order(self, planned: Order, rank_bytes: float) -> Order:
        """What to use instead of the planned order; every rank must ask with the same numbers."""
        return self.orders.get(self.way(rank_bytes), planned)

    def __str__(self) -> str:
        rows = []
        for size, seconds in zip(self.sizes_C.tolist(), self.seconds_CW.tolist(), strict=True):
            took = ", ".join(f"{way} {s * 1e3:.3g} ms" for way, s in zip(self.ways, seconds, strict=True))
            rows.append(f"{size / 1e6:.2g} MB a rank: {self.way(size)} ({took})")
        return "; ".join(rows)


def planned_method(plan: Plan) -> str:
    """The method of the plan's orders that `calibrate` shall try beside UNORDERED, if it has one."""
    methods = {order.method for model in plan.models for order in model.dispatch_L}
    return min(methods - set(UNORDERED), default=UNORDERED[0])


def calibrate(transport: Transport, cluster: Cluster, planned: str) -> OrderCalibration:
    """Time UNORDERED and the planned method of ORDER on drawn traffic; every rank comes to the same OrderCalibration.

    All ranks call it together. Interleaved, in alternating sequence, the first round not counted; that one says how many fit
    into ROUNDS_S. An exchange takes as long as on its slowest rank.
    """
    from aurora.planner.alltoall.registry import ORDER  # compiles: seconds that a run with the plan's order shall not pay

    ranks, rng = transport.ranks, np.random.default_rng(0)
    ways = (*(way for way in UNORDERED if way != planned), planned)
    seconds_CW: list[FloatArray] = []
    noise_CW: list[FloatArray] = []
    orders: dict[str, Order] = {}
    for size in SIZES:
        seconds_W, variance_W = np.zeros(len(ways)), np.zeros(len(ways))
        for shape in SHAPES:
            shape_GG = shape(ranks, rng)
            np.fill_diagonal(shape_GG, 0.0)
            bytes_GG = np.round(shape_GG * (size * ranks / max(shape_GG.sum(), 1.0))).astype(np.int64)
            orders = {way: ORDER[way](bytes_GG, cluster.network, rng=rng) for way in ways}
            took_TW = _took_TW(transport, list(orders.values()), bytes_GG)
            median_W = np.median(took_TW, axis=0)
            seconds_W += median_W
            # Of a median of normal values, from their median distance to it: 1.25 and 1.48.
            variance_W += (1.25 * 1.48 * np.median(abs(took_TW - median_W), axis=0)) ** 2 / len(took_TW)
        seconds_CW.append(seconds_W)
        noise_CW.append(np.sqrt(variance_W) / seconds_W)
        if seconds_W.min() > LONG_S * len(SHAPES):
            break
    del orders[planned]  # it was for drawn traffic; the others do not depend on it
    return OrderCalibration(np.array(SIZES[: len(seconds_CW)]), ways, np.stack(seconds_CW), np.stack(noise_CW), orders)


def _took_TW(transport: Transport, orders_W: list[Order], bytes_GG: IntArray) -> FloatArray:
    rank = transport.rank
    sends = [torch.zeros(size, dtype=torch.uint8) for size in bytes_GG[rank].tolist()]
    recvs = [torch.zeros(size, dtype=torch.uint8) for size in bytes_GG[:, rank].tolist()]

    def slowest_TW(rounds: int) -> FloatArray:
        took_TW = torch.zeros(rounds, len(orders_W), dtype=torch.float64)
        for number in range(rounds):
            for way in range(len(orders_W))[:: -1 if number % 2 else 1]:
                transport.gather(torch.zeros(1))
                began_s = time.perf_counter()
                transport.exchange(orders_W[way], sends, recvs, lambda *_: None)
                took_TW[number, way] = time.perf_counter() - began_s
        return np.asarray(transport.gather(took_TW).amax(dim=0).numpy())

    return slowest_TW(int(np.clip(ROUNDS_S / slowest_TW(1).sum(), FEWEST, MOST)))
