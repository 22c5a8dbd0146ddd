"""How many replicas each expert has, by its load and never below a floor. Source: Lazarus Eq. 1 (arXiv:2407.04656)."""

from fractions import Fraction

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.types import FailureDomains
from aurora.types.arrays import FloatArray, IntArray

DEFAULT_MIN_REPLICAS = 2  # one failure is survived for certain


def allocate(load_E: FloatArray | IntArray, hosts: FailureDomains, min_replicas: int) -> IntArray:
    """(E,) int64 replicas that fill all slots exactly: experts by rising load, each its share of the slots left, rounded down,
    and at least `min_replicas`.

    load_E (E,) of zero or more; all zero counts as all equal. Shares are exact. Raises as `check_floor`.
    Source: Lazarus Eq. 1.
    """
    experts = len(load_E)
    check_min_replicas(experts, hosts, min_replicas)
    loads = [Fraction(load) for load in np.asarray(load_E).tolist()] if load_E.any() else [Fraction(1)] * experts
    count_E = np.zeros(experts, dtype=np.int64)
    rest, left = sum(loads, start=Fraction(0)), int(hosts.slots_N.sum())
    for expert in np.argsort(load_E, kind="stable").tolist():
        count_E[expert] = max(
            int(loads[expert] * left / rest), min_replicas
        )  # every later load is as large, so rest is above zero
        rest -= loads[expert]
        left -= int(count_E[expert])
    return count_E


def capped(count_E: IntArray, load_E: FloatArray | IntArray, most: int) -> IntArray:
    """The same replicas, at most `most` of each: what is above goes, one by one, to the largest load a replica below."""
    count_E = np.minimum(spare_E := count_E, most)
    for _ in range(min(int((spare_E - count_E).sum()), int((most - count_E).sum()))):
        count_E[np.where(count_E < most, load_E / count_E, -1.0).argmax()] += 1
    return count_E


def default_min_replicas(experts: int, hosts: FailureDomains) -> int:
    """The floor where none was asked for: what USUAL_FLOOR says, or what fits."""
    return max(1, min(DEFAULT_MIN_REPLICAS, int(hosts.slots_N.sum()) // experts))


def check_min_replicas(experts: int, hosts: FailureDomains, min_replicas: int) -> None:
    """InfeasiblePlan unless every expert can have `min_replicas` replicas, on as many nodes or on all. BadInput below one."""
    if min_replicas < 1:
        raise BadInput(f"`min_replicas`: expected one or more, found {min_replicas}")
    have = int(hosts.slots_N.sum())
    if experts * min_replicas > have:
        raise InfeasiblePlan(
            f"`min_replicas` {min_replicas}: {experts} experts x {min_replicas} replicas need {experts * min_replicas} slots; "
            f"{hosts.nodes} nodes have {have}"
        )
    distinct, useful = min(min_replicas, hosts.nodes), int(np.minimum(hosts.slots_N, experts).sum())
    if experts * distinct > useful:
        raise InfeasiblePlan(
            f"`min_replicas` {min_replicas}: {experts} experts on {distinct} distinct nodes each need {experts * distinct} "
            f"slots; of {have} slots {useful} can hold different experts"
        )
