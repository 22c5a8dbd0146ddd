"""Calibration before serving: times the orders of an all-to-all by message size, and measures network rates and start-ups.

All at once is the default: an order is used only where it is faster by more than its spread (`OrderCalibration.method`).
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.network.switch import timed
from aurora.moe.transport import Transport
from aurora.types import Cluster, Order, Plan
from aurora.types.arrays import BoolArray, FloatArray, IntArray

UNORDERED = ("all-at-once", "paced")
COLLECTIVE = "all_to_all_single"  # torch's own
WIDTHS = (4, 2)  # sends and receives of a stage that are tried beside those of the planned order
SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes that a rank sends on average
MIN_REPETITIONS, MAX_REPETITIONS = 3, 9  # of each shape
REPETITIONS_S = 0.2  # time for them: small sizes are repeated more often
LONG_S = 0.1  # larger sizes are not tried once one takes this long: shorter ones tell more of start-ups than of rates
SHAPES: tuple[Callable[[int, np.random.Generator], FloatArray], ...] = (
    lambda n, rng: np.ones((n, n)),
    lambda n, rng: rng.integers(1, 100, (n, n)).astype(np.float64),
    lambda n, rng: np.stack([rng.permutation(1 / (1.0 + np.arange(n))) for _ in range(n)]),
)
MESSAGE_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)  # bytes of a message


@dataclass(frozen=True)
class OrderCalibration:
    """Measured seconds of an all-to-all by size and method: an order, a stage width, torch's collective."""

    # W ways to exchange: names of orders, COLLECTIVE or `stages_of`; the default is last
    methods: tuple[str, ...]
    sizes_C: IntArray  # (C,) bytes per rank
    seconds_CW: FloatArray  # (C, W) the default's median times the mean ratio to it in pairs of exchanges
    spread_CW: FloatArray  # (C, W) standard deviation of the logarithm of that ratio
    orders: Mapping[str, Order | None]  # orders of the methods that do not depend on the planned order; None for COLLECTIVE
    widths: Mapping[str, int]  # sends and receives in a stage, of the planned order's methods in wider stages

    def seconds_W(self, rank_bytes: float) -> FloatArray:
        """Returns (W,) the seconds of an all-to-all by each method, if a rank sends `rank_bytes` on average.

        Values are interpolated log-log between the measured sizes; beyond them, the value of the nearest size is returned.
        """
        return np.exp(self._at(rank_bytes, np.log(self.seconds_CW)))

    def method(self, rank_bytes: float) -> str:
        """Returns the name of the fastest method, if a rank sends `rank_bytes` on average.

        Of methods that are not the default, only those count that are faster than it by more than their spread.
        """
        log_W = np.log(self.seconds_W(rank_bytes))
        wins_W = log_W[-1] - log_W > self._at(rank_bytes, self.spread_CW)
        wins_W[-1] = True
        return self.methods[int(np.where(wins_W, log_W, np.inf).argmin())]

    def order(self, planned: Order, method: str) -> Order | None:
        """Returns the order that `method` uses in place of the order `planned`; None: torch's own collective.

        `method` is one of `methods`.
        """
        return planned.opened(self.widths[method]) if method in self.widths else self.orders.get(method, planned)

    def _at(self, rank_bytes: float, table_CW: FloatArray) -> FloatArray:
        """(W,) the row of a table at a size."""
        size, tried_C = math.log2(max(rank_bytes, 1.0)), np.log2(self.sizes_C)
        return np.array([np.interp(size, tried_C, column) for column in table_CW.T])

    def __str__(self) -> str:
        rows = []
        for size, seconds in zip(self.sizes_C.tolist(), self.seconds_CW.tolist(), strict=True):
            took = ", ".join(
                f"{method} {float(f'{s * 1e3:.3g}'):g} ms" for method, s in zip(self.methods, seconds, strict=True)
            )
            rows.append(f"{size / 1e6:.2g} MB a rank: {self.method(size)} ({took})")
        return "\n".join(rows)


def planned_method(plan: Plan) -> str | Order:
    """Returns the plan's ordering method, which `calibrate` times against the methods in UNORDERED.

    If the plan uses several, the first by name is returned; if it uses only methods in UNORDERED, UNORDERED[0]. If the method
    is not in ORDER or its order is hierarchical, the Order itself is returned, because it cannot be computed for other traffic.
    """
    orders = {order.method: order for model in plan.models for order in model.dispatch_L}
    method = min(orders.keys() - set(UNORDERED), default=UNORDERED[0])
    return method if method not in orders or (method in ORDER and orders[method].tier_X is None) else orders[method]


def stages_of(planned: str, width: int) -> str:
    """Returns the name of the method that runs the order `planned` in stages of `width` sends and receives."""
    return f"{planned} in stages of {width}"


def calibrate(transport: Transport, cluster: Cluster, planned: str | Order, device: str = "cpu") -> OrderCalibration:
    """Times all at once, the default, beside the planned method and others. A collective call, the same result on all ranks.

    The others are "paced", and COLLECTIVE if the transport has it. If the transport runs orders in stages, they are
    COLLECTIVE, and the planned order in stages of WIDTHS sends and receives.

    Traffic is random. Methods alternate. The first round is a warm-up that tells how many rounds fit into REPETITIONS_S. The
    time of an exchange is that of its slowest rank.

    Args:
        transport: carries the exchanges.
        cluster: the cluster for which orders are computed.
        planned: name of the planned method, or its order if the method is not in ORDER.
        device: device of the tensors.
    """
    ranks, rng = transport.ranks, np.random.default_rng(0)
    name = planned if isinstance(planned, str) else planned.method
    strategies = {**ORDER, **({} if isinstance(planned, str) else {name: lambda *_, **__: planned})}
    default = UNORDERED[0]
    others = [*(UNORDERED[1:] if not transport.in_stages else ()), *([COLLECTIVE] if transport.has_collective else [])]
    fixed = [*(method for method in others if method != name), default]
    drawn = strategies[name](np.ones((ranks, ranks), np.int64) - np.eye(ranks, dtype=np.int64), cluster.network, rng=rng)
    narrow = [width for width in WIDTHS if width < ranks - 1]  # in wider stages all transfers are open
    widths = {stages_of(name, width): width for width in narrow if transport.in_stages and drawn.one_to_one}
    methods = (*([name] if name != default else []), *widths, *fixed)
    orders: dict[str, Order | None] = {}

    def ways(size: int) -> Iterable[list[Callable[[], None]]]:
        for shape in SHAPES:
            shape_GG = shape(ranks, rng)
            np.fill_diagonal(shape_GG, 0.0)
            bytes_GG = np.round(shape_GG * (size * ranks / max(shape_GG.sum(), 1.0))).astype(np.int64)
            order_of = {
                method: strategies[method](bytes_GG, cluster.network, rng=rng) for method in methods if method in strategies
            }
            orders.update({method: order_of.get(method) for method in fixed})
            of_methods = [
                order_of[name].opened(widths[method]) if method in widths else order_of.get(method) for method in methods
            ]
            yield _performing(transport, [(order, bytes_GG) for order in of_methods], device)

    return OrderCalibration(methods, *_timed(transport, ways), orders, widths)


def _timed(
    transport: Transport, calls: Callable[[int], Iterable[Sequence[Callable[[], None]]]]
) -> tuple[IntArray, FloatArray, FloatArray]:
    """(C,) sizes, the first of SIZES; (C, W) the last call's median seconds times the mean ratio to it, a mean over all traffic
    of a size; (C, W) the standard deviation of the logarithm of this ratio.

    `calls` returns for a size the W calls for each traffic of that size.
    """
    seconds_CW: list[FloatArray] = []
    spread_CW: list[FloatArray] = []
    for size in SIZES:
        seconds_XW, variance_XW = [], []
        for calls_W in calls(size):
            took_TW = _took_TW(transport, calls_W)
            ratio_TW = np.log(took_TW / took_TW[:, -1:])  # of one round
            seconds_XW.append(np.median(took_TW[:, -1]) * np.exp(ratio_TW.mean(axis=0)))
            variance_XW.append(ratio_TW.var(axis=0, ddof=1))
        seconds_CW.append(np.mean(seconds_XW, axis=0))
        spread_CW.append(np.sqrt(np.mean(variance_XW, axis=0)))
        if seconds_CW[-1].min() > LONG_S:
            break
    return np.array(SIZES[: len(seconds_CW)]), np.stack(seconds_CW), np.stack(spread_CW)


def _performing(
    transport: Transport, exchanges: Sequence[tuple[Order | None, IntArray]], device: str
) -> list[Callable[[], None]]:
    """Returns a call for each exchange, which is given by its order and its bytes (G, G)."""
    rank = transport.rank
    out, into = (
        torch.zeros(int(max(sizes.sum() for sizes in ends)), dtype=torch.uint8, device=device)
        for ends in ([bytes_GG[rank] for _, bytes_GG in exchanges], [bytes_GG[:, rank] for _, bytes_GG in exchanges])
    )

    def perform(order: Order | None, bytes_GG: IntArray) -> None:
        sends, recvs = (
            tensor[: int(sizes.sum())].split_with_sizes(sizes.tolist())
            for tensor, sizes in ((out, bytes_GG[rank]), (into, bytes_GG[:, rank]))
        )
        transport.exchange(order, sends, recvs, lambda *_: None)
        transport.wait()

    return [partial(perform, *exchange) for exchange in exchanges]


def _took_TW(transport: Transport, calls_W: Sequence[Callable[[], None]]) -> FloatArray:
    """(T, W) seconds of T repetitions of each call, on the slowest rank."""

    def slowest_TW(rounds: int) -> FloatArray:
        took_TW = torch.zeros(rounds, len(calls_W), dtype=torch.float64)
        for number in range(rounds):
            for method in range(len(calls_W))[:: -1 if number % 2 else 1]:
                transport.gather(torch.zeros(1))
                began_s = time.perf_counter()
                calls_W[method]()
                took_TW[number, method] = time.perf_counter() - began_s
        return np.asarray(transport.gather(took_TW).amax(dim=0).numpy())

    return slowest_TW(int(np.clip(REPETITIONS_S / slowest_TW(1).sum(), MIN_REPETITIONS, MAX_REPETITIONS)))


def measured_network(transport: Transport, cluster: Cluster, device: str) -> Cluster:
    """Returns `cluster` with measured start-up times and rates.

    A collective call; all ranks get the same result. Every rank sends equally many bytes to every other rank, one partner at a
    time, so that start-ups add up. All port rates are scaled by one measured factor. With several servers, an exchange inside
    servers yields the factor of the port rates, and one between servers that of the NIC rates.
    """
    other_GG, startups_s, messages = ~np.eye(transport.ranks, dtype=bool), 0.0, 0
    server_G = np.array(cluster.servers.server_G if cluster.servers is not None else (), dtype=np.int64)
    same_GG = np.equal.outer(server_G, server_G) if server_G.any() else other_GG
    inside_GG, between_GG = other_GG & same_GG, other_GG & ~same_GG
    if inside_GG.any():
        took_s, share = _timed_exchange(transport, cluster, inside_GG, device)
        startups_s, messages, cluster = took_s, int(inside_GG.sum(axis=1).max()), _scaled(cluster, ports=share)
    if between_GG.any():
        took_s, share = _timed_exchange(transport, cluster, between_GG, device)
        startups_s, messages = startups_s + took_s, messages + int(between_GG.sum(axis=1).max())
        cluster = _scaled(cluster, ports=1.0 if inside_GG.any() else share, nics=share)
    gpus = (replace(gpu, startup_s=startups_s / messages if messages else gpu.startup_s) for gpu in cluster.gpus)
    return replace(cluster, gpus=tuple(gpus))


def _timed_exchange(transport: Transport, cluster: Cluster, pairs_GG: BoolArray, device: str) -> tuple[float, float]:
    """The start-up seconds of an exchange between some pairs of ranks, and the share of the cluster's rates that it reaches."""
    network, network_s, took_s = cluster.network.without_startup, [], []
    for size in MESSAGE_SIZES:
        bytes_GG = pairs_GG * size
        order = ORDER["openshop"](bytes_GG, network, rng=np.random.default_rng(0))
        network_s.append(timed(order, bytes_GG, network).makespan_s)
        took_s.append(float(np.median(_took_TW(transport, _performing(transport, [(order, bytes_GG)], device)))))
        if took_s[-1] > max(LONG_S, 4 * took_s[0]):
            break
    return startups_and_share((network_s[0], network_s[-1]), (took_s[0], took_s[-1]))


def _scaled(cluster: Cluster, ports: float = 1.0, nics: float = 1.0) -> Cluster:
    """The cluster with its ports' rates times a factor, and those of its servers' NICs times another."""
    gpus = tuple(replace(gpu, out_Bps=gpu.out_Bps * ports, in_Bps=gpu.in_Bps * ports) for gpu in cluster.gpus)
    servers = cluster.servers
    return replace(cluster, gpus=gpus, servers=None if servers is None else replace(servers, nic_Bps=servers.nic_Bps * nics))


def startups_and_share(ports_s: tuple[float, float], took_s: tuple[float, float]) -> tuple[float, float]:
    """Estimates start-up time and achieved rate from a small and a large exchange (a line through the two measured times).

    Args:
        ports_s: seconds of the small and of the large exchange at the network's full rates.
        took_s: measured seconds of the small and of the large exchange.

    Returns:
        (start-up seconds of an exchange, achieved share of the full rates). If the line has a negative start-up, as after a
        burst, start-up is 0 and the rate is that of the large exchange.
    """
    (small_s, large_s), (first_s, last_s) = ports_s, took_s
    startups_s = max(0.0, first_s - small_s * max(0.0, last_s - first_s) / (large_s - small_s))
    return startups_s, large_s / (last_s - startups_s) if last_s > startups_s else 1.0
