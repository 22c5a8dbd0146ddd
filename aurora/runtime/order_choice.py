"""Order choice while serving: chooses the order of each exchange by the measured times of earlier ones, alike on all ranks.

`OrderTrials` chooses among the ways of one kind of exchange, `OrderWatch` for all exchanges of a model on a rank, and
`WatchedExchanges` times them.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from aurora.moe.transport import Transport
from aurora.runtime.order_calibration import OVER_SERVERS, OrderCalibration
from aurora.runtime.phase_recorder import Timer
from aurora.types import Gpu, Order
from aurora.types.arrays import IntArray

REPORTED = 2  # exchanges between two gathers at most: dispatch and combine
LEAST_S = 1e-6  # clocks that differ may say less
RECENT = 9  # exchanges of the current way that a trial is compared with
TRIALS = 9  # trials of another way that count
SERIES = 5  # trials of another way before a change-over
CLOSE = 3  # exchanges between two trials of a series
RARITY = 50  # exchanges between two trials outside of a series at least, of ways that are not promising
PROMISING_RARITY = 10  # the same of promising ways
MAX_COST = 0.02  # of the time, for trials
PROMISING_COST = 0.75 * MAX_COST  # of that, for trials of promising ways
MIN_GAIN = math.log(1.05)  # a way that is faster by less is not changed to
STANDARD_ERRORS = 1.5  # by which it is surely faster
DRIFT = math.log(1.15)  # of what the current way takes: more means that the machine has changed
FAR = math.log(2.0)  # slower ways have no series


class OrderTrials:
    """Chooses among the ways (methods) to perform one kind of exchange: uses the current way, and sometimes tries another.

    A trial is compared with the median of the last RECENT exchanges of the current way. Another way becomes the current one
    when the median of its last trials (SERIES to TRIALS of them) is faster by more than MIN_GAIN and STANDARD_ERRORS. After a
    trial that was faster by MIN_GAIN the next one follows soon, as long as the last trial or the median of the last three was
    faster.

    Other trials are rare, so that they cost little time. Trials of promising ways take at most PROMISING_COST of the time,
    trials of other ways the rest of MAX_COST. A way is promising if its fastest trial beat the present time of the current way
    by MIN_GAIN: it may become fastest again if conditions change back. The slower a way is, by the median of its last three
    trials, the more exchanges pass between two of its trials.

    A series is some trials in close succession. All ways that are not FAR slower get a series at the beginning, after a change
    of the current way, and when the current way's time drifts; drift starts a series at most once in RARITY exchanges.

    Ranks that report the same seconds to `record` choose the same ways.

    Args:
        seconds_W: seconds of each way, from calibration.
        current: index of the way to begin with.

    Attributes:
        current: index of the way that is used.
    """

    def __init__(self, seconds_W: Sequence[float], current: int) -> None:
        ways = len(seconds_W)
        self.current = current
        self._ratios_W = [deque([math.log(seconds / seconds_W[current])], TRIALS) for seconds in seconds_W]
        self._best_W = [math.inf] * ways  # what each way took when it was fastest
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._rng = random.Random(0)
        self._exchanges = 0
        self._tried_W = [0] * ways  # when each way was tried last
        self._patience_W = [self._rng.random() for _ in range(ways)]  # intervals until its next trial
        self._series_W = [0] * ways  # trials that are left of a series
        self._level: float | None = None  # what the current way took when all others had a series
        self._next_review = 0  # after a drift, not before so many exchanges

    def next_way(self) -> int:
        """Returns the index of the way for the next exchange; its time must be passed to `record` before the next call."""
        self._exchanges += 1
        if len(self._recent) < RECENT:
            return self.current
        intervals_W = self._intervals_W()
        late_W = [
            self._exchanges - tried - patience * interval
            for tried, patience, interval in zip(self._tried_W, self._patience_W, intervals_W, strict=True)
        ]
        latest = max(range(len(late_W)), key=late_W.__getitem__)
        return latest if late_W[latest] > 0 else self.current

    def record(self, way: int, seconds: float) -> float:
        """Records the time of an exchange, and makes `way` the current way if it has proved faster.

        Returns the share of time that such a change saves; 0 if the current way stays.

        Args:
            way: index of the way that the exchange used, from `next_way`.
            seconds: measured seconds / expected seconds of an exchange of its size.
        """
        if way == self.current:
            self._recent.append(math.log(seconds))
            self._watch_level()
            return 0.0
        ratios, level = self._ratios_W[way], median(self._recent)
        ratios.append(math.log(seconds) - level)
        last = _last(ratios)
        self._best_W[way] = min(self._best_W[way], level + last)
        self._series_W[way] = max(self._series_W[way] - 1, int(min(ratios[-1], last) < -MIN_GAIN))
        self._put_off(way)
        if len(ratios) < SERIES or median(ratios) + STANDARD_ERRORS * _standard_error(ratios) > -MIN_GAIN:
            return 0.0
        return self._change_over(way)

    def try_soon(self, way: int) -> None:
        """Begins a series of trials of a way, unless it is the current way or FAR slower.

        The median of its older trials replaces them, and counts as one trial.
        """
        ratio = median(self._ratios_W[way])
        if way != self.current and ratio < FAR:
            self._ratios_W[way] = deque([ratio], TRIALS)
            self._series_W[way] = SERIES
            self._put_off(way)

    def _watch_level(self) -> None:
        """Begins a series of all others if what the current way takes is new, or has drifted."""
        if len(self._recent) < RECENT:
            return
        level = median(self._recent)
        self._best_W[self.current] = min(self._best_W[self.current], level)
        if self._level is not None:
            if abs(level - self._level) < DRIFT or self._exchanges < self._next_review:
                return
            self._next_review = self._exchanges + SERIES * (len(self._ratios_W) - 1) * RARITY
        self._level = level
        for way in range(len(self._ratios_W)):
            self.try_soon(way)

    def _change_over(self, way: int) -> float:
        """Makes `way` the current one; what is known of the others is then relative to it. Returns the part that it saves."""
        ratio, before = median(self._ratios_W[way]), self.current
        self._ratios_W[before] = deque([0.0], TRIALS)
        self._ratios_W = [deque((other - ratio for other in ratios), TRIALS) for ratios in self._ratios_W]
        self.current, self._level = way, None
        self._recent.clear()
        self._series_W[way] = 0
        self._put_off(before)
        return -math.expm1(ratio)

    def _intervals_W(self) -> list[float]:
        """Exchanges between two trials of each way."""
        level, ways = median(self._recent), range(len(self._ratios_W))
        promising = {way for way in ways if way != self.current and self._best_W[way] < level - MIN_GAIN}
        intervals_W: list[float] = []
        for way in ways:
            slower = math.expm1(max(0.0, _last(self._ratios_W[way])))
            if way == self.current:
                intervals_W.append(math.inf)
            elif self._series_W[way]:
                intervals_W.append(CLOSE)
            elif way in promising:
                intervals_W.append(len(promising) * max(PROMISING_RARITY, slower / PROMISING_COST))
            else:
                intervals_W.append((len(ways) - 1) * max(RARITY, slower / (MAX_COST - PROMISING_COST)))
        return intervals_W

    def _put_off(self, way: int) -> None:
        """Its next trial is one interval to half as many more from now, so that trials do not keep step with layers."""
        self._tried_W[way], self._patience_W[way] = self._exchanges, self._rng.uniform(1.0, 1.5)


def _last(ratios: Sequence[float]) -> float:
    """Median of the last three."""
    return median(list(ratios)[-3:])


def _standard_error(values: Collection[float]) -> float:
    """Standard error of the median of normal values, from their median distance to it."""
    middle = median(values)
    return 1.25 * 1.48 * median(abs(value - middle) for value in values) / math.sqrt(len(values))


@dataclass(frozen=True)
class OrdersUsed:
    """Counts of the methods that one model's exchanges used.

    Args:
        exchanges: number of exchanges by method, trials included.
        changes: one sentence per change of the current method.
        servers: calibrated times of flat and hierarchical all-to-alls by size, as text; empty if the model uses only one kind.
    """

    exchanges: Mapping[str, int]
    changes: tuple[str, ...]
    servers: str = ""

    def lines(self, name: str) -> Iterator[str]:
        """Yields lines for users: the number of exchanges by method of the model `name`, then one line per change."""
        counts = sorted(self.exchanges.items(), key=lambda entry: -entry[1])
        yield f"{name}: exchanges by {', '.join(f'{method} {count}' for method, count in counts)}"
        if self.servers:
            yield f"{name}, before serving: {self.servers}"
        yield from (f"order changed over: {change}" for change in self.changes)


class _Kind(NamedTuple):
    """Exchanges that are alike."""

    phase: str
    size: int  # bit length of the bytes that a rank sends on average
    hierarchical: bool = False

    def __str__(self) -> str:
        way = f" {OVER_SERVERS}" if self.hierarchical else ""
        return f"{self.phase}{way} of {2**self.size / 2e6:.2g} to {2**self.size / 1e6:.2g} MB a rank"


class _Pair(NamedTuple):
    """A dispatch and its combine, which go over servers or do not."""

    kind: _Kind
    way: int  # index of their method
    expected_s: float  # seconds of a dispatch of their size by the planned method


class OrderWatch:
    """Chooses the order of each exchange of one model on one rank: at first the fastest in calibration, then by OrderTrials.

    Exchanges of one phase, with sizes in the same power of two, form a kind and share their trials. An exchange lasts from the
    start of the last rank that starts to the end of the last that ends; OrderTrials get this time / (fluid bound + start-up).
    Ranks' clocks need not agree: times count from the last gather, which ends on all ranks at about the same time. When one
    kind changes its method, the other kinds try that method soon.

    For models that can use both, flat or hierarchical is chosen in the same way, for a dispatch and its combine together, by
    the size of the flat dispatch. Flat and hierarchical exchanges are different kinds.

    The only extra messages are some numbers in the gather of row counts before every dispatch. All ranks receive the same
    numbers, so they choose alike, provided that they make the same calls: `order` and `record` for an exchange, `report` and
    `gathered` for a gather.

    Args:
        calibration: the methods, and their times before serving.
        model: the model's name, for the log.
        gpu: this rank's ports.
        say: receives one line per change of method; None: changes are kept only in `used`.
        servers: calibration of flat against hierarchical all-to-alls; None: the plan decides.
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
        """Counts of the methods used so far."""
        return OrdersUsed(dict(self._exchanges), tuple(self._changes), "" if self._servers is None else str(self._servers))

    def is_hierarchical(self, rank_bytes: float) -> bool:
        """Returns True if the next dispatch and combine are to be hierarchical. Call it before `order` of the dispatch.

        Args:
            rank_bytes: average bytes that a rank would send in a flat dispatch.
        """
        if self._servers is None:
            return True
        kind = _Kind("dispatch and combine", int(rank_bytes).bit_length())
        trials = _trials(self._pair_trials, kind, self._servers, rank_bytes)
        self._pair = _Pair(kind, trials.next_way(), float(self._servers.seconds_W(rank_bytes)[-1]))
        self._over_servers = self._servers.methods[self._pair.way] == OVER_SERVERS
        return self._over_servers

    def order(self, planned: Order, phase: str, rank_bytes: float) -> Order | None:
        """Returns the order to use for the next exchange in place of `planned`; None: torch's own collective.

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

    def record(self, start_s: float, end_s: float, out_bytes: int, in_bytes: int) -> None:
        """Records an exchange on this rank: start and end in seconds since the last gather, and bytes sent and received."""
        bound_s = max(out_bytes / self._gpu.out_Bps, in_bytes / self._gpu.in_Bps)
        self._times_ns += [round(seconds * 1e9) for seconds in (start_s, end_s, bound_s)]

    def report(self) -> torch.Tensor:
        """Returns (3 * REPORTED,) int64 to all-gather: start, end and bound (ns) of each exchange since the last gather."""
        times_ns, self._times_ns = self._times_ns, []
        return torch.tensor(times_ns + [0] * (3 * REPORTED - len(times_ns)), dtype=torch.int64)

    def gathered(self, reports_RX: IntArray) -> None:
        """Updates the trials from all ranks' reports, reports_RX (R, 3 * REPORTED): the exchanges since the last gather."""
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
        if saved := trials[kind].record(way, seconds):
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


class WatchedExchanges:
    """Times exchanges, and passes the times to an OrderWatch with each gather of row counts.

    All ranks must make the same calls: a gather, then at most one dispatch and its combine.

    Args:
        watch: chooses the orders.
        timer: timer of the thread that performs the exchanges.
    """

    def __init__(self, watch: OrderWatch, timer: Timer) -> None:
        self._watch, self._timer = watch, timer
        self._gathered: Any = None  # mark after the last gather
        self._exchanged: list[tuple[Any, Any, int, int]] = []  # since then: start and end marks, bytes sent and received

    def gather(self, transport: Transport, counts: torch.Tensor) -> torch.Tensor:
        """All-gathers `counts` and the watch's reports. Returns all counts, (R, *counts.shape) on the CPU. Collective call."""
        counts = counts.cpu()  # from here on no mark has to be waited for
        for start, end, out_bytes, in_bytes in self._exchanged:
            start_s, end_s, gathered_s = map(self._timer.seconds, (start, end, self._gathered))
            self._watch.record(start_s - gathered_s, end_s - gathered_s, out_bytes, in_bytes)
        self._exchanged.clear()
        rows = transport.gather(torch.cat([counts.flatten(), self._watch.report()]))
        self._gathered = self._timer.mark()
        self._watch.gathered(rows[:, counts.numel() :].numpy())
        return rows[:, : counts.numel()].reshape(-1, *counts.shape).contiguous()

    def is_hierarchical(self, flat_RR: IntArray, row_bytes: int) -> bool:
        """Returns True if the next dispatch and combine are to be hierarchical, False if flat.

        Args:
            flat_RR: (R, R) rows that a flat dispatch would send from each rank (row) to each rank (column).
            row_bytes: size of a row in bytes.
        """
        return self._watch.is_hierarchical(float(flat_RR.sum() - flat_RR.trace()) * row_bytes / len(flat_RR))

    @contextmanager
    def exchanging(self, planned: Order, phase: str, rank: int, bytes_RR: IntArray) -> Iterator[Order | None]:
        """Context manager that times one all-to-all. Yields the order to use; None: torch's own collective.

        Args:
            planned: the plan's order.
            phase: "dispatch" or "combine".
            rank: this rank.
            bytes_RR: (R, R) bytes from each rank (row) to each rank (column), summed over the steps of the all-to-all.
        """
        order = self._watch.order(planned, phase, bytes_RR.sum() / len(bytes_RR))
        start = self._timer.mark()
        yield order
        out_bytes, in_bytes = (int(bytes_R.sum() - bytes_R[rank]) for bytes_R in (bytes_RR[rank], bytes_RR[:, rank]))
        self._exchanged.append((start, self._timer.mark(), out_bytes, in_bytes))
