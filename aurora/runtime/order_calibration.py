"""Order calibration: measures, before serving starts, which order of an all-to-all is fastest on this network, by size."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from aurora.runtime.distributed.transport import Transport
from aurora.types import Cluster, Order, Plan
from aurora.types.arrays import FloatArray, IntArray

UNORDERED = ("all-at-once", "paced")
COLLECTIVE = "all_to_all_single"  # torch's own
WIDTHS = (4, 2)  # sends and receives of a stage that are tried beside those of the planned order
SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes that a rank sends on average
MIN_REPETITIONS, MAX_REPETITIONS = 3, 9  # of each shape
REPETITIONS_S = 0.2  # time for them: small sizes are repeated more often
LONG_S = 0.1  # larger sizes are not tried once one takes this long
MAX_NOISE = 0.03  # a slower planned order is kept within this much noise
SHAPES: tuple[Callable[[int, np.random.Generator], FloatArray], ...] = (
    lambda n, rng: np.ones((n, n)),
    lambda n, rng: rng.integers(1, 100, (n, n)).astype(np.float64),
    lambda n, rng: np.stack([rng.permutation(1 / (1.0 + np.arange(n))) for _ in range(n)]),
)


@dataclass(frozen=True)
class OrderCalibration:
    """Measured seconds of an all-to-all by size and method."""

    sizes_C: IntArray  # (C,) bytes per rank
    methods: tuple[str, ...]  # W ways to exchange: names of orders, COLLECTIVE, `stages_of`; the last is the plan's method
    seconds_CW: FloatArray  # (C, W) median seconds, summed over SHAPES
    noise_CW: FloatArray  # (C, W) standard error of seconds_CW, as a share of it
    orders: Mapping[str, Order | None]  # orders of the methods that do not depend on the planned order; None for COLLECTIVE
    widths: Mapping[str, int]  # sends and receives in a stage, of the planned order's methods in wider stages

    def seconds_W(self, rank_bytes: float) -> FloatArray:
        """Returns (W,) the seconds of each method for bytes that a rank sends on average.

        Between measured sizes they go by their logarithms; outside of them the nearest size counts.
        """
        return np.exp(self._at(rank_bytes, np.log(self.seconds_CW))) / len(SHAPES)

    def method(self, rank_bytes: float) -> str:
        """Returns the fastest method for bytes that a rank sends on average.

        The plan's method is returned unless another one is faster by more than the noise, of which at most MAX_NOISE counts.
        """
        log_W, noise_W = np.log(self.seconds_W(rank_bytes)), self._at(rank_bytes, self.noise_CW)
        best = int(log_W.argmin())
        noise = min(float(np.hypot(noise_W[best], noise_W[-1])), MAX_NOISE)
        return self.methods[-1 if log_W[-1] <= log_W[best] + noise else best]

    def order(self, planned: Order, method: str) -> Order | None:
        """Returns the order of a method, where the plan has `planned`; None: torch's own collective."""
        return planned.opened(self.widths[method]) if method in self.widths else self.orders.get(method, planned)

    def among(self, cluster: Cluster) -> "OrderCalibration":
        """Returns the calibration for another cluster, as of the ranks that are left: its orders, with the seconds measured."""
        from aurora.planner.alltoall.registry import ORDER

        ones_GG = 1 - np.eye(len(cluster), dtype=np.int64)
        made = {
            method: None if order is None else ORDER[method](ones_GG, cluster.network, rng=np.random.default_rng(0))
            for method, order in self.orders.items()
        }
        return replace(self, orders=made)

    @property
    def startup_s(self) -> float:
        """Seconds of an all-to-all of the smallest size, by the fastest method."""
        return float(self.seconds_CW[0].min()) / len(SHAPES)

    def _at(self, rank_bytes: float, table_CW: FloatArray) -> FloatArray:
        """(W,) the row of a table at a size."""
        size, tried_C = math.log2(max(rank_bytes, 1.0)), np.log2(self.sizes_C)
        return np.array([np.interp(size, tried_C, column) for column in table_CW.T])

    def __str__(self) -> str:
        rows = []
        for size, seconds in zip(self.sizes_C.tolist(), self.seconds_CW.tolist(), strict=True):
            took = ", ".join(f"{method} {s * 1e3:.3g} ms" for method, s in zip(self.methods, seconds, strict=True))
            rows.append(f"{size / 1e6:.2g} MB a rank: {self.method(size)} ({took})")
        return "; ".join(rows)


def planned_method(plan: Plan) -> str:
    """Returns the plan's method that `calibrate` tries beside UNORDERED: the first by name; UNORDERED[0] if there is none."""
    methods = {order.method for model in plan.models for order in model.dispatch_L}
    return min(methods - set(UNORDERED), default=UNORDERED[0])


def stages_of(planned: str, width: int) -> str:
    """Returns the name of the planned method in stages of `width` sends and receives."""
    return f"{planned} in stages of {width}"


def calibrate(transport: Transport, cluster: Cluster, planned: str, device: str = "cpu") -> OrderCalibration:
    """Times the planned method and others on drawn traffic. A collective call: all ranks make it and get the same result.

    The others are UNORDERED, and COLLECTIVE where the transport has it. Where orders run in stages, the others are a single
    stage of all transfers, and the planned method in stages of WIDTHS.

    Methods alternate. The first round is not counted; it tells how many rounds fit into REPETITIONS_S. An exchange counts with
    the seconds of its slowest rank.

    Args:
        transport: carries the exchanges.
        cluster: the machines, for the orders.
        planned: name of the planned method.
        device: where the tensors lie.
    """
    from aurora.planner.alltoall.registry import ORDER  # compiles: seconds that a run with the plan's order shall not pay

    ranks, rng = transport.ranks, np.random.default_rng(0)
    unordered = UNORDERED[:1] if transport.in_stages else UNORDERED
    fixed = [method for method in (*unordered, *([COLLECTIVE] if transport.has_collective else [])) if method != planned]
    drawn = ORDER[planned](np.ones((ranks, ranks), np.int64) - np.eye(ranks, dtype=np.int64), cluster.network, rng=rng)
    narrow = [width for width in WIDTHS if width < ranks - 1]  # in wider stages all transfers are open
    widths = {stages_of(planned, width): width for width in narrow if transport.in_stages and drawn.one_to_one}
    methods = (*fixed, *widths, planned)
    seconds_CW: list[FloatArray] = []
    noise_CW: list[FloatArray] = []
    orders: dict[str, Order | None] = {}
    for size in SIZES:
        seconds_W, variance_W = np.zeros(len(methods)), np.zeros(len(methods))
        for shape in SHAPES:
            shape_GG = shape(ranks, rng)
            np.fill_diagonal(shape_GG, 0.0)
            bytes_GG = np.round(shape_GG * (size * ranks / max(shape_GG.sum(), 1.0))).astype(np.int64)
            made = {name: ORDER[name](bytes_GG, cluster.network, rng=rng) for name in (*fixed, planned) if name != COLLECTIVE}
            orders = {method: made.get(method) for method in fixed}
            wider = [made[planned].opened(width) for width in widths.values()]
            took_TW = _took_TW(transport, [*orders.values(), *wider, made[planned]], bytes_GG, device)
            median_W = np.median(took_TW, axis=0)
            seconds_W += median_W
            # Of a median of normal values, from their median distance to it: 1.25 and 1.48.
            variance_W += (1.25 * 1.48 * np.median(abs(took_TW - median_W), axis=0)) ** 2 / len(took_TW)
        seconds_CW.append(seconds_W)
        noise_CW.append(np.sqrt(variance_W) / seconds_W)
        if seconds_W.min() > LONG_S * len(SHAPES):
            break
    sizes_C = np.array(SIZES[: len(seconds_CW)])
    return OrderCalibration(sizes_C, methods, np.stack(seconds_CW), np.stack(noise_CW), orders, widths)


def _took_TW(transport: Transport, orders_W: list[Order | None], bytes_GG: IntArray, device: str) -> FloatArray:
    """(T, W) seconds of T repetitions of each order, on the slowest rank."""
    rank = transport.rank
    sends, recvs = (
        torch.zeros(sum(sizes), dtype=torch.uint8, device=device).split_with_sizes(sizes)
        for sizes in (bytes_GG[rank].tolist(), bytes_GG[:, rank].tolist())
    )

    def slowest_TW(rounds: int) -> FloatArray:
        took_TW = torch.zeros(rounds, len(orders_W), dtype=torch.float64)
        for number in range(rounds):
            for method in range(len(orders_W))[:: -1 if number % 2 else 1]:
                transport.gather(torch.zeros(1))
                began_s = time.perf_counter()
                transport.exchange(orders_W[method], sends, recvs, lambda *_: None)
                transport.wait()
                took_TW[number, method] = time.perf_counter() - began_s
        return np.asarray(transport.gather(took_TW).amax(dim=0).numpy())

    return slowest_TW(int(np.clip(REPETITIONS_S / slowest_TW(1).sum(), MIN_REPETITIONS, MAX_REPETITIONS)))
