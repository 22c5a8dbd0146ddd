"""Lower bounds on the largest load of a GPU when experts have replicas: mean load, counting slots, and certificates.

The load of a GPU here is the sum of its experts' loads, times its cost. A certificate for a threshold T proves that no
placement has a largest load of T or less. So every certified T is a lower bound, whether or not smaller thresholds are
certified too.

All functions take load_E, (E,) float64, the load of each expert, and `slots`, the GPUs.
"""

import numpy as np

from aurora.types import GpuSlots
from aurora.types.arrays import FloatArray, IntArray

SLACK = 1e-9  # margin by which certificates must hold, so that rounding errors prove nothing
WORTH = 2e-3  # relative: certificates are tried only for gaps larger than this
GRID = 24  # thresholds tried, from the largest down


def mean_load(load_E: FloatArray, slots: GpuSlots) -> float:
    """Returns the lower bound of a perfectly balanced load: total load / sum of 1 / cost over the GPUs."""
    return float(load_E.sum() / (1 / slots.cost_G).sum())


def by_counting(load_E: FloatArray, slots: GpuSlots) -> float:
    """Returns a lower bound: the smallest T for which the slots suffice to cut every expert into parts of load T or less.

    On equal GPUs with P slots in all, T is the smallest value with sum_e max(1, ceil(load_e / T)) <= P. On unequal GPUs, each
    expert is counted as if it were on the fastest GPUs. The bound holds for every load split.
    """
    speed_R = np.cumsum(np.sort(1 / slots.cost_G)[::-1])  # of the R fastest GPUs
    spare = int(slots.useful_G(len(load_E)).sum()) - len(load_E)
    return least_largest(load_E[:, None] / speed_R, spare)


def least_largest(value_ER: FloatArray, spare: int) -> float:
    """Returns the least T for which `spare` replicas, beyond one per expert, bring every expert's value to T or less.

    Args:
        value_ER: (E, R) float64, each expert's value, such as load per replica, if it has 1 to R replicas; falling along R.
        spare: number of further replicas.
    """
    on_all = float(value_ER[:, -1].max(initial=0.0))
    if spare >= value_ER.size:
        return on_all
    return max(on_all, float(-np.partition(-value_ER, spare, axis=None)[spare]))


def given_counts(load_E: FloatArray, slots: GpuSlots, count_E: IntArray) -> float:
    """Returns a lower bound on the largest load for given replica counts, with the same part of an expert's load on each.

    It is the mean load, or the load that some expert puts on a GPU if its replicas are on the fastest ones, if that is larger.

    Args:
        load_E, slots: as in the module.
        count_E: (E,) int64, the number of replicas of each expert.
    """
    speed_R = np.sort(1 / slots.cost_G)[::-1]
    carried_R = speed_R * np.arange(1, slots.gpus + 1)
    return max(mean_load(load_E, slots), float((load_E / carried_R[count_E - 1]).max()))


def any_split(load_E: FloatArray, slots: GpuSlots, value: float) -> float:
    """Returns a lower bound on the largest load for any load split.

    It is the largest of the bounds by mean load, by counting and, on equal GPUs, by certificates. These are tried for
    thresholds below `value`, the largest load of a known placement: the highest of a grid, then bisection above it.
    """
    base = max(mean_load(load_E, slots), by_counting(load_E, slots))
    if not slots.alike or base <= 0 or value <= base * (1 + WORTH):
        return base
    per_gpu = int(slots.useful_G(len(load_E))[0])

    def certified(most: float) -> bool:
        return _certified(load_E * slots.cost_G[0] / most, slots.gpus, per_gpu)

    grid = np.linspace(base, value, GRID + 1)[1:-1]
    low, high = base, float(grid[0])
    for most, above in zip(grid[::-1], [value, *grid[:0:-1]], strict=True):
        if certified(float(most)):
            low, high = float(most), float(above)
            break
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if certified(middle) else (low, middle)
    return low


def _certified(share_E: FloatArray, gpus: int, slots: int) -> bool:
    """Returns whether loads share_E, in units of the threshold, need a GPU above 1 on equal GPUs of `slots` slots.

    Experts and the GPUs that hold a part of them form connected groups. A group of m experts on k GPUs has v >= 0 experts fewer
    than the k (slots - 1) + 1 that it could have, and all groups together waste sum (k - 1 + v) = gpus slots - E at most.
    With s the smallest share and d = 1 - (slots - 1) s >= s, a group's load of at most k gives k d + v s >= sum (share - s)
    + s, so k - 1 + v is at least ceil(sum y + s / d) - 1 for y = (share - s) / d. That is no less than the sum of floor(y),
    plus a half for every y whose fraction exceeds 1 - s / d: one alone costs a slot more, and of b together at least b / 2
    do.
    """
    smallest = float(share_E.min())
    width = 1 - (slots - 1) * smallest
    if width < smallest:  # so a group on k GPUs has k slots - 1 experts at most; there are E + G - G slots groups at least
        return slots * smallest > 1 + SLACK and 2 * len(share_E) + gpus > 2 * gpus * slots
    y_E = (share_E - smallest) / width
    whole_E = np.maximum(np.floor(y_E - SLACK), 0.0)
    bad_E = (y_E - whole_E > 1 - smallest / width + SLACK) & (2 * smallest < width)
    return int(whole_E.sum()) + int(np.ceil(bad_E.sum() / 2)) > gpus * slots - len(share_E)
