"""The switch: ports and links with their own rates, flows that share them max-min fairly, orders that gate who may start."""

from collections.abc import Sequence

import numpy as np

from aurora.plan.routes import Routes
from aurora.types import Order
from aurora.types.arrays import FloatArray, IntArray


def fair_rates(src_X: IntArray, dst_X: IntArray, routes: Routes, most_Bps_X: FloatArray | None = None) -> FloatArray:
    """(X,) max-min fair rates of concurrent flows by progressive filling: the tightest resource fixes its flows, and so on.

    most_Bps_X (X,): what a flow is held to at most.
    """
    use_KX = np.ascontiguousarray(routes.use_GGK[src_X, dst_X].T)
    share_KX = np.ascontiguousarray(routes.share_GGK[src_X, dst_X].T)
    most_X = np.full(len(src_X), np.inf) if most_Bps_X is None else most_Bps_X
    room, resources = routes.room_R, len(routes.room_R)
    rates = np.zeros(len(src_X))
    open_X = np.arange(len(src_X))
    while len(open_X):
        flows = np.bincount(use_KX.ravel(), share_KX.ravel(), minlength=resources)
        level = np.divide(room, flows, out=np.full(resources, np.inf), where=flows > 0)
        tightest = int(level.argmin())
        held = most_X <= level[tightest]
        fixed = held if held.any() else (use_KX == tightest).any(axis=0)
        rate_X = np.minimum(most_X[fixed], level[tightest])
        rates[open_X[fixed]] = rate_X
        taken = np.bincount(use_KX[:, fixed].ravel(), (share_KX[:, fixed] * rate_X).ravel(), minlength=resources)
        room = np.maximum(room - taken, 0.0)
        rest = np.flatnonzero(~fixed)
        use_KX, share_KX, most_X, open_X = use_KX[:, rest], share_KX[:, rest], most_X[rest], open_X[rest]
    return rates


class Gate:
    """Which rows of an order may start in one all-to-all: both ends have joined, and it is among the first open ones of each.

    size_X (X,) int64: the bytes of each row, for the all-to-all's bytes_GG.
    """

    def __init__(self, order: Order, bytes_GG: IntArray) -> None:
        n = len(bytes_GG)
        self.pairs = order.pairs_X2.tolist()
        cuts_X2 = order.cuts(bytes_GG[order.pairs_X2[:, 0], order.pairs_X2[:, 1]])
        self.size_X: list[int] = (cuts_X2[:, 1] - cuts_X2[:, 0]).tolist()
        self._windows = (order.sends_open, order.recvs_open)
        self._sends: list[list[int]] = [[] for _ in range(n)]
        self._recvs: list[list[int]] = [[] for _ in range(n)]
        for row, (src, dst) in enumerate(self.pairs):
            if self.size_X[row] > 0:
                self._sends[src].append(row)
                self._recvs[dst].append(row)
        self._started: set[int] = set()
        self._joined: set[int] = set()

    def join(self, rank: int) -> list[int]:
        """`rank` takes part from now on; gives the rows that start with that."""
        self._joined.add(rank)
        return self._startable((rank,))

    def finish(self, row: int) -> list[int]:
        """The row is over; gives the rows that start with that."""
        src, dst = self.pairs[row]
        self._sends[src].remove(row)
        self._recvs[dst].remove(row)
        return self._startable(sorted((src, dst)))

    def done(self, rank: int) -> bool:
        """Whether `rank` has nothing more to send or receive."""
        return not self._sends[rank] and not self._recvs[rank]

    def _startable(self, near: Sequence[int]) -> list[int]:
        sends_open, recvs_open = self._windows
        rows = [row for rank in near for row in (*self._sends[rank][:sends_open], *self._recvs[rank][:recvs_open])]
        fresh = []
        for row in rows:
            src, dst = self.pairs[row]
            if row in self._started or src not in self._joined or dst not in self._joined:
                continue
            if row in self._sends[src][:sends_open] and row in self._recvs[dst][:recvs_open]:
                self._started.add(row)
                fresh.append(row)
        return fresh


def paces(order: Order, bytes_GG: IntArray, routes: Routes) -> FloatArray | None:
    """(G, G) the rate that each pair is held to, bytes / fluid optimum, or None where the order is not paced (coflow MADD)."""
    if not order.paced:
        return None
    optimum_s = routes.seconds(bytes_GG)
    return bytes_GG / optimum_s if optimum_s > 0 else None


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
