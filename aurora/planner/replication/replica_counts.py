"""Replica counts in proportion to load, and never below a minimum. Source: Lazarus (arXiv:2407.04656) Eq. 1."""

from fractions import Fraction

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.types import FailureDomains
from aurora.types.arrays import FloatArray, IntArray

DEFAULT_MIN_REPLICAS = 2  # every expert survives any one failure


def allocate(load_E: FloatArray | IntArray, failure_domains: FailureDomains, min_replicas: int) -> IntArray:
    """Chooses replica counts in proportion to load that fill all slots.

    Each expert in turn, by rising load, gets its share of the slots left, rounded down, and at least `min_replicas`.

    Args:
        load_E: (E,) loads of zero or more; if all are zero they count as equal. Shares are computed exactly.
        failure_domains: the nodes and their slots.
        min_replicas: replicas of each expert at least.

    Returns:
        (E,) int64 replica counts, whose sum is the number of slots.

    Raises:
        BadInput, InfeasiblePlan: as `check_min_replicas`.

    Source:
        Lazarus (arXiv:2407.04656) Eq. 1.
    """
    experts = len(load_E)
    check_min_replicas(experts, failure_domains, min_replicas)
    loads = [Fraction(load) for load in np.asarray(load_E).tolist()] if load_E.any() else [Fraction(1)] * experts
    count_E = np.zeros(experts, dtype=np.int64)
    rest, left = sum(loads, start=Fraction(0)), int(failure_domains.slots_N.sum())
    for expert in np.argsort(load_E, kind="stable").tolist():
        share = loads[expert] * left / rest  # every later load is as large, so rest is above zero
        count_E[expert] = max(int(share), min_replicas)
        rest -= loads[expert]
        left -= int(count_E[expert])
    return count_E


def capped(count_E: IntArray, load_E: FloatArray | IntArray, most: int) -> IntArray:
    """Limit replica counts to `most` for each expert.

    Replicas above the limit go one by one to the expert below it with the largest load per replica.

    Args:
        count_E: (E,) int64, the replicas of each expert.
        load_E: (E,) loads.
        most: replicas of each expert at most.

    Returns:
        (E,) int64, the limited counts.
    """
    count_E = np.minimum(spare_E := count_E, most)
    for _ in range(min(int((spare_E - count_E).sum()), int((most - count_E).sum()))):
        count_E[np.where(count_E < most, load_E / count_E, -1.0).argmax()] += 1
    return count_E


def default_min_replicas(experts: int, failure_domains: FailureDomains) -> int:
    """Returns the default of `min_replicas`: DEFAULT_MIN_REPLICAS, or fewer if the slots hold fewer of each expert."""
    return max(1, min(DEFAULT_MIN_REPLICAS, int(failure_domains.slots_N.sum()) // experts))


def check_min_replicas(experts: int, failure_domains: FailureDomains, min_replicas: int) -> None:
    """Raise unless every expert can have `min_replicas` replicas on distinct nodes, or on all nodes if these are fewer.

    Args:
        experts: how many there are.
        failure_domains: the nodes and their slots.
        min_replicas: replicas of each expert at least.

    Raises:
        BadInput: if `min_replicas` is below one.
        InfeasiblePlan: if the slots do not suffice.
    """
    if min_replicas < 1:
        raise BadInput(f"`min_replicas`: expected one or more, found {min_replicas}")
    have = int(failure_domains.slots_N.sum())
    if experts * min_replicas > have:
        raise InfeasiblePlan(
            f"`min_replicas` {min_replicas}: {experts} experts x {min_replicas} replicas need {experts * min_replicas} slots; "
            f"{failure_domains.nodes} nodes have {have}"
        )
    distinct, useful = min(min_replicas, failure_domains.nodes), int(np.minimum(failure_domains.slots_N, experts).sum())
    if experts * distinct > useful:
        raise InfeasiblePlan(
            f"`min_replicas` {min_replicas}: {experts} experts on {distinct} distinct nodes each need {experts * distinct} "
            f"slots; of {have} slots {useful} can hold different experts"
        )
