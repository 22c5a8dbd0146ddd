"""Tracks the loads of experts over windows, detects changes of traffic, and predicts loads; computes loads of GPUs from slots.

Traffic stays similar for some windows (a spell), then changes: another task arrives, the mix of tasks drifts, an old task
returns. The tracker keeps the windows since the last change. It finds changes by testing whether the newest windows have the
same shares of experts as those before them. Traffic that returns is recognised, and its earlier windows count again.

If spells are shorter than HORIZON windows, as for short tasks or where prompts and answers alternate, a placement for the
present spell comes late and is soon wrong. The prediction is then a mixture with the windows before, of whatever traffic.

Windows vary more than independent tokens would, since tokens of a prompt choose similar experts. So the test measures in units
of the usual difference between windows (a design effect; Kish, Survey Sampling, 1965): between neighbouring windows, or between
windows of the same traffic that are further apart, whichever is larger. Neighbours may share prompts, and differ by less.

Source: the newest windows are compared at every length, as in ADWIN (Bifet and Gavalda, 2007).
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from aurora.algorithms.workload.load_statistics import shrunk_shares
from aurora.errors import BadInput
from aurora.types.arrays import FloatArray
from aurora.types.placement import expert_loads

CHANGE = 5.0  # times what windows usually differ by, above which traffic has changed
FIRST_EFFECT = 4.0  # times what single tokens would differ by, that windows differ by at least until FEW have been compared
FEW = 4
RECENT = 32  # windows that are kept one by one; older ones are summed
HALF_LIFE = 64  # windows in which a sum of older windows loses half of its weight
APART = (1, 2, 4, 8, 16)  # windows of the same traffic, by which it is measured what they differ by
HORIZON = 8  # windows: traffic that lasts for fewer is expected with what came before it
SPELLS = 2  # of traffic, after which it is known for how long traffic usually lasts
REMEMBERED = 8  # kinds of traffic, and lengths of their spells


@dataclass
class AlikeWindows:
    """The loads of windows with one kind of traffic.

    Attributes:
        older_LE: (L, E) float64, the discounted sum of the older windows' loads.
        recent: the loads (L, E) of the newest windows, one by one.
        windows: number of windows so far.
        lengths: lengths, in windows, of the newest spells of this traffic that have ended.
    """

    older_LE: FloatArray
    recent: deque[FloatArray] = field(default_factory=deque)
    windows: int = 0
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def add(self, load_LE: FloatArray) -> None:
        """Adds the loads load_LE (L, E) of one window."""
        self.recent.append(load_LE)
        self.windows += 1
        if len(self.recent) > RECENT:
            self.older_LE = self.older_LE * 0.5 ** (1 / HALF_LIFE) + self.recent.popleft()

    def load_LE(self, newest: int | None = None) -> FloatArray:
        """Returns (L, E), the sum of the loads of the `newest` newest windows; None: of all windows, older ones discounted."""
        recent = list(self.recent)
        if newest is not None:
            return np.asarray(sum(recent[len(recent) - newest :]))
        return np.asarray(sum(recent, self.older_LE))


class LoadTracker:
    """Tracks the experts' loads from window to window, and predicts the loads to come.

    Args:
        layers: number of layers, L.
        experts: number of experts of a layer, E.

    Attributes:
        experts: number of experts of a layer.
        windows: number of windows so far that had tokens.
        changes: number of changes of traffic detected so far.

    Example:
        >>> tracker = LoadTracker(1, 2)
        >>> for load in ([300, 100], [290, 110], [305, 95]):
        ...     _ = tracker.add([load])
        >>> tracker.expected_LE.round().tolist()
        [[297.0, 103.0]]
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.experts = experts
        self._now = AlikeWindows(np.zeros((layers, experts)))
        self._before: deque[AlikeWindows] = deque(maxlen=REMEMBERED)
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._began = 0
        self._differences: deque[float] = deque(maxlen=4 * FEW)  # of windows that follow each other
        self._alike_differences: deque[float] = deque(maxlen=4 * FEW)  # of windows of the same traffic
        self._last_LE: FloatArray | None = None
        self._mixed_LE = np.zeros((layers, experts))  # all windows, the newest count most: as much as HORIZON windows
        self.windows = self.changes = 0

    def add(self, loads: ArrayLike) -> FloatArray:
        """Adds a window's loads; a window without tokens is ignored.

        Args:
            loads: (L, E) tokens of each expert.

        Returns:
            (L, E) float64, the loads after the checks.

        Raises:
            BadInput: if the loads have another shape or are not numbers of zero or more.
        """
        load_LE = expert_loads("loads", loads)
        if load_LE.shape != self._now.older_LE.shape:
            layers, experts = self._now.older_LE.shape
            raise BadInput(f"loads: expected {layers} layers of {experts} experts, found shape {load_LE.shape}")
        if not load_LE.any():
            return load_LE
        if self._last_LE is not None:
            self._differences.append(_statistic(self._last_LE, load_LE))
        self._last_LE = load_LE
        self.windows += 1
        self._now.add(load_LE)
        self._mixed_LE = self._mixed_LE * (1 - 1 / HORIZON) + load_LE
        if newest := self._changed_since():
            self._divide(newest)
        before = [self._now.recent[-1 - apart] for apart in APART if apart < len(self._now.recent)]
        if before:
            self._alike_differences.append(float(np.mean([_statistic(earlier_LE, load_LE) for earlier_LE in before])))
        return load_LE

    @property
    def age(self) -> int:
        """Number of windows since the last change of traffic."""
        return self.windows - self._began

    @property
    def remaining(self) -> float:
        """Returns the number of further windows that the present traffic is expected to last.

        It is the mean of (length - age) over earlier spells at least as long as the present one, which has lasted `age`
        windows. If this traffic had spells before, only these count. If not, all spells count, and one of length 2 x age is
        added, which also stands in if no spell was as long.
        """
        lengths = self._now.lengths
        remaining = [length - self.age for length in lengths or self._lengths if length >= self.age]
        return float(np.mean(remaining if lengths and remaining else [*remaining, max(self.age, 1)]))

    @property
    def effect(self) -> float:
        """Variance between windows of the same traffic / variance if tokens were drawn independently (the design effect)."""
        least = 1.0 if len(self._differences) >= FEW else FIRST_EFFECT
        return max(least, *(float(np.median(series)) for series in (self._differences, self._alike_differences) if series), 0.0)

    @property
    def horizon(self) -> float:
        """Number of coming windows that `expected_LE` averages: `remaining`, moved towards HORIZON the shorter spells are."""
        return self._lasting * self.remaining + (1 - self._lasting) * HORIZON

    @property
    def expected_LE(self) -> FloatArray:
        """(L, E) float64, the expected mean loads of the next `horizon` windows; zero before the first window.

        If spells last HORIZON windows or more, these are the loads of the present traffic. If they are shorter, they are a
        mixture with the loads of earlier windows, of whatever traffic, because one placement then serves several spells.
        """
        if self._last_LE is None:
            return self._mixed_LE
        shares = (shrunk_shares(load_LE, self.effect) for load_LE in (self._now.load_LE(), self._mixed_LE))
        share_LE = self._lasting * next(shares) + (1 - self._lasting) * next(shares)
        return np.asarray(share_LE * self._last_LE.sum(axis=1, keepdims=True))

    @property
    def _lasting(self) -> float:
        """Expected duration of the current traffic phase as a fraction of HORIZON (at most 1), from earlier spells.

        1 until SPELLS have been seen: that one task was short tells little of the next.
        """
        if len(self._lengths) < SPELLS:
            return 1.0
        return min(max(self.age, float(np.median(self._now.lengths or self._lengths))) / HORIZON, 1.0)

    @property
    def spread_LE(self) -> FloatArray:
        """(L, E) float64, standard deviation of loads over the present traffic's newest windows; zero if fewer than FEW."""
        recent = self._now.recent
        if len(recent) < FEW or self._last_LE is None:
            return np.zeros_like(self._now.older_LE)
        share_WLE = [load_LE / np.maximum(load_LE.sum(axis=1, keepdims=True), 1) for load_LE in recent]
        return np.asarray(np.std(share_WLE, axis=0, ddof=1) * self._last_LE.sum(axis=1, keepdims=True))

    @property
    def sample_L(self) -> FloatArray:
        """(L,) float64, effective sample size of the present traffic: the observed (token, expert) pairs / `effect`."""
        return np.asarray(self._now.load_LE().sum(axis=1) / self.effect)

    def _changed_since(self) -> int:
        """Returns the number of newest windows that differ from the windows before them by more than CHANGE; 0 if none do."""
        worst, since, newest = CHANGE * self.effect, 0, 1
        whole_LE = self._now.load_LE()
        while newest <= len(self._now.recent) and newest < self._now.windows:
            late_LE = self._now.load_LE(newest)
            difference = _statistic(np.maximum(whole_LE - late_LE, 0.0), late_LE)
            if difference > worst:
                worst, since = difference, newest
            newest *= 2
        return since

    def _divide(self, newest: int) -> None:
        """Begins other traffic with the newest windows: traffic that has been seen before, where it is like that."""
        late = [self._now.recent.pop() for _ in range(newest)][::-1]
        self._now.windows -= newest
        if self._now.windows > 0:
            self._before.append(self._now)
        if self.age > newest:
            self._lengths.append(self.age - newest)
            self._now.lengths.append(self.age - newest)
        self._began, self.changes = self.windows - newest, self.changes + 1
        late_LE = np.asarray(sum(late))
        apart = [_statistic(traffic.load_LE(), late_LE) for traffic in self._before]
        nearest = int(np.argmin(apart)) if apart else 0
        if apart and apart[nearest] <= CHANGE * self.effect:
            self._now = self._before[nearest]
            del self._before[nearest]
        else:
            self._now = AlikeWindows(np.zeros_like(late_LE))
        for load_LE in late:
            self._now.add(load_LE)


def _statistic(one_LE: FloatArray, other_LE: FloatArray) -> float:
    """Pearson's statistic of equal shares in two samples, over its degrees of freedom, all layers together; 1 by chance."""
    both_LE = one_LE + other_LE
    one_L1, both_L1 = one_LE.sum(axis=1, keepdims=True), both_LE.sum(axis=1, keepdims=True)
    part_L1 = np.divide(one_L1, both_L1, out=np.zeros_like(one_L1), where=both_L1 > 0)
    apart_LE = (one_LE - both_LE * part_L1) ** 2
    variance_LE = both_LE * part_L1 * (1 - part_L1)
    statistic = float(np.divide(apart_LE, variance_LE, out=np.zeros_like(apart_LE), where=variance_LE > 0).sum())
    freedom = int(np.maximum(np.count_nonzero(variance_LE > 0, axis=1) - 1, 0).sum())
    return statistic / freedom if freedom else 1.0
