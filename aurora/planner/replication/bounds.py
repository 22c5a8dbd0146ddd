"""Lower bounds on the largest load of a GPU when experts have replicas: mean load, counting slots, and certificates.

The load of a GPU here is the sum of its experts' loads, times its cost. A certificate for a threshold T proves that no
placement has a largest load of T or less. So every certified T is a lower bound, whether or not smaller thresholds are
certified too.

All functions take load_E, (E,) float64, the load of each expert, and `slots`, the GPUs.
"""

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np

from aurora.types import GpuSlots
from aurora.types.arrays import FloatArray, IntArray

Weight = Callable[[FloatArray, int], FloatArray]

SLACK = 1e-9  # margin by which certificates must hold, so that rounding errors prove nothing
WORTH = 2e-3  # relative: certificates are tried only for gaps larger than this
GRID = 24  # thresholds tried, from the largest down
MOST_COUNTS = 15_000  # even splits are certified up to this number of possible replica counts


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


def slots_by_counting(load_E: FloatArray, slots: GpuSlots, most: float) -> int:
    """Returns the smallest number of slots with which `by_counting` allows a largest load of `most` or less."""
    speed_R = np.cumsum(np.sort(1 / slots.cost_G)[::-1])
    need_E = np.searchsorted(speed_R, load_E / most * (1 - SLACK)) + 1 if most > 0 else np.ones(len(load_E))
    return int(np.minimum(need_E, slots.gpus).sum())


def given_counts(load_E: FloatArray, slots: GpuSlots, count_E: IntArray, divided_evenly: bool) -> float:
    """Returns a lower bound on the largest load for given replica counts.

    It is the mean load, or the load that some expert puts on a GPU if its replicas are on the fastest ones, if that is larger.

    Args:
        load_E, slots: as in the module.
        count_E: (E,) int64, the number of replicas of each expert.
        divided_evenly: whether each replica takes the same part of its expert's load.
    """
    speed_R = np.sort(1 / slots.cost_G)[::-1]
    carried_R = speed_R * np.arange(1, slots.gpus + 1) if divided_evenly else np.cumsum(speed_R)
    return max(mean_load(load_E, slots), float((load_E / carried_R[count_E - 1]).max()))


def free_split(load_E: FloatArray, slots: GpuSlots, value: float) -> float:
    """Returns a lower bound on the largest load for any load split.

    It is the largest of the bounds by mean load, by counting and, on equal GPUs, by certificates. These are tried for
    thresholds below `value`, the largest load of a known placement.
    """
    base = max(mean_load(load_E, slots), by_counting(load_E, slots))
    if not slots.alike or base <= 0:
        return base
    per_gpu = int(slots.useful_G(len(load_E))[0])
    return _raised(base, value, lambda most: _free_certified(load_E * slots.cost_G[0] / most, slots.gpus, per_gpu))


def equal_split(load_E: FloatArray, slots: GpuSlots, value: float) -> float:
    """Returns a lower bound on the largest load if replicas of an expert take equal parts of its load.

    It is computed as in `free_split`; for small layers, certificates cover every choice of replica counts too.
    """
    base = free_split(load_E, slots, value)
    slots_G = slots.useful_G(len(load_E))
    if not slots.alike or base <= 0 or (count_VE := _every_count(len(load_E), int(slots_G.sum()))) is None:
        return base
    per_gpu = int(slots_G[0])
    return _raised(base, value, lambda most: _equal_certified(load_E * slots.cost_G[0] / most, slots.gpus, per_gpu, count_VE))


def _raised(base: float, value: float, certified: Callable[[float], bool]) -> float:
    """The largest certified threshold found between base and value: the highest of a grid, then bisection above it."""
    if value <= base * (1 + WORTH):
        return base
    grid = np.linspace(base, value, GRID + 1)[1:-1]
    low, high = base, value
    for most, above in zip(grid[::-1], [value, *grid[:0:-1]], strict=True):
        if certified(float(most)):
            low, high = float(most), float(above)
            break
    else:
        high = float(grid[0])
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if certified(middle) else (low, middle)
    return low


def _free_certified(share_E: FloatArray, gpus: int, slots: int) -> bool:
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
    if width < smallest:
        return False
    y_E = (share_E - smallest) / width
    whole_E = np.maximum(np.floor(y_E - SLACK), 0.0)
    bad_E = (y_E - whole_E > 1 - smallest / width + SLACK) & (2 * smallest < width)
    return int(whole_E.sum()) + int(np.ceil(bad_E.sum() / 2)) > gpus * slots - len(share_E)


def _equal_certified(share_E: FloatArray, gpus: int, slots: int, count_VE: IntArray) -> bool:
    """Returns whether loads share_E, in units of the threshold, need a GPU above 1 for each row of the counts (V, E).

    Loads are divided evenly over replicas, and the GPUs are equal with `slots` slots each.

    Weights w with sum w(x) <= 1 for any at most `slots` sizes with sum x <= 1 bound the replicas' total weight by the number of
    GPUs; each row of counts must break one of them. Source: dual feasible functions (Fekete & Schepers 2001).
    """
    size_ER = share_E[:, None] / np.arange(1, count_VE.max() + 1)
    open_V = np.arange(len(count_VE))
    for weigh in (_too_large, *_WEIGHTS):
        weight_ER = weigh(size_ER, slots) * np.arange(1, count_VE.max() + 1)
        total_V = weight_ER[np.arange(len(share_E)), count_VE[open_V] - 1].sum(axis=1)
        open_V = open_V[total_V <= gpus * (1 + SLACK)]
        if not len(open_V):
            return True
    return False


def _every_count(experts: int, slots: int) -> IntArray | None:
    """(V, E) int64: all counts of one or more that fit into `slots` slots; None where there are more than MOST_COUNTS."""
    if math.comb(slots, experts) > MOST_COUNTS:
        return None
    marks = np.array(list(combinations(range(1, slots + 1), experts)), dtype=np.int64)
    return np.diff(marks, axis=1, prepend=0)


def _too_large(x: FloatArray, slots: int) -> FloatArray:
    """A weight: infinite for a replica above 1, which fits nowhere; else 0."""
    return np.where(x > 1 + SLACK, np.inf, 0.0)


def _step(small: float, exclusive: bool) -> Weight:
    """A weight: 1 for a replica above 1 - small, 0 below small, otherwise its size, or with `exclusive` 1 / slots.

    1 / slots is valid because only replicas below small fit beside one above 1 - small.
    """
    return lambda x, slots: np.where(
        x > 1 - small + SLACK, 1.0, np.where(x < small + SLACK, 0.0, 1 / slots if exclusive else x)
    )


def _stairs(parts: int) -> Weight:
    """A weight: (ceil((parts + 1) x) - 1) / parts for a replica of size x."""
    return lambda x, slots: np.maximum(0.0, np.ceil((parts + 1) * x - SLACK) - 1) / parts


_WEIGHTS: tuple[Weight, ...] = (
    *(_step(0.02 * step, exclusive) for exclusive in (False, True) for step in range(26)),
    *map(_stairs, (1, 2, 3, 4)),
)
