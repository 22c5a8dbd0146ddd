"""Order trials: which way of exchanging is fastest while serving, from what exchanges take; the same on all ranks."""

import math
import random
from collections import deque
from collections.abc import Collection, Sequence
from statistics import median

RECENT = 9  # exchanges of the current way that a trial is compared with
TRIALS = 9  # trials of another way that count
SERIES = 5  # trials of another way before a change-over
RARITY = 50  # one exchange in this many is a trial of a series at most, and one a trial outside of a series
MAX_COST = 0.02  # of the time, for trials outside of a series
CLOSE = 5  # exchanges between two trials of a series
MIN_GAIN = math.log(1.05)  # a way that is faster by less is not changed to
DRIFT = math.log(1.15)  # of what the current way takes: more means that the machine has changed
FAR = math.log(2.0)  # slower ways have no series


class OrderTrials:
    """Chooses among the ways to perform one kind of exchange, by trials of the other ways between exchanges of the current one.

    A trial is compared with the median of the last RECENT exchanges of the current way. Another way becomes the current one
    when the median of its last trials, SERIES to TRIALS of them, is faster by more than MIN_GAIN and its standard error.

    Trials are bounded. With W ways, and x the part by which the median of a way's last three trials was slower, at least
    (W - 1) times the larger of RARITY and x / MAX_COST exchanges pass between two trials of the way: ways that stay as they are
    cost MAX_COST of the time at most. A trial that was faster by MIN_GAIN is followed by more, until there is a series of them
    and as long as their median is faster. The ways that are not FAR slower all have a series at the beginning, when the current
    way has changed, and when what it takes drifts, but for that no more often than such trials are one in RARITY exchanges.

    Ranks that are told the same seconds choose the same ways.

    Args:
        seconds_W: seconds of each way as far as known.
        current: index of the way to begin with.

    Attributes:
        current: index of the way that is used.
    """

    def __init__(self, seconds_W: Sequence[float], current: int) -> None:
        self.current = current
        self._ratios_W = [deque([math.log(seconds / seconds_W[current])], TRIALS) for seconds in seconds_W]
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._rng = random.Random(0)
        self._exchanges = 0
        self._due_W = [float(self._rng.randint(RECENT, self._interval(way))) for way in range(len(seconds_W))]
        self._due_W[current] = math.inf  # others' next trials come after this many exchanges
        self._series_W = [0] * len(seconds_W)  # trials that are left of a series
        self._level: float | None = None  # what the current way took when all others had a series
        self._next_review = 0  # after a drift, not before so many exchanges

    def next_way(self) -> int:
        """Returns the way of the next exchange. `took` must be told of each before the next."""
        self._exchanges += 1
        due = min(range(len(self._due_W)), key=self._due_W.__getitem__)
        return due if self._due_W[due] < self._exchanges and len(self._recent) == RECENT else self.current

    def took(self, way: int, seconds: float) -> float:
        """Counts an exchange. Returns the part of the time that is saved if `way` becomes the current way by it, else 0.

        Args:
            way: how it was performed, as `next_way` said.
            seconds: what it took, over what an exchange of its size should take.
        """
        if way == self.current:
            self._recent.append(math.log(seconds))
            self._watch_level()
            return 0.0
        ratios = self._ratios_W[way]
        ratios.append(math.log(seconds) - median(self._recent))
        if self._series_W[way]:
            self._series_W[way] -= 1
        elif ratios[-1] < -MIN_GAIN:
            self._series_W[way] = SERIES - 1
        goes_on = self._series_W[way] or _last(ratios) < -MIN_GAIN
        self._due_W[way] = self._drawn(CLOSE if goes_on else self._interval(way))
        if len(ratios) < SERIES or median(ratios) + _standard_error(ratios) > -MIN_GAIN:
            return 0.0
        return self._change_over(way)

    def _watch_level(self) -> None:
        """Begins a series of all others if what the current way takes is new, or has drifted."""
        if len(self._recent) < RECENT:
            return
        level = median(self._recent)
        if self._level is not None:
            if abs(level - self._level) < DRIFT or self._exchanges < self._next_review:
                return
            self._next_review = self._exchanges + SERIES * (len(self._ratios_W) - 1) * RARITY
        self._level = level
        self._review()

    def _review(self) -> None:
        """Begins a series of each way that is not far slower. Of its older trials the median counts as one."""
        for way, ratios in enumerate(self._ratios_W):
            ratio = median(ratios)
            if way != self.current and ratio < FAR:
                self._ratios_W[way] = deque([ratio], TRIALS)
                self._series_W[way] = SERIES
                self._due_W[way] = self._drawn(CLOSE)

    def _change_over(self, way: int) -> float:
        """Makes `way` the current one; what is known of the others is then relative to it. Returns the part that it saves."""
        ratio, before = median(self._ratios_W[way]), self.current
        self._ratios_W[before] = deque([0.0], TRIALS)
        self._ratios_W = [deque((other - ratio for other in ratios), TRIALS) for ratios in self._ratios_W]
        self.current, self._level = way, None
        self._recent.clear()
        self._due_W[before], self._due_W[way], self._series_W[way] = self._drawn(self._interval(before)), math.inf, 0
        return -math.expm1(ratio)

    def _interval(self, way: int) -> int:
        """Exchanges between two trials of a way."""
        slower = math.expm1(max(0.0, _last(self._ratios_W[way])))
        return math.ceil(max(len(self._ratios_W) - 1, 1) * max(RARITY, slower / MAX_COST))

    def _drawn(self, interval: int) -> int:
        """When to try again: after `interval` exchanges to half as many more, so that trials do not keep step with layers."""
        return self._exchanges + self._rng.randint(interval, interval + interval // 2)


def _last(ratios: Sequence[float]) -> float:
    """Median of the last three."""
    return median(list(ratios)[-3:])


def _standard_error(values: Collection[float]) -> float:
    """Standard error of the median of normal values, from their median distance to it."""
    middle = median(values)
    return 1.25 * 1.48 * median(abs(value - middle) for value in values) / math.sqrt(len(values))
