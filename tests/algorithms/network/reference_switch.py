"""The switch written for reading: every event looks at every flow. What the compiled one is compared with."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aurora.algorithms.network.routes import Routes, route
from aurora.types import Network, Order
from aurora.types.arrays import FloatArray, IntArray


def fair_rates(src_X: IntArray, dst_X: IntArray, routes: Routes, most_Bps_X: FloatArray | None = None) -> FloatArray:
    """(X,) max-min fair rates of concurrent flows by progressive filling: the tightest resource fixes its flows, and so on.

    most_Bps_X (X,): the rate that a flow never exceeds.
    """
    use_KX = np.ascontiguousarray(routes.use_GGK[src_X, dst_X].T)
    use_KX = np.where(use_KX < 0, len(routes.capacity_Bps_R), use_KX)  # a resource without limit stands for none
    most_X = np.full(len(src_X), np.inf) if most_Bps_X is None else most_Bps_X
    left_Bps_R, resources = np.append(routes.capacity_Bps_R, np.inf), len(routes.capacity_Bps_R) + 1
    rates = np.zeros(len(src_X))
    open_X = np.arange(len(src_X))
    while len(open_X):
        flows = np.bincount(use_KX.ravel(), minlength=resources)
        level = np.divide(left_Bps_R, flows, out=np.full(resources, np.inf), where=flows > 0)
        tightest = int(level.argmin())
        held = most_X <= level[tightest]
        fixed = held if held.any() else (use_KX == tightest).any(axis=0)
        rate_X = np.minimum(most_X[fixed], level[tightest])
        rates[open_X[fixed]] = rate_X
        taken = np.bincount(use_KX[:, fixed].ravel(), np.tile(rate_X, len(use_KX)), minlength=resources)
        left_Bps_R = np.maximum(left_Bps_R - taken, 0.0)
        rest = np.flatnonzero(~fixed)
        use_KX, most_X, open_X = use_KX[:, rest], most_X[rest], open_X[rest]
    return rates


class Gate:
    """Which rows of an order may start in one all-to-all: both ends have joined, and it is among the first open ones of each.

    size_X: the bytes of each row, for the all-to-all's bytes_GG (G, G). most_Bps_X: the limit of each row's rate: its bytes
    over the fluid optimum where the order is paced (coflow MADD), infinity otherwise.
    """

    def __init__(self, order: Order, bytes_GG: IntArray, routes: Routes) -> None:
        src_X, dst_X = order.pairs_X2.T
        cuts_X2 = order.cuts(bytes_GG[src_X, dst_X])
        size_X = cuts_X2[:, 1] - cuts_X2[:, 0]
        most_Bps_X = np.full(len(size_X), np.inf)
        if order.paced and (optimum_s := routes.seconds(bytes_GG)) > 0:
            most_Bps_X = size_X / optimum_s
        self.pairs = order.pairs_X2.tolist()
        self.size_X: list[int] = size_X.tolist()
        self.most_Bps_X: list[float] = most_Bps_X.tolist()
        self._order = order
        self._tiers = [0] * len(self.pairs) if order.tier_X is None else order.tier_X.tolist()
        self._sends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by rank and tier
        self._recvs: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for row, ((src, dst), tier) in enumerate(zip(self.pairs, self._tiers, strict=True)):
            if self.size_X[row] > 0:
                self._sends[src, tier].append(row)
                self._recvs[dst, tier].append(row)
        self._started: set[int] = set()
        self._joined: set[int] = set()

    def join(self, rank: int) -> list[int]:
        """`rank` takes part from now on; gives the rows that start with that."""
        self._joined.add(rank)
        return self._startable((rank,))

    def finish(self, row: int) -> list[int]:
        """The row is over; gives the rows that start with that."""
        src, dst = self.pairs[row]
        self._sends[src, self._tiers[row]].remove(row)
        self._recvs[dst, self._tiers[row]].remove(row)
        return self._startable(sorted((src, dst)))

    def _startable(self, near: Sequence[int]) -> list[int]:
        tiers = sorted(set(self._tiers))
        rows = [
            row for rank in near for each in tiers for row in (*self._open_sends(rank, each), *self._open_recvs(rank, each))
        ]
        fresh = []
        for row in rows:
            (src, dst), tier = self.pairs[row], self._tiers[row]
            if row in self._started or src not in self._joined or dst not in self._joined:
                continue
            if row in self._open_sends(src, tier) and row in self._open_recvs(dst, tier):
                self._started.add(row)
                fresh.append(row)
        return fresh

    def _open_sends(self, rank: int, tier: int) -> list[int]:
        return self._sends[rank, tier][: self._order.sends_open]

    def _open_recvs(self, rank: int, tier: int) -> list[int]:
        return self._recvs[rank, tier][: self._order.recvs_open]


class Switch:
    """Flows under way. Each pays the start-up of its slower end, during which it holds no bandwidth, then flows."""

    def __init__(self, routes: Routes, startup_s: FloatArray) -> None:
        self._routes, self._startup = routes, startup_s
        self._now = 0.0
        self._flows: dict[int, list[float]] = {}  # key -> [source, destination, bytes left, flows from, rate at most]
        self._rates: dict[int, float] = {}
        self._keys = 0
        self._stale = False

    def open(self, src: int, dst: int, size: int, most_Bps: float = float("inf")) -> int:
        """Start a flow of `size` bytes now, held to most_Bps; gives its key."""
        key, self._keys = self._keys, self._keys + 1
        from_s = self._now + max(self._startup[src], self._startup[dst])
        self._flows[key] = [src, dst, float(size), from_s, most_Bps]
        self._stale = True
        return key

    def rates(self) -> dict[int, float]:
        """Bytes per second of each flow that has left its start-up."""
        self._share()
        return self._rates

    def next_event(self) -> float:
        """When a flow next ends or leaves its start-up; infinity without flows."""
        self._share()
        times = [
            from_s if from_s > self._now else self._now + left / self._rates[key]
            for key, (_, _, left, from_s, _) in self._flows.items()
        ]
        return min(times, default=float("inf"))

    def advance(self, to_s: float) -> list[int]:
        """Move to `to_s`, at most the next event; gives the keys of the flows that ended, in the order they were opened."""
        self._share()
        ended = []
        for key, flow in self._flows.items():
            if flow[3] <= self._now:
                end_s = self._now + flow[2] / self._rates[key]
                flow[2] -= self._rates[key] * (to_s - self._now)
                if end_s <= to_s * (1 + 1e-12):
                    ended.append(key)
            elif flow[3] <= to_s:
                self._stale = True
        for key in ended:
            del self._flows[key]
        self._stale = self._stale or bool(ended)
        self._now = to_s
        return ended

    def _share(self) -> None:
        if not self._stale:
            return
        self._stale = False
        keys = [key for key, flow in self._flows.items() if flow[3] <= self._now]
        ends = np.array([self._flows[key][:2] for key in keys], dtype=np.int64).reshape(-1, 2)
        most = np.array([self._flows[key][4] for key in keys])
        rates = fair_rates(ends[:, 0], ends[:, 1], self._routes, most)
        self._rates = dict(zip(keys, rates.tolist(), strict=True))


Row = tuple[float, int, int, int, float, float]  # start, source, destination, bytes, end, rate


@dataclass
class _Flight:
    """A transfer under way in `timed`: what it has carried since when at which rate."""

    row: int
    src: int
    dst: int
    size: int
    rate_Bps: float = 0.0
    since_s: float = 0.0
    carried: float = 0.0


def slow_rows(order: Order, bytes_GG: IntArray, network: Network) -> list[Row]:
    """Event by event on the switch: whatever is open shares ports and links, and a row ends where its rate changes."""
    n = len(bytes_GG)
    routes = route(network)
    switch = Switch(routes, network.startup_s_G)
    gate = Gate(order, bytes_GG, routes)
    now = 0.0
    rows: list[Row] = []
    flying: dict[int, _Flight] = {}

    def change(flight: _Flight, rate_Bps: float, ended: bool = False) -> None:
        """Close the row that flowed until now; the next flows at rate_Bps."""
        if flight.rate_Bps > 0:
            before = round(flight.carried)
            flight.carried += flight.rate_Bps * (now - flight.since_s)
            part = (flight.size if ended else round(flight.carried)) - before
            rows.append((flight.since_s, flight.src, flight.dst, part, now, flight.rate_Bps))
        flight.rate_Bps, flight.since_s = rate_Bps, now

    fresh = deque(row for rank in range(n) for row in gate.join(rank))
    while fresh or flying:
        while fresh:
            row = fresh.popleft()
            (src, dst), size = gate.pairs[row], gate.size_X[row]
            flying[switch.open(src, dst, size, gate.most_Bps_X[row])] = _Flight(row, src, dst, size)
        for key, rate_Bps in switch.rates().items():
            if rate_Bps != flying[key].rate_Bps:
                change(flying[key], rate_Bps)
        now = switch.next_event()
        for key in switch.advance(now):
            flight = flying.pop(key)
            change(flight, 0.0, ended=True)
            fresh.extend(gate.finish(flight.row))
    return rows
