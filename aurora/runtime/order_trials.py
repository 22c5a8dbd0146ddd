"""Order trials: which way of exchanging is fastest while serving, from what exchanges take; the same on all ranks."""

import math
import random
from collections import deque
from collections.abc import Collection, Sequence
from statistics import median

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
    """Chooses among the ways to perform one kind of exchange, by trials of the other ways between exchanges of the current one.

    A trial is compared with the median of the last RECENT exchanges of the current way. Another way becomes the current one
    when the median of its last trials, SERIES to TRIALS of them, is faster by more than MIN_GAIN and STANDARD_ERRORS. A trial
    that was faster by MIN_GAIN is soon followed by another, and so on as long as the last trial or the median of the last three
    was faster.

    The other trials are bounded. A way is promising if it was once faster, by MIN_GAIN, than the current way is now: when the
    machine changes back, it is so again. Trials of promising ways cost PROMISING_COST of the time at most, trials of the others
    the rest of MAX_COST, if ways stay as they are. So the slower a way is, by the median of its last three trials, the more
    exchanges pass between two of its trials.

    The ways that are not FAR slower all have a series of trials at the beginning, when the current way has changed, and when
    what it takes drifts, but for that no more often than such trials are one in RARITY exchanges.

    Ranks that are told the same seconds choose the same ways.

    Args:
        seconds_W: seconds of each way as far as known.
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
        """Returns the way of the next exchange. `took` must be told of each before the next."""
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
        """Begins a series of a way that is neither current nor FAR slower. Of its older trials the median counts as one."""
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
