"""Order watch: chooses the order of every exchange by what exchanges take while serving, alike on all ranks."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from aurora.runtime.order_calibration import OVER_SERVERS, OrderCalibration
from aurora.runtime.order_trials import OrderTrials
from aurora.types import Gpu, Order
from aurora.types.arrays import IntArray

REPORTED = 2  # exchanges between two gathers at most: dispatch and combine
LEAST_S = 1e-6  # clocks that differ may say less


@dataclass(frozen=True)
class OrdersUsed:
    """How one model's exchanges were performed.

    Args:
        exchanges: by method, how many exchanges it served, trials included.
        changes: a sentence for each change-over.
        servers: where all-to-alls may go flat or over servers, what each took before serving, by size; else empty.
    """

    exchanges: Mapping[str, int]
    changes: tuple[str, ...]
    servers: str = ""


class _Kind(NamedTuple):
    """Exchanges that are alike."""

    phase: str
    size: int  # bit length of the bytes that a rank sends on average
    over_servers: bool = False

    def __str__(self) -> str:
        way = f" {OVER_SERVERS}" if self.over_servers else ""
        return f"{self.phase}{way} of {2**self.size / 2e6:.2g} to {2**self.size / 1e6:.2g} MB a rank"


class _Pair(NamedTuple):
    """A dispatch and its combine, which go over servers or do not."""

    kind: _Kind
    way: int  # index of their method
    expected_s: float  # seconds of a dispatch of their size by the planned method


class OrderWatch:
    """Chooses the order of each exchange of one model on one rank, first as calibrated, then by OrderTrials.

    Exchanges are alike if they have the same phase, and the same size up to a factor of two. What an exchange took, from its
    last rank's start to its last rank's end, counts over its fluid bound plus a start-up. Clocks of ranks need not agree: times
    are since the last gather, which ends everywhere at about the same time. When one kind of exchange changes over, the others
    try the same method soon.

    If all-to-alls may be flat or go over servers, that is chosen in the same way for a dispatch and its combine together. Their
    sizes are those of a flat dispatch. Orders are then watched apart for both.

    Nothing more is sent for it than some numbers in the gather of row counts that comes before every dispatch. All ranks see
    the same numbers there, so they choose alike, if they make the same calls: for an exchange `order` and `took`, for a gather
    `report` and `gathered`.

    Args:
        calibration: the methods, and what each took before serving.
        model: the model's name, for the log.
        gpu: this rank's ports.
        say: receives a line for each change-over; None: they are kept without a word.
        servers: the same as `calibration` for all-to-alls that are flat or go over servers; None: there is no choice.
    """

    def __init__(
        self,
        calibration: OrderCalibration,
        model: str,
        gpu: Gpu,
        say: Callable[[str], None] | None,
        servers: OrderCalibration | None = None,
    ) -> None:
        self._calibration, self._model, self._gpu, self._say = calibration, model, gpu, say
        self._servers = servers
        self._pair: _Pair | None = None  # since the last gather
        self._over_servers = False
        self._pair_trials: dict[_Kind, OrderTrials] = {}
        self._trials: dict[_Kind, OrderTrials] = {}
        self._started: list[tuple[_Kind, int]] = []  # exchanges since the last gather, and the index of their method
        self._times_ns: list[int] = []  # of those that have ended: start, end, bound
        self._exchanges: Counter[str] = Counter()
        self._changes: list[str] = []

    @property
    def used(self) -> OrdersUsed:
        """How the exchanges so far were performed."""
        return OrdersUsed(dict(self._exchanges), tuple(self._changes), "" if self._servers is None else str(self._servers))

    def over_servers(self, rank_bytes: float) -> bool:
        """Returns whether the next dispatch and its combine go over servers. To be called before the first `order` of the two.

        Args:
            rank_bytes: bytes that a rank sends on average in the dispatch if it is flat.
        """
        if self._servers is None:
            return True
        kind = _Kind("dispatch and combine", int(rank_bytes).bit_length())
        trials = _trials(self._pair_trials, kind, self._servers, rank_bytes)
        self._pair = _Pair(kind, trials.next_way(), float(self._servers.seconds_W(rank_bytes)[-1]))
        self._over_servers = self._servers.methods[self._pair.way] == OVER_SERVERS
        return self._over_servers

    def order(self, planned: Order, phase: str, rank_bytes: float) -> Order | None:
        """Returns the order of the next exchange, in place of the planned one; None: torch's own collective.

        Args:
            planned: the plan's order.
            phase: "dispatch" or "combine".
            rank_bytes: bytes that a rank sends on average.
        """
        kind = _Kind(phase, int(rank_bytes).bit_length(), self._over_servers)
        way = _trials(self._trials, kind, self._calibration, rank_bytes).next_way()
        self._started.append((kind, way))
        if self._servers is not None and self._pair is not None:  # the plan has no order for the way that it does not take
            other = self._servers.orders.get(self._servers.methods[self._pair.way])
            planned = planned if other is None else other if phase == "dispatch" else other.reversed
        method = self._calibration.methods[way]
        self._exchanges[f"{method} {OVER_SERVERS}" if self._over_servers else method] += 1
        return self._calibration.order(planned, method)

    def took(self, start_s: float, end_s: float, out_bytes: int, in_bytes: int) -> None:
        """Notes when the exchange began and ended on this rank, in seconds since the last gather, and its bytes out and in."""
        bound_s = max(out_bytes / self._gpu.out_Bps, in_bytes / self._gpu.in_Bps)
        self._times_ns += [round(seconds * 1e9) for seconds in (start_s, end_s, bound_s)]

    def report(self) -> torch.Tensor:
        """Returns (3 * REPORTED,) int64, this rank's times since the last gather, to be gathered from all ranks."""
        times_ns, self._times_ns = self._times_ns, []
        return torch.tensor(times_ns + [0] * (3 * REPORTED - len(times_ns)), dtype=torch.int64)

    def gathered(self, reports_RX: IntArray) -> None:
        """Counts the exchanges that ended before a gather, by the reports of all ranks."""
        slowest_X, pair_s = reports_RX.max(axis=0).tolist(), 0.0
        for index, (kind, way) in enumerate(self._started):
            start_ns, end_ns, bound_ns = slowest_X[3 * index : 3 * index + 3]
            seconds = max((end_ns - start_ns) / 1e9, LEAST_S)
            pair_s += seconds
            self._count(self._calibration, self._trials, kind, way, seconds / (bound_ns / 1e9 + self._calibration.startup_s))
        if self._servers is not None and self._pair is not None and self._started:
            self._count(self._servers, self._pair_trials, self._pair.kind, self._pair.way, pair_s / self._pair.expected_s)
        self._started.clear()

    def _count(
        self, calibration: OrderCalibration, trials: dict[_Kind, OrderTrials], kind: _Kind, way: int, seconds: float
    ) -> None:
        """Counts an exchange that took `seconds` over what it should take; all kinds of `trials` have the same ways."""
        before = trials[kind].current
        if saved := trials[kind].took(way, seconds):
            self._tell_change(calibration.methods, kind, before, way, saved)
            for other in trials.values():
                other.try_soon(way)

    def _tell_change(self, methods: Sequence[str], kind: _Kind, before: int, after: int, saved: float) -> None:
        """Keeps and tells a change-over that saves a part of the time."""
        self._changes.append(f"{self._model}, {kind}: from {methods[before]} to {methods[after]}, {saved:.0%} shorter")
        if self._say is not None:
            self._say(f"order changed over: {self._changes[-1]}")


def _trials(trials: dict[_Kind, OrderTrials], kind: _Kind, calibration: OrderCalibration, rank_bytes: float) -> OrderTrials:
    """The trials of a kind, which begin with what was calibrated for its first exchange."""
    if kind not in trials:
        current = calibration.methods.index(calibration.method(rank_bytes))
        trials[kind] = OrderTrials(calibration.seconds_W(rank_bytes).tolist(), current)
    return trials[kind]
