"""Replica counts in proportion to load, and never below a minimum. Source: Lazarus (arXiv:2407.04656) Eq. 1."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from aurora.errors import BadInput, InfeasiblePlan
from aurora.types import FailureDomains
from aurora.types.arrays import FloatArray, IntArray, counts

DEFAULT_MIN_REPLICAS = 2  # every expert survives any one failure


def allocate(load_E: FloatArray | IntArray, failure_domains: FailureDomains, min_replicas: int) -> IntArray:
    """Chooses replica counts in proportion to load that fill all slots.

    Each expert in turn, by rising load, gets its share of the slots left, rounded down, and at least `min_replicas`.

    Args:
        load_E: (E,) loads of zero or more; if all are zero they count as equal. Shares are computed exactly.
        failure_domains: the nodes and their slots.
        min_replicas: replicas of each expert at least.

    Raises:
        BadInput, InfeasiblePlan: as `check_min_replicas`.
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
    """Returns the replica counts count_E (E,), limited to `most` for each expert.

    Replicas above the limit go one by one to the expert with the largest load per replica among those below it.
    """
    count_E = np.minimum(spare_E := count_E, most)
    for _ in range(min(int((spare_E - count_E).sum()), int((most - count_E).sum()))):
        count_E[np.where(count_E < most, load_E / count_E, -1.0).argmax()] += 1
    return count_E


def default_min_replicas(experts: int, failure_domains: FailureDomains) -> int:
    """Returns the default of `min_replicas`: DEFAULT_MIN_REPLICAS, or fewer if nodes or domains hold fewer of each."""
    useful = (int(np.minimum(slots_X, experts).sum()) for slots_X in (failure_domains.slots_N, failure_domains.slots_D))
    return max(1, min(DEFAULT_MIN_REPLICAS, min(useful) // experts))


def check_min_replicas(experts: int, failure_domains: FailureDomains, min_replicas: int) -> None:
    """Raises BadInput or InfeasiblePlan unless every expert can have `min_replicas` replicas on distinct nodes.

    If there are fewer nodes than `min_replicas`, it is enough that every expert can be on all nodes.
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


def checked_counts(replicas: Sequence[int], experts: int, least: int, slots_X: IntArray, holders: str) -> IntArray:
    """Returns `replicas` as (E,) int64, after checking that each expert has `least`, and that the holders' slots suffice."""
    count_E = counts("`replicas`", replicas, 1)
    if len(count_E) != experts or (count_E < least).any():
        raise BadInput(f"`replicas`: expected {experts} counts of {least} or more, found {count_E.tolist()}")
    if count_E.sum() > slots_X.sum():
        raise InfeasiblePlan(f"{count_E.sum()} replicas need as many slots; {len(slots_X)} {holders} have {slots_X.sum()}")
    return count_E
